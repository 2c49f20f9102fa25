"""Every statement of the SQLite store goes by an index: none reads all rows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter
from celery_wheel.stores.sql import SqlStore
from tests.stores.rows import LATER, NOW, owner, task

KEYS = [n.to_bytes(16, "big") for n in range(400)]
REFS = [(key, 0) for key in KEYS]


@pytest.fixture
def store(tmp_path):
    """A store with enough rows, leases and tombstones of every kind for plans to matter."""
    made = open_store(f"sqlite:///{tmp_path / 'wheel.db'}")
    made.open()
    names = [None, "w1", "w2"]
    made.put(
        [
            task(
                f"t{n}",
                NOW + n,
                stamps=(f"s={n % 7}",),
                expires_ms=LATER,
                owner=names[n % 3],
                queue=f"q{n % 4}",
            )
            for n in range(300)
        ],
        NOW,
    )
    for name in ("w1", "w2"):
        made.heartbeat(owner(name), 3600)
    made.cancel([f"x{n}" for n in range(50)], ["s=x"], LATER)
    made.settle(KEYS, seen_until_ms=LATER)
    yield made
    made.close()


def plans(store: SqlStore, call: Callable[[SqlStore], Any]) -> list[str]:
    """The steps of the plans of all statements that a call runs."""
    connection = store.database._connection
    assert connection is not None
    ran: list[tuple[str, Any]] = []

    def note(_, __, statement, parameters, ___, many):
        if re.match("SELECT|INSERT|UPDATE|DELETE", statement):
            ran.append((statement, parameters[0] if many else parameters))

    sa.event.listen(connection, "before_cursor_execute", note)
    call(store)
    sa.event.remove(connection, "before_cursor_execute", note)
    assert ran
    steps = []
    for statement, parameters in ran:
        explained = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        steps += [row.detail for row in explained if re.match("SCAN|SEARCH|USE", row.detail)]
    connection.rollback()
    return steps


CALLS: dict[str, tuple[Callable[[SqlStore], Any], str]] = {
    "put": (lambda s: s.put([task("n", NOW, stamps=("s=1",))], NOW), "ix_key"),
    "claim": (lambda s: s.claim("w1", LATER, 10), "ix_free (queue=? AND due_ms<?"),
    "claim of": (lambda s: s.claim("w1", LATER, 9, queues=["q1", "q2"], unknown=["n"]), "ix_free"),
    "confirm": (lambda s: s.confirm("w1", REFS, NOW), "ix_key"),
    "settle": (lambda s: s.settle(KEYS, LATER), "ix_key"),
    "release": (lambda s: s.release("w1", KEYS), "ix_key"),
    "release all": (lambda s: s.release("w1"), "ix_owner"),
    "reap": (lambda s: s.reap(["w2"]), "ix_owner"),
    "cancel": (lambda s: s.cancel(["t1", "t2"], ["s=1"], LATER), "ix_id"),
    "forget": (lambda s: s.forget(KEYS), "ix_key"),
    "reschedule": (lambda s: s.reschedule("t3", LATER), "ix_id"),
    "find": (lambda s: s.find(Filter(due_from_ms=NOW, due_before_ms=LATER), 9), "ix_due"),
    "find on": (lambda s: s.find(Filter(), 9, f"{NOW}:1:1"), "ix_due"),
    "find ids": (lambda s: s.find(Filter(ids=("t1", "t2")), 9), "ix_id"),
    "find stamps": (lambda s: s.find(Filter(stamps=("s=1",)), 9), "ix_key"),
    "histogram": (lambda s: s.histogram([NOW, LATER]), "COVERING INDEX celery_wheel_ix_due"),
    "next_expiring": (lambda s: s.next_expiring(LATER, 9), "ix_expires"),
    "heartbeat": (lambda s: s.heartbeat(owner("w1"), 60), "celery_wheel_owners"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_go_by_an_index(store, name):
    """The call uses its index, scans nothing but the short list of leases, and sorts only
    what it was asked for by id or stamp."""
    call, index = CALLS[name]
    steps = plans(store, call)
    assert any(index in step for step in steps)
    scans = [step for step in steps if step.startswith("SCAN") and "owners" not in step]
    # The first queue of free rows is the first entry of their index.
    assert scans in ([], ["SCAN celery_wheel_tasks USING INDEX celery_wheel_ix_free"])
    if name not in ("find ids", "find stamps"):
        assert [step for step in steps if "TEMP B-TREE" in step] == []


@pytest.mark.parametrize("name", ["find", "oldest_due"])
def test_the_first_rows_come_in_index_order(store, name):
    """Without bounds the index of due times is walked from its start, as far as needed."""
    calls = {"find": lambda s: s.find(Filter(), 9), "oldest_due": lambda s: s.oldest_due()}
    (step,) = plans(store, calls[name])
    assert step == "SCAN celery_wheel_tasks USING INDEX celery_wheel_ix_due"


def test_counting_reads_indexes_only(store):
    """Exact counts read an index, never the rows."""
    assert all("INDEX" in step for step in plans(store, lambda s: s.count()))
