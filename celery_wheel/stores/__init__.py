"""Stores: where delayed tasks are kept. :func:`open_store` makes one of a URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery_wheel.errors import ConfigError
from celery_wheel.stores.base import Store

__all__ = ("open_store",)

DEFAULT_NAMESPACE = "celery_wheel"


def open_store(url: str, namespace: str = DEFAULT_NAMESPACE) -> Store:
    """Make the store that a URL names; it is not connected before its ``open()``.

    ``sqlite:///relative.db`` and ``sqlite:////absolute.db`` are files; ``redis://…``,
    ``rediss://…``, ``unix://…`` and ``redis+sentinel://…`` are Redis servers;
    ``postgresql://…`` (or ``postgres://…``) is a database as libpq writes it; ``mysql://…`` and
    ``mariadb://…`` are the same, with PyMySQL's options; ``memory://`` is a store of this object
    and its siblings alone.

    Raises:
        ConfigError: no store has such a URL, the namespace is no identifier, or the package
            that talks to the server is not installed.
    """
    scheme, separator, _ = url.partition("://")
    make = _MAKERS.get(scheme) if separator else None
    if make is None:
        # The URL itself may hold a password: it is not repeated.
        what = f"the scheme {scheme!r}" if separator else "a text without '://'"
        raise ConfigError(
            f"wheel_store is {what}, for which there is no store: "
            f"use {', '.join(f'{name}://' for name in _MAKERS)}"
        )
    return make(url, namespace)


def _sqlite(url: str, namespace: str) -> Store:
    from celery_wheel.stores.sql import SqlStore
    from celery_wheel.stores.sqlite import SqliteDatabase

    rest = url.partition("://")[2]
    path = rest.removeprefix("/")
    if not rest.startswith("/") or path in ("", ":memory:") or "?" in path:
        raise ConfigError(
            "wheel_store sqlite:// takes a file and no options: "
            "sqlite:///relative.db or sqlite:////absolute.db (memory:// for tests)"
        )
    return SqlStore(SqliteDatabase(path, namespace))


def _redis(url: str, namespace: str) -> Store:
    with _needs("redis", "redis"):
        from celery_wheel.stores.redis import RedisStore
    return RedisStore(url, namespace)


def _postgresql(url: str, namespace: str) -> Store:
    from celery_wheel.stores.sql import SqlStore

    with _needs("psycopg", "postgresql"):
        from celery_wheel.stores.postgresql import PostgresqlDatabase
    return SqlStore(PostgresqlDatabase(url, namespace))


def _mysql(url: str, namespace: str) -> Store:
    from celery_wheel.stores.sql import SqlStore

    with _needs("pymysql", "mysql"):
        from celery_wheel.stores.mysql import MysqlDatabase
    return SqlStore(MysqlDatabase(url, namespace))


@contextmanager
def _needs(package: str, extra: str) -> Iterator[None]:
    try:
        yield
    except ImportError as exc:
        if exc.name not in (package, None):  # psycopg without a libpq gives no name
            raise
        raise ConfigError(
            f"wheel_store is of a kind for which the package {package} is not installed: "
            f"pip install 'celery-wheel[{extra}]'"
        ) from exc


def _memory(url: str, namespace: str) -> Store:  # noqa: ARG001 - nothing to tell apart
    from celery_wheel.stores.memory import MemoryStore

    return MemoryStore()


_MAKERS = {
    "sqlite": _sqlite,
    "redis": _redis,
    "rediss": _redis,
    "redis+sentinel": _redis,
    "unix": _redis,
    "postgresql": _postgresql,
    "postgres": _postgresql,
    "mysql": _mysql,
    "mariadb": _mysql,
    "memory": _memory,
}
