"""Every pool on every kind of broker: countdown tasks run on time, and a revoke takes effect."""

from __future__ import annotations

import time
import uuid

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker

from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 2.0


@pytest.mark.parametrize("pool", ["threads", "solo"])  # all other tests run on prefork
@on("redis-sqlite", "rabbitmq-sqlite")
def test_each_pool_runs_delayed_tasks(pool, app, worker, publish, probes):
    """Early and late ack, a retry, a failure and more tasks than slots: once each, on time."""
    held = worker(pool=pool, concurrency=2)
    for _ in range(5):
        publish("probe", "early", countdown=1)
        publish("late_probe", "late", countdown=1)
    publish("retries", "retried", 1, 0.5, countdown=1)
    publish("fails", "failed", countdown=1)
    revoked = publish("probe", "revoked", countdown=4)
    wait_for(lambda: held.wheel()["received"] >= 10, 20, what="most were in time to be held")
    app.control.revoke(revoked.id)
    probes.wait("retried", 2)
    probes.wait("early", 5)
    probes.wait("late", 5)
    held.wait_held(0)
    wait_for(lambda: held.wheel()["in_flight"] == 0, what="nothing is in flight")
    runs = probes.runs()
    assert len(runs) == 13
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < LATE_S
    assert held.wheel()["dispatched_rows"] == 0
    wait_for(lambda: revoked.state == "REVOKED", 5)
    publish("probe", "far", countdown=3600)
    held.wait_held(1)
    asked = time.monotonic()
    assert held.stop() == 0
    assert time.monotonic() - asked < 5 + LATE_S
    assert probes.runs("revoked") == []
    assert "The wheel's turn failed" not in held.log()


@on("filesystem-sqlite")
def test_a_prefork_pool_without_an_event_loop(app, worker, publish, probes):
    """filesystem:// in processes: tasks run on time, and a revoke takes effect."""
    # Before the worker reads: kombu may read a message that is being written.
    for _ in range(2):
        publish("probe", "early", countdown=8)
        publish("late_probe", "late", countdown=8)
    revoked = publish("probe", "revoked", countdown=9)
    held = worker(concurrency=2)
    held.wait_held(5)
    app.control.revoke(revoked.id)
    wait_for(lambda: revoked.state == "REVOKED", 10, what="it is revoked")
    probes.wait("early", 2)
    probes.wait("late", 2)
    held.wait_held(0)
    assert len(probes.runs()) == 4
    assert min(run.late_s for run in probes.runs()) >= 0
    assert max(run.late_s for run in probes.runs()) < LATE_S
    assert held.stop() == 0


@pytest.mark.parametrize("pool", ["threads", "solo"])
def test_a_worker_in_this_process_on_memory(pool, tmp_path):
    """memory:// has no event loop and no second process: tasks run on time all the same."""
    app = Celery("inside", broker=f"memory://{uuid.uuid4().hex}", set_as_current=False)
    app.conf.update(
        worker_consumer="celery_wheel:Consumer",
        wheel_store=f"sqlite:///{tmp_path / 'wheel.db'}",
        task_default_queue=f"q{uuid.uuid4().hex[:8]}",
        task_ignore_result=True,
        broker_connection_retry_on_startup=True,
    )
    runs = []

    @app.task(name=f"note-{uuid.uuid4().hex}")  # Celery has one table for all apps
    def note(label, due):
        runs.append((label, time.time() - due))

    with start_worker(app, pool=pool, concurrency=2, perform_ping_check=False, shutdown_timeout=20):
        for delay_s in (0.25, 0.5, 0.5, 1.5):
            note.apply_async((delay_s, time.time() + delay_s), countdown=delay_s)
        revoked = note.apply_async(("revoked", 0), countdown=2)
        note.apply_async((0, time.time()))
        time.sleep(0.5)
        app.control.revoke(revoked.id)
        wait_for(lambda: len(runs) == 5, 10, what="five have run")
        time.sleep(1)
    app.close()
    assert sorted(label for label, _ in runs) == [0, 0.25, 0.5, 0.5, 1.5]
    assert min(late_s for _, late_s in runs) >= -0.02  # due is taken before the ETA is made
    assert max(late_s for _, late_s in runs) < LATE_S
