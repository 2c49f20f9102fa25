"""Warm, soft and cold shutdown: what is held, due and running goes on in the next worker."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.fixtures import SHARED, on

LATE_S = 2.0


@on("redis-sqlite", "rabbitmq-sqlite", "rabbitmq-broker")
def test_a_warm_shutdown_with_tasks_in_every_place(worker, publish, probes):
    """Held, due and running ones, early and late ack: each runs once, and the worker ends when
    what runs has ended."""
    first = worker(concurrency=2)
    publish("slow", "running early", 3, countdown=0.5)
    publish("late_probe", "running late", 3, countdown=0.5)
    probes.wait("running early")
    (running,) = probes.wait("running late")
    for _ in range(12):
        publish("probe", "due", countdown=0.5)
    publish("probe", "held", countdown=10)
    time.sleep(1)
    assert probes.runs("due") == []
    assert first.stop(30) == 0
    assert time.time() - running.at < 3 + 3 + LATE_S
    assert probes.runs("due") == []

    second = worker(concurrency=2)
    probes.wait("due", 12)
    (held,) = probes.wait("held")
    assert held.late_s >= 0
    second.wait_held(0)
    time.sleep(0.5)
    counts = {label: len(probes.runs(label)) for label in ("running early", "running late", "held")}
    assert counts == {"running early": 1, "running late": 1, "held": 1}
    assert len(probes.runs("due")) == 12
    assert len({run.task_id for run in probes.runs("due")}) == 12
    assert second.wheel()["dispatched_rows"] == 0


@pytest.mark.parametrize("soft_s", [0, 1])
@on("redis-sqlite", "rabbitmq-sqlite", *SHARED)
def test_a_late_ack_task_that_a_cold_shutdown_cut_short_runs_again(
    soft_s, conf, worker, publish, probes
):
    """SIGQUIT, with soft shutdown and without, ends the worker soon; the next one runs the task
    again and tells it that it was delivered before."""
    conf["worker_soft_shutdown_timeout"] = soft_s
    first = worker(concurrency=2)
    publish("late_probe", "cut short", 20, countdown=0.5)
    publish("probe", "held", countdown=8)
    probes.wait("cut short")
    first.wait_held(1)
    asked = time.monotonic()
    first.kill(signal.SIGQUIT)
    first.wait(20)
    assert time.monotonic() - asked < soft_s + 5 + LATE_S
    assert "Traceback" not in first.log()

    worker(concurrency=2)
    again = probes.wait("cut short", 2)[1]
    assert again.redelivered
    (held,) = probes.wait("held")
    assert held.late_s >= 0
    assert len(probes.runs("cut short")) == 2
