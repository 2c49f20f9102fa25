"""Clocks that are set, workers that are stopped, and node names that are used twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing

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


@pytest.fixture
def owners(custody):
    """``owners()``: how many rows of the store each owner has; its name begins with the node's."""
    path = custody["wheel_store"].removeprefix("sqlite:///")
    query = f"SELECT owner, count(*) FROM {custody['wheel_namespace']}_tasks GROUP BY owner"

    def read():
        with closing(sqlite3.connect(path)) as database:
            return dict(database.execute(query).fetchall())

    return read


@on("redis-sqlite")
def test_a_worker_that_is_stopped_past_its_lease(worker, conf, owners, publish, probes):
    """SIGSTOP, the lease runs out, another worker runs the tasks; after SIGCONT the first one
    hands nothing over that is not its own any more, and goes on."""
    conf["wheel_lease_ttl"] = 2
    stopped = worker()
    other = worker()
    for _ in range(30):
        publish("probe", "taken", countdown=3.5)

    def owned():
        return sum(n for owner, n in owners().items() if (owner or "").startswith(stopped.nodename))

    # Each takes what is due in two seconds.
    wait_for(lambda: owned() > 5 and not probes.runs(), 5, every_s=0.02, what="rows are shared")
    os.kill(stopped.process.pid, signal.SIGSTOP)
    try:
        probes.wait("taken", 30, timeout_s=20)
    finally:
        os.kill(stopped.process.pid, signal.SIGCONT)
    stopped.wait_log("lease had run out")
    publish("probe", "new", countdown=1)
    probes.wait("new")
    other.wait_held(0)
    time.sleep(0.5)
    taken = probes.runs("taken")
    assert len({run.task_id for run in taken}) == len(taken) == 30
    assert min(run.late_s for run in taken) >= 0
    assert stopped.inspect("ping")
    assert other.wheel()["dispatched_rows"] == 0


@on("redis-sqlite")
def test_two_workers_with_one_node_name(owners, worker, publish, probes):
    """A namesake that starts while the first one lives leaves it what it runs, and each task
    runs once."""
    first = worker(name="same@test")
    publish("late_probe", "running", 6, countdown=0.2)
    probes.wait("running")
    for _ in range(5):
        publish("probe", "label", countdown=7)
    first.wait_held(5)
    (owner,) = owners()
    assert owner.startswith("same@test/")
    worker(name="same@test")
    time.sleep(1)
    assert owner in owners()
    assert len(probes.wait("label", 5)) == 5
    time.sleep(0.5)
    assert len(probes.runs("label")) == 5
    assert len(probes.runs("running")) == 1
    assert min(run.late_s for run in probes.runs("label")) >= 0
