"""The kinds of store that every test of the contract runs over."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import cache
from pathlib import Path

import sqlalchemy as sa

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Store
from celery_wheel.stores.sql import SqlStore
from tests.support.databases import MariaServer, PostgresServer, shared_database
from tests.support.servers import RedisServer

__all__ = ("KINDS", "SERVERS", "emptied", "redis_server")

#: Kinds that talk to a server; a call takes a hundred times as long.
SERVERS = {"redis", "postgresql", "mysql"}


@cache
def redis_server() -> RedisServer:
    """This test process's redis-server, started when first asked for; the leash ends it."""
    return RedisServer()


def _redis(_: Path) -> Store:
    # Empty, because nobody else has the namespace; no time goes into emptying the server.
    return open_store(f"{redis_server().url}/0", namespace=f"n{uuid.uuid4().hex}")


@cache
def namespace() -> str:
    """This test process's own: making tables anew for each test takes longer than the tests."""
    return f"n{uuid.uuid4().hex}"


def emptied(url: str) -> SqlStore:
    """An unopened store without rows, leases and tombstones."""
    store = open_store(url, namespace())
    assert isinstance(store, SqlStore)
    store.open()
    with store.database.transaction("write") as connection:
        for table in store.database.tables.metadata.sorted_tables:
            if table is not store.database.tables.meta:
                connection.execute(sa.delete(table))
    store.close()
    return store


#: What makes an unopened, empty store, by kind. A new kind of store is one more line.
KINDS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: open_store("memory://"),
    "sqlite": lambda directory: open_store(f"sqlite:///{directory / 'wheel.db'}"),
    "redis": _redis,
    "postgresql": lambda _: emptied(shared_database(PostgresServer)),
    "mysql": lambda _: emptied(shared_database(MariaServer)),
}
