"""Random operations on a store and on a plain dict of rows: the same answers, always."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from celery_wheel.stores.base import Counts, Filter
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask
from tests.stores.rows import NOW, owner
from tests.stores.stores import KINDS, SERVERS

OWNERS = st.sampled_from(["w1", "w2", "w3"])
IDS = st.sampled_from([f"id{n}" for n in range(6)])
STAMPS = st.sampled_from(["s=1", "s=2", "t=1"])
QUEUES = st.none() | st.lists(st.sampled_from(["q0", "q1", "q2"]), max_size=3)
NAMES = st.just([]) | st.lists(st.sampled_from(["n0", "n1"]), max_size=1)
TIMES = st.integers(NOW, NOW + 12)
NUMBERS = st.integers(0, 11)
TASKS = st.builds(
    lambda n, **fields: DelayedTask(
        key=bytes([n]) * 16,
        id=f"id{n % 6}",
        name=f"n{n % 2}",
        queue=f"q{n % 3}",
        envelope=bytes([n]),
        arrival=n,
        stamps=("s=1", "s=2")[: n % 3] if n % 2 else ("t=1",) * (n % 4 == 0),
        **fields,
    ),
    NUMBERS,
    due_ms=TIMES,
    expires_ms=st.none() | TIMES,
    owner=st.none() | OWNERS,
)


def by_due(row: DelayedTask) -> tuple[int, int]:
    return (row.due_ms, row.arrival)


class Model(RuleBasedStateMachine):
    """A store and its model side by side. Arrivals are unique, so the order is total."""

    kind: str

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.store = KINDS[self.kind](Path(self._directory.name))
        self.store.open()
        self.rows: dict[bytes, DelayedTask] = {}
        self.tombstones: dict[Any, int] = {}
        self.leases: set[str] = set()
        self.heard: set[str] = set()

    def teardown(self) -> None:
        self.store.close()
        self._directory.cleanup()

    def holds(self, name: Any, now_ms: int) -> bool:
        return self.tombstones.get(name, now_ms) > now_ms

    def is_cancelled(self, row: DelayedTask, now_ms: int) -> bool:
        names = [("id", row.id), *(("stamp", stamp) for stamp in row.stamps)]
        return any(self.holds(name, now_ms) for name in names)

    def remember(self, name: Any, until_ms: int) -> None:
        self.tombstones[name] = max(until_ms, self.tombstones.get(name, until_ms))

    def free(self, row: DelayedTask, *, redelivered: bool = False) -> None:
        row.redelivered = row.redelivered or redelivered or row.state == DISPATCHED
        row.state, row.owner = PENDING, None

    def pending(self) -> list[DelayedTask]:
        return sorted((row for row in self.rows.values() if row.state == PENDING), key=by_due)

    @rule(tasks=st.lists(TASKS, max_size=8), now_ms=TIMES)
    def put(self, tasks, now_ms):
        new, known, cancelled = set(), set(), set()
        for task in tasks:
            if task.key in new:
                continue
            if task.key in self.rows or self.holds(task.key, now_ms):
                known.add(task.key)
            elif self.is_cancelled(task, now_ms):
                cancelled.add(task.key)
            else:
                new.add(task.key)
                self.rows[task.key] = dataclasses.replace(task)
        result = self.store.put(tasks, now_ms)
        assert (result.new, result.known, result.cancelled) == (new, known, cancelled)

    @rule(by=OWNERS, until_ms=TIMES, limit=st.integers(0, 5), queues=QUEUES, unknown=NAMES)
    def claim(self, by, until_ms, limit, queues, unknown):
        free = [
            row
            for row in self.pending()
            if row.owner is None
            and row.due_ms <= until_ms
            and (queues is None or row.queue in queues)
            and row.name not in unknown
        ]
        for row in free[:limit]:
            row.owner = by
        found = self.store.claim(by, until_ms, limit, queues=queues, unknown=unknown)
        assert found == free[:limit]

    @rule(by=OWNERS, numbers=st.sets(NUMBERS), version=st.integers(0, 1), now_ms=TIMES)
    def confirm(self, by, numbers, version, now_ms):
        keys = {bytes([n]) * 16 for n in numbers}
        confirmed = set()
        for key in keys & self.rows.keys():
            row = self.rows[key]
            fits = row.owner == by and row.version == version
            if fits and row.state == PENDING:
                fits = row.due_ms <= now_ms and not self.is_cancelled(row, now_ms)
            if fits:
                row.state = DISPATCHED
                confirmed.add(key)
        assert self.store.confirm(by, [(key, version) for key in keys], now_ms) == confirmed

    @rule(numbers=st.sets(NUMBERS, max_size=4), until_ms=st.none() | TIMES)
    def settle(self, numbers, until_ms):
        keys = [bytes([n]) * 16 for n in numbers]
        gone = [self.rows.pop(key) for key in keys if key in self.rows]
        if until_ms is not None:
            for key in keys:
                self.remember(key, until_ms)
        assert self.store.settle(keys, until_ms) == len(gone)

    @rule(by=OWNERS, numbers=st.none() | st.sets(NUMBERS), redelivered=st.booleans())
    def release(self, by, numbers, redelivered):
        keys = None if numbers is None else [bytes([n]) * 16 for n in numbers]
        mine = [
            row
            for key, row in self.rows.items()
            if row.owner == by and (keys is None or key in keys)
        ]
        for row in mine:
            self.free(row, redelivered=redelivered and keys is not None)
        assert self.store.release(by, keys, redelivered=redelivered) == len(mine)

    @rule(by=OWNERS)
    def heartbeat(self, by):
        expected = by in self.leases or by not in self.heard
        self.leases.add(by)
        self.heard.add(by)
        assert self.store.heartbeat(owner(by), 3600) is expected

    @rule(dead=st.sets(OWNERS))
    def reap(self, dead):
        self.leases -= dead
        orphans = [row for row in self.rows.values() if row.owner not in {None, *self.leases}]
        for row in orphans:
            self.free(row)
        assert self.store.reap(dead) == len(orphans)

    @rule(ids=st.lists(IDS, max_size=3), stamps=st.lists(STAMPS, max_size=2), until_ms=TIMES)
    def cancel(self, ids, stamps, until_ms):
        for task_id in ids:
            self.remember(("id", task_id), until_ms)
        for stamp in stamps:
            self.remember(("stamp", stamp), until_ms)
        found = [
            row for row in self.rows.values() if row.id in ids or set(row.stamps) & set(stamps)
        ]
        outcomes = dict.fromkeys(ids, "unknown")
        outcomes |= {row.id: "dispatched" for row in found if row.state == DISPATCHED}
        outcomes |= {row.id: "cancelled" for row in found if row.state == PENDING}
        gone = [self.rows.pop(row.key) for row in found if row.state == PENDING]
        answer = self.store.cancel(ids, stamps, until_ms)
        assert answer.outcomes == outcomes
        assert sorted(answer.rows, key=by_due) == sorted(gone, key=by_due)

    @rule(numbers=st.sets(NUMBERS, max_size=3))
    def forget(self, numbers):
        keys = [bytes([n]) * 16 for n in numbers]
        gone = [row for row in self.pending() if row.key in keys]
        for row in gone:
            del self.rows[row.key]
        assert sorted(self.store.forget(keys), key=by_due) == gone

    @rule(task_id=IDS, due_ms=TIMES)
    def reschedule(self, task_id, due_ms):
        found = [row for row in self.pending() if row.id == task_id]
        for row in found:
            if row.due_ms != due_ms:
                row.due_ms, row.version, row.owner = due_ms, row.version + 1, None
        assert self.store.reschedule(task_id, due_ms) == len(found)

    @rule(from_ms=st.none() | TIMES, before_ms=st.none() | TIMES, limit=st.integers(1, 4))
    def find(self, from_ms, before_ms, limit):
        expected = [
            row
            for row in sorted(self.rows.values(), key=by_due)
            if (from_ms is None or row.due_ms >= from_ms)
            and (before_ms is None or row.due_ms < before_ms)
        ]
        found: list[DelayedTask] = []
        cursor = None
        while True:
            which = Filter(due_from_ms=from_ms, due_before_ms=before_ms)
            page = self.store.find(which, limit, cursor)
            found += page.rows
            cursor = page.cursor
            if cursor is None:
                break
        assert found == expected

    @rule(before_ms=TIMES)
    def next_expiring(self, before_ms):
        expected = sorted(
            row.expires_ms
            for row in self.pending()
            if row.expires_ms is not None and row.expires_ms < before_ms
        )
        assert [row.expires_ms for row in self.store.next_expiring(before_ms, 99)] == expected

    @invariant()
    def rows_and_counts_agree(self):
        pending = self.pending()
        assert self.store.find(Filter(), 99).rows == sorted(self.rows.values(), key=by_due)
        assert self.store.count() == Counts(
            len(pending),
            len(self.rows) - len(pending),
            sum(row.owner is not None for row in self.rows.values()),
        )
        assert self.store.oldest_due() == (pending[0].due_ms if pending else None)
        below = sum(row.due_ms < NOW + 6 for row in pending)
        assert self.store.histogram([NOW + 6]) == [below, len(pending) - below]


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_agrees_with_its_model(kind):
    """Whatever the order of calls, the store answers as a plain dict of rows would."""
    machine = type("Machine", (Model,), {"kind": kind})
    examples = 5 if kind in SERVERS else 15
    modest = settings(max_examples=examples, stateful_step_count=30)
    run_state_machine_as_test(machine, settings=modest)
