"""Never early, hardly late: order, edges of the wheel, bursts, past and sub-second delays.

The numbers are those of the project's scenarios. A test process on a busy machine is late by
itself, so lateness is bounded generously; a run before its ETA is a failure by any amount.
"""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.fixtures import on

LATE_S = 1.5


def at(seconds: float) -> datetime:
    """A wall time in seconds as an ETA."""
    return datetime.fromtimestamp(seconds, timezone.utc)


@pytest.mark.smoke
@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker", "rabbitmq-broker", "filesystem-sqlite")
def test_delays_below_a_second_and_in_the_past(worker, publish, probes):
    """Delays of 0.25 s, 0, −5 s and an hour ago: on time, and only the first is ever held."""
    held = worker()
    publish("probe", "soon", countdown=0.25)
    publish("probe", "zero", countdown=0)
    publish("probe", "past", countdown=-5)
    publish("probe", "long past", eta=at(time.time() - 3600))
    probes.wait(count=4)
    (soon,) = probes.runs("soon")
    assert 0 <= soon.late_s < LATE_S
    (past,) = probes.runs("past")
    assert past.late_s < 5 + LATE_S
    wheel = held.wheel()
    # The one of 0.25 s may be late already where the transport polls.
    assert wheel["received"] <= 1
    assert wheel["held"] == wheel["resident"] == 0


@pytest.mark.parametrize("kind", ["hierarchical", "hashed"])
@on("redis-sqlite")
def test_the_edges_of_the_levels(kind, worker, publish, probes):
    """Around where one and two turns of the first wheel end, all run once and none early."""
    tick_s, size = 0.02, 64
    turn_s = tick_s * size
    held = worker(conf={"wheel_tick": tick_s, "wheel_size": size, "wheel_kind": kind})
    # Whole ticks of the wall clock, so that ETAs lie exactly on a tick and just beside it.
    start = round(time.time() / turn_s + 1) * turn_s
    for turns in (1, 2):
        for ticks in (-1, -0.5, 0, 0.5, 1):
            publish("probe", "edge", eta=at(start + turns * turn_s + ticks * tick_s))
    # And taken in while buckets are being moved down.
    for _ in range(10):
        time.sleep(turn_s / 10)
        publish("probe", "edge", eta=at(time.time() + 2 * tick_s))
    runs = probes.wait("edge", 20)
    held.wait_held(0)
    assert len({run.task_id for run in runs}) == len(runs) == 20
    late = sorted(run.late_s for run in runs)
    assert late[0] >= 0
    assert late[-1] < LATE_S


@on("redis-sqlite", "redis-broker")
def test_a_burst_on_the_solo_pool(worker, publish, probes, app):
    """300 tasks of one ETA on the solo pool start within moments, and ping is answered."""
    held = worker(pool="solo")
    eta = datetime.now(timezone.utc) + timedelta(seconds=8)
    for _ in range(300):
        publish("probe", "burst", eta=eta, ignore_result=True)
    held.wait_held(300, 30)
    probes.wait("burst")
    before = time.monotonic()
    assert held.inspect("ping", timeout_s=10)
    assert time.monotonic() - before < 2
    runs = probes.wait("burst", 300, 20)
    assert len(runs) == 300
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < 1 + LATE_S


@on("redis-sqlite", "rabbitmq-sqlite")
def test_one_eta_means_priority_then_order_of_publishing(
    broker, app, conf, worker, publish, probes
):
    """Nine of low priority and then one of high priority, one ETA: the high one runs first."""
    high, low = (0, 9) if broker.kind == "redis" else (9, 1)
    if broker.kind == "rabbitmq":
        app.conf.task_queue_max_priority = conf["task_queue_max_priority"] = 10
    worker()
    eta = datetime.now(timezone.utc) + timedelta(seconds=2)
    for number in range(9):
        publish("probe", f"low {number}", eta=eta, priority=low)
    publish("probe", "high", eta=eta, priority=high)
    runs = probes.wait(count=10)
    assert [run.label for run in runs] == ["high", *(f"low {number}" for number in range(9))]
    assert runs[0].late_s >= 0


@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker")
def test_immediate_tasks_do_not_wait_for_delayed_ones(worker, publish, probes):
    """With one slot, and room for two in memory, three held tasks keep nobody waiting."""
    held = worker(
        conf={"worker_prefetch_multiplier": 1, "wheel_resident_limit": 2, "wheel_horizon": 1}
    )
    for number in range(3):
        publish("probe", f"held {number}", countdown=4)
    held.wait_held(3)
    sent = time.time()
    publish("probe", "now")
    (now,) = probes.wait("now", timeout_s=5)
    assert now.at - sent < LATE_S
    assert not probes.runs("held 0")
    for number in range(3):
        (run,) = probes.wait(f"held {number}")
        assert 0 <= run.late_s < LATE_S
