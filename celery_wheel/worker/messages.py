"""A message of the broker, from its arrival to its acknowledgement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from celery.utils.log import get_logger

from celery_wheel import _compat
from celery_wheel.task import task_key

__all__ = ("Delivery", "acknowledge", "key_of")

logger = get_logger(__name__)


class Delivery:
    """One delivery and how to answer it; knows the connection's errors.

    The prefetch window was raised by one for a delivery that waits for its commit, on ``qos``;
    :meth:`lower_window` takes that back exactly once, on the same object, whatever became of
    the connection meanwhile.

    Args:
        at: when it arrived, monotonic seconds.
    """

    __slots__ = ("at", "errors", "message", "qos")

    def __init__(
        self, message: Any, errors: tuple[type[BaseException], ...], qos: Any, at: float
    ) -> None:
        self.message, self.errors, self.qos, self.at = message, errors, qos, at
        if qos is not None:
            qos.increment_eventually()

    def lower_window(self) -> None:
        """Give back the place in the prefetch window."""
        qos, self.qos = self.qos, None
        if qos is not None:
            qos.decrement_eventually()

    @property
    def tag(self) -> Any:
        """The delivery tag."""
        return self.message.delivery_tag

    def ack_log_error(self) -> bool:
        """Acknowledge; a dead connection is no error (the broker delivers again)."""
        self.lower_window()
        try:
            if not self.message.acknowledged:
                self.message.ack()
        except Exception as exc:  # noqa: BLE001 - transports raise their own errors
            logger.warning("A message could not be acknowledged (%r); a copy may come.", exc)
            return False
        return True

    def requeue(self) -> None:
        """Give the message back to the broker."""
        self.lower_window()
        if not self.message.acknowledged:
            self.message.reject_log_error(logger, self.errors, requeue=True)

    def reject(self) -> None:
        """Refuse the message: the broker discards it or dead-letters it."""
        self.lower_window()
        if not self.message.acknowledged:
            self.message.reject_log_error(logger, self.errors, requeue=False)


def key_of(headers: Mapping[str, Any], queue: str) -> bytes:
    """The key of a message that came from a queue."""
    retries, nesting = headers.get("retries") or 0, headers.get("replaced_task_nesting") or 0
    return task_key(queue, headers["id"], retries, nesting, str(headers.get("eta")))


def acknowledge(deliveries: Iterable[Delivery]) -> set[Any]:
    """Acknowledge many; returns the tags whose ack the broker is known to have taken.

    On Redis all acks of one channel go out in one pipeline, whose answer is the proof. An AMQP
    ack has no answer: those are never known.
    """
    known: set[Any] = set()
    by_channel: dict[int, list[Delivery]] = {}
    for delivery in deliveries:
        by_channel.setdefault(id(delivery.message.channel), []).append(delivery)
    for group in by_channel.values():
        try:
            known |= _compat.redis_ack_many([delivery.message for delivery in group])
        except Exception as exc:  # noqa: BLE001 - transports raise their own errors
            logger.warning("Messages could not be acknowledged (%r); copies may come.", exc)
        for delivery in group:
            if delivery.tag in known:
                delivery.lower_window()
            else:
                delivery.ack_log_error()
    return known
