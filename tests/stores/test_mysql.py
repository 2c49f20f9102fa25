"""What is particular to MariaDB and MySQL: sessions, versions, and one setting for the log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_wheel.errors import ConfigError, StoreUnavailable
from celery_wheel.stores import mysql, open_store
from celery_wheel.stores.mysql import MysqlDatabase
from celery_wheel.stores.sql import SqlStore
from tests.stores.rows import LATER, NOW, task
from tests.stores.stores import emptied
from tests.support.databases import MariaServer, shared_database


@pytest.fixture
def url() -> str:
    return shared_database(MariaServer)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    made = emptied(url)
    made.open()
    yield made
    made.close()


def value(store: SqlStore, query: str) -> object:
    with store.database.transaction("read") as connection:
        return connection.exec_driver_sql(query).scalar()


def test_a_repeated_call_is_made_durable_too(store):
    """A put or cancel that finds everything as it should be writes something of its own: the
    first writer's rows may not be on disk yet, and the caller acks on this answer."""
    calls = [lambda: store.put([task("a", arrival=1)], NOW), lambda: store.cancel(["x"], [], LATER)]
    seen = f"SELECT count(*) FROM {store.database.tables.seen.name}"
    for call in calls:
        call()
        before = value(store, seen)
        call()
        assert value(store, seen) == before + 1
    store.reap()
    assert value(store, seen) == 0


def test_sessions_are_what_the_store_needs(store):
    """Texts are never cut off, reads don't lock ranges, and locks of the dead are let go."""
    names = ("sql_mode", "tx_isolation", "innodb_lock_wait_timeout", "wait_timeout")
    mode, level, lock_s, silence_s = (value(store, f"SELECT @@{name}") for name in names)
    assert "STRICT_ALL_TABLES" in str(mode)
    assert (level, lock_s, silence_s) == ("READ-COMMITTED", 10, 90)


def test_an_idle_connection_is_made_anew(store, monkeypatch):
    """A connection that was idle longer than the server allows is not tried any more."""
    number = "SELECT connection_id()"
    first = value(store, number)
    assert value(store, number) == first
    monkeypatch.setattr(MysqlDatabase, "idle_s", -1.0)
    assert value(store, number) != first


def test_an_old_server_is_refused(url, monkeypatch):
    """A server without SKIP LOCKED is refused with the versions that have it."""
    monkeypatch.setattr(mysql, "_OLDEST", {True: (99,), False: (99,)})
    with pytest.raises(ConfigError, match=r"version 1\d\..*use MariaDB 10.6 or MySQL 8"):
        open_store(url).open()


def test_opening_waits_only_so_long_for_another(url, monkeypatch):
    """While somebody else makes the schema and does not end, opening is unavailable."""
    monkeypatch.setattr(mysql, "OPEN_TIMEOUT_S", 0)
    first, second = open_store(url, "f_slow"), open_store(url, "f_slow")
    assert isinstance(first, SqlStore)
    opening = type(first.database)._make_schema

    def slow(database: MysqlDatabase, connection: object) -> int:
        with pytest.raises(StoreUnavailable, match="being made by somebody else"):
            second.open()
        return opening(database, connection)

    monkeypatch.setattr(MysqlDatabase, "_make_schema", slow)
    first.open()
    second.open()
    for store in (first, second):
        store.close()


def test_many_tombstones_go_in_one_statement(store):
    """A cancel of a thousand ids is a handful of round trips."""
    before = value(store, QUESTIONS)
    store.cancel([f"x{n}" for n in range(1000)], [], LATER)
    assert value(store, QUESTIONS) - before < 30


QUESTIONS = (
    "SELECT CAST(variable_value AS SIGNED) FROM information_schema.session_status "
    "WHERE variable_name = 'Questions'"
)
