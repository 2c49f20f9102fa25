"""MariaDB (10.6 or later) and MySQL (8), through PyMySQL: a store that any number of hosts share.

Row locks (``SKIP LOCKED`` for claims) under READ COMMITTED, a lock on one row of ``<ns>_meta``
as the gate, the server's clock for leases. Texts are kept as UTF-8 bytes (see
:mod:`celery_wheel.stores.sql_schema`).

What survives a crash of the server: InnoDB knows one setting for all transactions,
``innodb_flush_log_at_trx_commit``, and it is the server's. With 1, its default, whatever was
answered is on disk; with 0 or 2 the last second of it may be gone.

DDL commits by itself there: a schema that was left half made is completed at the next open.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pymysql
import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, DBAPIError

from celery_wheel.errors import ConfigError, StoreUnavailable
from celery_wheel.stores.sql_database import Database, Gate, Mode, place_of

__all__ = ("MysqlDatabase",)

#: How long connecting takes at most, unless the URL says ``connect_timeout``.
CONNECT_TIMEOUT_S = 5
#: How long an answer takes at most, unless the URL says ``read_timeout``.
ANSWER_TIMEOUT_S = 30
#: How long a statement waits for the lock of a row.
LOCK_TIMEOUT_S = 10
#: How long the server waits for our next statement, before it takes our locks away.
SILENCE_TIMEOUT_S = 90
#: How long opening waits while others are making the schema.
OPEN_TIMEOUT_S = 20

#: In full, because a server's own may be lax (texts cut off), or change what a quote means.
_SESSION = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_SUBSTITUTION'"
    f", innodb_lock_wait_timeout = {LOCK_TIMEOUT_S}, wait_timeout = {SILENCE_TIMEOUT_S}"
)
_SNAPSHOT = (
    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "START TRANSACTION READ ONLY",  # the snapshot is that of its first statement
)
_OLDEST = {True: (10, 6), False: (8, 0, 1)}

#: Deadlock, record changed since last read, duplicate key (two put one key).
_CONFLICTS = frozenset({1213, 1020, 1062})

#: What a refusal at the start means for whoever set ``wheel_store``, by the server's number.
_ADVICE = {
    1044: "let this user use the database",
    1045: "check user and password",
    1698: "check user and password",
    1049: "create the database, or name another one",
    1142: "let this user create tables in the database and use them",
    1227: "let this user create tables in the database and use them",
}


class MysqlDatabase(Database):
    """A database of a MariaDB or MySQL server.

    Args:
        url: ``mysql://`` or ``mariadb://``, with PyMySQL's options.
        namespace: what table names begin with.

    Raises:
        ConfigError: of the constructor, where the URL can't be read.
    """

    idle_s = SILENCE_TIMEOUT_S / 2

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(namespace)
        self._url, self._namespace = url, namespace
        self.where = place_of(url)
        try:
            self._parsed = sa.make_url(url).set(drivername="mysql+pymysql")
        except (ArgumentError, ValueError):
            raise self._unreadable() from None
        if not self._parsed.database:
            raise self._unreadable()

    def _unreadable(self) -> ConfigError:
        return ConfigError(
            f"wheel_store {self.where} can't be read: write "
            "mysql://user:password@host:3306/database, with the odd characters of a password as "
            "%XX and with options of PyMySQL only (ssl_ca=…, unix_socket=…, read_timeout=…)"
        )

    def sibling(self) -> MysqlDatabase:
        """See :meth:`Database.sibling`."""
        return MysqlDatabase(self._url, self._namespace)

    def now_ms(self, connection: sa.Connection) -> int:
        """See :meth:`Database.now_ms`: the clock of the server, which knows no summer time."""
        since = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) DIV 1000"
        return int(connection.exec_driver_sql(since).scalar_one())

    def keep_latest(self, table: sa.Table) -> Any:
        """See :meth:`Database.keep_latest`; written out, so that PyMySQL sends many at once."""
        columns = list(table.columns)
        names = ", ".join(f"`{column.name}`" for column in columns)
        marks = ", ".join(f":{column.name}" for column in columns)
        statement = sa.text(
            f"INSERT INTO `{table.name}` ({names}) VALUES ({marks}) "  # noqa: S608 - our names
            "ON DUPLICATE KEY UPDATE until_ms = GREATEST(until_ms, VALUES(until_ms))"
        )
        return statement.bindparams(*(sa.bindparam(one.name, type_=one.type) for one in columns))

    def open(self) -> None:
        """See :meth:`Database.open`."""
        try:
            super().open()
        except ConfigError:
            raise
        except (TypeError, ValueError) as exc:  # an option that PyMySQL does not know, or take
            self.close()
            raise self._unreadable() from exc
        except RuntimeError as exc:  # how it says that a way to log in needs another package
            self.close()
            raise ConfigError(
                f"wheel_store {self.where}: {exc}: pip install 'pymysql[rsa]'"
            ) from exc

    def _make_engine(self) -> sa.Engine:
        fixed = {"charset": "utf8mb4", "init_command": _SESSION, "program_name": "celery-wheel"}
        timeouts = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": ANSWER_TIMEOUT_S,
            "write_timeout": ANSWER_TIMEOUT_S,
        }
        own = {name: s for name, s in timeouts.items() if name not in self._parsed.query}
        return sa.create_engine(
            self._parsed,
            poolclass=sa.pool.NullPool,
            pool_reset_on_return=None,
            isolation_level="READ COMMITTED",
            connect_args=fixed | own,
        )

    def _set_up(self, connection: sa.Connection) -> None:
        dialect: Any = connection.dialect
        oldest, found = _OLDEST[dialect.is_mariadb], dialect.server_version_info
        if found < oldest:
            raise ConfigError(
                f"wheel_store {self.where}: the server is of version "
                f"{'.'.join(map(str, found))}: use MariaDB 10.6 or MySQL 8, or a later one"
            )
        super()._set_up(connection)

    def _begin(self, connection: sa.Connection, mode: Mode, gate: Gate | None) -> None:
        """See :meth:`Database._begin`; the first statement begins a transaction that writes."""
        if mode == "read":
            for statement in _SNAPSHOT:
                connection.exec_driver_sql(statement)
        if gate is not None:
            meta = self.tables.meta
            row = sa.select(meta.c.value).where(meta.c.name == "schema")
            connection.execute(row.with_for_update(read=gate == "share"))

    def _finish(self, connection: sa.Connection, mode: Mode) -> None:
        """Let a durable transaction write something, whatever else it did.

        InnoDB shows a row to others before it is on disk, and a transaction that finds its
        rows there already waits for no disk: but the caller acks on our word. What is written
        is a tombstone that is out already, of no key; the next reap sweeps it away.
        """
        if mode == "durable":
            nothing = {"key": os.urandom(32), "until_ms": 0}
            connection.execute(sa.insert(self.tables.seen), nothing)

    @contextmanager
    def _schema_lock(self, connection: sa.Connection) -> Iterator[None]:
        where = f"{self._parsed.database}.{self._namespace}".encode()
        name = f"celery_wheel.{hashlib.blake2b(where, digest_size=16).hexdigest()}"
        taken = connection.exec_driver_sql("SELECT GET_LOCK(%s, %s)", (name, OPEN_TIMEOUT_S))
        if taken.scalar() != 1:
            raise StoreUnavailable(
                f"the store {self.where} is being made by somebody else for {OPEN_TIMEOUT_S} s now"
            )
        yield
        # Before others go on, who have to see it. After an error the connection is closed,
        # which lets go of the lock, too.
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("SELECT RELEASE_LOCK(%s)", (name,))

    def _is_conflict(self, exc: DBAPIError) -> bool:
        return _number(exc) in _CONFLICTS

    def _advice(self, exc: DBAPIError) -> str | None:
        advice = _ADVICE.get(_number(exc))
        return advice and f"{advice} ({exc.orig})"


def _number(exc: DBAPIError) -> int:
    error = exc.orig
    if isinstance(error, pymysql.MySQLError) and error.args and isinstance(error.args[0], int):
        return error.args[0]
    return 0
