"""The rows of the in-memory store and their indexes, kept in step by three methods.

Owns which row is where; knows nothing of leases, tombstones or locks. Every change is
O(log n). Not thread-safe: :mod:`celery_wheel.stores.memory` holds a lock around it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile
from operator import attrgetter

from celery_wheel.stores._ordered import Ordered
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask

__all__ = ("Table", "copy_of", "due_order")

due_order = attrgetter("due_ms", "arrival", "key")


def copy_of(task: DelayedTask, owner: str | None, state: str) -> DelayedTask:
    """Another object with the same content but for these two fields."""
    return DelayedTask(
        task.key,
        task.id,
        task.name,
        task.queue,
        task.due_ms,
        task.envelope,
        task.retries,
        task.priority,
        task.expires_ms,
        task.arrival,
        task.stamps,
        task.version,
        state,
        owner,
        task.redelivered,
    )


class Table:
    """Rows by key, id, stamp, due time and expiry; those to claim by queue and due time."""

    def __init__(self) -> None:
        self.rows: dict[bytes, DelayedTask] = {}
        self.by_due: Ordered[DelayedTask] = Ordered(due_order)
        self.free: dict[str, Ordered[DelayedTask]] = {}
        self.expiring: Ordered[DelayedTask] = Ordered(attrgetter("expires_ms", "key"))
        self.dispatched: dict[bytes, DelayedTask] = {}
        self.owned: Counter[str] = Counter()
        # Nearly every id has one row: that one is kept bare, without a container of its own.
        self._by_id: dict[str, DelayedTask | list[DelayedTask]] = {}
        self._by_stamp: dict[str, dict[bytes, DelayedTask]] = {}

    def add(self, row: DelayedTask) -> None:
        """Take a row in."""
        self.rows[row.key] = row
        self.by_due.add(row)
        self._enter(row)
        known = self._by_id.get(row.id)
        if known is None:
            self._by_id[row.id] = row
        elif isinstance(known, list):
            known.append(row)
        else:
            self._by_id[row.id] = [known, row]
        for stamp in row.stamps:
            self._by_stamp.setdefault(stamp, {})[row.key] = row

    def drop(self, row: DelayedTask) -> None:
        """Take a row out."""
        del self.rows[row.key]
        self.by_due.remove(row)
        self._leave(row)
        known = self._by_id[row.id]
        if isinstance(known, list):
            known.remove(row)
            if len(known) == 1:
                self._by_id[row.id] = known[0]
        else:
            del self._by_id[row.id]
        for stamp in set(row.stamps):
            rows = self._by_stamp[stamp]
            del rows[row.key]
            if not rows:
                del self._by_stamp[stamp]

    def change(self, row: DelayedTask, state: str, owner: str | None) -> None:
        """Move a row to another state or owner."""
        self._leave(row)
        row.state, row.owner = state, owner
        self._enter(row)

    def move(self, row: DelayedTask, due_ms: int) -> None:
        """Give a pending row another due time, a higher version and no owner."""
        self._leave(row)
        self.by_due.remove(row)
        row.due_ms, row.version, row.owner = due_ms, row.version + 1, None
        self.by_due.add(row)
        self._enter(row)

    def claimable(self, queues: Iterable[str] | None, until_ms: int) -> Iterator[DelayedTask]:
        """Pending rows without an owner, of these queues, in due order up to ``until_ms``."""
        wanted = self.free if queues is None else dict.fromkeys(queues)
        lines = [self.free[queue] for queue in wanted if queue in self.free]
        return takewhile(lambda row: row.due_ms <= until_ms, heapq.merge(*lines, key=due_order))

    def of_ids(self, ids: Iterable[str]) -> Iterator[DelayedTask]:
        """Rows of these ids."""
        for task_id in ids:
            known = self._by_id.get(task_id)
            if isinstance(known, list):
                yield from tuple(known)
            elif known is not None:
                yield known

    def of_stamps(self, stamps: Iterable[str]) -> Iterator[DelayedTask]:
        """Rows that carry one of these stamps; a row may come more than once."""
        for stamp in stamps:
            yield from tuple(self._by_stamp.get(stamp, {}).values())

    def _enter(self, row: DelayedTask) -> None:
        if row.owner is not None:
            self.owned[row.owner] += 1
        if row.state == DISPATCHED:
            self.dispatched[row.key] = row
            return
        if row.owner is None:
            free = self.free.get(row.queue)
            if free is None:
                free = self.free[row.queue] = Ordered(due_order)
            free.add(row)
        if row.expires_ms is not None:
            self.expiring.add(row)

    def _leave(self, row: DelayedTask) -> None:
        if row.owner is not None:
            self.owned[row.owner] -= 1
            if not self.owned[row.owner]:
                del self.owned[row.owner]
        if row.state == DISPATCHED:
            del self.dispatched[row.key]
            return
        if row.owner is None:
            free = self.free[row.queue]
            free.remove(row)
            if not free:
                del self.free[row.queue]
        if row.expires_ms is not None:
            self.expiring.remove(row)

    def pending(self) -> int:
        """How many rows are pending."""
        return len(self.rows) - len(self.dispatched)

    def pending_before(self, due_ms: int) -> int:
        """How many pending rows are due before an instant."""
        handed_over = sum(row.due_ms < due_ms for row in self.dispatched.values())
        return self.by_due.rank((due_ms,)) - handed_over

    def first_pending(self) -> DelayedTask | None:
        """The pending row that is due first. Steps over dispatched rows only."""
        return next((row for row in self.by_due if row.state == PENDING), None)
