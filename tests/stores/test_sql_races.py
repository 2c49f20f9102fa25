"""Two connections to one server database, one of them stopped in the middle of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import psycopg
import pymysql
import pytest
import sqlalchemy as sa

from celery_wheel.stores.base import Counts
from celery_wheel.stores.sql import SqlStore
from celery_wheel.task import DISPATCHED, PENDING
from tests.stores.rows import LATER, NOW, claimed, everything, ids, owner, task
from tests.stores.stores import emptied
from tests.support.databases import (
    DatabaseServer,
    MariaServer,
    PostgresServer,
    shared_database,
)
from tests.support.processes import wait_for

#: A lease that has run out when it begins.
RUN_OUT = -1.0


@pytest.fixture(params=[PostgresServer, MariaServer], ids=lambda kind: kind.scheme)
def kind(request: pytest.FixtureRequest) -> type[DatabaseServer]:
    return request.param


@pytest.fixture
def store(kind: type[DatabaseServer]) -> Iterator[SqlStore]:
    made = emptied(shared_database(kind))
    made.open()
    yield made
    made.close()


@pytest.fixture
def other(store: SqlStore) -> Iterator[SqlStore]:
    made = store.sibling()
    made.open()
    yield made
    made.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


class Stopped:
    """A call of a store in a thread, which stops before a statement until :meth:`go_on`.

    Args:
        before: how the statement begins; ``COMMIT`` is the end of the transaction.
    """

    def __init__(
        self, pool: ThreadPoolExecutor, store: SqlStore, before: str, call: Callable[[], Any]
    ) -> None:
        self._reached, self._go = threading.Event(), threading.Event()
        connection = store.database._connect()
        name = "commit" if before == "COMMIT" else "before_cursor_execute"

        def stop(_: sa.Connection, *rest: Any) -> None:
            if not rest or rest[1].startswith(before):
                self._reached.set()
                assert self._go.wait(30)

        sa.event.listen(connection, name, stop)
        self.result = pool.submit(call)
        assert self._reached.wait(30)

    def go_on(self) -> Any:
        """The rest of the call; its answer."""
        self._go.set()
        return self.result.result(30)


def number(store: SqlStore) -> int:
    """The server's number of a store's connection."""
    connection = store.database._connect()
    raw: Any = connection.connection.dbapi_connection
    return int(raw.thread_id() if hasattr(raw, "thread_id") else raw.info.backend_pid)


def waiting(
    pool: ThreadPoolExecutor, kind: type[DatabaseServer], store: SqlStore, call: Callable[[], Any]
) -> Future[Any]:
    """Begin a call that has to wait for another one, and see that it does."""
    session = number(store)
    result = pool.submit(call)
    wait_for(lambda: result.done() or kind.waits(shared_database(kind), session), 20)
    assert not result.done()
    return result


def test_a_cancel_waits_for_a_put_that_looked_for_tombstones(store, other, kind, pool):
    """A task that is being put when its id is cancelled is found and cancelled."""
    mine = task("a")
    put = Stopped(pool, store, f"INSERT INTO {tasks(store)} ", lambda: store.put([mine], NOW))
    cancel = waiting(pool, kind, other, lambda: other.cancel(["a"], [], LATER))
    assert put.go_on().new == {mine.key}
    assert cancel.result(30).outcomes == {"a": "cancelled"}
    assert everything(store) == []


def test_a_put_waits_for_a_cancel_that_looks_for_rows(store, other, kind, pool):
    """A task that comes while its stamp is being cancelled is not kept."""
    mine = task("a", stamps=("s=1",))
    looks = f"SELECT {tasks(store)}."
    cancel = Stopped(pool, store, looks, lambda: store.cancel(["x"], ["s=1"], LATER))
    put = waiting(pool, kind, other, lambda: other.put([mine], NOW))
    assert cancel.go_on().rows == []
    assert put.result(30).cancelled == {mine.key}


def test_a_cancel_waits_for_a_confirm(store, other, kind, pool):
    """What passed the fence first is answered dispatched, and stays."""
    (row,) = claimed(store, task("a"))
    refs = [(row.key, row.version)]
    confirm = Stopped(
        pool, store, f"UPDATE {tasks(store)} ", lambda: store.confirm("w1", refs, NOW)
    )
    cancel = waiting(pool, kind, other, lambda: other.cancel(["a"], [], LATER))
    assert confirm.go_on() == {row.key}
    assert cancel.result(30).outcomes == {"a": "dispatched"}
    assert [row.state for row in everything(store)] == [DISPATCHED]


def test_a_confirm_waits_for_a_cancel(store, other, kind, pool):
    """What is being cancelled does not pass the fence."""
    (row,) = claimed(store, task("a"))
    cancel = Stopped(
        pool, store, f"DELETE FROM {tasks(store)} ", lambda: store.cancel(["a"], [], LATER)
    )
    confirm = waiting(pool, kind, other, lambda: other.confirm("w1", [(row.key, 0)], NOW))
    assert cancel.go_on().outcomes == {"a": "cancelled"}
    assert confirm.result(30) == set()


def test_puts_do_not_wait_for_each_other(store, other, pool):
    """Puts and confirms share the gate: one that hangs holds nobody up but cancels."""
    (row,) = claimed(store, task("b"))
    put = Stopped(pool, store, "COMMIT", lambda: store.put([task("a")], NOW))
    assert len(other.put([task("c")], NOW).new) == 1
    assert other.confirm("w1", [(row.key, 0)], NOW) == {row.key}
    assert len(put.go_on().new) == 1


def test_copies_put_at_once_are_new_once(store, other, kind, pool):
    """Of two workers that put copies of one message one is told new and one known."""
    mine, more = task("a"), task("b")
    first = Stopped(pool, store, "COMMIT", lambda: store.put([mine], NOW))
    second = waiting(pool, kind, other, lambda: other.put([more, mine], NOW))
    assert first.go_on().new == {mine.key}
    result = second.result(30)
    assert (result.new, result.known) == ({more.key}, {mine.key})
    assert store.count() == Counts(pending=2)


def test_a_claim_steps_over_what_another_claims(store, other, pool):
    """A claimer takes the next rows at once while another one is at it."""
    store.put([task(f"t{n}", NOW + n) for n in range(4)], NOW)
    first = Stopped(pool, store, "COMMIT", lambda: store.claim("w1", LATER, 2))
    assert ids(other.claim("w2", LATER, 9)) == ["t2", "t3"]
    assert ids(first.go_on()) == ["t0", "t1"]


def test_claimers_race(store, other, pool):
    """Two that claim as fast as they can share the rows: each goes to exactly one."""
    store.put([task(f"t{n}", NOW + n // 7, queue=f"q{n % 3}") for n in range(600)], NOW)
    start = threading.Barrier(2)

    def claim(by: SqlStore, name: str) -> list[str]:
        start.wait(30)
        taken: list[str] = []
        while rows := by.claim(name, LATER, 7):
            taken += ids(rows)
        return taken

    both = [pool.submit(claim, store, "w1"), pool.submit(claim, other, "w2")]
    mine, theirs = (result.result(60) for result in both)
    assert sorted(mine + theirs) == sorted(f"t{n}" for n in range(600))
    owners = {row.id: row.owner for row in everything(store)}
    assert owners == dict.fromkeys(mine, "w1") | dict.fromkeys(theirs, "w2")


def test_one_of_two_gets_a_row(store, other, kind, pool):
    """A row that one forgets as expired and another cancels is returned to one of them."""
    (row,) = claimed(store, task("a"))
    forget = Stopped(pool, store, "DELETE", lambda: store.forget([row.key]))
    cancel = waiting(pool, kind, other, lambda: other.cancel(["a"], [], LATER))
    # Whoever it is: MySQL sees a deadlock here, and one of them has to begin anew.
    assert ids(forget.go_on() + cancel.result(30).rows) == ["a"]


def test_a_heartbeat_that_came_first_keeps_the_rows(store, other, kind, pool):
    """A reap that meets a renewal under way frees nothing."""
    store.heartbeat(owner("w1"), RUN_OUT)
    claimed(store, task("a"))
    heartbeat = Stopped(pool, store, "COMMIT", lambda: store.heartbeat(owner("w1"), 60))
    reap = waiting(pool, kind, other, other.reap)
    assert heartbeat.go_on() is True
    assert reap.result(30) == 0
    assert [row.owner for row in everything(store)] == ["w1"]


def test_a_heartbeat_that_came_too_late_is_told(store, other, kind, pool):
    """A renewal that meets a reap under way is told that the rows are gone."""
    other.heartbeat(owner("w1"), RUN_OUT)
    claimed(store, task("a"))
    reap = Stopped(pool, store, "COMMIT", store.reap)
    heartbeat = waiting(pool, kind, other, lambda: other.heartbeat(owner("w1"), 60))
    assert reap.go_on() == 1
    assert heartbeat.result(30) is False
    assert [row.owner for row in everything(store)] == [None]


def test_a_reap_spares_an_owner_that_begins_meanwhile(store, other, pool):
    """A worker that starts its lease and claims while a reap looks around keeps its rows."""
    store.put([task("a")], NOW)
    reap = Stopped(pool, store, f"SELECT {tasks(store, 'owners')}", store.reap)
    other.heartbeat(owner("w2"), 60)
    other.claim("w2", LATER, 1)
    assert reap.go_on() == 0
    assert [row.owner for row in everything(store)] == ["w2"]


def test_a_deadlock_is_nobodys_business(store, kind, pool):
    """A call that the server sacrifices to end a deadlock is repeated, and succeeds."""
    first, second = task("a"), task("b")
    store.put([first, second], NOW)
    lock = f"SELECT seq FROM {tasks(store)} WHERE id = %s FOR UPDATE"
    with closing(kind.connect(shared_database(kind))) as rude:
        cursor = rude.cursor()
        cursor.execute("BEGIN")
        cursor.execute(lock, ("b",))
        release = waiting(pool, kind, store, lambda: store.forget([first.key, second.key]))
        with suppress(psycopg.errors.DeadlockDetected, pymysql.OperationalError):
            cursor.execute(lock, ("a",))  # the server may choose either
        rude.rollback()
    assert sorted(ids(release.result(30))) == ["a", "b"]
    assert store.count().pending == 0


def tasks(store: SqlStore, table: str = "tasks") -> str:
    name: str = getattr(store.database.tables, table).name
    return name


def test_rows_locked_by_somebody_else_are_no_rows_for_a_claim(store, kind):
    """A claim waits for nobody: a row that an operator's session keeps locked is left."""
    store.put([task("a"), task("b", NOW + 1)], NOW)
    with closing(kind.connect(shared_database(kind))) as rude:
        cursor = rude.cursor()
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT seq FROM {tasks(store)} WHERE id = 'a' FOR UPDATE")
        assert ids(store.claim("w1", LATER, 9)) == ["b"]
        rude.rollback()
    assert [row.state for row in store.claim("w1", LATER, 9)] == [PENDING]
