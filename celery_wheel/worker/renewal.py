"""Broker custody on Redis: held messages stay invisible to others.

Redis hands a message out again once its visibility timeout has passed. Every quarter of it the
timeout of all held messages is started anew, in one pipeline; a message that the server does
not have any more was taken away, and its task is dropped here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery.utils.log import get_logger

from celery_wheel import _compat

if TYPE_CHECKING:
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper

__all__ = ("Renewal",)

logger = get_logger(__name__)

#: Seconds until the next try after one that failed, or before the timeout is known.
FIRST_S = 0.2


class Renewal:
    """Renews the messages of one keeper. Owned by the engine, used in its turn."""

    def __init__(self, engine: Engine, keeper: Keeper) -> None:
        self._engine, self._keeper = engine, keeper
        self._at: float | None = None

    @property
    def renew_at(self) -> float | None:
        """When to renew next, monotonic seconds."""
        if self._at is None and self._keeper.messages:
            self._at = self._engine.clock.monotonic() + FIRST_S
        return self._at if self._keeper.messages else None

    def forget(self) -> None:
        """The connection is new: nothing is held on it."""
        self._at = None

    def renew(self) -> None:
        """Renew if it is time."""
        at = self.renew_at
        if at is None or self._engine.clock.monotonic() < at:
            return
        deliveries = list(self._keeper.messages.items())
        channel = deliveries[0][1].message.channel
        if not _compat.redis_held_tags(channel):
            self._at = float("inf")
            return
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
            self._taken(tags[tag])

    def _taken(self, key: bytes) -> None:
        item = self._engine.residents.by_key.get(key)
        if item is None or item.place == "in_flight":
            return
        logger.info("%s[%s] was given to another worker.", item.task.name, item.task.id)
        if item.place == "ready":
            self._engine.dispatcher.unready()
        self._engine.residents.remove(item)
        delivery = self._keeper.messages.pop(key, None)
        if delivery is not None:
            delivery.lower_window()
        self._keeper.settle_key(key, acked=True)
