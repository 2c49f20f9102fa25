"""What is particular to the SQLite store: several processes, crashes, and a failing file."""

from __future__ import annotations

import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from celery_wheel.errors import ConfigError, SchemaVersionError, StoreUnavailable
from celery_wheel.stores import open_store, sqlite
from celery_wheel.stores.base import Store
from tests.stores.rows import LATER, NOW, everything, ids, task

ROOT = Path(__file__).parents[2]
NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "wheel.db"


@pytest.fixture
def store(path: Path) -> Iterator[Store]:
    made = open_store(f"sqlite:///{path}")
    made.open()
    yield made
    made.close()


@contextmanager
def child(act: str, path: Path, who: str) -> Iterator[subprocess.Popen[str]]:
    """Another process on the same file; it is gone at the end."""
    command = [sys.executable, "-m", "tests.stores.sqlite_child", act, str(path), who]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def all_go(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    """Let processes start at once; what each printed, after all ended well."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    printed = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return printed


def check(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_processes_race_for_rows(store, path):
    """Two processes that claim at once share the rows: each row goes to exactly one."""
    store.put([task(f"t{n}") for n in range(700)], NOW)
    with child("claim", path, "w1") as one, child("claim", path, "w2") as two:
        mine, theirs = all_go([one, two])
    assert sorted(mine + theirs) == sorted(f"t{n}" for n in range(700))
    owners = {row.id: row.owner for row in everything(store)}
    assert owners == dict.fromkeys(mine, "w1") | dict.fromkeys(theirs, "w2")


def test_ten_processes_make_one_file(path):
    """Ten processes that open a new file at once all succeed, and one schema is made."""
    names = [f"w{n}" for n in range(10)]
    with ExitStack() as stack:
        all_go([stack.enter_context(child("first", path, name)) for name in names])
    check(path)
    made = open_store(f"sqlite:///{path}")
    made.open()
    assert sorted(ids(everything(made))) == sorted(names)
    made.close()


def test_what_was_put_survives_a_kill(path):
    """A writer killed at any point leaves a sound file with all that it was told is kept."""
    for round_ in range(4):
        with child("put", path, f"r{round_}") as writer:
            told = [int(writer.stdout.readline()) for _ in range(2 + 3 * round_)][-1]
            writer.kill()
            told = max([told, *map(int, writer.stdout.read().split())])
        check(path)
        store = open_store(f"sqlite:///{path}")
        store.open()
        names = {row.id for row in everything(store) if row.id.startswith(f"r{round_}-")}
        assert names >= {f"r{round_}-{n}" for n in range(told)}
        assert len(names) % 20 == 0
        store.close()


def test_a_fork_leaves_the_parent_alone(path):
    """A child closes nothing that it inherited, and can't open the file a second time."""
    with child("fork", path, "") as process:
        kept, used, sibling, count = process.communicate()[0].splitlines()
        assert process.returncode == 0
    assert (kept, count) == ("kept", "2")
    assert "was opened before a fork: only the parent can use it" in used
    assert "in a process of its own" in sibling
    check(path)


def test_durable_calls_sync_and_others_do_not(store):
    """Put and cancel commit with full synchronisation, whatever came before; others without."""
    assert (put(store), level(store)) == (1, 2)
    assert (len(store.claim("w1", LATER, 1)), level(store)) == (1, 1)
    assert (len(store.cancel(["t0"], [], LATER).rows), level(store)) == (1, 2)
    store.settle([b"x"])
    assert level(store) == 1


def test_a_repeated_call_is_made_durable_too(store, path):
    """A put or cancel that finds everything as it should be commits something of its own: the
    first writer may have died before its rows were synced, and the caller acks on this answer."""
    calls = [lambda: put(store), lambda: store.cancel(["x"], [], LATER)]
    for call in calls:
        call()
        before = Path(f"{path}-wal").stat().st_size
        call()
        assert Path(f"{path}-wal").stat().st_size > before


def put(store: Store, rows: int = 1, size: int = 10) -> int:
    result = store.put([task(f"t{n}", envelope=b"x" * size) for n in range(rows)], NOW)
    return len(result.new)


def level(store: Store) -> int:
    (value,) = store.database._connection.exec_driver_sql("PRAGMA synchronous").one()
    store.database._connection.rollback()
    return value


def test_a_full_disk_is_unavailable_and_passes(store, path, monkeypatch):
    """With no page left a put is refused as a whole; once there is room the same put works."""
    put(store)
    full = (*sqlite._PRAGMAS, "PRAGMA max_page_count=60")
    monkeypatch.setattr(sqlite, "_PRAGMAS", full)
    store.close()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"wheel\.db.*full"):
            put(store, 100, 20_000)
        assert store.count().pending == 1
    monkeypatch.undo()
    store.close()
    assert put(store, 100, 20_000) == 99
    check(path)


def test_a_file_that_may_not_grow_is_unavailable_and_passes(store, path):
    """An input/output error in the middle of a put leaves nothing of it, and passes."""
    put(store)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = Path(f"{path}-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100_000, hard))
    try:
        with pytest.raises(StoreUnavailable):
            put(store, 100, 20_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.count().pending == 1
    assert put(store, 100, 20_000) == 99
    check(path)


def test_a_locked_file_is_unavailable_and_passes(path, monkeypatch):
    """While another process keeps the file locked, calls that write are refused."""
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.01)
    store = open_store(f"sqlite:///{path}")
    store.open()
    with closing(sqlite3.connect(path, isolation_level=None)) as rude:
        rude.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="locked") as refused:
            put(store)
        assert refused.value.__cause__ is not None
        assert store.count().pending == 0
        rude.execute("ROLLBACK")
        assert put(store) == 1
    store.close()


def test_opening_goes_on_while_others_make_the_file(path, monkeypatch):
    """Opening is tried again while the file is locked, for a while, and then refused."""
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_S", 0.01)
    attempts = []

    class Patient(sqlite.SqliteDatabase):
        def _open_file(self):
            attempts.append(1)
            if len(attempts) == 3:
                rude.execute("ROLLBACK")
            return super()._open_file()

    with closing(sqlite3.connect(path, isolation_level=None)) as rude:
        rude.execute("BEGIN EXCLUSIVE")
        database = Patient(path, "celery_wheel")
        database.open()
        database.close()
        rude.execute("BEGIN EXCLUSIVE")
        monkeypatch.setattr(sqlite, "OPEN_TIMEOUT_S", 0.0)
        with pytest.raises(StoreUnavailable, match="locked"):
            database.open()


def test_a_vanished_file_is_made_anew(store, path):
    """After the file was deleted the store fails once, then goes on with an empty one."""
    put(store)
    for file in path.parent.iterdir():
        file.unlink()
    with pytest.raises(StoreUnavailable, match="removed or replaced"):
        put(store, 2)
    assert put(store, 2) == 2
    check(path)


def test_a_newer_schema_is_refused(store, path):
    """A store that a newer release made is refused, with both versions and what to do."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("UPDATE celery_wheel_meta SET value = 99 WHERE name = 'schema'")
    newer = store.sibling()
    with pytest.raises(SchemaVersionError, match=r"schema version 99.*knows 1.*upgrade"):
        newer.open()
    newer.close()


def test_namespaces_share_a_file(store, path):
    """Applications with their own namespace do not see each other's rows."""
    put(store)
    other = open_store(f"sqlite:///{path}", "other_app")
    other.open()
    assert other.count().pending == 0
    assert put(other) == 1
    other.close()


@pytest.mark.parametrize("namespace", ["", "1st", "a-b", "a;b", "x" * 41, "é"])
def test_a_namespace_is_an_identifier(namespace):
    """A namespace that can't begin a table's name is refused with the rule."""
    with pytest.raises(ConfigError, match="letters, digits and underscores"):
        open_store("sqlite:///wheel.db", namespace)


def test_a_relative_path_is_taken_at_once(tmp_path, monkeypatch):
    """A relative file is that of the directory at the start, wherever the process goes later."""
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///wheel.db")
    monkeypatch.chdir("/")
    store.open()
    store.close()
    assert (tmp_path / "wheel.db").exists()


def refused(path: Path, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as error:
        open_store(f"sqlite:///{path}").open()
    assert str(path) in str(error.value)


def test_places_that_are_no_file(tmp_path):
    """A missing directory, a directory, and a file of another kind are told apart."""
    refused(tmp_path / "none" / "wheel.db", "there is no directory")
    refused(tmp_path, "it is a directory")
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear reader, " * 100)
    refused(letter, "no SQLite file: name another file")
    assert letter.read_text() == "Dear reader, " * 100


def test_a_damaged_file(store, path):
    """A file with a broken first page is told as damaged, not as unavailable."""
    store.close()
    content = bytearray(path.read_bytes())
    content[100:4096] = b"\xff" * 3996
    path.write_bytes(content)
    refused(path, "it is damaged: restore it")


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be an ordinary user for a while: root may read and write everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_places_without_permission():
    """A directory or file that may not be written or read is told with what to do."""
    # Not below tmp_path, where another user may not even look.
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        made = open_store(f"sqlite:///{directory / 'made.db'}")
        made.open()
        made.close()
        (directory / "hidden.db").write_bytes((directory / "made.db").read_bytes())
        (directory / "hidden.db").chmod(0o000)
        (directory / "made.db").chmod(0o444)
        directory.chmod(0o555)
        with as_nobody():
            refused(directory / "new.db", "let this user")
            refused(directory / "hidden.db", "let this user")
            refused(directory / "made.db", "let this user")
        directory.chmod(0o777)
        with as_nobody():
            refused(directory / "made.db", "let this user")
