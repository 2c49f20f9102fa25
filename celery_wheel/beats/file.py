"""The schedule file: when each entry ran last, one row for each.

What an entry *is* comes from the app's configuration at every start, as with Celery; kept are
the last run and the number of runs, and of one-offs that they were sent. So there is nothing
to unpickle, and a write costs by the entries that changed.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from celery.utils.log import get_logger

from celery_wheel.beats.stock import read_stock, stock_kind
from celery_wheel.errors import ConfigError

__all__ = ("Run", "ScheduleFile")

logger = get_logger("celery_wheel.beat")

_SCHEMA = 1
_LOCK_WAIT_S = 5.0
_SUFFIXES = ("", "-wal", "-shm", "-journal")
_STOCK_SUFFIXES = (".db", ".dat", ".bak", ".dir", ".pag")

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (
    name TEXT PRIMARY KEY,
    last_run_at TEXT,            -- ISO 8601, with the offset it was given
    total_run_count INTEGER NOT NULL,
    once TEXT,                   -- of a one-off: its schedule, as a text
    sending INTEGER NOT NULL     -- 1 from the intent to send a one-off until it was sent
) WITHOUT ROWID;
"""
_UPSERT = "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?)"


@dataclass(slots=True)
class Run:
    """One row."""

    name: str
    last_run_at: datetime | None
    total_run_count: int
    once: str | None = None
    sending: bool = False


class ScheduleFile:
    """An SQLite file that one beat has to itself.

    *Crash:* each :meth:`write` is one transaction. After a killed *process* all of them are
    there; after a killed *machine* those that were ``durable``.
    *Thread-safety:* none. *Fork-safety:* open it in the process that uses it.

    Attributes:
        replaced: ``True`` if a file that can't be read was removed.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.replaced = False
        self._conn: sqlite3.Connection | None = None

    @property
    def closed(self) -> bool:
        """``True`` before :meth:`open` and after :meth:`close`."""
        return self._conn is None

    def open(self) -> dict[str, Run]:
        """Open the file, take over a stock one, replace a broken one; its rows.

        Raises:
            ConfigError: another beat has the file, it can't be opened or written, or a newer
                release made it.
        """
        kind = stock_kind(self.path)
        if kind == "stock":
            self._take_over()
        elif kind == "unknown":
            self._remove("it is no schedule file")
        try:
            return self._connect()
        except sqlite3.DatabaseError as exc:
            self.close()
            # An error of the file's contents has this very class; of its surroundings, others.
            if type(exc) is not sqlite3.DatabaseError:
                raise self._config_error(exc) from exc
            self._remove(repr(exc))
            return self._connect()

    def _connect(self) -> dict[str, Run]:
        conn = self._conn = sqlite3.connect(
            self.path, timeout=_LOCK_WAIT_S, isolation_level=None, check_same_thread=False
        )
        conn.execute("PRAGMA locking_mode = EXCLUSIVE")
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("PRAGMA synchronous = NORMAL")
        conn.execute("BEGIN IMMEDIATE")
        for statement in _TABLES.split(";\n"):
            conn.execute(statement)
        schema = self.meta("schema")
        if schema is None:
            self.set_meta("schema", str(_SCHEMA))
        elif int(schema) > _SCHEMA:
            self.close()
            raise ConfigError(
                f"schedule file {self.path} was made by a newer release (schema {schema}, this "
                f"one knows {_SCHEMA}): upgrade celery-wheel, or name another file with -s"
            )
        conn.execute("COMMIT")
        return {row[0]: _run(row) for row in conn.execute("SELECT * FROM runs")}

    def _config_error(self, exc: sqlite3.DatabaseError) -> ConfigError:
        if "locked" in str(exc):
            return ConfigError(
                f"schedule file {self.path} is in use by another beat: stop that one, or give "
                "this one a file of its own with -s"
            )
        return ConfigError(
            f"schedule file {self.path} can't be used ({exc}): name a file with -s that beat "
            "can write, in a directory that exists"
        )

    def _remove(self, why: str) -> None:
        logger.error("Removing corrupted schedule file %r: %s", self.path, why)
        self.replaced = True
        for suffix in _SUFFIXES:
            Path(self.path + suffix).unlink(missing_ok=True)

    def _take_over(self) -> None:
        """Make our file of a stock one; a copy of that stays beside it, named ``.stock``."""
        try:
            settings, entries = read_stock(self.path)
            runs = [
                Run(name, entry.last_run_at, entry.total_run_count)
                for name, entry in entries.items()
            ]
        except Exception as exc:  # noqa: BLE001  (unpickling can raise anything)
            self._remove(repr(exc))
            return
        for suffix in _SUFFIXES:
            Path(self.path + ".new" + suffix).unlink(missing_ok=True)
        new = ScheduleFile(self.path + ".new")
        new._connect()
        for key, value in settings.items():
            if value is not None:
                new.set_meta(key, str(value))
        new.write(runs)
        new.close()
        if Path(self.path).exists():
            shutil.copy2(self.path, self.path + ".stock")
        Path(self.path + ".new").replace(self.path)
        # Some kinds of dbm make several files, none of them of the very name.
        for suffix in _STOCK_SUFFIXES:
            if Path(self.path + suffix).exists():
                Path(self.path + suffix).replace(self.path + ".stock" + suffix)
        logger.info("Took over %d entries of stock schedule file %r", len(runs), self.path)

    def meta(self, key: str) -> str | None:
        """A setting that was noted, or ``None``."""
        conn = self._open_conn()
        row = conn.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def set_meta(self, key: str, value: str) -> None:
        """Note a setting."""
        self._open_conn().execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def write(
        self, runs: Iterable[Run], removed: Iterable[str] = (), *, durable: bool = False
    ) -> None:
        """Write rows and delete others, in one transaction.

        With ``durable`` it is on the disk on return.

        Raises:
            sqlite3.Error: nothing was written.
        """
        conn = self._open_conn()
        # A signal handler may close the scheduler in the middle of a write: start over.
        if conn.in_transaction:
            conn.execute("ROLLBACK")
        conn.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        conn.execute("BEGIN IMMEDIATE")
        try:
            conn.executemany("DELETE FROM runs WHERE name = ?", [(name,) for name in removed])
            conn.executemany(_UPSERT, map(_row, runs))
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                conn.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        conn, self._conn = self._conn, None
        if conn is not None:
            conn.close()

    def _open_conn(self) -> sqlite3.Connection:
        if self._conn is None:
            raise ConfigError(f"schedule file {self.path} is closed: make a new scheduler")
        return self._conn


def _row(run: Run) -> tuple[object, ...]:
    at = run.last_run_at
    text = None if at is None else at.isoformat()
    return run.name, text, run.total_run_count, run.once, int(run.sending)


def _run(row: tuple[str, str | None, int, str | None, int]) -> Run:
    name, text, count, once, sending = row
    at = None if text is None else datetime.fromisoformat(text)
    return Run(name, at, count, once, bool(sending))
