"""Taking delayed messages in: Celery's own strategy decides, the store commits, then the ack.

The task's own strategy is called with a consumer whose timer *captures* instead of scheduling.
Where it captured, Celery has logged, signalled, sent the event, checked for revokes and
expiry and parsed the ETA; the message is delayed and is ours. Where it did not, the task is on
its way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.worker.state import task_reserved

from celery_wheel import _compat
from celery_wheel.envelope import pack
from celery_wheel.stores.base import PutResult
from celery_wheel.task import DelayedTask
from celery_wheel.worker.messages import Delivery, acknowledge, key_of

if TYPE_CHECKING:
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper

__all__ = ("Intake", "Line")

logger = get_logger(__name__)

#: A batch that messages keep coming into waits this many times as long as for one message.
MOST_WAITS = 10


class _Captured:
    """What the strategy would have scheduled."""

    def __init__(self) -> None:
        self.request: Any = None

    def call_at(self, _eta: float, _fun: Any, args: tuple[Any, ...], **_: int) -> None:
        self.request = args[0]

    def increment_eventually(self, n: int = 1) -> None:
        """The window is raised when the message is kept, not here."""


class _CapturingConsumer:
    """A consumer to the strategy, but for its timer and its prefetch window."""

    def __init__(self, consumer: Any, captured: _Captured) -> None:
        self._consumer = consumer
        self.timer = self.qos = captured

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


class Line:
    """Tasks of one keeper on their way into its store: gathered, committed, acknowledged.

    At most one commit is under way; what arrives meanwhile makes the next batch. Broker
    custody uses the same line: its commit is immediate and the message is kept, not acked.
    """

    def __init__(self, engine: Engine, keeper: Keeper) -> None:
        self._engine, self._keeper = engine, keeper
        self._waiting: list[tuple[DelayedTask, Delivery]] = []
        self._since = self._latest = 0.0
        self._soonest_ms = 0
        self._committing: list[tuple[DelayedTask, Delivery]] | None = None

    def add(self, task: DelayedTask, delivery: Delivery) -> None:
        """Gather one message."""
        self._latest = self._engine.clock.monotonic()
        if not self._waiting:
            self._since, self._soonest_ms = self._latest, task.due_ms
        self._soonest_ms = min(self._soonest_ms, task.due_ms)
        self._waiting.append((task, delivery))
        if len(self._waiting) >= self._engine.settings.batch_size:
            self._engine.wake()
        elif self._committing is None:
            self._engine.by(self._due_at())

    def __len__(self) -> int:
        return len(self._waiting) + len(self._committing or ())

    def due_at(self) -> float | None:
        """When what waits has to be committed, monotonic seconds."""
        if not self._waiting or self._committing is not None:
            return None
        return self._due_at()

    def _due_at(self) -> float:
        """A wait after the latest message, but what is due soon is not kept waiting by others.

        A spike comes with milliseconds between its messages, and each commit costs an fsync.
        """
        wait_s = self._engine.settings.batch_wait_s
        most_s = MOST_WAITS * wait_s
        if self._soonest_ms < self._engine.clock.wall_ms() + 2000 * most_s:
            most_s = wait_s
        return min(self._latest + wait_s, self._since + most_s)

    def commit(self, *, now: bool = False) -> None:
        """Commit what waits if the batch is full or old enough, or ``now``."""
        at = self.due_at()
        if at is None:
            return
        full = len(self._waiting) >= self._engine.settings.batch_size
        if not (now or full or self._engine.clock.monotonic() >= at):
            return
        batch, self._waiting = self._waiting, []
        self._committing = batch
        unique = {task.key: task for task, _ in batch}
        self._keeper.put(list(unique.values()), self._committed, self._failed)

    def drop(self) -> None:
        """Forget what was not sent to the store: the broker delivers it again."""
        self._waiting.clear()

    def _committed(self, result: PutResult) -> None:
        batch, self._committing = self._committing or [], None
        if self._keeper.holds_messages:
            known: set[Any] = set()
        else:
            known = acknowledge(delivery for _, delivery in batch)
        first: set[bytes] = set()
        for task, delivery in batch:
            if self._keeper.holds_messages and self._engine.renewal.returned(task, delivery):
                continue
            if task.key in result.new and task.key not in first:
                first.add(task.key)
                self._kept(task, delivery, acked=delivery.tag in known)
            elif task.key in result.cancelled:
                self._refuse(delivery)
                message = delivery.message if self._keeper.holds_messages else None
                self._engine.announcer.revoked(task, message=message)
            elif self._keeper.holds_messages and task.key not in self._keeper.messages:
                # The row that was in its way belonged to a message that has been let go since.
                self.add(task, delivery)
            else:
                self._engine.stats.counts["duplicates"] += 1
                logger.info("Dropped a copy of delayed task %s[%s].", task.name, task.id)
                self._refuse(delivery)

    def _failed(self, _: Exception) -> None:
        """The store can't take this batch, ever: the broker keeps these until they are due."""
        batch, self._committing = self._committing or [], None
        for task, delivery in batch:
            task.owner = self._engine.broker_keeper.owner
            self._engine.intake.lines[self._engine.broker_keeper].add(task, delivery)

    def _kept(self, task: DelayedTask, delivery: Delivery, *, acked: bool) -> None:
        self._engine.stats.counts["received"] += 1
        if self._keeper.holds_messages:
            self._keeper.messages[task.key] = delivery
        if task.owner is not None:
            self._engine.hold(task, self._keeper, acked=acked)

    def _refuse(self, delivery: Delivery) -> None:
        if self._keeper.holds_messages:
            delivery.ack_log_error()


class Intake:
    """Decides per message, and owns a :class:`Line` per keeper."""

    def __init__(self, engine: Engine, consumer: Any) -> None:
        self._engine, self._consumer = engine, consumer
        self.lines = {keeper: Line(engine, keeper) for keeper in engine.keepers}
        self._arrival = 0

    def strategy(self, celery_task: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the strategy of a task; what is not delayed goes to ``stock`` untouched."""
        if not _compat.uses_default_strategy(celery_task):
            return stock
        captured = _Captured()
        capturing = celery_task.start_strategy(
            self._consumer.app, _CapturingConsumer(self._consumer, captured)
        )

        def handler(message: Any, body: Any, ack: Any, reject: Any, callbacks: Any) -> Any:
            if body is not None or (message.headers or {}).get("eta") is None:
                return stock(message, body, ack, reject, callbacks)
            if self._engine.renewal.unwanted(message):
                message.ack_log_error(logger, self._consumer.connection_errors)
                return None
            if message.headers["eta"] == "":  # Celery would die of it
                raise InvalidTaskError("invalid ETA value ''")
            captured.request = None
            capturing(message, body, ack, reject, callbacks)
            request, captured.request = captured.request, None
            if request is not None:
                self._captured(request, message, callbacks)
            return None

        return handler

    def commit(self, *, now: bool = False) -> None:
        """Commit what is due to be committed."""
        for line in self.lines.values():
            line.commit(now=now)

    @property
    def busy(self) -> bool:
        """Whether messages wait for their commit."""
        return any(len(line) for line in self.lines.values())

    def drop(self) -> None:
        """The connection is gone: what was not sent to a store comes again."""
        for line in self.lines.values():
            line.drop()

    # -- one message ---------------------------------------------------------------------------

    def _captured(self, request: Any, message: Any, callbacks: Any) -> None:
        _compat.forget_scheduled(request)
        due_ms = math.ceil(request.eta.timestamp() * 1000)
        now_ms = self._engine.clock.wall_ms()
        redelivered = bool((message.delivery_info or {}).get("redelivered"))
        if due_ms <= now_ms and not redelivered:
            self._run_now(request, callbacks)
            return
        engine = self._engine
        queue = engine.sources.current
        keeper = engine.keeper_for(queue)
        task = self._task(request, message, queue, due_ms)
        if not keeper.holds_messages:
            try:
                task.envelope = pack_message(message)
            except (TypeError, ValueError) as exc:
                logger.warning(
                    "Delayed task %s[%s] stays with the broker until it is due: its message "
                    "can't be stored (%s).",
                    request.name,
                    request.id,
                    exc,
                )
                keeper = engine.broker_keeper
        with engine.lock:
            task.owner = keeper.owner if engine.wants(task, keeper) else None
            self.lines[keeper].add(task, self._delivery(message, keeper))

    def _run_now(self, request: Any, callbacks: Any) -> None:
        """Celery's own way for a task without an ETA; no timer, no prefetch window."""
        consumer = self._consumer
        bucket = None
        if not consumer.disable_rate_limits:
            bucket = consumer.task_buckets[request.task.name]
        if bucket:
            _compat.limit_task(consumer, request, bucket)
            return
        task_reserved(request)
        for callback in callbacks or ():
            callback(request)
        consumer.on_task_request(request)

    def _delivery(self, message: Any, keeper: Keeper) -> Delivery:
        consumer = self._consumer
        # A limit clamps the window, and a clamped raise can't be taken back exactly.
        raised = consumer.qos if consumer.app.conf.get("worker_eta_task_limit") is None else None
        if not keeper.holds_messages:
            # While the store is away, what waits for it must not fill the memory.
            uncommitted = len(self.lines[keeper])
            raised = raised if uncommitted < self._engine.settings.resident_limit else None
        now = self._engine.clock.monotonic()
        return Delivery(message, consumer.connection_errors, raised, now)

    def _task(self, request: Any, message: Any, queue: str, due_ms: int) -> DelayedTask:
        headers = message.headers
        expires = request.expires
        self._arrival = max(self._arrival + 1, self._engine.clock.wall_ms() * 1000)
        priority = (message.properties or {}).get("priority")
        return DelayedTask(
            key=key_of(headers, queue),
            id=request.id,
            name=headers["task"],
            queue=queue,
            due_ms=due_ms,
            envelope=b"",
            retries=headers.get("retries") or 0,
            priority=priority if isinstance(priority, int) else 0,
            expires_ms=None if expires is None else math.ceil(expires.timestamp() * 1000),
            arrival=self._arrival,
            stamps=stamps_of(request),
            redelivered=bool((message.delivery_info or {}).get("redelivered")),
        )


def pack_message(message: Any) -> bytes:
    """The whole message as an envelope.

    Raises:
        TypeError: something in it can't be written down without pickle.
    """
    return pack(
        message.headers,
        message.properties,
        message.delivery_info,
        message.content_type,
        message.content_encoding,
        message.body,
    )


def stamps_of(request: Any) -> tuple[str, ...]:
    """One ``header=value`` per stamp of a request."""
    found = []
    for header, value in request.stamps.items():
        values = value if isinstance(value, (list, tuple, set)) else [value]
        found += [f"{header}={one}" for one in values]
    return tuple(found)
