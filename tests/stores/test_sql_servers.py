"""What PostgreSQL and MariaDB have in common: opening, errors, texts, and a server that ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from celery_wheel.errors import ConfigError, SchemaVersionError, StoreUnavailable
from celery_wheel.stores import open_store, postgresql
from celery_wheel.stores.base import Store
from celery_wheel.stores.sql import SqlStore
from tests.stores.rows import LATER, NOW, everything, ids, owner, task
from tests.stores.stores import emptied
from tests.support.databases import (
    DatabaseServer,
    MariaServer,
    PostgresServer,
    shared_database,
)

ROOT = Path(__file__).parents[2]
KINDS = [PostgresServer, MariaServer]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.scheme)
def kind(request: pytest.FixtureRequest) -> type[DatabaseServer]:
    return request.param


@pytest.fixture
def url(kind: type[DatabaseServer]) -> str:
    return shared_database(kind)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    made = emptied(url)
    made.open()
    yield made
    made.close()


@pytest.fixture(scope="module")
def own() -> Iterator[dict[type[DatabaseServer], DatabaseServer]]:
    made: dict[type[DatabaseServer], DatabaseServer] = {}
    yield made
    for server in made.values():
        server.stop()


@pytest.fixture
def server(kind: type[DatabaseServer], own: dict[Any, DatabaseServer]) -> DatabaseServer:
    """A server that the test may stop."""
    if kind not in own:
        own[kind] = kind()
    return own[kind]


@pytest.fixture
def fresh(url: str) -> SqlStore:
    """An unopened store without a schema."""
    store = open_store(url, f"f{uuid.uuid4().hex}")
    assert isinstance(store, SqlStore)
    return store


def test_ten_open_at_once(fresh):
    """Ten workers that open a new database at once all succeed, with one whole schema."""
    stores = [fresh.sibling() for _ in range(10)]
    start = threading.Barrier(10)

    def use(number: int) -> int:
        start.wait(30)
        stores[number].open()
        kept = len(stores[number].put([task(f"t{number}")], NOW).new)
        stores[number].close()
        return kept

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(use, range(10))) == 10
    fresh.open()
    assert sorted(ids(everything(fresh))) == sorted(f"t{n}" for n in range(10))
    assert indexes(fresh) == {
        index.name
        for table in fresh.database.tables.metadata.sorted_tables
        for index in table.indexes
        if index._ddl_if is None or not skipped(fresh, index)
    }
    fresh.close()


def skipped(store: SqlStore, index: sa.Index) -> bool:
    mysql = "mysql" in store.database.where
    return index.name.endswith(
        ("_free", "_owner", "_dispatched") if mysql else ("_claim", "_state")
    )


def indexes(store: SqlStore) -> set[str]:
    with store.database.transaction("read") as connection:
        there = sa.inspect(connection)
        tables = store.database.tables.metadata.sorted_tables
        return {index["name"] for table in tables for index in there.get_indexes(table.name)}


def test_a_half_made_schema_is_completed(fresh):
    """Where the making of the schema ended early, the next open makes the rest."""
    fresh.open()
    whole = indexes(fresh)
    tables = fresh.database.tables
    with fresh.database.transaction("write") as connection:
        tables.seen.drop(connection)
        next(index for index in tables.tasks.indexes if index.name.endswith("_due")).drop(
            connection
        )
        connection.execute(sa.delete(tables.meta))
    fresh.close()
    fresh.open()
    assert indexes(fresh) == whole
    assert fresh.settle([b"key"], LATER) == 0
    fresh.close()


def test_a_newer_schema_is_refused(fresh):
    """A store that a newer release made is refused, with both versions and what to do."""
    fresh.open()
    with fresh.database.transaction("write") as connection:
        connection.execute(sa.update(fresh.database.tables.meta).values(value=99))
    newer = fresh.sibling()
    with pytest.raises(SchemaVersionError, match=r"schema version 99.*knows 1.*upgrade"):
        newer.open()
    fresh.close()


def test_texts_that_look_alike_are_different(store):
    """Case, accents, spaces at the end and composition tell ids, queues and stamps apart."""
    texts = ["a", "A", "ä", "a ", " a", "a\u0308", "\uff41", "a\t"]
    tasks = [task(text, name=text, queue=text, stamps=(f"s={text}",)) for text in texts]
    assert len(store.put(tasks, NOW).new) == len(texts)
    assert [row.id for row in store.claim("W", NOW, 9, queues=["a "])] == ["a "]
    assert store.release("w") == 0
    assert list(store.cancel(["A"], ["s=ä"], LATER).outcomes) == ["A", "ä"]
    assert sorted(ids(everything(store))) == sorted(set(texts) - {"A", "ä"})
    assert store.put([task("a", retries=1)], NOW).cancelled == frozenset()


def test_texts_of_any_length(store):
    """Ids and stamps longer than any index takes are kept, found and cancelled."""
    long = "".join(f"{n:x}" for n in range(9000))
    tasks = [task(long + end, stamps=(f"s={long}{end}",)) for end in ("1", "2", "3")]
    assert len(store.put(tasks, NOW).new) == 3
    assert store.cancel([long + "1"], [f"s={long}2"], LATER).outcomes == {
        long + "1": "cancelled",
        long + "2": "cancelled",
    }
    assert everything(store) == [tasks[2]]
    late = [task(long + "1", retries=1), task("x", stamps=(f"s={long}2",)), task(long)]
    assert len(store.put(late, NOW).cancelled) == 2


def test_a_large_envelope(store):
    """An envelope larger than 64 KB, of any bytes, comes back as it went in."""
    envelope = bytes(range(256)) * 8000
    store.put([task("a", envelope=envelope)], NOW)
    (row,) = store.claim("w1", LATER, 1)
    assert row.envelope == envelope


@pytest.mark.parametrize(
    ("change", "advice"),
    [
        (("wheel:wh%23el@", "wheel:secret@"), "check user and password"),
        (("/wheel", "/none"), "(create the database|let this user use the database)"),
    ],
    ids=["password", "database"],
)
def test_a_refused_login_is_told(url, change, advice):
    """A wrong password or database is a mistake in the settings; the password is not shown."""
    wrong = open_store(change[1].join(url.rsplit(change[0], 1)))
    with pytest.raises(ConfigError, match=advice) as error:
        wrong.open()
    assert "secret" not in str(error.value)
    assert "wh#el" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_user_who_may_not_make_tables_is_told(kind, url):
    """Without the right to create tables the message says which right is missing."""
    name = f"u{uuid.uuid4().hex[:12]}"
    right = {
        PostgresServer: (f"CREATE USER {name} PASSWORD 'x'",),
        MariaServer: (
            f"CREATE USER {name}@'127.0.0.1' IDENTIFIED BY 'x'",
            f"GRANT SELECT ON wheel.* TO {name}@'127.0.0.1'",
        ),
    }[kind]
    kind.execute(url, *right)
    limited = open_store(url.replace("wheel:wh%23el", f"{name}:x"), "f_limited")
    with pytest.raises(ConfigError, match="let this user create tables"):
        limited.open()


@pytest.mark.parametrize(
    "url",
    ["postgresql://u:secret@[h/db", "mysql://u:secret@host:port/db", "mysql://u:secret@h"],
)
def test_a_url_that_cannot_be_read(url):
    """A URL with a mistake is refused with a good one, and without its password."""
    with pytest.raises(ConfigError, match=r"write (postgresql|mysql)://user:password@") as error:
        open_store(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("option", ["no_such_option=1", "connect_timeout=soon"])
def test_a_wrong_option_of_a_url(url, option):
    """An option that the driver does not know, or can't read, is refused at the start."""
    with pytest.raises(ConfigError, match=r"can't be read|correct the URL"):
        open_store(f"{url}?{option}").open()


@pytest.mark.parametrize("scheme", ["postgres", "mariadb"])
def test_other_names_of_a_scheme(scheme):
    """What other tools call these databases is understood, too."""
    kind = {"postgres": PostgresServer, "mariadb": MariaServer}[scheme]
    store = open_store(f"{scheme}://" + shared_database(kind).partition("://")[2])
    store.open()
    store.close()


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [("postgresql://h/d", "psycopg", "postgresql"), ("mysql://h/d", "pymysql", "mysql")],
)
def test_a_missing_driver_is_told(monkeypatch, url, driver, extra):
    """Without its driver a store is refused with what to install."""
    monkeypatch.setitem(sys.modules, driver, None)
    monkeypatch.delitem(sys.modules, f"celery_wheel.stores.{extra}", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'celery-wheel\[{extra}\]'"):
        open_store(url)


def test_an_unreachable_server_is_unavailable(kind):
    """A port where nobody listens, or a name that is none, is unavailable, not a mistake."""
    for place in ("127.0.0.1:1", "no-such-host.invalid"):
        with pytest.raises(StoreUnavailable, match=place.partition(":")[0]):
            open_store(f"{kind.scheme}://u:p@{place}/d").open()


def test_a_killed_connection_is_made_anew(kind, url, store):
    """After the server ended the session one call fails, and the next one works."""
    kill = {
        PostgresServer: "SELECT pg_backend_pid(), 'SELECT pg_terminate_backend({})'",
        MariaServer: "SELECT connection_id(), 'KILL {}'",
    }[kind]
    with store.database.transaction("read") as connection:
        session, statement = connection.exec_driver_sql(kill).one()
    kind.execute(url, statement.format(session))
    with pytest.raises(StoreUnavailable):
        store.put([task("a")], NOW)
    assert len(store.put([task("a")], NOW).new) == 1


def test_a_row_that_stays_locked_is_unavailable(kind, url, store, monkeypatch):
    """A statement that waits too long for a lock is given up; once it is free the call works."""
    monkeypatch.setitem(postgresql._BEGIN, "write", "BEGIN; SET LOCAL statement_timeout = 100")
    if kind is MariaServer:
        monkeypatch.setattr("celery_wheel.stores.mysql._SESSION", "SET innodb_lock_wait_timeout=1")
    store.close()
    mine = task("a")
    store.put([mine], NOW)
    name = store.database.tables.tasks.name
    with closing(kind.connect(url)) as rude:
        cursor = rude.cursor()
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT seq FROM {name} WHERE id = 'a' FOR UPDATE")
        with pytest.raises(StoreUnavailable, match=r"(?i)timeout"):
            store.settle([mine.key])
        rude.rollback()
    assert store.settle([mine.key]) == 1
    store.close()


def test_leases_go_by_the_clock_of_the_server(store):
    """The clock of leases is the server's, in UTC, whatever the zone of the session."""
    with store.database.transaction("write") as connection:
        before = store.database.now_ms(connection)
        zone = (
            "SET TIME ZONE '+05:00'"
            if "postgres" in store.database.where
            else "SET time_zone='+5:00'"
        )
        connection.exec_driver_sql(zone)
        assert 0 <= store.database.now_ms(connection) - before < 60_000
    store.close()
    assert abs(before - postgresql.SYSTEM_CLOCK.wall_ms()) < 60_000


def test_a_forked_child_leaves_the_parent_alone(store, url):
    """A child can't use what its parent opened, and its end does not disturb the parent."""
    code = """if True:
        import os, sys
        from celery_wheel.errors import StoreError
        from celery_wheel.stores import open_store
        store = open_store(sys.argv[1], sys.argv[2])
        store.open()
        if os.fork() == 0:
            try:
                store.count()
            except StoreError as exc:
                print(exc, flush=True)
            store.close()
            sys.exit(0)
        os.wait()
        print(store.count().pending)
    """
    store.put([task("a")], NOW)
    namespace = store.database.tables.namespace
    command = [sys.executable, "-W", "ignore", "-c", code, url, namespace]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    refused, count = told.stdout.splitlines()
    assert "was opened before a fork: only the parent can use it" in refused
    assert count == "1"


def test_a_server_that_dies_in_the_middle(kind, server):
    """A put that the server's end cuts short is refused; after the restart the same put works,
    what was kept before is there, and leases are as they were."""
    store = open_store(server.url)
    store.open()
    store.heartbeat(owner("w1"), 3600)
    assert len(store.put([task("a")], NOW).new) == 1
    more = [task("b"), task("c")]

    def die(_: sa.Connection, *rest: object) -> None:
        server.stop()

    sa.event.listen(store.database._connect(), "commit", die)
    with pytest.raises(StoreUnavailable):
        store.put(more, NOW)
    with pytest.raises(StoreUnavailable):
        store.count()
    server.start()
    again = store.put(more, NOW)
    assert again.new | again.known == {one.key for one in more}
    assert sorted(ids(everything(store))) == ["a", "b", "c"]
    assert store.owners() == [owner("w1")]
    store.close()


def test_a_server_that_hangs_is_given_up(kind, server, monkeypatch):
    """A server that takes calls and never answers is unavailable after the time for answers."""
    monkeypatch.setattr(postgresql, "ANSWER_TIMEOUT_S", 0.3)
    options = "" if kind is PostgresServer else "?read_timeout=1"
    store = open_store(server.url + options)
    store.open()
    server.pause()
    try:
        with pytest.raises(StoreUnavailable, match=r"(no answer for|timed out)"):
            store.put([task("d")], NOW)
    finally:
        server.go_on()
    assert len(store.put([task("d")], NOW).new) == 1
    store.settle([task("d").key])
    store.close()


def test_a_server_that_only_reads_is_unavailable(kind, server):
    """Where a failover has left a server that can't be written, calls wait for better times."""
    change, back = {
        PostgresServer: (
            "ALTER ROLE wheel SET default_transaction_read_only = on",
            "ALTER ROLE wheel RESET default_transaction_read_only",
        ),
        MariaServer: ("SET GLOBAL read_only = 1", "SET GLOBAL read_only = 0"),
    }[kind]
    store = open_store(server.url)
    store.open()
    store.close()
    kind.execute(server.url, change)
    try:
        with pytest.raises(StoreUnavailable, match="read-only"):
            store.open()
        with pytest.raises(StoreUnavailable, match="read-only"):
            store.put([task("e")], NOW)
    finally:
        kind.execute(server.url, back)
    assert len(store.put([task("e")], NOW).new) == 1
    store.settle([task("e").key])
    store.close()


def open_two(first: Store, second: Store) -> None:
    first.open()
    second.open()


def test_too_many_connections_are_unavailable(kind, server):
    """A server without a free place is unavailable, not a mistake."""
    change, back = {
        PostgresServer: (
            "ALTER ROLE wheel CONNECTION LIMIT 0",
            "ALTER ROLE wheel CONNECTION LIMIT -1",
        ),
        MariaServer: (
            "ALTER USER wheel@'127.0.0.1' WITH MAX_USER_CONNECTIONS 1",
            "ALTER USER wheel@'127.0.0.1' WITH MAX_USER_CONNECTIONS 0",
        ),
    }[kind]
    kind.execute(server.url, change)
    first, second = open_store(server.url), open_store(server.url)
    try:
        with pytest.raises(StoreUnavailable, match=r"too many|max_user_connections"):
            open_two(first, second)
    finally:
        first.close()
        kind.execute(server.url, back)
    second.open()
    second.close()
