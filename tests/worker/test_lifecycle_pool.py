"""Pools that grow, shrink and restart: tasks go on, and never more at once than there are slots."""

from __future__ import annotations

import json
import time

import pytest

from tests.crash.journal import JOURNAL_VARIABLE
from tests.support.fixtures import on
from tests.support.processes import wait_for

ARGS = ("--without-mingle", "--without-gossip")


@pytest.fixture
def journal(tmp_path):
    """Intervals ``(start, end)`` of the runs that have ended."""
    path = tmp_path / "journal"

    def intervals():
        lines = (
            [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        )
        begun = {e["id"]: e["at"] for e in lines if e["event"] == "start"}
        return [(begun[e["id"]], e["at"]) for e in lines if e["event"] == "end"]

    return intervals


@pytest.fixture
def start(worker, conf, tmp_path):
    """Start a worker whose tasks write a journal."""
    conf["imports"] = ["tests.crash.journal"]
    return lambda **options: worker(env={JOURNAL_VARIABLE: str(tmp_path / "journal")}, **options)


def at_once(intervals):
    """The most that ran at one time."""
    edges = sorted([(at, 1) for at, _ in intervals] + [(at, -1) for _, at in intervals])
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


@on("rabbitmq-sqlite")
def test_a_pool_that_grows_shrinks_and_restarts(app, conf, start, journal):
    """One slot, then three, then two, then new processes: every task runs, and as many at once
    as there are slots."""
    conf["worker_pool_restarts"] = True
    held = start(concurrency=1)

    def burst(count, slots):
        done = len(journal())
        for _ in range(count):
            app.send_task("journal", (0.6,), countdown=0.3)
        wait_for(lambda: len(journal()) == done + count, 30, what=f"{count} more have run")
        most = at_once(journal()[done:])
        assert most <= slots
        return most

    assert burst(3, 1) == 1
    assert "ok" in held.control("pool_grow", n=2)
    assert burst(9, 3) == 3
    assert "ok" in held.control("pool_shrink", n=1)
    time.sleep(1)  # a process that is asked to end may still be there
    burst(6, 2)
    app.send_task("journal", (0.1,), countdown=2)
    held.wait_held(1)
    assert "ok" in held.control("pool_restart", timeout_s=10)
    burst(4, 2)
    held.wait_held(0)
    wait_for(lambda: held.wheel()["in_flight"] == 0, what="nothing is in flight")
    assert held.stop() == 0
    assert "Traceback" not in held.log()


@on("redis-sqlite")
def test_autoscale(app, start, journal):
    """A pool of one to three: all tasks run, at most three at once."""
    held = start(concurrency=1, args=(*ARGS, "--autoscale=3,1"))
    for _ in range(12):
        app.send_task("journal", (0.4,), countdown=0.5)
    wait_for(lambda: len(journal()) == 12, 40, what="all have run")
    assert at_once(journal()) <= 3
    held.wait_held(0)
    assert held.wheel()["dispatched_rows"] == held.wheel()["in_flight"] == 0
    assert held.stop() == 0
