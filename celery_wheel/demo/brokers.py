"""Where the demo's messages go: a temporary folder, or a real broker under unique names."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kombu.connection import Connection

from celery_wheel.settings import hide_password

__all__ = ("FILESYSTEM", "Broker", "BrokerError", "make_broker")

FILESYSTEM = "filesystem://"
#: Seconds to connect.
PATIENCE_S = 3.0
#: Seconds between two looks into an empty folder.
FOLDER_POLL_S = 0.05

_KINDS = {
    "filesystem": "filesystem",
    "redis": "redis",
    "rediss": "redis",
    "amqp": "amqp",
    "amqps": "amqp",
    "pyamqp": "amqp",
}


class BrokerError(Exception):
    """The broker can't be used. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A broker's URL, and a name that no other queue, exchange or key begins with."""

    url: str
    kind: str
    tag: str
    options: dict[str, Any]

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return hide_password(self.url)

    @property
    def node(self) -> str:
        """The worker's node name."""
        return f"{self.tag}@localhost"

    def conf(self) -> dict[str, Any]:
        """The part of an app's configuration that concerns the broker."""
        return {
            "broker_url": self.url,
            "broker_transport_options": self.options,
            "broker_connection_timeout": PATIENCE_S,
            "broker_connection_retry_on_startup": True,
            "task_default_queue": self.tag,
            "control_exchange": self.tag,
            "event_exchange": f"{self.tag}.events",
        }

    def check(self) -> None:
        """Connect once.

        Raises:
            BrokerError: it does not answer.
        """
        try:
            with self._connection() as connection:
                connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        except ImportError as exc:
            extra = f"; install celery-wheel[{self.kind}]" if self.kind == "redis" else ""
            raise BrokerError(f"the broker {self.shown} needs a driver: {exc}{extra}") from exc
        except Exception as exc:  # whatever a driver or a URL parser raises: told in one line
            reason = hide_password(str(exc)).partition("\n")[0] or type(exc).__name__
            raise BrokerError(
                f"the broker {self.shown} does not answer ({reason}): is it running, and are "
                "host, port, user and password right? Without BROKER the demo needs no server"
            ) from exc

    def clean(self) -> None:
        """Delete everything under the demo's name. Errors are passed over."""
        with suppress(Exception):
            if self.kind == "redis":
                self._clean_redis()
            elif self.kind == "amqp":
                self._clean_amqp()

    def _connection(self) -> Any:
        make: Any = Connection
        return make(self.url, connect_timeout=PATIENCE_S, transport_options=self.options)

    def _clean_redis(self) -> None:
        with self._connection() as connection:
            connection.ensure_connection(max_retries=1)
            # Its client puts the prefix before every key; SCAN's pattern is left as it is.
            client = connection.default_channel.client
            for key in client.scan_iter(match=f"{self.tag}*", count=1000):
                client.delete(key.decode().removeprefix(f"{self.tag}:"))

    def _clean_amqp(self) -> None:
        names = (self.tag, f"{self.tag}.events", f"{self.tag}.pidbox", f"reply.{self.tag}.pidbox")
        queues = (self.tag, f"{self.node}.{self.tag}.pidbox")
        with self._connection() as connection:
            connection.ensure_connection(max_retries=1)
            channel = connection.default_channel
            for queue in queues:
                channel.queue_delete(queue)
            for exchange in names:
                channel.exchange_delete(exchange)


def make_broker(url: str, folder: Path) -> Broker:
    """The broker of a URL; ``filesystem://`` gets its folders inside ``folder``.

    Raises:
        BrokerError: the demo does not know such a URL.
    """
    try:
        scheme = urlsplit(url).scheme if "://" in url else ""
    except ValueError:
        scheme = ""
    kind = _KINDS.get(scheme.partition("+")[0])
    if kind is None:
        raise BrokerError(
            f"BROKER is {hide_password(url)!r}: it must be a URL such as redis://localhost:6379/0 "
            "or amqp://guest:guest@localhost:5672//, or be left out"
        )
    tag = f"wheeldemo-{uuid.uuid4().hex[:8]}"
    return Broker(url, kind, tag, _options(kind, tag, folder))


def _options(kind: str, tag: str, folder: Path) -> dict[str, Any]:
    if kind == "redis":
        return {"global_keyprefix": f"{tag}:", "socket_connect_timeout": PATIENCE_S}
    if kind == "amqp":
        return {}
    options: dict[str, Any] = {"polling_interval": FOLDER_POLL_S}
    for name in ("data_folder_in", "data_folder_out", "control_folder"):
        place = folder / ("control" if name == "control_folder" else "messages")
        place.mkdir(exist_ok=True)
        options[name] = str(place)
    return options
