"""One test's view of a broker: a URL, a queue of its own, and what lies in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import redis
from kombu import Connection, Queue

__all__ = ("Broker",)

#: kombu's redis transport keeps one list per priority step, named with this separator.
_PRIORITIES = ("", "\x06\x163", "\x06\x166", "\x06\x169")


@dataclass
class Broker:
    """``kind`` is redis, rabbitmq or filesystem; ``queue`` belongs to this test alone."""

    kind: str
    url: str
    queue: str
    options: dict[str, Any] = field(default_factory=dict)

    def conf(self) -> dict[str, Any]:
        """What an app needs to use this broker."""
        conf: dict[str, Any] = {
            "broker_url": self.url,
            "task_default_queue": self.queue,
            "broker_connection_retry_on_startup": True,
        }
        if self.options:
            conf["broker_transport_options"] = self.options
        return conf

    def depth(self, queue: str | None = None) -> int:
        """How many messages wait in a queue, those that a worker holds not counted."""
        name = queue or self.queue
        if self.kind == "redis":
            with redis.Redis.from_url(self.url) as client:
                return sum(client.llen(name + priority) for priority in _PRIORITIES)
        with Connection(self.url, transport_options=self.options) as connection:
            return int(Queue(name, channel=connection).queue_declare(passive=True).message_count)

    def unacked(self) -> int:
        """How many messages workers hold unacknowledged; redis only."""
        if self.kind != "redis":
            raise NotImplementedError("for RabbitMQ use the fixture rabbit_unacked")
        with redis.Redis.from_url(self.url) as client:
            return int(client.hlen("unacked"))
