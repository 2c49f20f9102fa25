"""A store in a SQL database, the same for every database.

Knows the contract of :mod:`celery_wheel.stores.base` and the statements; what databases
differ in is behind :class:`~celery_wheel.stores.sql_database.Database`. Every call is one
transaction, and long lists are cut into pieces inside it: a crash leaves all of a call or
nothing. Rows are chosen by a ``SELECT`` inside the transaction that changes them, and locked by
it where a database has row locks. A call that lost to another one is repeated.

Thread-safety: one thread at a time. Fork-safety: as the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import sqlalchemy as sa

from celery_wheel.stores._cursor import decode_cursor, encode_cursor
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
from celery_wheel.stores.sql_database import Database, again
from celery_wheel.stores.sql_schema import shortened, stamps_of, task_of, values_of
from celery_wheel.stores.sql_statements import Statements
from celery_wheel.task import DelayedTask

__all__ = ("SqlStore",)

T = TypeVar("T")

#: How many values one statement is given; the oldest SQLite still met takes 999.
CHUNK = 500
#: The ends of what a column of instants holds.
_EARLIEST_MS, _LATEST_MS = -(2**63), 2**63 - 1

#: What the fence and the tombstones look at: key, id, stamps.
_Named = tuple[bytes, str, tuple[str, ...]]


class SqlStore(Store):
    """Rows in one namespace of a database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._sql = Statements(database.tables, database.keep_latest)
        self._started: set[str] = set()

    def open(self) -> None:
        """See :meth:`Store.open`."""
        self.database.open()

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self.database.close()

    def sibling(self) -> SqlStore:
        """See :meth:`Store.sibling`."""
        return SqlStore(self.database.sibling())

    @again
    def put(self, tasks: Sequence[DelayedTask], now_ms: int) -> PutResult:
        """See :meth:`Store.put`."""
        offered: dict[bytes, DelayedTask] = {}
        for task in tasks:
            offered.setdefault(task.key, task)
        with self.database.transaction("durable", "share") as connection:
            rows = _select(connection, self._sql.known_keys, "keys", offered)
            known = {row.key for row in rows}
            rows = _select(connection, self._sql.seen_keys, "keys", offered, now_ms=now_ms)
            known.update(row.key for row in rows)
            unknown = [task for task in offered.values() if task.key not in known]
            named = [(task.key, task.id, task.stamps) for task in unknown]
            cancelled = self._cancelled(connection, named, now_ms)
            new = [task for task in unknown if task.key not in cancelled]
            if new:
                self._insert(connection, new)
        keys = frozenset(task.key for task in new)
        return PutResult(keys, frozenset(known), frozenset(cancelled))

    def _insert(self, connection: sa.Connection, tasks: Sequence[DelayedTask]) -> None:
        connection.execute(self._sql.put, [values_of(task) for task in tasks])
        stamps = [{"stamp": stamp, "key": task.key} for task in tasks for stamp in set(task.stamps)]
        if stamps:
            connection.execute(self._sql.put_stamps, stamps)

    def _cancelled(
        self, connection: sa.Connection, tasks: Sequence[_Named], now_ms: int
    ) -> set[bytes]:
        """Keys of those tasks whose id or one of whose stamps has a tombstone."""
        names = (
            {task_id for _, task_id, _ in tasks},
            {stamp for _, _, stamps in tasks for stamp in stamps},
        )
        ids, stamps = (
            {
                row.name
                for row in _select(
                    connection,
                    self._sql.cancelled,
                    "names",
                    names[is_stamp],
                    is_stamp=is_stamp,
                    now_ms=now_ms,
                )
            }
            for is_stamp in (0, 1)
        )
        return {
            key
            for key, task_id, of_task in tasks
            if shortened(task_id) in ids or not stamps.isdisjoint(map(shortened, of_task))
        }

    @again
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
        if limit <= 0:
            return []
        wanted: dict[str, Any] = {"until_ms": until_ms, "row_limit": limit}
        free = self._sql.claimable
        if unknown:
            free, wanted["unknown"] = self._sql.claimable_known, list(unknown)
        rows: list[Any] = []
        with self.database.transaction("write") as connection:
            if queues is None:
                queues = list(self._free_queues(connection))
            for queue in dict.fromkeys(queues):
                rows += connection.execute(free, {"queue": queue, **wanted})
                rows.sort(key=_in_order)
                del rows[limit:]
                if len(rows) == limit:
                    wanted["until_ms"] = rows[-1].due_ms  # no later row has a place any more
            for chunk in _chunks(row.seq for row in rows):
                connection.execute(self._sql.own, {"rows": chunk, "by": owner})
        tasks = [task_of(row) for row in rows]
        for task in tasks:
            task.owner = owner
        return tasks

    def _free_queues(self, connection: sa.Connection) -> Iterator[str]:
        queue = connection.scalar(self._sql.first_free_queue)
        while queue is not None:
            yield queue
            queue = connection.scalar(self._sql.next_free_queue, {"after": queue})

    @again
    def confirm(self, owner: str, refs: Sequence[Ref], now_ms: int) -> set[bytes]:
        """See :meth:`Store.confirm`."""
        wanted, keys = set(refs), [key for key, _ in refs]
        confirmed: set[bytes] = set()
        ready: dict[bytes, Any] = {}
        with self.database.transaction("write", "share") as connection:
            for row in _select(connection, self._sql.fence, "keys", keys):
                if row.owner != owner or (row.key, row.version) not in wanted:
                    continue
                if row.state:
                    confirmed.add(row.key)
                elif row.due_ms <= now_ms:
                    ready[row.key] = row
            named = [(row.key, row.id, stamps_of(row.stamps)) for row in ready.values()]
            for key in self._cancelled(connection, named, now_ms):
                del ready[key]
            for chunk in _chunks(row.seq for row in ready.values()):
                connection.execute(self._sql.dispatch, {"rows": chunk})
        return confirmed.union(ready)

    @again
    def settle(self, keys: Sequence[bytes], seen_until_ms: int | None = None) -> int:
        """See :meth:`Store.settle`."""
        with self.database.transaction("write") as connection:
            if seen_until_ms is not None and keys:
                seen = [{"key": key, "until_ms": seen_until_ms} for key in dict.fromkeys(keys)]
                connection.execute(self._sql.remember_seen, seen)
            return self._delete(connection, keys)

    def _delete(self, connection: sa.Connection, keys: Iterable[bytes]) -> int:
        count = 0
        for chunk in _chunks(keys):
            count += connection.execute(self._sql.delete, {"keys": chunk}).rowcount
            connection.execute(self._sql.delete_stamps, {"keys": chunk})
        return count

    @again
    def release(
        self, owner: str, keys: Sequence[bytes] | None = None, *, redelivered: bool = False
    ) -> int:
        """See :meth:`Store.release`."""
        with self.database.transaction("write") as connection:
            if keys is None:
                return connection.execute(self._sql.release_all, {"by": owner}).rowcount
            free = self._sql.release_redelivered if redelivered else self._sql.release
            return sum(
                connection.execute(free, {"by": owner, "keys": chunk}).rowcount
                for chunk in _chunks(keys)
            )

    @again
    def heartbeat(self, owner: Owner, ttl_s: float) -> bool:
        """See :meth:`Store.heartbeat`."""
        with self.database.transaction("write") as connection:
            until_ms = self.database.now_ms(connection) + round(ttl_s * 1000)
            renewed = {"by": owner.name, "to_ms": until_ms}
            held = connection.execute(self._sql.renew_lease, renewed).rowcount > 0
            if not held:
                lease = {
                    "name": owner.name,
                    "node": owner.node,
                    "boot": owner.boot,
                    "pid": owner.pid,
                    "started": owner.started,
                    "until_ms": until_ms,
                }
                connection.execute(self._sql.start_lease, lease)
        first = owner.name not in self._started
        self._started.add(owner.name)
        self.database.tidy()
        return held or first

    @again
    def end_lease(self, owner: str) -> None:
        """See :meth:`Store.end_lease`."""
        with self.database.transaction("write") as connection:
            connection.execute(self._sql.end_lease, {"by": owner})
        self._started.discard(owner)

    def owners(self) -> list[Owner]:
        """See :meth:`Store.owners`."""
        with self.database.transaction("read") as connection:
            return [Owner(*row[:5]) for row in connection.execute(self._sql.owners)]

    def reap(self, dead: Iterable[str] = ()) -> int:
        """See :meth:`Store.reap`."""
        return self._reap(list(dead))

    @again
    def _reap(self, dead: Sequence[str]) -> int:
        freed = 0
        with self.database.transaction("write") as connection:
            now = {"now_ms": self.database.now_ms(connection)}
            for name in dead:
                connection.execute(self._sql.end_lease, {"by": name})
            connection.execute(self._sql.end_expired, now)
            # In this order: who begins a lease and claims rows in between is not met.
            owners = list(self._row_owners(connection))
            living = set(connection.scalars(self._sql.lease_names))
            for name in owners:
                if name not in living:
                    freed += connection.execute(self._sql.release_all, {"by": name}).rowcount
            for expired, delete in self._sql.expired:
                for chunk in _chunks(connection.scalars(expired, now).all()):
                    connection.execute(delete, {"names": chunk, **now})
        return freed

    def _row_owners(self, connection: sa.Connection) -> Iterator[str]:
        name = connection.scalar(self._sql.next_row_owner, {"after": ""})
        while name is not None:
            yield name
            name = connection.scalar(self._sql.next_row_owner, {"after": name})

    @again
    def cancel(
        self,
        ids: Sequence[str],
        stamps: Sequence[str],
        remember_until_ms: int,
    ) -> Cancelled:
        """See :meth:`Store.cancel`."""
        outcomes = dict.fromkeys(ids, "unknown")
        tombstones = [
            {"is_stamp": is_stamp, "name": name, "until_ms": remember_until_ms}
            for is_stamp, names in enumerate((list(outcomes), list(dict.fromkeys(stamps))))
            for name in names
        ]
        if not tombstones:
            return Cancelled()
        with self.database.transaction("durable", "shut") as connection:
            connection.execute(self._sql.remember_cancelled, tombstones)
            found = {row.key: row for row in _select(connection, self._sql.by_ids, "ids", ids)}
            carriers = _select(connection, self._sql.by_stamps, "names", stamps)
            found.update((row.key, row) for row in carriers)
            gone = [task_of(row) for row in found.values() if not row.state]
            self._delete(connection, [task.key for task in gone])
        outcomes.update((row.id, "dispatched") for row in found.values() if row.state)
        outcomes.update((task.id, "cancelled") for task in gone)
        return Cancelled(gone, outcomes)

    @again
    def forget(self, keys: Sequence[bytes]) -> list[DelayedTask]:
        """See :meth:`Store.forget`."""
        with self.database.transaction("write") as connection:
            rows = _select(connection, self._sql.pending_by_keys, "keys", keys)
            gone = [task_of(row) for row in rows]
            self._delete(connection, [task.key for task in gone])
        return gone

    @again
    def reschedule(self, task_id: str, due_ms: int) -> int:
        """See :meth:`Store.reschedule`."""
        with self.database.transaction("write") as connection:
            moved = {"task_id": task_id, "to_ms": due_ms}
            connection.execute(self._sql.reschedule, moved)
            return int(connection.scalar(self._sql.pending_of_id, {"task_id": task_id}) or 0)

    def find(self, which: Filter, limit: int, cursor: str | None = None) -> Page:
        """See :meth:`Store.find`."""
        if limit <= 0:
            return Page()
        query = self._sql.find(which, None if cursor is None else _bound(cursor))
        with self.database.transaction("read") as connection:
            if which.ids is None:
                rows = list(connection.execute(query, {"row_limit": limit + 1}))
            else:
                rows = list(_select(connection, query, "ids", which.ids, row_limit=limit + 1))
                rows.sort(key=_in_order)
        tasks = [task_of(row) for row in rows[:limit]]
        if len(rows) <= limit:
            return Page(tasks, None)
        last = rows[limit - 1]
        return Page(tasks, encode_cursor(last.due_ms, last.arrival, str(last.seq)))

    def count(self) -> Counts:
        """See :meth:`Store.count`."""
        with self.database.transaction("read") as connection:
            rows = connection.scalar(self._sql.count_all) or 0
            dispatched = connection.scalar(self._sql.count_dispatched) or 0
            owned = connection.scalar(self._sql.count_owned) or 0
        return Counts(rows - dispatched, dispatched, owned)

    def histogram(self, edges_ms: Sequence[int]) -> list[int]:
        """See :meth:`Store.histogram`."""
        edges = [_EARLIEST_MS, *edges_ms, _LATEST_MS]
        counts = []
        with self.database.transaction("read") as connection:
            for from_ms, before_ms in pairwise(edges):
                within = {"from_ms": from_ms, "before_ms": before_ms}
                rows = connection.scalar(self._sql.count_due, within) or 0
                dispatched = connection.scalar(self._sql.count_due_dispatched, within) or 0
                counts.append(rows - dispatched)
        return counts

    def remembered(self, limit: int) -> list[str]:
        """See :meth:`Store.remembered`."""
        with self.database.transaction("read") as connection:
            return list(connection.scalars(self._sql.remembered, {"row_limit": limit}))

    def oldest_due(self) -> int | None:
        """See :meth:`Store.oldest_due`."""
        with self.database.transaction("read") as connection:
            return connection.scalar(self._sql.oldest_due)

    def next_expiring(self, before_ms: int, limit: int) -> list[DelayedTask]:
        """See :meth:`Store.next_expiring`."""
        if limit <= 0:
            return []
        with self.database.transaction("read") as connection:
            fixed = {"before_ms": before_ms, "row_limit": limit}
            return [task_of(row) for row in connection.execute(self._sql.expiring, fixed)]


def _chunks(values: Iterable[T]) -> Iterator[list[T]]:
    distinct = list(dict.fromkeys(values))
    for start in range(0, len(distinct), CHUNK):
        yield distinct[start : start + CHUNK]


def _select(
    connection: sa.Connection, statement: Any, name: str, values: Iterable[Any], **fixed: Any
) -> Iterator[Any]:
    """Rows of a statement that takes a list under ``name``, however long the list is."""
    for chunk in _chunks(values):
        yield from connection.execute(statement, {name: chunk, **fixed}).all()


def _in_order(row: Any) -> tuple[int, int, int]:
    return row.due_ms, row.arrival, row.seq


def _bound(cursor: str) -> tuple[int, int, int]:
    due_ms, arrival, seq = decode_cursor(cursor)
    return due_ms, arrival, int(seq)
