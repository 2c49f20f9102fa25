"""The client: look at delayed tasks and steer them from any process, workers or none.

Everything is decided by the store. A row that a worker has claimed is decided by the fence:
what is cancelled or moved here, the worker's own copy can't run any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, tzinfo
from typing import Any

from celery.utils.log import get_logger

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.connection import Connection
from celery_wheel.drain import Drain, Drained
from celery_wheel.envelope import unpack
from celery_wheel.errors import CorruptRow
from celery_wheel.instants import LATEST_MS, iso, to_ms
from celery_wheel.notice import Notices
from celery_wheel.settings import Settings
from celery_wheel.stores.base import Filter, Owner
from celery_wheel.task import DISPATCHED, DelayedTask
from celery_wheel.worker import report

__all__ = ("CANCELLED", "DISPATCHED", "RESCHEDULED", "UNKNOWN", "Backlog")

logger = get_logger(__name__)

#: Answers per id, with :data:`~celery_wheel.task.DISPATCHED`: handed to a pool already.
CANCELLED, RESCHEDULED, UNKNOWN = "cancelled", "rescheduled", "unknown"
#: Rows or ids in one call of the store.
CHUNK = 500

# ``list`` is a method below.
Rows = list[DelayedTask]
Shown = list[dict[str, Any]]
Owners = list[Owner]
Ids = list[str]
When = datetime | str


class Backlog:
    """The delayed tasks of an app, in its ``wheel_store``.

    Making one does no I/O; the first call connects. Dates may be ``datetime`` or ISO 8601;
    without an offset they are in the app's timezone.

    Every method raises :class:`~celery_wheel.errors.ConfigError` for wrong settings or no
    ``wheel_store``, :class:`~celery_wheel.errors.StoreUnavailable` where the store does not
    answer (calling again is safe), and ``ValueError`` for arguments that make no sense.

    Thread-safety: calls of several threads take turns. Fork-safety: it disconnects before a
    fork, and parent and child connect anew.
    """

    def __init__(self, app: Any, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.app, self._clock = app, clock
        self._connection = Connection(app)

    def __enter__(self) -> Backlog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; the next call connects again."""
        self._connection.close()

    @property
    def settings(self) -> Settings:
        """The app's ``wheel_*`` settings, read once."""
        return self._connection.settings

    @property
    def zone(self) -> tzinfo:
        """The app's timezone."""
        zone: tzinfo = self.app.timezone
        return zone

    # -- looking -------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Exact counts, how late the oldest task is, and how many are due when."""
        now_ms = self._clock.wall_ms()
        with self._connection.opened() as store:
            counts, found = store.count(), report.of_store(store, now_ms)
        oldest_ms = found["oldest_due_ms"]
        overdue_ms = 0 if oldest_ms is None else max(0, now_ms - oldest_ms)
        return {
            "store": self.settings.store_shown,
            "pending": counts.pending,
            "dispatched": counts.dispatched,
            "oldest_overdue_s": round(overdue_ms / 1000, 3),
            "owned": counts.owned,
            "horizon": dict(zip(report.labels(), found["histogram"], strict=True)),
        }

    def list(self, *, limit: int | None = 100, **which: Any) -> Rows:
        """Rows in due order; ``limit=None`` for all. ``which``: see :meth:`select`."""
        rows: Rows = []
        for page in self.pages(self.select(**which), limit):
            rows += page
        return rows

    def pages(self, which: Filter, limit: int | None = None) -> Iterator[Rows]:
        """Rows that fit, in due order, a page at a time."""
        cursor = None
        while limit is None or limit > 0:
            size = CHUNK if limit is None else min(CHUNK, limit)
            with self._connection.opened() as store:
                page = store.find(which, size, cursor)
            yield page.rows
            cursor = page.cursor
            if cursor is None:
                return
            limit = None if limit is None else limit - len(page.rows)

    def select(
        self,
        *,
        name: str | None = None,
        queue: str | None = None,
        ids: Iterable[str] | str | None = None,
        due_before: When | None = None,
        due_after: When | None = None,
        owner: str | None = None,
    ) -> Filter:
        """A filter; what is not given does not matter.

        Args:
            name: the task's name, in full.
            queue: the source queue.
            ids: some of these.
            due_before: due earlier than this.
            due_after: due at this or later.
            owner: the worker that holds it, as ``owner`` of a row names it.
        """
        return Filter(
            ids=None if ids is None else _ids(ids),
            name=name,
            queue=queue,
            owner=owner,
            due_from_ms=None if due_after is None else to_ms(due_after, self.zone),
            due_before_ms=None if due_before is None else to_ms(due_before, self.zone),
        )

    def show(self, task_id: str) -> Shown:
        """All that is kept of an id: usually one row, none if it is not held."""
        rows = self.list(ids=[task_id], limit=None)
        return [{**self.describe(row), **_message(row)} for row in rows]

    def describe(self, row: DelayedTask) -> dict[str, Any]:
        """A row without its message, with dates in the app's timezone."""
        expires = None if row.expires_ms is None else iso(row.expires_ms, self.zone)
        due_in_s = round((row.due_ms - self._clock.wall_ms()) / 1000, 3)
        return {
            **row.describe(),
            "due": iso(row.due_ms, self.zone),
            "due_in_s": due_in_s,
            "expires": expires,
            "redelivered": row.redelivered,
            "stamps": list(row.stamps),
        }

    # -- steering ------------------------------------------------------------------------------

    def cancel(
        self, ids: Iterable[str] | str | None = None, *, dry_run: bool = False, **which: Any
    ) -> dict[str, str]:
        """Cancel as a revoke does; ids that are not held are remembered, too.

        Tasks are cancelled in chunks: an error in between leaves what was done before. A
        filter cancels the *ids* of the rows that fit, whatever else is held of them.

        Args:
            ids: these, or ``None`` for whatever fits the filter.
            dry_run: answer and change nothing.
            **which: the filter, see :meth:`select`; without ids and filter: every task. With
                both, those of the ids that are held and fit.

        Returns:
            Per id ``cancelled``, ``dispatched`` (too late: use Celery's revoke to terminate it)
            or ``unknown`` (not held; it is refused when it comes, for ``wheel_revoke_ttl``).
        """
        outcomes: dict[str, str] = {}
        notices = Notices(self.app)
        for chunk in self._chunks(ids, which):
            if dry_run:
                outcomes.update(self._outcomes(chunk))
                continue
            until_ms = self._clock.wall_ms() + self.settings.revoke_ttl_ms
            with self._connection.opened() as store:
                answer = store.cancel(chunk, [], until_ms)
            # An id may be in several chunks of a filter: the first one had all its rows.
            for one, outcome in answer.outcomes.items():
                outcomes.setdefault(one, outcome)
            notices.revoked(answer.rows)
        return outcomes

    def reschedule(
        self, task_id: str, *, countdown: float | None = None, eta: When | None = None
    ) -> str:
        """Give a task another ETA; its id stays. What is in the past runs at once.

        Args:
            task_id: all its rows that wait are moved.
            countdown: seconds from now.
            eta: an instant.

        Returns:
            ``rescheduled``, ``dispatched`` (too late) or ``unknown``.
        """
        if (countdown is None) == (eta is None):
            raise ValueError("give either countdown or eta")
        due_ms = self._due_ms(countdown) if eta is None else to_ms(eta, self.zone)
        return self._move([task_id], due_ms)[task_id]

    def run_now(self, ids: Iterable[str] | str) -> dict[str, str]:
        """Let tasks run at once; answers as :meth:`reschedule`, per id."""
        return self._move(_ids(ids), self._clock.wall_ms())

    def drain(
        self,
        *,
        force: bool = False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> Drained:
        """Give every task back to its source queue; see :mod:`celery_wheel.drain`.

        Raises:
            WheelError: workers hold leases and ``force`` is off, or the broker failed.
        """
        with self._connection.opened() as store:
            drain = Drain(
                self.app, store, self.settings, clock=self._clock, force=force, progress=progress
            )
            drained = drain.run()
        Notices(self.app).revoked(drained.revoked)
        return drained

    # -- the store itself ----------------------------------------------------------------------

    def migrate(self) -> str:
        """Make the schema, or bring it up to date; returns the store's URL. Repeating is safe."""
        with self._connection.opened():
            return self.settings.store_shown

    def owners(self) -> Owners:
        """Every worker with a lease on record, after those that ran out were cleared away."""
        with self._connection.opened() as store:
            store.reap()
            return store.owners()

    def look(self) -> bool:
        """Tell the workers that hold leases to look into the store now.

        Best effort, for promptness: they look every few seconds anyway. Returns whether it was
        sent.
        """
        nodes = sorted({owner.node for owner in self.owners() if owner.node})
        if not nodes:
            return False
        try:
            with self.app.connection_for_write() as connection:
                connection.ensure_connection(max_retries=1, interval_start=0)
                self.app.control.broadcast(
                    "wheel_look", destination=nodes, connection=connection, reply=False
                )
        except Exception as exc:  # noqa: BLE001 - transports raise their own errors
            logger.info("The workers could not be told to look at once: %r", exc)
            return False
        return True

    def clock_skew_ms(self) -> int | None:
        """How far this machine's clock is ahead of the store's; ``None``: the store can't tell."""
        with self._connection.opened() as store:
            store_clock = getattr(store, "clock_ms", None)
            if store_clock is None:
                return None
            before_ms = self._clock.wall_ms()
            told_ms = store_clock()
            after_ms = self._clock.wall_ms()
        return None if told_ms is None else (before_ms + after_ms) // 2 - int(told_ms)

    # -- within --------------------------------------------------------------------------------

    def _chunks(self, ids: Iterable[str] | str | None, which: dict[str, Any]) -> Iterator[Ids]:
        if ids is None or which:
            for rows in self.pages(self.select(ids=ids, **which)):
                yield list(dict.fromkeys(row.id for row in rows))
            return
        wanted = _ids(ids)
        for start in range(0, len(wanted), CHUNK):
            yield list(wanted[start : start + CHUNK])

    def _outcomes(self, ids: Ids) -> dict[str, str]:
        """What a cancel would answer."""
        outcomes = dict.fromkeys(ids, UNKNOWN)
        for rows in self.pages(Filter(ids=tuple(ids))):
            for row in rows:
                if row.state != DISPATCHED:
                    outcomes[row.id] = CANCELLED
                elif outcomes[row.id] == UNKNOWN:
                    outcomes[row.id] = DISPATCHED
        return outcomes

    def _move(self, ids: Iterable[str], due_ms: int) -> dict[str, str]:
        outcomes: dict[str, str] = {}
        for task_id in ids:
            with self._connection.opened() as store:
                moved = store.reschedule(task_id, max(0, due_ms))
            outcomes[task_id] = RESCHEDULED if moved else self._outcomes([task_id])[task_id]
        if RESCHEDULED in outcomes.values():
            self.look()
        return outcomes

    def _due_ms(self, countdown: float | None) -> int:
        seconds = float(countdown or 0)
        due_ms = self._clock.wall_ms() + max(0.0, seconds) * 1000
        if not (math.isfinite(seconds) and due_ms <= LATEST_MS):
            raise ValueError(f"countdown = {seconds:g}: give seconds, ending before the year 9999")
        return math.ceil(due_ms)


def _ids(ids: Iterable[str] | str) -> tuple[str, ...]:
    return tuple(dict.fromkeys([ids] if isinstance(ids, str) else map(str, ids)))


def _message(row: DelayedTask) -> dict[str, Any]:
    """What a row's envelope holds, but for the body."""
    try:
        envelope = unpack(row.envelope)
    except CorruptRow as exc:
        return {"unreadable": str(exc)}
    return {
        "args": envelope.headers.get("argsrepr"),
        "kwargs": envelope.headers.get("kwargsrepr"),
        "headers": envelope.headers,
        "properties": envelope.properties,
        "content_type": envelope.content_type,
        "content_encoding": envelope.content_encoding,
        "body_bytes": len(envelope.body),
    }
