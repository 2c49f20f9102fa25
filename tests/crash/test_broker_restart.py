"""RabbitMQ is killed and comes back while a worker's store has delayed tasks."""

from __future__ import annotations

import time

import pytest

from tests.support.broker import Broker
from tests.support.servers import RabbitServer

LOST = "Connection to broker lost"


@pytest.fixture
def rabbit():
    """A RabbitMQ of this test alone."""
    server = RabbitServer()
    yield server
    server.stop()


@pytest.fixture
def broker(rabbit):
    """A queue there."""
    return Broker("rabbitmq", f"{rabbit.url}/gw0", "restarts")


@pytest.mark.slow
def test_rabbitmq_restarts_in_mid_flight(broker, rabbit, worker, publish, probes):
    """Tasks that run, that fall due meanwhile, that are held for longer and that wait in the
    queue: each runs once, none early, and nothing needs a person."""
    held = worker(concurrency=1)
    publish("late_probe", "running", 4, countdown=0.2)
    probes.wait("running")
    for _ in range(5):
        publish("probe", "falls due", countdown=5)
        publish("probe", "held", countdown=20)
    held.wait_held(10)
    rabbit.stop()
    held.wait_log(LOST)
    time.sleep(1)
    rabbit.start()
    for _ in range(5):
        publish("probe", "arrives", countdown=1)
    for label in ("arrives", "falls due", "held"):
        probes.wait(label, 5, 60)
    held.wait_held(0, 30)
    time.sleep(0.5)  # for a run that nobody should have started
    assert len({run.task_id for run in probes.runs()}) == len(probes.runs()) == 16
    assert min(run.late_s for run in probes.runs()) >= 0
    assert held.wheel()["dispatched_rows"] == 0
    assert broker.depth() == 0
    assert "The wheel's turn failed" not in held.log()
