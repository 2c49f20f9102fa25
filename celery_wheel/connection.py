"""One store for a process that is no worker: opened when needed, shared by its threads."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery_wheel.errors import ConfigError
from celery_wheel.places import settings_of
from celery_wheel.settings import Settings
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Store

__all__ = ("Connection",)


class Connection:
    """The connection of an app to its ``wheel_store``.

    Thread-safety: threads take turns. Fork-safety: it disconnects before a fork, and parent and
    child connect anew.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._lock = threading.RLock()
        self._store: Store | None = None
        self._in_use = 0
        self._settings: Settings | None = None
        _alive.add(self)

    @property
    def settings(self) -> Settings:
        """The app's ``wheel_*`` settings, read once."""
        if self._settings is None:
            self._settings = settings_of(self._app)
        return self._settings

    @contextmanager
    def opened(self) -> Iterator[Store]:
        """The store, for this thread alone.

        Raises:
            ConfigError: the settings are wrong, or name no store.
            StoreError: it can't be opened.
        """
        with self._lock:
            if self._store is None:
                self._store = self._open()
            self._in_use += 1
            try:
                yield self._store
            finally:
                self._in_use -= 1

    def close(self) -> None:
        """Disconnect; the next use connects again."""
        with self._lock:
            store, self._store = self._store, None
            if store is not None:
                store.close()

    def before_fork(self) -> None:
        """Disconnect, unless it is in use: a store must not be shared by two processes."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._in_use:
                    self.close()
            finally:
                self._lock.release()

    def after_fork(self) -> None:
        """In the child: another thread of the parent may have held the lock."""
        self._lock = threading.RLock()

    def _open(self) -> Store:
        url = self.settings.store_url
        if url in (None, "broker://"):
            raise ConfigError(
                "no wheel_store is set, so the broker keeps delayed tasks: ask the workers with "
                "`celery inspect wheel`, and revoke with `celery control revoke`"
            )
        store = open_store(url or "", self.settings.namespace)
        try:
            store.open()
        except BaseException:
            with suppress(Exception):
                store.close()
            raise
        return store


_alive: weakref.WeakSet[Connection] = weakref.WeakSet()


def _before_fork() -> None:
    for connection in list(_alive):
        connection.before_fork()


def _after_fork() -> None:
    for connection in list(_alive):
        connection.after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
