"""Every statement of the SQL stores, by name.

Built once per namespace. ``:keys``, ``:ids`` and ``:names`` take lists, of which the caller
gives no more than fit. ``state`` is compared with literals, never with parameters: only then
can a database see that a partial index holds all the rows in question.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from celery_wheel.stores.base import Filter
from celery_wheel.stores.sql_schema import Tables

__all__ = ("Statements",)

#: How many tombstones of a kind are swept at a time: after days without a worker there may be
#: millions, and the call that frees the rows of the dead must not take minutes.
SWEEP = 20_000

_0: sa.ColumnElement[int] = sa.literal_column("0")
_1: sa.ColumnElement[int] = sa.literal_column("1")


def _list(name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(name, expanding=True)


def _holds(tombstones: sa.Table) -> sa.ColumnElement[bool]:
    # Wrapped, so that no planner goes over all tombstones that hold: the names are few.
    return tombstones.c.until_ms + _0 > sa.bindparam("now_ms")


def _expired(name: sa.Column[Any]) -> tuple[Any, Any]:
    until_ms = name.table.c.until_ms
    out = until_ms <= sa.bindparam("now_ms")
    some = sa.select(name).where(out).order_by(until_ms).limit(SWEEP)
    return some, sa.delete(name.table).where(name.in_(_list("names")), out)


class Statements:
    """Named statements over one set of tables.

    Args:
        tables: the tables.
        keep_latest: makes the statement that remembers tombstones in one of them.
    """

    def __init__(self, tables: Tables, keep_latest: Callable[[sa.Table], Any]) -> None:
        self.tables = tables
        self._about_rows()
        self._about_fences()
        self._about_counts()
        self._about_tombstones(keep_latest)
        self._about_leases()

    def _about_rows(self) -> None:
        tasks, stamps = self.tables.tasks, self.tables.stamps
        one, pending = tasks.c, tasks.c.state == _0
        self.in_order = (one.due_ms, one.arrival, one.seq)
        self._about_claims(pending & one.owner.is_(None))
        self.put = sa.insert(tasks)
        self.put_stamps = sa.insert(stamps)
        self.known_keys = sa.select(one.key).where(one.key.in_(_list("keys")))
        self.delete = sa.delete(tasks).where(one.key.in_(_list("keys")))
        self.delete_stamps = sa.delete(stamps).where(stamps.c.key.in_(_list("keys")))
        self.by_ids = sa.select(tasks).where(one.id.in_(_list("ids"))).with_for_update()
        carriers = sa.select(stamps.c.key).where(stamps.c.stamp.in_(_list("names")))
        self.by_stamps = sa.select(tasks).where(one.key.in_(carriers)).with_for_update()
        of_keys = sa.select(tasks).where(one.key.in_(_list("keys")), pending)
        self.pending_by_keys = of_keys.with_for_update()
        self.expiring = (
            sa.select(tasks)
            .where(pending, one.expires_ms < sa.bindparam("before_ms"))
            .order_by(one.expires_ms)
            .limit(sa.bindparam("row_limit"))
        )
        of_id = (one.id == sa.bindparam("task_id"), pending)
        self.pending_of_id = sa.select(sa.func.count()).select_from(tasks).where(*of_id)
        self.reschedule = (
            sa.update(tasks)
            .where(*of_id, one.due_ms != sa.bindparam("to_ms"))
            .values(due_ms=sa.bindparam("to_ms"), version=one.version + 1, owner=None)
        )

    def _about_claims(self, free: sa.ColumnElement[bool]) -> None:
        tasks, one = self.tables.tasks, self.tables.tasks.c
        # MySQL guesses what is free and due, and guesses wrong.
        hint = (tasks, f"FORCE INDEX ({self.tables.namespace}_ix_claim)", "mysql")
        self.claimable = (
            sa.select(tasks)
            .where(free, one.queue == sa.bindparam("queue"), one.due_ms <= sa.bindparam("until_ms"))
            .order_by(*self.in_order)
            .limit(sa.bindparam("row_limit"))
            .with_for_update(skip_locked=True)
            .with_hint(*hint)
        )
        self.claimable_known = self.claimable.where(one.name.not_in(_list("unknown")))
        self.own = (
            sa.update(tasks).where(one.seq.in_(_list("rows"))).values(owner=sa.bindparam("by"))
        )
        #: The queues of free rows, from one to the next: no row in between is read.
        queues = sa.select(one.queue).where(free).order_by(one.queue).limit(_1)
        self.first_free_queue = queues.with_hint(*hint)
        self.next_free_queue = self.first_free_queue.where(one.queue > sa.bindparam("after"))

    def _about_fences(self) -> None:
        tasks = self.tables.tasks
        one = tasks.c
        seen = (one.seq, one.key, one.id, one.version, one.state, one.owner, one.due_ms, one.stamps)
        self.fence = sa.select(*seen).where(one.key.in_(_list("keys"))).with_for_update()
        self.dispatch = sa.update(tasks).where(one.seq.in_(_list("rows"))).values(state=_1)
        flag = sa.case((one.state == _1, _1), else_=one.redelivered)
        # In this order: MySQL's flag would look at the new state.
        rest = ((one.state, _0), (one.owner, sa.null()))
        free = sa.update(tasks).ordered_values((one.redelivered, flag), *rest)
        self.release_all = free.where(one.owner == sa.bindparam("by"))
        # Wrapped, so that no planner reads all rows of the owner to find those with the keys.
        is_mine = sa.func.coalesce(one.owner, "") == sa.bindparam("by")
        named = (is_mine, one.key.in_(_list("keys")))
        self.release = free.where(*named)
        marked = sa.update(tasks).ordered_values((one.redelivered, _1), *rest)
        self.release_redelivered = marked.where(*named)

    def _about_counts(self) -> None:
        tasks = self.tables.tasks
        one = tasks.c
        count = sa.select(sa.func.count()).select_from(tasks)
        dispatched = one.state == _1
        self.count_all = count
        self.count_dispatched = count.where(dispatched)
        self.count_owned = count.where(one.owner.is_not(None))
        within = (one.due_ms >= sa.bindparam("from_ms"), one.due_ms < sa.bindparam("before_ms"))
        self.count_due = count.where(*within)
        self.count_due_dispatched = count.where(dispatched, *within)
        self.oldest_due = sa.select(one.due_ms).where(one.state == _0).order_by(one.due_ms).limit(1)

    def _about_tombstones(self, keep_latest: Callable[[sa.Table], Any]) -> None:
        cancelled, seen = self.tables.cancelled, self.tables.seen
        self.cancelled = sa.select(cancelled.c.name).where(
            cancelled.c.is_stamp == sa.bindparam("is_stamp"),
            cancelled.c.name.in_(_list("names")),
            _holds(cancelled),
        )
        self.seen_keys = sa.select(seen.c.key).where(seen.c.key.in_(_list("keys")), _holds(seen))
        self.remembered = (
            sa.select(cancelled.c.name)
            .where(cancelled.c.is_stamp == _0)
            .order_by(cancelled.c.until_ms.desc())
            .limit(sa.bindparam("row_limit"))
        )
        self.remember_cancelled = keep_latest(cancelled)
        self.remember_seen = keep_latest(seen)
        #: Pairs of statements: names of tombstones that ran out, and the deletion of those.
        self.expired = tuple(map(_expired, (cancelled.c.name, seen.c.key)))

    def _about_leases(self) -> None:
        owners, one = self.tables.owners, self.tables.tasks.c
        self.start_lease = sa.insert(owners)
        self.renew_lease = (
            sa.update(owners)
            .where(owners.c.name == sa.bindparam("by"))
            .values(until_ms=sa.bindparam("to_ms"))
        )
        self.end_lease = sa.delete(owners).where(owners.c.name == sa.bindparam("by"))
        self.end_expired = sa.delete(owners).where(owners.c.until_ms <= sa.bindparam("now_ms"))
        self.owners = sa.select(owners).order_by(owners.c.name)
        self.lease_names = sa.select(owners.c.name)
        #: The next owner that has rows: walks the index from name to name, not over the rows.
        self.next_row_owner = (
            sa.select(one.owner)
            .where(one.owner > sa.bindparam("after"))
            .order_by(one.owner)
            .limit(_1)
        )

    def find(self, which: Filter, after: tuple[int, int, int] | None) -> sa.Select[Any]:
        """Select the rows of a filter in order, but for its ids, which ``:ids`` takes."""
        tasks, stamps = self.tables.tasks, self.tables.stamps
        one = tasks.c
        due, *rest = self.in_order
        named = which.ids is not None or which.stamps is not None
        # Wrapped, so that no planner goes over all rows in order to find those few.
        order = (due + _0 if named else due, *rest)
        query = sa.select(tasks).order_by(*order).limit(sa.bindparam("row_limit"))
        if after is not None:
            query = query.where(sa.tuple_(*self.in_order) > sa.tuple_(*after))
            query = query.where(one.due_ms >= after[0])  # MySQL finds no range in a tuple
        if which.ids is not None:
            query = query.where(one.id.in_(_list("ids")))
        if which.stamps is not None:
            carriers = sa.select(stamps.c.key).where(stamps.c.stamp.in_(which.stamps))
            query = query.where(one.key.in_(carriers))
        if which.due_from_ms is not None:
            query = query.where(one.due_ms >= which.due_from_ms)
        if which.due_before_ms is not None:
            query = query.where(one.due_ms < which.due_before_ms)
        equal = {one.name: which.name, one.queue: which.queue, one.owner: which.owner}
        return query.where(*(col == value for col, value in equal.items() if value is not None))
