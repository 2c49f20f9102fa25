"""What calls of the server databases read, counted by the server: no more than they return.

Counted with 20 000 rows, once as a database is that has never collected statistics, and once
after it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter, Store
from celery_wheel.stores.sql import SqlStore
from tests.stores.rows import LATER, NOW, owner, task
from tests.support.databases import (
    DatabaseServer,
    MariaServer,
    PostgresServer,
    shared_database,
)

ROWS = 20_000
#: How many rows each call is about.
FEW = 50
#: How many rows, and entries of indexes, a call may read for each that it is about.
EACH = 10


def fill(store: SqlStore) -> None:
    """Most rows are of the far future, of another queue, or somebody else's; and tombstones."""
    kinds: list[dict[str, Any]] = [
        {"queue": "mine", "due_ms": LATER},
        {"queue": "mine", "due_ms": LATER, "owner": "w1"},
        {"queue": "theirs", "due_ms": NOW - 1000},
        {"queue": "theirs", "due_ms": NOW - 1000, "owner": "w2", "stamps": ("s=1",)},
    ]
    for start in range(0, ROWS, 5000):
        numbers = range(start, start + 5000)
        store.put([task(f"t{n}", name=f"n{n % 3}", **kinds[n % 4]) for n in numbers], NOW)
    due = [task(f"due{n}", NOW + n, queue="mine", expires_ms=NOW + n) for n in range(200)]
    store.put(due, NOW)
    store.put([task(f"run{n}", NOW + n, stamps=("s=few",)) for n in range(FEW)], NOW)
    store.put([task(f"out{n}", NOW + 1, owner="w3") for n in range(FEW)], NOW)
    names = [f"x{n}" for n in range(2000)]
    store.cancel(names, [f"x={n}" for n in range(2000)], LATER)
    store.settle([name.encode() for name in names], seen_until_ms=LATER)
    for name in ("w1", "w2"):
        store.heartbeat(owner(name), 3600)


def filled(kind: type[DatabaseServer], *, analysed: bool) -> SqlStore:
    """An open store with many rows."""
    store = open_store(shared_database(kind), f"plans_{'old' if analysed else 'new'}")
    assert isinstance(store, SqlStore)
    store.open()
    fill(store)
    if analysed:
        tables = ", ".join(table.name for table in store.database.tables.metadata.sorted_tables)
        statement = "ANALYZE " + ("TABLE " if kind is MariaServer else "") + tables
        with store.database.transaction("write") as connection:
            connection.exec_driver_sql(statement)
    return store


READ = {
    PostgresServer: (
        "SELECT (SELECT sum(seq_tup_read) FROM pg_stat_xact_user_tables) + "
        "(SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_stat_user_indexes)"
    ),
    MariaServer: (
        "SELECT sum(variable_value) FROM information_schema.session_status "
        "WHERE variable_name LIKE 'Handler_read%'"
    ),
}


class Undone(Exception):
    """Ends a transaction that was only looked at."""


def rows_read(kind: type[DatabaseServer], store: SqlStore, call: Callable[[Store], Any]) -> int:
    """How many rows and index entries one call reads; what it changes is undone."""
    connection = store.database._connect()
    counts: list[int] = []

    def count() -> None:
        cursor = connection.connection.cursor()
        cursor.execute(READ[kind])
        counts.append(int(cursor.fetchone()[0] or 0))
        cursor.close()

    def before_commit(_: sa.Connection) -> None:
        count()
        raise Undone

    if kind is PostgresServer:
        with connection.begin():
            connection.exec_driver_sql("SELECT pg_stat_force_next_flush()")
    count()
    sa.event.listen(connection, "commit", before_commit)
    try:
        with pytest.raises(Undone):
            call(store)
    finally:
        store.close()
    return counts[1] - counts[0]


def keys(prefix: str) -> list[bytes]:
    due = {"due": lambda n: NOW + n, "run": lambda n: NOW + n, "out": lambda n: NOW + 1}[prefix]
    return [task(f"{prefix}{n}", due(n)).key for n in range(FEW)]


CALLS: dict[str, Callable[[Store], Any]] = {
    "put": lambda s: s.put([task(f"p{n}", stamps=("s=2",)) for n in range(FEW)], NOW),
    "put again": lambda s: s.put([task(f"run{n}", NOW + n) for n in range(FEW)], NOW),
    "claim": lambda s: s.claim("w9", NOW + 100, FEW, queues=["mine", "none"]),
    "claim all": lambda s: s.claim("w9", NOW + 100, FEW),
    "claim known": lambda s: s.claim("w9", NOW + 9, FEW, queues=["mine"], unknown=["n0", "n1"]),
    "claim nothing": lambda s: s.claim("w9", NOW - 1, FEW, queues=["mine"]),
    "confirm": lambda s: s.confirm("w3", [(key, 0) for key in keys("out")], LATER),
    "settle": lambda s: s.settle(keys("out"), LATER),
    "release": lambda s: s.release("w3", keys("out")),
    "release all": lambda s: s.release("w3"),
    "heartbeat": lambda s: s.heartbeat(owner("w1"), 60),
    "reap": lambda s: s.reap(),
    "cancel": lambda s: s.cancel([f"run{n}" for n in range(FEW)], ["s=few"], LATER),
    "forget": lambda s: s.forget(keys("due")),
    "reschedule": lambda s: s.reschedule("t5", LATER + 1),
    "find": lambda s: s.find(Filter(due_from_ms=NOW, due_before_ms=LATER), FEW),
    "find on": lambda s: s.find(Filter(), FEW, f"{NOW + 50}:1:1"),
    "find ids": lambda s: s.find(Filter(ids=tuple(f"run{n}" for n in range(FEW))), FEW),
    "find stamps": lambda s: s.find(Filter(stamps=("s=few",)), FEW),
    "oldest_due": lambda s: s.oldest_due(),
    "next_expiring": lambda s: s.next_expiring(LATER, FEW),
}


@pytest.mark.parametrize("analysed", [False, True], ids=["new", "analysed"])
@pytest.mark.parametrize("kind", [PostgresServer, MariaServer], ids=lambda kind: kind.scheme)
def test_calls_read_what_they_are_about(kind, analysed):
    """Rows of other queues, later ones and other tasks' are not read, however many there are."""
    store = filled(kind, analysed=analysed)
    read = {name: rows_read(kind, store, call) for name, call in CALLS.items()}
    assert {name: count for name, count in read.items() if count > FEW * EACH} == {}
