"""Publishing a message again, as it is, and knowing that RabbitMQ has it.

A :class:`Courier` works in the thread of :class:`~celery_wheel.worker.errands.Errands` alone, over
a connection of its own, which is there only while there is something to publish.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kombu.compression import compress

__all__ = ("CONFIRM_S", "Courier", "Letter", "letter_of")

#: Seconds until a broker that does not confirm what was published counts as gone.
CONFIRM_S = 30.0
#: What the broker, or kombu for it, writes into a message's properties anew for each delivery.
LEFTOVERS = frozenset(
    (
        "application_headers",
        "body_encoding",
        "content_encoding",
        "content_type",
        "delivery_info",
        "delivery_tag",
    )
)


@dataclass(frozen=True, slots=True)
class Letter:
    """One message on its way. ``mandatory``: it counts as taken only if a queue got it."""

    exchange: str
    routing_key: str
    body: Any
    content_type: str | None
    content_encoding: str | None
    headers: dict[str, Any]
    properties: dict[str, Any] = field(default_factory=dict)
    mandatory: bool = False


def letter_of(message: Any, exchange: str, routing_key: str, *, mandatory: bool) -> Letter:
    """A message (or envelope) as it came, to somewhere else.

    Nothing is added, and only what the broker wrote for the delivery is left out.
    """
    headers, body = dict(message.headers), message.body
    if headers.get("compression"):
        # kombu decompressed the body when it arrived.
        try:
            body, headers["compression"] = compress(  # type: ignore[no-untyped-call]
                body, headers["compression"]
            )
        except KeyError:
            del headers["compression"]
    properties = {k: v for k, v in message.properties.items() if k not in LEFTOVERS}
    return Letter(
        exchange,
        routing_key,
        body,
        message.content_type,
        message.content_encoding,
        headers,
        properties,
        mandatory,
    )


class Courier:
    """Publishes letters with publisher confirms.

    Attributes:
        like: the worker's latest connection to its broker; connections are made like it.
    """

    def __init__(self) -> None:
        self.like: Any = None
        self._connection: Any = None
        self._channel: Any = None
        self._errors: tuple[type[BaseException], ...] = (OSError,)
        self._published = 0
        self._waiting: set[int] = set()
        self._refused: set[int] = set()
        self._returned: set[tuple[str, str]] = set()

    def publish(self, letters: Sequence[Letter]) -> list[bool]:
        """Publish, and wait for the broker's word: whether it has each of them.

        Raises:
            Exception: the connection's or the channel's own errors. What was published before
                may have been taken.
        """
        try:
            channel = self._open()
            tags = []
            for letter in letters:
                self._published += 1
                self._waiting.add(self._published)
                tags.append(self._published)
                self._send(channel, letter)
            while self._waiting:
                self._connection.drain_events(timeout=CONFIRM_S)
        except Exception:
            self.close()
            raise
        refused, self._refused = self._refused, set()
        returned, self._returned = self._returned, set()
        return [
            tag not in refused and (letter.exchange, letter.routing_key) not in returned
            for tag, letter in zip(tags, letters, strict=True)
        ]

    def close(self) -> None:
        """Close the connection; the next letter opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):
                connection.release()

    def passing(self, exc: Exception) -> bool:
        """Whether an error is of the connection, so that the same may work later."""
        return isinstance(exc, self._errors)

    def _open(self) -> Any:
        if self._connection is None:
            self._errors = (*self.like.connection_errors, OSError)
            self._published = 0
            self._waiting, self._refused, self._returned = set(), set(), set()
            # It lives for moments, and nobody would send heartbeats.
            self._connection = self.like.clone(heartbeat=0)
            self._connection.ensure_connection(max_retries=1, interval_start=0)
            self._channel = self._connection.channel()
            self._channel.confirm_select()
            self._channel.events["basic_ack"].add(self._confirm)
            self._channel.events["basic_nack"].add(self._refuse)
            self._channel.events["basic_return"].add(self._return)
        return self._channel

    @staticmethod
    def _send(channel: Any, letter: Letter) -> None:
        properties = dict(letter.properties)
        message = channel.prepare_message(
            letter.body,
            priority=properties.pop("priority", None),
            content_type=letter.content_type,
            content_encoding=letter.content_encoding,
            headers=letter.headers,
            properties=properties,
        )
        channel.basic_publish(
            message,
            exchange=letter.exchange,
            routing_key=letter.routing_key,
            mandatory=letter.mandatory,
        )

    def _confirm(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - amqp's callback
        self._waiting -= self._up_to(tag, multiple=multiple)

    def _refuse(self, tag: int, multiple: bool) -> None:  # noqa: FBT001 - amqp's callback
        some = self._up_to(tag, multiple=multiple)
        self._waiting -= some
        self._refused |= some

    def _up_to(self, tag: int, *, multiple: bool) -> set[int]:
        return {one for one in self._waiting if one <= tag} if multiple else {tag}

    def _return(self, _exc: Exception, exchange: str, routing_key: str, _message: Any) -> None:
        self._returned.add((exchange, routing_key))
