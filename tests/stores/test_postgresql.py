"""What is particular to PostgreSQL: durability by transaction, poolers, several hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from celery_wheel.errors import ConfigError
from celery_wheel.stores import open_store
from celery_wheel.stores.sql import SqlStore
from tests.stores.rows import LATER, NOW, everything, task
from tests.stores.stores import emptied, namespace
from tests.support.databases import PostgresServer, shared_database


@pytest.fixture
def url() -> str:
    return shared_database(PostgresServer)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    made = emptied(url)
    made.open()
    yield made
    made.close()


def test_only_puts_and_cancels_wait_for_the_disk(store):
    """Put and cancel commit as the server says, the others do not wait for the log."""
    seen: dict[str, str] = {}

    def note(connection: sa.Connection) -> None:
        cursor = connection.connection.cursor()
        cursor.execute("SHOW synchronous_commit")
        seen[call] = cursor.fetchone()[0]

    sa.event.listen(store.database._connect(), "commit", note)
    mine = task("a")
    calls = {
        "put": lambda: store.put([mine], NOW),
        "claim": lambda: store.claim("w1", LATER, 1),
        "confirm": lambda: store.confirm("w1", [(mine.key, 0)], NOW),
        "settle": lambda: store.settle([mine.key]),
        "cancel": lambda: store.cancel(["a"], [], LATER),
    }
    for call, run in calls.items():  # noqa: B007 - note() reads it
        run()
    off = dict.fromkeys(("claim", "confirm", "settle"), "off")
    assert seen == {"put": "on", "cancel": "on"} | off


def test_nothing_outlives_a_transaction(store):
    """No setting, lock or prepared statement stays in the session: a pooler may lie between."""
    for n in range(20):
        store.put([task(f"a{n}")], NOW)
        store.cancel([f"a{n}"], [], LATER)
    raw = store.database._connect().connection.cursor()
    raw.execute(
        "SELECT (SELECT count(*) FROM pg_prepared_statements), "
        "(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()), "
        "current_setting('synchronous_commit'), current_setting('enable_seqscan')"
    )
    assert raw.fetchone() == (0, 0, "on", "on")


def test_several_hosts(url):
    """Of several hosts in the URL the first that answers is taken, as libpq does."""
    login, _, place = url.rpartition("@")
    store = open_store(f"{login}@127.0.0.1:1,{place}", namespace())
    store.open()
    store.close()
    assert "wh" not in store.database.where.partition("/wheel")[0]


def test_a_schema_of_the_search_path(url):
    """The tables are made in the first schema of the search path that the URL names."""
    PostgresServer.execute(
        url,
        "CREATE SCHEMA IF NOT EXISTS elsewhere AUTHORIZATION wheel",
    )
    store = open_store(f"{url}?options=-csearch_path%3Delsewhere", "f_path")
    store.open()
    store.put([task("a")], NOW)
    assert len(everything(store)) == 1
    store.close()
    (row,) = PostgresServer.execute(url, "SELECT count(*) FROM elsewhere.f_path_tasks")
    assert row == (1,)


def test_another_encoding_is_refused(url):
    """A database that can't hold every text is refused with what to do."""
    PostgresServer.execute(
        url, "CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0 OWNER wheel"
    )
    latin = open_store(url.removesuffix("wheel") + "latin")
    with pytest.raises(ConfigError, match=r"encoding is LATIN1: name one .* ENCODING 'UTF8'"):
        latin.open()
