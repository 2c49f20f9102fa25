"""Any number of workers draw on one backlog."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime, timedelta, timezone

from tests.support.fixtures import SHARED, on
from tests.support.processes import wait_for


@on("redis-sqlite", *SHARED)
def test_two_workers_share_a_storm(worker, publish, probes):
    """Tasks of one minute, held before the second worker starts: both run a fair part."""
    first = worker(concurrency=2)
    eta = datetime.now(timezone.utc) + timedelta(seconds=12)
    for _ in range(300):
        publish("slow", "label", 0.02, eta=eta)
    first.wait_held(300)
    second = worker(concurrency=2)
    assert time.time() < eta.timestamp() - 1, "the machine was too slow to start a worker in time"
    runs = probes.wait("label", 300, 40)
    assert len({run.task_id for run in runs}) == 300
    assert min(run.late_s for run in runs) >= 0
    shares = Counter(run.hostname for run in runs)
    assert set(shares) == {first.nodename, second.nodename}
    # Half each but for what the machine does to one of them meanwhile.
    assert min(shares.values()) >= 75


@on("redis-sqlite", *SHARED)
def test_a_worker_added_in_a_storm_helps(worker, publish, probes):
    """What is due already and waits in the first worker is given to the one that comes."""
    first = worker(concurrency=1)
    for _ in range(200):
        publish("slow", "label", 0.1, countdown=3)
    first.wait_held(200)
    probes.wait("label", 1)
    second = worker(concurrency=1)
    wait_for(
        lambda: any(run.hostname == second.nodename for run in probes.runs("label")),
        5,
        what="the second worker runs tasks of the storm",
    )
    first.stop()
    runs = probes.wait("label", 200, 60)
    assert len({run.task_id for run in runs}) == 200


@on("redis-sqlite", *SHARED)
def test_nothing_waits_behind_a_long_task(worker, publish, probes):
    """A pool that is stuck on long tasks keeps nothing that an idle worker could run."""
    first = worker(concurrency=1)
    eta = datetime.now(timezone.utc) + timedelta(seconds=3)
    for number in range(12):
        publish(
            "slow", f"long {number}" if number < 2 else "short", 15 if number < 2 else 0, eta=eta
        )
    first.wait_held(12)
    probes.wait("long 0")
    second = worker(concurrency=2)
    runs = probes.wait("short", 10, 12)
    assert {run.hostname for run in runs} == {second.nodename}
