"""PostgreSQL, through psycopg 3: a store that any number of hosts share.

Row locks (``SKIP LOCKED`` for claims) under READ COMMITTED, an advisory lock as the gate, the
server's clock for leases. Whatever a transaction needs is set inside it, and nothing is
prepared, so a pooler that gives each transaction another session (PgBouncer) may lie between.

What survives a crash of the server: ``put`` and ``cancel`` commit as the server's
``synchronous_commit`` says, replicas included. The others commit with it off: of the last half
second a claim, confirm, settle or release may be lost, whose worst is that a task runs again.

A server that hangs is given up after :data:`ANSWER_TIMEOUT_S`, by the client's own clock.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.errors import ConfigError
from celery_wheel.stores.sql_database import Database, Gate, Mode, place_of

__all__ = ("PostgresqlDatabase",)

R = TypeVar("R")

#: How long connecting takes at most, unless the URL says ``connect_timeout``.
CONNECT_TIMEOUT_S = 5
#: How long the server works on a statement, locks included, before it gives up itself.
STATEMENT_TIMEOUT_S = 20
#: How long an answer takes at most, before the connection is given up.
ANSWER_TIMEOUT_S = 30.0
#: How long the server waits for our next statement, before it takes our locks away.
SILENCE_TIMEOUT_S = 30

_SETTINGS = (
    # Every statement has its index; a planner without statistics may not know.
    "; SET LOCAL enable_seqscan = off"
    f"; SET LOCAL statement_timeout = {STATEMENT_TIMEOUT_S * 1000}"
    f"; SET LOCAL idle_in_transaction_session_timeout = {SILENCE_TIMEOUT_S * 1000}"
)
_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED" + _SETTINGS
_BEGIN = {
    "read": "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY" + _SETTINGS,
    "write": _WRITE + "; SET LOCAL synchronous_commit = off",
    "durable": _WRITE,
}
_PASS = {"share": "pg_advisory_xact_lock_shared", "shut": "pg_advisory_xact_lock"}

#: serialization_failure, deadlock_detected, unique_violation (two put one key).
_CONFLICTS = frozenset({"40001", "40P01", "23505"})

#: What a refusal at the start means for whoever set ``wheel_store``. A refused login carries no
#: SQLSTATE, only its text.
_ADVICE = (
    ("password authentication failed|no password supplied|fe_sendauth", "check user and password"),
    ('role ".*" (does not exist|is not permitted)', "name a user that may log in"),
    ('database ".*" does not exist', "create the database, or name another one"),
    ("(invalid|bad) .*(value|number|name)", "correct the URL"),
    ("no pg_hba.conf entry|permission denied for database", "let this user in from this host"),
    (
        "permission denied|no schema has been selected",
        "let this user create tables in the schema and use them",
    ),
)


class PostgresqlDatabase(Database):
    """A database of a PostgreSQL server.

    Args:
        url: ``postgresql://`` with libpq's options; may hold several hosts.
        namespace: what table names begin with; the schema is the first of the search path.

    Raises:
        ConfigError: of the constructor, where the URL can't be read.
    """

    insert = staticmethod(insert)
    idle_s = 300.0

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(namespace)
        self._url, self._namespace = url, namespace
        self.where = place_of(url)
        digest = hashlib.blake2b(namespace.encode(), digest_size=8).digest()
        self._gate = int.from_bytes(digest, "big", signed=True)
        try:
            self._options: dict[str, Any] = conninfo_to_dict(url)
        except psycopg.Error:
            # libpq's message may hold a piece of the password.
            raise ConfigError(
                f"wheel_store {self.where} can't be read: write "
                "postgresql://user:password@host:5432/database, with the odd characters of a "
                "password as %XX"
            ) from None
        self._options.setdefault("connect_timeout", CONNECT_TIMEOUT_S)
        self._options.setdefault("application_name", "celery-wheel")

    def sibling(self) -> PostgresqlDatabase:
        """See :meth:`Database.sibling`."""
        return PostgresqlDatabase(self._url, self._namespace)

    def now_ms(self, connection: sa.Connection) -> int:
        """See :meth:`Database.now_ms`: the clock of the server."""
        seconds = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
        return int(connection.exec_driver_sql(seconds).scalar_one())

    def _make_engine(self) -> sa.Engine:
        return sa.create_engine(
            "postgresql+psycopg://",
            creator=self._connect_to_server,
            poolclass=sa.pool.NullPool,
            pool_reset_on_return=None,
            isolation_level="AUTOCOMMIT",  # transactions begin where _begin says
            use_native_hstore=False,
        )

    def _connect_to_server(self) -> _Connection:
        options = {**self._options, "client_encoding": "utf8", "prepare_threshold": None}
        connection = _Connection.connect(autocommit=True, **options)
        encoding = connection.info.parameter_status("server_encoding")
        if encoding != "UTF8":
            connection.close()
            raise ConfigError(
                f"wheel_store {self.where}: the database's encoding is {encoding}: name one that "
                "was created with ENCODING 'UTF8'"
            )
        return connection

    def _begin(self, connection: sa.Connection, mode: Mode, gate: Gate | None) -> None:
        begin = _BEGIN[mode]
        if gate is not None:
            begin += f"; SELECT {_PASS[gate]}({self._gate})"
        connection.exec_driver_sql(begin)  # one round trip

    @contextmanager
    def _schema_lock(self, connection: sa.Connection) -> Iterator[None]:
        # Until the commit; not the gate itself, which nobody keeps for long.
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({~self._gate})")
        yield

    def _is_conflict(self, exc: DBAPIError) -> bool:
        return getattr(exc.orig, "sqlstate", None) in _CONFLICTS

    def _advice(self, exc: DBAPIError) -> str | None:
        reason = " ".join(str(exc.orig).split())
        for sign, advice in _ADVICE:
            if re.search(sign, reason):
                return f"{advice} ({reason})"
        return None


class _Connection(psycopg.Connection[Any]):
    """A connection that waits no longer than :data:`ANSWER_TIMEOUT_S` for an answer."""

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a generator of psycopg's to its end, unless it takes too long."""
        return super().wait(self._in_time(gen), *args, **kwargs)

    def _in_time(self, gen: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
        give_up_at = SYSTEM_CLOCK.monotonic() + ANSWER_TIMEOUT_S
        try:
            wanted = next(gen)
            while True:
                # Every tenth of a second psycopg says that nothing came.
                came = yield wanted
                if not came and SYSTEM_CLOCK.monotonic() > give_up_at:
                    self.close()
                    raise psycopg.OperationalError(f"no answer for {ANSWER_TIMEOUT_S:g} s")
                wanted = gen.send(came)
        except StopIteration as end:
            result: R = end.value
            return result
