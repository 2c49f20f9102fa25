"""Reads the schedule file that Celery's own ``PersistentScheduler`` leaves."""

from __future__ import annotations

import dbm
import shelve
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import quote

__all__ = ("read_stock", "stock_kind")


def stock_kind(path: str) -> str:
    """``none`` if nothing is there, ``stock``, ``ours``, or ``unknown``."""
    if Path(path).is_file():
        with Path(path).open("rb") as file:
            if file.read(16) == b"SQLite format 3\0":
                return "stock" if _is_dbm_sqlite(path) else "ours"
    kind = dbm.whichdb(path)
    if kind is None:
        return "unknown" if Path(path).exists() else "none"
    return "stock" if kind else "unknown"


def _is_dbm_sqlite(path: str) -> bool:
    """Whether it is what :mod:`dbm.sqlite3` (Python 3.13 and later) makes."""
    try:
        conn = sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=0)
        try:
            rows = conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            return {name for (name,) in rows} == {"Dict"}
        finally:
            conn.close()
    except sqlite3.DatabaseError:
        return False


def read_stock(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings kept in the file, and its entries by name.

    Raises:
        Exception: whatever opening or unpickling a file that is broken raises.
    """
    with shelve.open(path, "r") as shelf:  # noqa: S301  (with the trust Celery gives it)
        settings = {key: shelf.get(key) for key in ("tz", "utc_enabled")}
        return settings, dict(shelf.get("entries", {}))
