"""Giving delayed tasks back to the broker: the way out of a store.

Each row goes to its own source queue, as the message that it was. A row is confirmed before it
is published, so no worker runs it and no cancel is answered wrongly meanwhile, and settled when
the broker has it.

On crash: what was published and not yet settled (at most :data:`BATCH` rows) is in both places.
Those rows are free again when the lease has ended, and the next drain publishes them once more:
a drain is at least once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from celery_wheel.envelope import unpack
from celery_wheel.errors import CorruptRow, StoreError, StoreUnavailable, WheelError
from celery_wheel.instants import iso
from celery_wheel.stores.base import Filter
from celery_wheel.task import PENDING
from celery_wheel.worker.courier import CONFIRM_S, letter_of
from celery_wheel.worker.incarnation import new_owner
from celery_wheel.worker.lease import Lease

if TYPE_CHECKING:
    from celery_wheel.clock import Clock
    from celery_wheel.settings import Settings
    from celery_wheel.stores.base import Owner, Store
    from celery_wheel.task import DelayedTask

__all__ = ("Drain", "Drained", "SourceQueues")

logger = get_logger(__name__)

#: Rows in RAM: they are published in the order of their arrival within this many.
WINDOW = 50_000
#: Rows per claim.
PAGE = 1000
#: Rows that are confirmed, published and settled together.
BATCH = 200
#: Later than any ETA, UTC milliseconds.
EVER_MS = 2**53


@dataclass
class Drained:
    """What a drain did.

    Attributes:
        queues: rows that were published, by queue.
        revoked: rows that a revoke on record kept from being published; deleted.
        unreadable: rows that are no message any more, or none for this broker; kept.
        left: rows that are in the store now.
    """

    queues: Counter[str] = field(default_factory=Counter)
    revoked: list[DelayedTask] = field(default_factory=list)
    unreadable: int = 0
    left: int = 0


class Drain:
    """One drain of one store. Used once, by one thread.

    Args:
        store: an open store.
        progress: called with the number of rows dealt with so far, and of all.
        force: go on while workers hold leases; what they hold stays.
    """

    def __init__(
        self,
        app: Any,
        store: Store,
        settings: Settings,
        *,
        clock: Clock,
        force: bool = False,
        progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> None:
        self._app, self._store, self._clock = app, store, clock
        self._force, self._progress = force, progress
        self.owner = new_owner("drain")
        self._lease = Lease(store.sibling(), self.owner, settings.lease_ttl_s, clock)
        self._drained = Drained()
        self._done = 0

    def run(self) -> Drained:
        """Publish every row that no worker holds.

        Raises:
            WheelError: workers hold leases and ``force`` is off, or the broker failed.
            StoreUnavailable: the store does not answer, or the lease was lost.
        """
        self._lease.start()
        try:
            self._require_lease()
            self._store.reap()  # what a drain left that was killed, and leases that ran out
            if not self._force:
                self._require_no_workers()
            with SourceQueues(self._app) as queues:
                self._all(queues)
        finally:
            self._lease.stop(CONFIRM_S)
            self._give_back()
        counts = self._store.count()
        self._drained.left = counts.pending + counts.dispatched
        return self._drained

    def _give_back(self) -> None:
        try:
            self._store.release(self.owner.name)
            self._store.end_lease(self.owner.name)
        except StoreError as exc:
            logger.warning("What the drain holds is free when its lease ends (%s).", exc)

    def _require_lease(self) -> None:
        if not self._lease.holds():
            raise StoreUnavailable(
                "the store does not keep the drain's lease: nothing more is published; run it "
                "again when the store answers"
            )

    def _require_no_workers(self) -> None:
        others = [owner for owner in self._store.owners() if owner.name != self.owner.name]
        if others:
            names = ", ".join(sorted({_who(owner) for owner in others}))
            raise WheelError(
                f"leases are held by {names}: stop the workers first (a killed one's lease ends "
                "by itself within wheel_lease_ttl), or use --force to drain only what they do "
                "not hold"
            )

    def _all(self, queues: SourceQueues) -> None:
        # Workers that go on put what we publish into the store anew: the number ends it.
        total = self._store.count().pending
        self._progress(0, total)
        while self._done < total:
            window = self._claim(min(WINDOW, total - self._done))
            if not window:
                return
            window.sort(key=lambda row: row.arrival)
            for start in range(0, len(window), BATCH):
                batch = window[start : start + BATCH]
                self._batch(queues, batch)
                self._done += len(batch)
                self._progress(self._done, total)

    def _claim(self, limit: int) -> list[DelayedTask]:
        rows: list[DelayedTask] = []
        while len(rows) < limit:
            page = self._store.claim(self.owner.name, EVER_MS, min(PAGE, limit - len(rows)))
            if not page:
                break
            rows += page
        return rows

    def _batch(self, queues: SourceQueues, rows: list[DelayedTask]) -> None:
        readable = list(self._readable(queues, rows))
        confirmed = self._confirm([row for row, _ in readable])
        self._require_lease()
        wanted = [(row, message) for row, message in readable if row.key in confirmed]
        sent = queues.send(wanted)
        self._store.settle([row.key for row in sent])
        self._drained.queues.update(row.queue for row in sent)
        self._drained.unreadable += len(wanted) - len(sent)

    def _readable(
        self, queues: SourceQueues, rows: list[DelayedTask]
    ) -> Iterator[tuple[DelayedTask, Any]]:
        for row in rows:
            try:
                yield row, queues.message(row)
            except CorruptRow as exc:
                self._drained.unreadable += 1
                logger.error("%s[%s] stays in the store: %s", row.name, row.id, exc)

    def _confirm(self, rows: list[DelayedTask]) -> set[bytes]:
        """Ask the fence: overdue rows now, the others as of their ETA."""
        now_ms, confirmed = self._clock.wall_ms(), set[bytes]()
        due = [row for row in rows if row.due_ms <= now_ms]
        later = [row for row in rows if row.due_ms > now_ms]
        if due:
            confirmed |= self._store.confirm(self.owner.name, _refs(due), now_ms)
            if len(confirmed) < len(due):
                self._forget_revoked([row for row in due if row.key not in confirmed])
        if later:
            at_ms = max(row.due_ms for row in later)
            confirmed |= self._store.confirm(self.owner.name, _refs(later), at_ms)
        return confirmed

    def _forget_revoked(self, refused: list[DelayedTask]) -> None:
        """Delete refused rows that are there yet: a revoke on record keeps them from running."""
        keys = {row.key for row in refused}
        which = Filter(ids=tuple({row.id for row in refused}), owner=self.owner.name)
        rows = self._store.find(which, 10 * BATCH).rows
        there = [row.key for row in rows if row.key in keys and row.state == PENDING]
        if there:
            self._drained.revoked += self._store.forget(there)


class SourceQueues:
    """The broker's end: publishes rows to their queues and knows when the broker has them.

    A context manager; errors of the broker come out of it as :class:`WheelError`.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connection = app.connection_for_write()
        self._channel: Any = None
        self._known: set[str] = set()
        self._options: dict[str, Any] = {}
        self._unconfirmed: set[int] = set()
        self._published = 0
        self._confirms = False

    def __enter__(self) -> SourceQueues:
        try:
            self._connection.ensure_connection(max_retries=1, interval_start=0)
            self._channel = self._connection.channel()
            if self._connection.transport.driver_type == "amqp":
                self._ask_for_confirms()
        except Exception as exc:
            self._connection.release()
            raise self._translated(exc) from exc
        return self

    def __exit__(self, _type: object, exc: BaseException | None, _traceback: object) -> None:
        try:
            self._connection.release()
        except Exception as closing:  # noqa: BLE001 - transports raise their own errors
            logger.debug("The broker's connection did not close: %r", closing)
        if exc is not None and isinstance(exc, self._errors()):
            raise self._translated(exc) from exc

    def message(self, row: DelayedTask) -> Any:
        """The row as the message that it was.

        Raises:
            CorruptRow: its envelope can't be read.
        """
        letter = letter_of(unpack(row.envelope), "", row.queue, mandatory=True)
        if row.version:
            # Rescheduled: the ETA of the message is not the task's any more.
            letter.headers["eta"] = iso(row.due_ms)
        return self._channel.prepare_message(
            letter.body,
            priority=letter.properties.pop("priority", None),  # passed by itself
            content_type=letter.content_type,
            content_encoding=letter.content_encoding,
            headers=letter.headers,
            properties=letter.properties,
        )

    def send(self, messages: Sequence[tuple[DelayedTask, Any]]) -> list[DelayedTask]:
        """Publish, in order; returns, when the broker has them, the rows that it has.

        What this transport can't write down is left out, with a line in the log.
        """
        sent = []
        for queue, group in groupby(messages, key=lambda pair: pair[0].queue):
            self._require(queue)
            for row, message in group:
                try:
                    self._publish(message, queue)
                except self._errors():
                    raise
                except Exception as exc:  # noqa: BLE001 - transports encode as they like
                    logger.error("%s[%s] stays in the store: %r", row.name, row.id, exc)
                else:
                    sent.append(row)
        while self._unconfirmed:
            self._connection.drain_events(timeout=CONFIRM_S)
        return sent

    def _publish(self, message: Any, queue: str) -> None:
        self._channel.basic_publish(message, exchange="", routing_key=queue, **self._options)
        if self._confirms:
            self._published += 1
            self._unconfirmed.add(self._published)

    def _require(self, queue: str) -> None:
        """Make a queue that is gone anew, as the app is configured; leave others as they are."""
        if queue in self._known:
            return
        with self._connection.channel() as channel:
            try:
                channel.queue_declare(queue, passive=True)
            except self._connection.channel_errors:
                self._declare(queue)
        self._known.add(queue)

    def _declare(self, queue: str) -> None:
        try:
            known = self._app.amqp.queues[queue]
        except KeyError:
            raise WheelError(
                f"the queue {queue} is gone, and the app does not create queues it does not know: "
                "declare it, or add it to task_queues"
            ) from None
        known.bind(self._connection.default_channel).declare()

    def _ask_for_confirms(self) -> None:
        """AMQP: the broker confirms each message, and returns what it has no queue for."""
        self._confirms = True
        self._options = {"mandatory": True}
        self._channel.confirm_select()
        self._channel.events["basic_ack"].add(self._confirmed)
        self._channel.events["basic_nack"].add(self._refused)

    def _confirmed(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - amqp's callback
        if multiple:
            self._unconfirmed = {one for one in self._unconfirmed if one > tag}
        else:
            self._unconfirmed.discard(tag)

    def _refused(self, tag: int, _multiple: bool) -> None:  # noqa: FBT001 - amqp's callback
        raise WheelError(f"the broker refused a message (number {tag} of this drain): is it full?")

    def _errors(self) -> tuple[type[BaseException], ...]:
        connection = self._connection
        return (*connection.connection_errors, *connection.channel_errors, OSError)

    def _translated(self, exc: BaseException) -> WheelError:
        where = self._connection.as_uri()
        what = " ".join(str(exc).split()) or type(exc).__name__
        return WheelError(f"the broker {where} does not take messages: {what}")


def _refs(rows: list[DelayedTask]) -> list[tuple[bytes, int]]:
    return [(row.key, row.version) for row in rows]


def _who(owner: Owner) -> str:
    return owner.node or owner.name
