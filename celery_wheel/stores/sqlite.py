"""The embedded store: a SQLite file that any number of processes of one host share.

WAL mode, so readers never wait. ``put`` and ``cancel`` commit with ``synchronous=FULL`` (they
return after an fsync); everything else with ``NORMAL``, whose worst loss at a power cut is
that a task runs again. Writers queue for the file: ``BEGIN IMMEDIATE`` and a busy timeout.

The file is as durable as its disk, and must be on a local one: WAL needs shared memory.
"""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.errors import ConfigError, StoreError, StoreUnavailable
from celery_wheel.stores.sql_database import Database, Gate, Mode

__all__ = ("SqliteDatabase",)

#: How long a writer waits for another one.
BUSY_TIMEOUT_S = 5.0
#: How long opening goes on while others are just making the file.
OPEN_TIMEOUT_S = 15.0
_OPEN_RETRY_S = 0.02

# The lease's thread copies the log into the file (see tidy), so that no task waits for that. A
# writer does it only where the log has grown to 32 MB: it begins anew only where a write finds
# all of it copied, which a copy that goes on beside writers never achieves.
_PRAGMAS = ("PRAGMA cache_size=-16000", "PRAGMA wal_autocheckpoint=8000")
_SYNCHRONOUS = {"write": "NORMAL", "durable": "FULL"}

#: What a driver's message at the start means for whoever set ``wheel_store``.
_ADVICE = {
    "file is not a database": "it is no SQLite file: name another file",
    "unable to open database file": "let this user read and write the file and its directory",
    "readonly database": "let this user write the file and its directory",
    "disk image is malformed": "it is damaged: restore it, or move it away to begin anew",
}


#: Files that were open at the fork that made this process. SQLite's record of its locks came
#: along, the locks did not: another connection to such a file would damage it.
_open_before_fork: set[Path] = set()


class SqliteDatabase(Database):
    """A SQLite file.

    Args:
        path: the file; a relative one is taken from the present working directory.
        namespace: what table names begin with.
        clock: where leases take their time from; it must be the same for every process.
    """

    insert = staticmethod(insert)

    def __init__(self, path: str | Path, namespace: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(namespace)
        self._path = Path(path).absolute()
        self._namespace = namespace
        self._clock = clock
        self._synchronous = ""
        self._opened: tuple[int, int] | None = None
        self.where = str(self._path)

    def sibling(self) -> SqliteDatabase:
        """See :meth:`Database.sibling`."""
        return SqliteDatabase(self._path, self._namespace, self._clock)

    def _forget(self) -> None:
        super()._forget()
        _open_before_fork.add(self._path)

    def now_ms(self, connection: sa.Connection) -> int:  # noqa: ARG002 - others ask the server
        """See :meth:`Database.now_ms`: the clock of the machine."""
        return self._clock.wall_ms()

    def open(self) -> None:
        """See :meth:`Database.open`.

        While one process turns a new file to WAL, the others are refused at once, busy timeout
        or not: they try again for a while.
        """
        self._check_place()
        give_up_at = SYSTEM_CLOCK.monotonic() + OPEN_TIMEOUT_S
        while True:
            try:
                super().open()
                with self.transaction("durable"):
                    return  # it writes: a file that can only be read is told of now
            except StoreUnavailable as exc:
                for sign, advice in _ADVICE.items():
                    if sign in str(exc):
                        raise ConfigError(f"wheel_store {self.where}: {advice}") from exc
                if "locked" not in str(exc) or SYSTEM_CLOCK.monotonic() > give_up_at:
                    raise
            threading.Event().wait(_OPEN_RETRY_S)

    def tidy(self) -> None:
        """Copy the log into the file; no writer or reader waits for it."""
        try:
            self._connect().connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except sqlite3.Error as exc:
            self.close()
            raise StoreUnavailable(f"the store {self.where} does not answer: {exc}") from exc

    def _connect(self) -> sa.Connection:
        """Notice a file that was removed or replaced: SQLite would go on writing to nowhere."""
        connected = self._connection is not None
        if connected and self._identity() != self._opened:
            self.close()
            raise StoreUnavailable(
                f"the store {self.where} was removed or replaced while it was open: "
                "put it back, or the next call goes on with what is there now"
            )
        connection = super()._connect()
        if not connected:
            self._opened = self._identity()
        return connection

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

    def _check_place(self) -> None:
        directory = self._path.parent
        if not directory.is_dir():
            raise ConfigError(
                f"wheel_store {self.where}: there is no directory {directory}: "
                "make it, or name a file in another one"
            )
        if self._path.is_dir():
            raise ConfigError(f"wheel_store {self.where}: it is a directory: name a file in it")

    def _make_engine(self) -> sa.Engine:
        return sa.create_engine("sqlite://", creator=self._open_file, poolclass=sa.pool.NullPool)

    def _open_file(self) -> sqlite3.Connection:
        if self._path in _open_before_fork:
            raise StoreError(
                f"the store {self.where} was open when this process was forked: use it in the "
                "parent, or in a process of its own"
            )
        connection = sqlite3.connect(
            self._path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,  # transactions begin where _begin says, and nowhere else
            check_same_thread=False,
        )
        try:
            (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
            if journal != "wal":
                (journal,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            for pragma in _PRAGMAS:
                connection.execute(pragma)
        except sqlite3.Error:
            connection.close()
            raise
        if journal != "wal":
            connection.close()
            raise ConfigError(
                f"wheel_store {self.where}: its file system can't share memory between "
                "processes (a network drive?): name a file on a local disk"
            )
        self._synchronous = ""
        return connection

    def _begin(self, connection: sa.Connection, mode: Mode, gate: Gate | None) -> None:  # noqa: ARG002
        """See :meth:`Database._begin`; there is one writer at a time, and no need of a gate."""
        if mode == "read":
            connection.exec_driver_sql("BEGIN")
            return
        synchronous = _SYNCHRONOUS[mode]
        if synchronous != self._synchronous:
            # SQLite refuses to change it inside a transaction.
            connection.exec_driver_sql(f"PRAGMA synchronous={synchronous}")
            self._synchronous = synchronous
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    def _finish(self, connection: sa.Connection, mode: Mode) -> None:
        """Let a durable transaction change something, whatever else it did.

        One that finds its rows there already changes nothing, and SQLite then syncs nothing.
        But whoever wrote those rows may have died before they were safe on disk, and the
        caller acks them on our word.
        """
        if mode == "durable":
            meta = self.tables.meta
            more = sa.update(meta).where(meta.c.name == "commits").values(value=meta.c.value + 1)
            connection.execute(more)
