"""RabbitMQ's quorum queues: a consumer's prefetch window is fixed, and nothing waits for it."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 2.0
#: What makes Celery use native delayed delivery.
NATIVE = {"task_default_exchange_type": "topic"}


@pytest.fixture
def conf(conf, broker):
    """The test's queue is a quorum queue."""
    conf.update(
        task_default_queue_type="quorum",
        task_default_exchange=f"x{broker.queue}",
        # The worker declares 28 queues of this type: quorum queues would take seconds.
        broker_native_delayed_delivery_queue_type="classic",
    )
    return conf


@on("rabbitmq-sqlite")
def test_more_is_held_than_is_prefetched(worker, publish, probes):
    """Without native delayed delivery: a window of one, fifty held, immediate tasks run at once."""
    held = worker(conf={"worker_prefetch_multiplier": 1})
    before = held.prefetch()
    eta = datetime.now(timezone.utc) + timedelta(seconds=6)
    for _ in range(50):
        publish("probe", "label", eta=eta)
    held.wait_held(50)
    asked = time.time()
    publish("probe", "at once")
    (run,) = probes.wait("at once")
    assert run.at - asked < LATE_S
    assert probes.runs("label") == []
    runs = probes.wait("label", 50)
    held.wait_held(0)
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < LATE_S
    assert len(probes.runs("label")) == 50
    assert held.prefetch() == before
    assert "Prefetch count is now static" in held.log()  # Celery found the quorum queue


@pytest.mark.parametrize("wheel", [True, False], ids=["wheel", "stock"])
@on("rabbitmq-sqlite")
def test_native_delayed_delivery_goes_on(wheel, conf, app, worker, publish, probes):
    """With it the broker keeps tasks until they are due: all run on time, few are ever held."""
    conf.update(NATIVE)
    app.conf.update(NATIVE)
    held = worker(conf={"worker_prefetch_multiplier": 1}, wheel=wheel)
    for _ in range(20):
        publish("probe", "label", countdown=3)
    publish("retries", "again", 2, 1, countdown=1)
    asked = time.time()
    publish("probe", "at once")
    (run,) = probes.wait("at once")
    assert run.at - asked < LATE_S
    if wheel:
        assert held.wheel()["received"] < 20
    runs = probes.wait("label", 20)
    runs += probes.wait("again", 3)
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < LATE_S + 1
    time.sleep(1)
    assert len(probes.runs()) == 24


@on("rabbitmq-broker")
def test_a_full_window_is_told_of(conf, worker):
    """Without a store the window of a quorum queue bounds what is held: the worker says so."""
    held = worker()
    wait_for(lambda: "quorum queue" in held.log(), what="the check has spoken")
