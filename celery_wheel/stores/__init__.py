"""Stores: where delayed tasks are kept. :func:`open_store` makes one of a URL."""

from __future__ import annotations

from celery_wheel.errors import ConfigError
from celery_wheel.stores.base import Store

__all__ = ("open_store",)

DEFAULT_NAMESPACE = "celery_wheel"


def open_store(url: str, namespace: str = DEFAULT_NAMESPACE) -> Store:
    """Make the store that a URL names; it is not connected before its ``open()``.

    ``sqlite:///relative.db`` and ``sqlite:////absolute.db`` are files; ``memory://`` is a store
    of this object and its siblings alone.

    Raises:
        ConfigError: no store has such a URL, or the namespace is no identifier.
    """
    scheme, separator, rest = url.partition("://")
    make = _MAKERS.get(scheme.partition("+")[0]) if separator else None
    if make is None:
        # The URL itself may hold a password: it is not repeated.
        what = f"the scheme {scheme!r}" if separator else "a text without '://'"
        raise ConfigError(
            f"wheel_store is {what}, for which there is no store: "
            f"use {', '.join(f'{name}://' for name in _MAKERS)}"
        )
    return make(rest, namespace)


def _sqlite(rest: str, namespace: str) -> Store:
    from celery_wheel.stores.sql import SqlStore
    from celery_wheel.stores.sqlite import SqliteDatabase

    path = rest.removeprefix("/")
    if not rest.startswith("/") or path in ("", ":memory:") or "?" in path:
        raise ConfigError(
            "wheel_store sqlite:// takes a file and no options: "
            "sqlite:///relative.db or sqlite:////absolute.db (memory:// for tests)"
        )
    return SqlStore(SqliteDatabase(path, namespace))


def _memory(rest: str, namespace: str) -> Store:  # noqa: ARG001 - nothing to tell apart
    from celery_wheel.stores.memory import MemoryStore

    return MemoryStore()


_MAKERS = {"sqlite": _sqlite, "memory": _memory}
