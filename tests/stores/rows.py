"""Rows for the tests of the stores."""

from __future__ import annotations

from itertools import count
from typing import Any

from celery_wheel.stores.base import Filter, Owner, Store
from celery_wheel.task import DelayedTask, task_key

#: Present and far future, in a year that no test run sees: no ``reap`` forgets by the way.
NOW = 4_000_000_000_000
LATER = NOW + 3_600_000

_arrivals = count(1)


def task(task_id: str, due_ms: int = NOW, **fields: Any) -> DelayedTask:
    """A task whose key depends on its id, retries and due time only."""
    retries = fields.get("retries", 0)
    values: dict[str, Any] = {
        "key": task_key("celery", task_id, retries, 0, str(due_ms)),
        "id": task_id,
        "name": "shop.send",
        "queue": "celery",
        "due_ms": due_ms,
        "envelope": b"envelope of " + task_id.encode("utf-8", "surrogatepass"),
        "arrival": next(_arrivals),
    }
    return DelayedTask(**values | fields)


def owner(name: str) -> Owner:
    """An owner of this name."""
    return Owner(name, node=f"{name}@host", boot="boot-1", pid=4711, started="123.45")


def everything(store: Store) -> list[DelayedTask]:
    """Every row of a store, in due order."""
    return store.find(Filter(), 10_000).rows


def ids(rows: list[DelayedTask]) -> list[str]:
    """The ids of rows, in their order."""
    return [row.id for row in rows]


def claimed(store: Store, *tasks: DelayedTask, by: str = "w1") -> list[DelayedTask]:
    """Put tasks and claim them all."""
    store.put(tasks, NOW)
    return store.claim(by, LATER, 10_000)


def dispatched(store: Store, *tasks: DelayedTask, by: str = "w1") -> list[DelayedTask]:
    """Put tasks, claim and confirm them all."""
    rows = claimed(store, *tasks, by=by)
    assert len(store.confirm(by, [(row.key, row.version) for row in rows], LATER)) == len(rows)
    return rows
