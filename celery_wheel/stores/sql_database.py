"""A connection to a SQL database: the seam between the one SQL store and the databases.

Owns the connection, transactions, the schema's version, and what happens at a fork. A
subclass says how to connect, how a transaction begins, whose clock leases go by, and which
errors a user has to put right.

**The gate.** Tombstones are of no use to a ``put`` that looked for them just before a
``cancel`` wrote them, while that ``cancel`` looked for rows just before the ``put`` wrote
them. So ``put`` and ``confirm`` *share* a gate, any number at once, and ``cancel`` *shuts* it:
it waits until those inside have committed, and those that come wait until it has. It is the
first thing a transaction takes, so nobody waits for it who holds anything else.

Thread-safety: one thread at a time. Fork-safety: a child forgets the connection, without
closing it, at the moment of the fork (closing SQLite or libpq there harms the parent).
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import wraps
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.errors import ConfigError, SchemaVersionError, StoreError, StoreUnavailable
from celery_wheel.stores.sql_schema import SCHEMA_VERSION, make_tables

__all__ = ("Conflict", "Database", "Gate", "Mode", "again", "place_of")

S = TypeVar("S")
P = ParamSpec("P")
R = TypeVar("R")

#: What a transaction is for: reading, writing, or writing what must outlive a power cut.
Mode = Literal["read", "write", "durable"]
#: How a transaction passes the gate; see the module's text.
Gate = Literal["share", "shut"]

#: How often a call is made that lost to another one (deadlock, both put one key).
ATTEMPTS = 4

_connected: weakref.WeakSet[Database] = weakref.WeakSet()
#: What a child inherited; kept, because to be collected is to be closed.
_inherited: list[object] = []


class Conflict(StoreUnavailable):
    """Another transaction was in the way and this one was undone: repeat it at once."""


def again(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method of one transaction repeat it after a conflict, a few times."""

    @wraps(call)
    def repeated(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(ATTEMPTS - 1):
            with suppress(Conflict):
                return call(self, *args, **kwargs)
        return call(self, *args, **kwargs)

    return repeated


def place_of(url: str) -> str:
    """Cut user, password and options out of a URL; what can't be told apart is left out, too."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"


class Database(ABC):
    """One connection, made when it is first needed and made anew after an error.

    Attributes:
        insert: the dialect's ``insert``, with ``on_conflict_do_update``.
        idle_s: a connection that was not used for so long is made anew before it is used:
            servers and firewalls drop what is idle.
        where: the place, for messages; without a password.
    """

    insert: ClassVar[Callable[..., Any]]
    idle_s: ClassVar[float] = float("inf")
    where: str

    def __init__(self, namespace: str) -> None:
        self.tables = make_tables(namespace)
        self._engine: sa.Engine | None = None
        self._connection: sa.Connection | None = None
        self._used_at = 0.0
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
    def _begin(self, connection: sa.Connection, mode: Mode, gate: Gate | None) -> None:
        """Begin a transaction of this kind on a connection that is in none; pass the gate."""

    def _finish(self, connection: sa.Connection, mode: Mode) -> None:  # noqa: B027
        """Do what has to be done last in a transaction of this kind."""

    def _schema_lock(self, connection: sa.Connection) -> AbstractContextManager[None]:  # noqa: ARG002
        """Let one connection at a time make the schema, where transactions don't see to it."""
        return nullcontext()

    def _is_conflict(self, exc: DBAPIError) -> bool:  # noqa: ARG002
        """Tell whether a transaction failed only because of another one."""
        return False

    def _advice(self, exc: DBAPIError) -> str | None:  # noqa: ARG002
        """Say what the user has to do about an error at the start, if anything."""
        return None

    def keep_latest(self, table: sa.Table) -> Any:
        """Insert tombstones, or let those that are there last the longer of both times."""
        insert = self.insert(table)
        new = insert.excluded.until_ms
        longest = sa.case((table.c.until_ms > new, table.c.until_ms), else_=new)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key.columns), set_={"until_ms": longest}
        )

    def tidy(self) -> None:  # noqa: B027 - most have nothing to do
        """Do what a database wants done now and then, by a thread that nobody waits for."""

    def open(self) -> None:
        """Connect, and make the schema where there is none.

        Raises:
            SchemaVersionError: a newer release made it.
            StoreUnavailable: it can't be reached.
            ConfigError: it can't be used until somebody changes something.
        """
        try:
            connection = self._connect()
            with connection.begin():
                self._begin(connection, "write", None)
                # Changes nothing, but a server that is read-only or lets us only look says so.
                connection.execute(sa.delete(self.tables.tasks).where(sa.false()))
        except DBAPIError as exc:
            self.close()
            advice = self._advice(exc)
            if advice is not None:
                raise ConfigError(f"wheel_store {self.where}: {advice}") from exc
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
    def transaction(self, mode: Mode, gate: Gate | None = None) -> Iterator[sa.Connection]:
        """Run one transaction.

        After an error the connection is given up and the next transaction makes a new one: a
        server that was away needs nothing but another call.

        Raises:
            Conflict: another transaction was in the way; the connection is as good as before.
            StoreUnavailable: the server can't do it now.
            StoreError: it refused.
        """
        try:
            connection = self._connect()
            with connection.begin():
                self._begin(connection, mode, gate)
                yield connection
                self._finish(connection, mode)
        except DBAPIError as exc:
            error = self._translated(exc)
            if exc.connection_invalidated or not isinstance(error, Conflict):
                self.close()
            raise error from exc
        except BaseException:
            # Whatever stopped us may have left half an answer in the connection.
            self.close()
            raise
        self._used_at = SYSTEM_CLOCK.monotonic()

    def _connect(self) -> sa.Connection:
        if self._forked:
            raise StoreError(
                f"the store {self.where} was opened before a fork: only the parent can use it"
            )
        if SYSTEM_CLOCK.monotonic() - self._used_at > self.idle_s:
            self.close()
        if self._connection is None:
            self._engine = self._make_engine()
            self._connection = self._engine.connect()
            _connected.add(self)
            try:
                self._set_up(self._connection)
            except BaseException:
                self.close()
                raise
            self._used_at = SYSTEM_CLOCK.monotonic()
        return self._connection

    def _set_up(self, connection: sa.Connection) -> None:
        """Look for the schema; make it unless somebody else was faster."""
        with connection.begin():
            self._begin(connection, "read", None)
            found = self._schema_version(connection)
        if found is None:
            with connection.begin():
                self._begin(connection, "durable", None)
                with self._schema_lock(connection):
                    found = self._schema_version(connection)
                    if found is None:
                        found = self._make_schema(connection)
        if found > SCHEMA_VERSION:
            raise SchemaVersionError(found, SCHEMA_VERSION, self.where)

    def _schema_version(self, connection: sa.Connection) -> int | None:
        meta = self.tables.meta
        if not sa.inspect(connection).has_table(meta.name):
            return None
        return connection.scalar(sa.select(meta.c.value).where(meta.c.name == "schema"))

    def _make_schema(self, connection: sa.Connection) -> int:
        """Make what is missing. The version is written last: until then it is half made."""
        there = sa.inspect(connection)
        for table in self.tables.metadata.sorted_tables:
            if not there.has_table(table.name):
                table.create(connection)
                continue
            for index in table.indexes:
                index.create(connection, checkfirst=True)
        rows = [{"name": "schema", "value": SCHEMA_VERSION}, {"name": "commits", "value": 0}]
        connection.execute(sa.insert(self.tables.meta), rows)
        return SCHEMA_VERSION

    def _translated(self, exc: DBAPIError) -> Exception:
        """Make one of our errors of a driver's."""
        reason = " ".join(str(exc.orig).split())
        if self._is_conflict(exc):
            return Conflict(f"the store {self.where} is contended: {reason}")
        mistakes = (sa.exc.IntegrityError, sa.exc.DataError, sa.exc.ProgrammingError)
        if isinstance(exc, mistakes):
            return StoreError(f"the store {self.where} refused a statement: {reason}")
        return StoreUnavailable(f"the store {self.where} does not answer: {reason}")

    def _forget(self) -> None:
        _inherited.append((self._connection, self._engine))
        self._connection = self._engine = None
        self._forked = True


def _forget_all() -> None:
    for database in list(_connected):
        database._forget()  # noqa: SLF001 - the class and this hook are one thing
    _connected.clear()


os.register_at_fork(after_in_child=_forget_all)
