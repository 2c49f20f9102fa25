"""The kinds of store that every test of the contract runs over."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Store
from tests.support.servers import RedisServer

__all__ = ("KINDS", "redis_server")


@cache
def redis_server() -> RedisServer:
    """This test process's redis-server, started when first asked for; the leash ends it."""
    return RedisServer()


def _redis(_: Path) -> Store:
    # Empty, because nobody else has the namespace; no time goes into emptying the server.
    return open_store(f"{redis_server().url}/0", namespace=f"n{uuid.uuid4().hex}")


#: What makes an unopened, empty store, by kind. A new kind of store is one more line.
KINDS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: open_store("memory://"),
    "sqlite": lambda directory: open_store(f"sqlite:///{directory / 'wheel.db'}"),
    "redis": _redis,
}
