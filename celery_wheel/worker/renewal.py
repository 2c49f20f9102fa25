"""Broker custody: what is held stays ours until it is done.

What has to be done for that differs by broker, so there is a :class:`Renewal` for each kind of
transport; the base class is for those that let a message be held for any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from celery_wheel import _compat
from celery_wheel.worker.residents import IN_FLIGHT, READY

if TYPE_CHECKING:
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper
    from celery_wheel.worker.messages import Delivery

__all__ = ("RedisRenewal", "Renewal")

logger = get_logger(__name__)

#: Seconds until the next try after one that failed, or before the timeout is known.
FIRST_S = 0.2


class Renewal:
    """Plain holding. Owned by the engine, used in its turn, made anew with each connection."""

    def __init__(self, engine: Engine, keeper: Keeper) -> None:
        self._engine, self._keeper = engine, keeper
        self._at: float | None = None

    @property
    def renew_at(self) -> float | None:
        """When to renew next, monotonic seconds."""
        return None

    @property
    def busy(self) -> bool:
        """Whether the worker should wait a moment before it closes its connection."""
        return False

    def forget(self) -> None:
        """The connection is new: nothing is held on it."""
        self._at = None

    def renew(self) -> None:
        """Renew if it is time."""

    def returned(self, _task: DelayedTask, _delivery: Delivery) -> bool:
        """Whether a delivery is no copy but a held message that comes again; then it is kept."""
        return False

    def unwanted(self, _message: Any) -> bool:
        """Whether a message that arrives is of a task that was revoked and announced."""
        return False

    def _take_over(self, key: bytes, delivery: Delivery) -> Delivery | None:
        """Hold this delivery instead of the one before it, which is returned."""
        before = self._keeper.messages.pop(key, None)
        if before is not None:
            # To the task it is the message that it was.
            for name in ("exchange", "routing_key", "redelivered"):
                if name in before.message.delivery_info:
                    delivery.message.delivery_info[name] = before.message.delivery_info[name]
        self._keeper.messages[key] = delivery
        return before

    def _let_go(self, key: bytes) -> Delivery | None:
        """Forget a task, unless it runs: the broker has it. Returns its held message."""
        item = self._engine.residents.by_key.get(key)
        if item is None or item.place == IN_FLIGHT:
            return None
        if item.place == READY:
            self._engine.dispatcher.unready()
        self._engine.residents.remove(item)
        delivery = self._keeper.messages.pop(key, None)
        if delivery is not None:
            delivery.lower_window()
        self._keeper.settle_key(key, acked=True)
        return delivery

    def _gone(self, key: bytes) -> bool:
        """The broker took a message away: forget its task, unless it runs."""
        delivery = self._let_go(key)
        if delivery is not None:
            _compat.forget_delivery(delivery.message)
        return delivery is not None


class RedisRenewal(Renewal):
    """Redis hands a message out again once its visibility timeout has passed.

    Every quarter of it the timeout of all held messages is started anew, in one pipeline; a
    message that the server does not have any more was taken away, and its task is dropped here.
    """

    @property
    def renew_at(self) -> float | None:
        """When to renew next, monotonic seconds."""
        if self._at is None and self._keeper.messages:
            self._at = self._engine.clock.monotonic() + FIRST_S
        return self._at if self._keeper.messages else None

    def renew(self) -> None:
        """Renew if it is time."""
        at = self.renew_at
        if at is None or self._engine.clock.monotonic() < at:
            return
        deliveries = list(self._keeper.messages.items())
        channel = deliveries[0][1].message.channel
        tags = {delivery.tag: key for key, delivery in deliveries}
        try:
            timeout_s, gone = _compat.redis_renew(
                channel, list(tags), self._engine.clock.wall_ms() / 1000
            )
        except Exception as exc:  # noqa: BLE001 - transports raise their own errors
            logger.warning("Held messages could not be renewed (%r); tried again.", exc)
            self._at = self._engine.clock.monotonic() + FIRST_S
            return
        self._at = self._engine.clock.monotonic() + timeout_s / 4
        for tag in gone:
            if self._gone(tags[tag]):
                logger.info("A held message was given to another worker (%s).", tag)

    def returned(self, task: DelayedTask, delivery: Delivery) -> bool:
        """A message that the server put back and delivered again has the tag that it had."""
        held = self._keeper.messages.get(task.key)
        if held is None or held.tag != delivery.tag:
            return False
        # One place in the window for one message that is held.
        held.lower_window()
        self._take_over(task.key, delivery)
        return True
