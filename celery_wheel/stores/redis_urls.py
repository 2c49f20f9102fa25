"""What a Redis store's URL can say beyond what redis-py reads.

- ``wheel_prefix=text``: every key begins with it (a broker's ``global_keyprefix``).
- ``wheel_wait_replicas=n``: a put or cancel returns once so many replicas have it.
- ``redis+sentinel://user:password@host:26379,host2:26379/service/0``: the master that these
  sentinels name, asked anew for each connection.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

__all__ = ("master_client", "own_options")

_OWN = ("wheel_prefix", "wheel_wait_replicas")
SENTINEL_PORT = 26379


def own_options(url: str) -> tuple[str, dict[str, str]]:
    """A URL without our own options, and those."""
    start, _, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    own = {name: value for name, value in options if name in _OWN}
    if not own:
        return url, {}
    rest = urlencode([(name, value) for name, value in options if name not in _OWN])
    return (f"{start}?{rest}" if rest else start), own


def master_client(url: str, patience: dict[str, float]) -> Any:
    """A client of the master that the sentinels of a ``redis+sentinel://`` URL name.

    Raises:
        ValueError: the URL has no service, or a port is no number.
    """
    rest, _, query = url.partition("://")[2].partition("?")
    hosts, _, path = rest.partition("/")
    login, _, hosts = hosts.rpartition("@")
    service, _, database = path.partition("/")
    if not service:
        raise ValueError("it names no service: …/service/0")
    user, _, password = login.partition(":")
    options: dict[str, Any] = {"db": int(database or 0), **patience}
    if password:
        options["password"] = unquote(password)
    if user:
        options["username"] = unquote(user)
    sentinels = []
    for one in hosts.split(","):
        host, _, port = one.partition(":")
        sentinels.append((host or "localhost", int(port or SENTINEL_PORT)))
    options.update(parse_qsl(query))
    make: Any = Sentinel
    found = make(sentinels, sentinel_kwargs=dict(patience))
    return found.master_for(service, retry=Retry(NoBackoff(), 0), **options)
