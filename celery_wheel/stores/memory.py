"""The store that lives in this process: for tests, and for what the broker keeps anyway.

The complete contract of :mod:`celery_wheel.stores.base` without durability. A worker whose
messages stay unacknowledged with the broker uses it too, so a million rows are no surprise:
every call costs by what it touches, and ``release(None)``, ``reap`` of a dead owner and
``find`` by anything but due, id or stamp are the only ones that read every row.

Leases are measured with the monotonic clock, tombstones with the wall clock.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise, takewhile
from typing import Any, TypeVar

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.stores._cursor import decode_cursor, encode_cursor
from celery_wheel.stores._filter import fits
from celery_wheel.stores._table import Table, copy_of, due_order
from celery_wheel.stores.base import (
    Cancelled,
    Counts,
    Filter,
    Owner,
    Page,
    PutResult,
    Ref,
    Store,
)
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask

__all__ = ("MemoryStore",)

T = TypeVar("T")


class _Place:
    """What siblings share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.table = Table()
        self.leases: dict[str, tuple[Owner, float]] = {}
        self.cancelled_ids: dict[str, int] = {}
        self.cancelled_stamps: dict[str, int] = {}
        self.seen: dict[bytes, int] = {}

    def is_known(self, key: bytes, now_ms: int) -> bool:
        return key in self.table.rows or self.seen.get(key, now_ms) > now_ms

    def is_cancelled(self, task: DelayedTask, now_ms: int) -> bool:
        if self.cancelled_ids.get(task.id, now_ms) > now_ms:
            return True
        return any(self.cancelled_stamps.get(stamp, now_ms) > now_ms for stamp in task.stamps)


class MemoryStore(Store):
    """Rows in this process. Siblings see the same rows, from any thread.

    Args:
        clock: where leases and the end of tombstones take their time from.
    """

    durable = False

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._place = _Place()
        self._started: set[str] = set()

    def open(self) -> None:
        """See :meth:`Store.open`; there is nothing to do."""

    def close(self) -> None:
        """See :meth:`Store.close`; the rows live as long as one sibling does."""

    def sibling(self) -> MemoryStore:
        """See :meth:`Store.sibling`."""
        other = MemoryStore(self._clock)
        other._place = self._place
        return other

    def put(self, tasks: Sequence[DelayedTask], now_ms: int) -> PutResult:
        """See :meth:`Store.put`."""
        new: set[bytes] = set()
        known: set[bytes] = set()
        cancelled: set[bytes] = set()
        with self._place.lock:
            for task in tasks:
                if task.key in new:
                    continue
                if self._place.is_known(task.key, now_ms):
                    known.add(task.key)
                elif self._place.is_cancelled(task, now_ms):
                    cancelled.add(task.key)
                else:
                    self._place.table.add(copy_of(task, task.owner, PENDING))
                    new.add(task.key)
        return PutResult(frozenset(new), frozenset(known), frozenset(cancelled - new))

    def claim(
        self,
        owner: str,
        until_ms: int,
        limit: int,
        *,
        queues: Sequence[str] | None = None,
        unknown: Sequence[str] = (),
    ) -> list[DelayedTask]:
        """See :meth:`Store.claim`."""
        skipped = set(unknown)
        with self._place.lock:
            table = self._place.table
            free = table.claimable(queues, until_ms)
            known = (row for row in free if row.name not in skipped)
            found = list(islice(known, max(limit, 0)))
            for row in found:
                table.change(row, PENDING, owner)
            return [_copy(row) for row in found]

    def confirm(self, owner: str, refs: Sequence[Ref], now_ms: int) -> set[bytes]:
        """See :meth:`Store.confirm`."""
        confirmed: set[bytes] = set()
        with self._place.lock:
            for key, version in refs:
                row = self._place.table.rows.get(key)
                if row is None or row.owner != owner or row.version != version:
                    continue
                if row.state == PENDING:
                    if row.due_ms > now_ms or self._place.is_cancelled(row, now_ms):
                        continue
                    self._place.table.change(row, DISPATCHED, owner)
                confirmed.add(key)
        return confirmed

    def settle(self, keys: Sequence[bytes], seen_until_ms: int | None = None) -> int:
        """See :meth:`Store.settle`."""
        with self._place.lock:
            if seen_until_ms is not None:
                _remember(self._place.seen, keys, seen_until_ms)
            return len(self._drop(self._of_keys(keys)))

    def release(
        self, owner: str, keys: Sequence[bytes] | None = None, *, redelivered: bool = False
    ) -> int:
        """See :meth:`Store.release`."""
        with self._place.lock:
            rows = self._place.table.rows.values() if keys is None else self._of_keys(keys)
            mine = [row for row in rows if row.owner == owner]
            self._free(mine, redelivered=redelivered and keys is not None)
            return len(mine)

    def heartbeat(self, owner: Owner, ttl_s: float) -> bool:
        """See :meth:`Store.heartbeat`."""
        with self._place.lock:
            held = owner.name in self._place.leases
            self._place.leases[owner.name] = (owner, self._clock.monotonic() + ttl_s)
        first = owner.name not in self._started
        self._started.add(owner.name)
        return held or first

    def end_lease(self, owner: str) -> None:
        """See :meth:`Store.end_lease`."""
        with self._place.lock:
            self._place.leases.pop(owner, None)
        self._started.discard(owner)

    def owners(self) -> list[Owner]:
        """See :meth:`Store.owners`."""
        with self._place.lock:
            return [owner for owner, _ in self._place.leases.values()]

    def reap(self, dead: Iterable[str] = ()) -> int:
        """See :meth:`Store.reap`."""
        named = set(dead)
        with self._place.lock:
            place, now = self._place, self._clock.monotonic()
            for name, (_, until) in list(place.leases.items()):
                if until <= now or name in named:
                    del place.leases[name]
            orphans: list[DelayedTask] = []
            if place.table.owned.keys() - place.leases.keys():
                orphans = [
                    row
                    for row in place.table.rows.values()
                    if row.owner is not None and row.owner not in place.leases
                ]
                self._free(orphans)
            wall_ms = self._clock.wall_ms()
            _expire(place.cancelled_ids, wall_ms)
            _expire(place.cancelled_stamps, wall_ms)
            _expire(place.seen, wall_ms)
            return len(orphans)

    def cancel(
        self,
        ids: Sequence[str],
        stamps: Sequence[str],
        remember_until_ms: int,
    ) -> Cancelled:
        """See :meth:`Store.cancel`."""
        with self._place.lock:
            place = self._place
            _remember(place.cancelled_ids, ids, remember_until_ms)
            _remember(place.cancelled_stamps, stamps, remember_until_ms)
            found = {row.key: row for row in place.table.of_ids(dict.fromkeys(ids))}
            found.update((row.key, row) for row in place.table.of_stamps(stamps))
            outcomes = dict.fromkeys(ids, "unknown")
            for row in found.values():
                if row.state == DISPATCHED:
                    outcomes[row.id] = "dispatched"
            gone = self._drop(row for row in found.values() if row.state == PENDING)
            outcomes.update((row.id, "cancelled") for row in gone)
            return Cancelled(gone, outcomes)

    def forget(self, keys: Sequence[bytes]) -> list[DelayedTask]:
        """See :meth:`Store.forget`."""
        with self._place.lock:
            return self._drop(row for row in self._of_keys(keys) if row.state == PENDING)

    def reschedule(self, task_id: str, due_ms: int) -> int:
        """See :meth:`Store.reschedule`."""
        with self._place.lock:
            table = self._place.table
            found = [row for row in table.of_ids([task_id]) if row.state == PENDING]
            for row in found:
                if row.due_ms != due_ms:
                    table.move(row, due_ms)
            return len(found)

    def find(self, which: Filter, limit: int, cursor: str | None = None) -> Page:
        """See :meth:`Store.find`."""
        with self._place.lock:
            bound = () if cursor is None else _bound(cursor)
            before_ms = which.due_before_ms
            near = self._candidates(which, bound)
            if before_ms is not None:
                near = takewhile(lambda row: row.due_ms < before_ms, near)
            fitting = (row for row in near if fits(row, which))
            rows = [_copy(row) for row in islice(fitting, max(limit, 0) + 1)]
        if len(rows) <= limit or limit <= 0:
            return Page(rows[: max(limit, 0)], None)
        last = rows[limit - 1]
        return Page(rows[:limit], encode_cursor(last.due_ms, last.arrival, last.key.hex()))

    def count(self) -> Counts:
        """See :meth:`Store.count`."""
        with self._place.lock:
            table = self._place.table
            return Counts(table.pending(), len(table.dispatched), table.owned.total())

    def histogram(self, edges_ms: Sequence[int]) -> list[int]:
        """See :meth:`Store.histogram`."""
        with self._place.lock:
            table = self._place.table
            below = [0, *map(table.pending_before, edges_ms), table.pending()]
        return [high - low for low, high in pairwise(below)]

    def remembered(self, limit: int) -> list[str]:
        """See :meth:`Store.remembered`."""
        with self._place.lock:
            until_ms = self._place.cancelled_ids
            return heapq.nlargest(limit, until_ms, key=until_ms.__getitem__)

    def oldest_due(self) -> int | None:
        """See :meth:`Store.oldest_due`."""
        with self._place.lock:
            first = self._place.table.first_pending()
            return None if first is None else first.due_ms

    def next_expiring(self, before_ms: int, limit: int) -> list[DelayedTask]:
        """See :meth:`Store.next_expiring`."""
        with self._place.lock:
            soonest = islice(self._place.table.expiring, max(limit, 0))
            return [
                _copy(row)
                for row in soonest
                if row.expires_ms is not None and row.expires_ms < before_ms
            ]

    def _of_keys(self, keys: Iterable[bytes]) -> Iterator[DelayedTask]:
        rows = self._place.table.rows
        for key in dict.fromkeys(keys):
            row = rows.get(key)
            if row is not None:
                yield row

    def _drop(self, found: Iterable[DelayedTask]) -> list[DelayedTask]:
        gone = list(found)
        for row in gone:
            self._place.table.drop(row)
        return gone

    def _free(self, rows: Iterable[DelayedTask], *, redelivered: bool = False) -> None:
        for row in rows:
            row.redelivered = row.redelivered or redelivered or row.state == DISPATCHED
            self._place.table.change(row, PENDING, None)

    def _candidates(self, which: Filter, bound: tuple[Any, ...]) -> Iterator[DelayedTask]:
        """Rows after ``bound`` in due order, by the narrowest index that serves."""
        table = self._place.table
        if which.ids is None and which.stamps is None:
            if which.due_from_ms is not None:
                bound = max(bound, (which.due_from_ms,))
            return table.by_due.after(bound)
        if which.ids is not None:
            found = table.of_ids(which.ids)
        else:
            found = table.of_stamps(which.stamps or ())
        distinct = {row.key: row for row in found}
        rows = sorted(distinct.values(), key=due_order)
        return (row for row in rows if due_order(row) > bound)


def _bound(cursor: str) -> tuple[Any, ...]:
    due_ms, arrival, tie = decode_cursor(cursor)
    return (due_ms, arrival, bytes.fromhex(tie))


def _copy(row: DelayedTask) -> DelayedTask:
    return copy_of(row, row.owner, row.state)


def _remember(tombstones: dict[T, int], names: Iterable[T], until_ms: int) -> None:
    for name in names:
        tombstones[name] = max(until_ms, tombstones.get(name, until_ms))


def _expire(tombstones: dict[T, int], now_ms: int) -> None:
    for name in [name for name, until_ms in tombstones.items() if until_ms <= now_ms]:
        del tombstones[name]
