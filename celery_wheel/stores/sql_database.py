"""A connection to a SQL database: the seam between the one SQL store and the databases.

Owns the connection, transactions, the schema's version, and what happens at a fork. A
subclass says how to connect, how a transaction begins, whose clock leases go by, and which
errors a user has to put right.

Thread-safety: one thread at a time. Fork-safety: a child forgets the connection, without
closing it, at the moment of the fork (closing SQLite or libpq there harms the parent).
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Literal

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from celery_wheel.errors import SchemaVersionError, StoreError, StoreUnavailable
from celery_wheel.stores.sql_schema import SCHEMA_VERSION, make_tables

__all__ = ("Database", "Mode")

#: What a transaction is for: reading, writing, or writing what must outlive a power cut.
Mode = Literal["read", "write", "durable"]

_connected: weakref.WeakSet[Database] = weakref.WeakSet()
#: What a child inherited; kept, because to be collected is to be closed.
_inherited: list[object] = []


class Database(ABC):
    """One connection, made when it is first needed and made anew after an error.

    Attributes:
        insert: the dialect's ``insert``, with ``on_conflict_do_update``.
        where: the place, for messages; without a password.
    """

    insert: ClassVar[Callable[..., Any]]
    where: str

    def __init__(self, namespace: str) -> None:
        self.tables = make_tables(namespace)
        self._engine: sa.Engine | None = None
        self._connection: sa.Connection | None = None
        self._forked = False

    @abstractmethod
    def sibling(self) -> Database:
        """Another one, not connected, of the same place."""

    @abstractmethod
    def now_ms(self, connection: sa.Connection) -> int:
        """Read the clock that leases go by."""

    @abstractmethod
    def _make_engine(self) -> sa.Engine:
        """Make an engine that pools nothing."""

    @abstractmethod
    def _begin(self, connection: sa.Connection, mode: Mode) -> None:
        """Begin a transaction of this kind on a connection that is in none."""

    @abstractmethod
    def _finish(self, connection: sa.Connection, mode: Mode) -> None:
        """Do what has to be done last in a transaction of this kind."""

    def open(self) -> None:
        """Connect, and make the schema where there is none.

        Raises:
            SchemaVersionError: a newer release made it.
            StoreUnavailable: it can't be reached.
            ConfigError: it can't be used until somebody changes something.
        """
        try:
            self._connect()
        except DBAPIError as exc:
            self.close()
            raise self._translated(exc) from exc

    def close(self) -> None:
        """Close the connection; in a child of the process that made it, only forget it."""
        connection, self._connection = self._connection, None
        engine, self._engine = self._engine, None
        _connected.discard(self)
        if connection is not None:
            with suppress(DBAPIError):  # what can't be closed any more is closed
                connection.close()
        if engine is not None:
            engine.dispose()

    @contextmanager
    def transaction(self, mode: Mode) -> Iterator[sa.Connection]:
        """Run one transaction.

        After an error of the database the connection is given up and the next transaction
        makes a new one: a server that was away needs nothing but another call.
        """
        try:
            connection = self._connect()
            with connection.begin():
                self._begin(connection, mode)
                yield connection
                self._finish(connection, mode)
        except DBAPIError as exc:
            self.close()
            raise self._translated(exc) from exc

    def _connect(self) -> sa.Connection:
        if self._forked:
            raise StoreError(
                f"the store {self.where} was opened before a fork: only the parent can use it"
            )
        if self._connection is None:
            self._engine = self._make_engine()
            self._connection = self._engine.connect()
            _connected.add(self)
            self._set_up(self._connection)
        return self._connection

    def _set_up(self, connection: sa.Connection) -> None:
        """Look for the schema; make it unless somebody else was faster."""
        with connection.begin():
            self._begin(connection, "read")
            found = self._schema_version(connection)
        if found is None:
            with connection.begin():
                self._begin(connection, "durable")
                found = self._schema_version(connection)
                if found is None:
                    found = self._make_schema(connection)
        if found > SCHEMA_VERSION:
            self.close()
            raise SchemaVersionError(found, SCHEMA_VERSION, self.where)

    def _schema_version(self, connection: sa.Connection) -> int | None:
        meta = self.tables.meta
        if not sa.inspect(connection).has_table(meta.name):
            return None
        return connection.scalar(sa.select(meta.c.value).where(meta.c.name == "schema"))

    def _make_schema(self, connection: sa.Connection) -> int:
        self.tables.metadata.create_all(connection)
        rows = [{"name": "schema", "value": SCHEMA_VERSION}, {"name": "commits", "value": 0}]
        connection.execute(sa.insert(self.tables.meta), rows)
        return SCHEMA_VERSION

    def _translated(self, exc: DBAPIError) -> Exception:
        """Make one of our errors of a driver's."""
        mistakes = (sa.exc.IntegrityError, sa.exc.DataError, sa.exc.ProgrammingError)
        if isinstance(exc, mistakes):
            return StoreError(f"the store {self.where} refused a statement: {exc.orig}")
        return StoreUnavailable(f"the store {self.where} does not answer: {exc.orig}")

    def _forget(self) -> None:
        _inherited.append((self._connection, self._engine))
        self._connection = self._engine = None
        self._forked = True


def _forget_all() -> None:
    for database in list(_connected):
        database._forget()  # noqa: SLF001 - the class and this hook are one thing
    _connected.clear()


os.register_at_fork(after_in_child=_forget_all)
