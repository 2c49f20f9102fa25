"""Rejected for good: to the dead-letter exchange of the source queue, as RabbitMQ would.

In store custody the broker was told long ago that the message was taken; so when the task
refuses it, the worker does what the broker would have done, and deletes the row when the broker
has confirmed it. On crash before that the row is pending again, and the task is run again.

Known is what the app says of its queues (``queue_arguments``); a dead-letter exchange that is
set by a policy of the broker is not.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from celery_wheel.envelope import unpack
from celery_wheel.errors import CorruptRow
from celery_wheel.worker.courier import Letter, letter_of

if TYPE_CHECKING:
    from celery_wheel.envelope import Envelope
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.residents import Item

__all__ = ("DeadLetters", "dead_letter", "with_death")

logger = get_logger(__name__)

#: Seconds between tries while the broker is away.
RETRY_S = 1.0


class DeadLetters:
    """Sends what was rejected. Thread-safety: :meth:`take` from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        #: Whether the broker has dead-letter exchanges; known once there is a connection.
        self.possible = False

    def take(self, item: Item, settle: Callable[[], None]) -> bool:
        """Whether there is an exchange for it; then ``settle`` is called when it is there."""
        queue = self._engine.app.amqp.queues.get(item.task.queue)
        arguments = getattr(queue, "queue_arguments", None) or {}
        exchange = arguments.get("x-dead-letter-exchange")
        if not self.possible or exchange is None:
            return False
        try:
            letter = dead_letter(
                unpack(item.task.envelope),
                item.task.queue,
                exchange,
                arguments.get("x-dead-letter-routing-key"),
                self._engine.clock.wall_ms(),
            )
        except CorruptRow as exc:
            logger.error("%s[%s] can't be dead-lettered: %s", item.task.name, item.task.id, exc)
            return False

        def sent(answer: Any) -> None:
            if isinstance(answer, Exception):
                logger.error(
                    "%s[%s] was rejected and is dropped: the dead-letter exchange %r of its "
                    "queue does not take it (%s).",
                    item.task.name,
                    item.task.id,
                    exchange,
                    answer,
                )
            elif not answer:
                if not self._engine.errands.stopping:  # else the row is given back
                    self._engine.errands.submit(partial(self._send, letter), sent)
                return
            settle()

        self._engine.errands.submit(partial(self._send, letter), sent)
        return True

    def _send(self, letter: Letter) -> bool:
        """Whether the broker has it; ``False`` asks for another try, after a pause."""
        courier, errands = self._engine.courier, self._engine.errands
        try:
            (taken,) = courier.publish([letter])
        except Exception as exc:
            if not courier.passing(exc):
                raise
            taken = False
        if not taken:
            errands.pause(RETRY_S)
        return taken


def dead_letter(
    envelope: Envelope, queue: str, exchange: str, routing_key: str | None, now_ms: int
) -> Letter:
    """A rejected message on its way to the dead-letter exchange of its queue.

    Args:
        envelope: the message as it came.
        queue: the source queue.
        exchange: its ``x-dead-letter-exchange``.
        routing_key: its ``x-dead-letter-routing-key``; ``None`` leaves the message's own.
        now_ms: UTC milliseconds.
    """
    came = envelope.delivery_info
    own_key = str(came.get("routing_key") or queue)
    letter = letter_of(
        envelope, exchange, own_key if routing_key is None else routing_key, mandatory=False
    )
    death = {
        "count": 1,
        "exchange": str(came.get("exchange") or ""),
        "queue": queue,
        "reason": "rejected",
        "routing-keys": [own_key],
        "time": datetime.fromtimestamp(now_ms // 1000, timezone.utc),
    }
    properties = dict(letter.properties)
    expiration = properties.pop("expiration", None)
    if expiration is not None:
        death["original-expiration"] = expiration
    return Letter(
        letter.exchange,
        letter.routing_key,
        letter.body,
        letter.content_type,
        letter.content_encoding,
        with_death(letter.headers, death),
        properties,
    )


def with_death(headers: Any, death: dict[str, Any]) -> dict[str, Any]:
    """Headers with one death more, in the broker's own form: the latest first, counted."""
    deaths = [dict(one) for one in headers.get("x-death") or ()]
    for one in deaths:
        if (one.get("queue"), one.get("reason")) == (death["queue"], death["reason"]):
            deaths.remove(one)
            death = {**one, "count": int(one.get("count") or 0) + 1}
            break
    first = {
        "x-first-death-exchange": death["exchange"],
        "x-first-death-queue": death["queue"],
        "x-first-death-reason": death["reason"],
    }
    return {**first, **headers, "x-death": [death, *deaths]}
