"""Clocks that are set, workers that are stopped, and node names that are used twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import time

import pytest

from tests.support.clocking import OFFSET_VARIABLE, set_clock
from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 2.0
HOUR_S = 3600


@pytest.fixture
def offset(tmp_path, conf):
    """The file with the workers' offset from true time."""
    conf["imports"] = ["tests.support.clocking"]
    return tmp_path / "offset"


@on("redis-sqlite")
def test_the_clock_is_set_forward(offset, worker, publish, probes):
    """An hour forward: what falls due by that runs within moments, in memory or not, and later
    tasks keep their ETA."""
    held = worker(env={OFFSET_VARIABLE: str(offset)})
    publish("probe", "resident", countdown=40)
    publish("probe", "in the store", countdown=1800)
    publish("probe", "not yet", countdown=HOUR_S + 300)
    publish("probe", "just after", countdown=HOUR_S + 6)
    held.wait_held(4)
    set_clock(offset, HOUR_S)
    stepped_at = time.time()
    (resident,) = probes.wait("resident")
    (stored,) = probes.wait("in the store")
    assert max(resident.at, stored.at) - stepped_at < 1 + LATE_S
    (after,) = probes.wait("just after")
    assert after.late_s >= -HOUR_S
    held.wait_held(1)
    assert len(probes.runs()) == 3


@on("redis-sqlite")
def test_the_clock_is_set_back(offset, conf, worker, publish, probes):
    """An hour back, with tasks waiting, due, confirmed, and waiting for a rate limit: none runs
    before its time comes again, and then all do, once."""
    held = worker(env={OFFSET_VARIABLE: str(offset)})
    publish("slow", "busy", 3, countdown=0.2)
    probes.wait("busy")
    for _ in range(6):
        publish("probe", "overtaken", countdown=1)
        publish("limited", "overtaken", countdown=1)
    publish("probe", "waiting", countdown=4)
    wait_for(lambda: held.wheel()["due"] >= 3, what="some are confirmed or due")
    time.sleep(0.5)
    set_clock(offset, -HOUR_S)
    # Longer than what runs, and than all ETAs by the true clock.
    time.sleep(5)
    assert [run.label for run in probes.runs()] == ["busy"]
    held.wait_held(13)
    publish("probe", "now")
    probes.wait("now")
    set_clock(offset, 0)
    probes.wait("overtaken", 12, timeout_s=20)
    probes.wait("waiting")
    held.wait_held(0)
    time.sleep(0.5)
    assert len(probes.runs()) == 15
    assert held.wheel()["dispatched_rows"] == 0
    assert "Traceback" not in held.log()


@on("redis-sqlite")
def test_a_worker_that_is_stopped_past_its_lease(worker, conf, publish, probes):
    """SIGSTOP, the lease runs out, another worker runs the tasks; after SIGCONT the first one
    hands nothing over that is not its own any more, and goes on."""
    conf["wheel_lease_ttl"] = 2
    stopped = worker()
    for _ in range(10):
        publish("probe", "taken", countdown=4)
    publish("probe", "later", countdown=14)
    stopped.wait_held(11)
    other = worker()
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        probes.wait("taken", 10, timeout_s=20)
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    wait_for(lambda: stopped.inspect("ping"), 10, what="the stopped worker goes on")
    stopped.wait_log("lease had run out")
    publish("probe", "new", countdown=1)
    probes.wait("new")
    (later,) = probes.wait("later", timeout_s=20)
    assert later.late_s >= 0
    other.wait_held(0)
    assert {run.hostname for run in probes.runs("taken")} == {other.nodename}
    assert len(probes.runs("taken")) == 10
    assert len(probes.runs()) == 12


@on("redis-sqlite")
def test_two_workers_with_one_node_name(custody, worker, publish, probes):
    """A namesake that starts while the first one lives leaves it its tasks."""

    def owners():
        path = custody["wheel_store"].removeprefix("sqlite:///")
        with sqlite3.connect(path) as database:
            rows = database.execute("SELECT DISTINCT owner FROM celery_wheel_tasks").fetchall()
        database.close()
        return {owner for (owner,) in rows}

    first = worker(name="same@test")
    for _ in range(5):
        publish("probe", "label", countdown=7)
    first.wait_held(5)
    (owner,) = owners()
    assert owner.startswith("same@test/")
    worker(name="same@test")
    time.sleep(1)
    assert owners() == {owner}
    assert len(probes.wait("label", 5)) == 5
    time.sleep(0.5)
    runs = probes.runs("label")
    assert len(runs) == 5
    assert min(run.late_s for run in runs) >= 0
