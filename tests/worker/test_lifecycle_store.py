"""A store that fails, a row that is damaged, and settings that can't be right."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing

import psutil
import pytest

from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 2.0


def path_of(custody):
    return custody["wheel_store"].removeprefix("sqlite:///")


@on("redis-sqlite", "rabbitmq-sqlite")
def test_the_store_is_locked_for_longer_than_anybody_waits(
    broker, custody, worker, publish, probes
):
    """Eight seconds in which tasks arrive and come due: immediate ones run, one line in the log,
    then all others, once."""
    held = worker(concurrency=2)
    for _ in range(5):
        publish("probe", "comes due", countdown=3)
    held.wait_held(5)
    with closing(sqlite3.connect(path_of(custody), isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        for _ in range(5):
            publish("probe", "arrives", countdown=1)
        until = time.monotonic() + 8
        number = 0
        while time.monotonic() < until:
            number += 1
            sent_at = time.time()
            publish("probe", f"immediate {number}")
            (run,) = probes.wait(f"immediate {number}")
            assert run.at - sent_at < LATE_S
            time.sleep(0.5)
        assert held.inspect("ping")
        assert probes.runs("arrives") == probes.runs("comes due") == []
        locker.execute("ROLLBACK")
    probes.wait("arrives", 5)
    probes.wait("comes due", 5)
    held.wait_held(0)
    if broker.kind == "redis":
        assert broker.unacked() == 0
    time.sleep(0.5)
    assert len(probes.runs("arrives")) == len(probes.runs("comes due")) == 5
    assert held.log().count("The store does not answer") == 1
    assert held.log().count("The store answers again") == 1
    assert held.wheel()["dispatched_rows"] == 0
    assert "Traceback" not in held.log()


@on("redis-sqlite")
def test_a_worker_stops_although_its_store_is_locked(custody, worker, publish, probes):
    """SIGTERM while the store does not answer: the end comes in seconds, nothing is lost."""
    first = worker()
    publish("probe", "held", countdown=10)
    first.wait_held(1)
    with closing(sqlite3.connect(path_of(custody), isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        publish("probe", "arrives", countdown=2)
        first.wait_log("received")
        time.sleep(0.5)
        asked = time.monotonic()
        assert first.stop(30) == 0
        assert time.monotonic() - asked < 10 + LATE_S
        locker.execute("ROLLBACK")
    second = worker()
    (arrives,) = probes.wait("arrives", timeout_s=20)
    (held,) = probes.wait("held", timeout_s=20)
    assert min(arrives.late_s, held.late_s) >= 0
    second.wait_held(0)
    assert len(probes.runs()) == 2


@on("redis-sqlite")
def test_what_waits_for_a_store_is_bounded(broker, custody, worker, publish, probes):
    """While the store is away the worker takes in as many as may be resident, and no more: the
    rest stays with the broker, and all run afterwards."""
    held = worker(concurrency=2, conf={"wheel_resident_limit": 10})
    before = held.prefetch()
    with closing(sqlite3.connect(path_of(custody), isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        for _ in range(100):
            publish("probe", "label", countdown=3)
        wait_for(lambda: broker.unacked() >= 10, what="some were taken in")
        time.sleep(1)
        assert broker.unacked() <= 10 + 2 * before
        assert broker.depth() >= 100 - 10 - 2 * before
        locker.execute("ROLLBACK")
    runs = probes.wait("label", 100, timeout_s=30)
    held.wait_held(0)
    assert len({run.task_id for run in runs}) == len(probes.runs("label")) == 100
    assert min(run.late_s for run in runs) >= 0
    wait_for(lambda: held.prefetch() == before, what="the prefetch window is back")


@on("redis-sqlite")
def test_damaged_rows_harm_no_others(custody, worker, publish, probes):
    """Envelopes that can't be read are told of and kept; tasks beside them run on time and the
    worker does not spin."""
    held = worker()
    damaged = publish("probe", "damaged", countdown=600)
    strange = publish("probe", "strange", countdown=600)
    publish("probe", "sound", countdown=600)
    held.wait_held(3)
    table = f"{custody['wheel_namespace']}_tasks"
    due_ms = int(time.time() * 1000) + 1500
    with closing(sqlite3.connect(path_of(custody))) as database, database:
        database.execute(f"UPDATE {table} SET due_ms = ?", (due_ms,))
        spoil = f"UPDATE {table} SET {{}} WHERE id = ?"
        database.execute(spoil.format("envelope = x'00ff'"), (damaged.id,))
        database.execute(spoil.format("stamps = '{{{'"), (strange.id,))
    (sound,) = probes.wait("sound")
    assert sound.at * 1000 >= due_ms
    held.wait_log(damaged.id)
    process = psutil.Process(held.process.pid)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5
    told = held.log().count("waits and is kept")
    assert told <= 2
    publish("probe", "then", countdown=0.3)
    probes.wait("then")
    with closing(sqlite3.connect(path_of(custody))) as database:
        rows = database.execute(f"SELECT id FROM {table}").fetchall()
    assert {damaged.id} <= {row for (row,) in rows}


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"wheel_tick": "soon"}, "wheel_tick"),
        ({"wheel_tik": 0.1}, "did you mean wheel_tick?"),
        ({"wheel_store": "sqlite:////nonexistent/wheel.db"}, "no directory /nonexistent"),
        ({"wheel_store": "sqlite:///{folder}/folder"}, "it is a directory"),
        ({"wheel_store": "sqlite:///{folder}/text"}, "no SQLite file"),
        ({"wheel_store": "sqlite:///{folder}/newer.db"}, "schema version 99"),
        ({"wheel_store": "mongodb://localhost/wheel"}, "mongodb"),
        ({"wheel_store": "wheel.db"}, "wheel_store"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_a_wrong_setting_stops_the_worker_with_one_line(wrong, says, custody, tmp_path, worker):
    """The exit code is not 0, and the one line names the setting and what to do."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("this is no database\n" * 100)
    with closing(sqlite3.connect(tmp_path / "newer.db")) as database, database:
        table = f"{custody['wheel_namespace']}_meta"
        database.execute(f"CREATE TABLE {table} (name VARCHAR(40), value BIGINT)")
        database.execute(f"INSERT INTO {table} VALUES ('schema', 99)")
    conf = {
        name: value.format(folder=tmp_path) if isinstance(value, str) else value
        for name, value in wrong.items()
    }
    stopped = worker(conf=conf, ready=False)
    assert stopped.wait(30) not in (0, None)
    log = stopped.log()
    lines = [line for line in log.splitlines() if "CRITICAL" in line or "rror:" in line]
    assert len(lines) == 1, log
    assert says in lines[0]
    assert "Traceback" not in log
