"""RabbitMQ's consumer timeout, on a node of its own that is impatient."""

from __future__ import annotations

import uuid

import pytest

from tests.support.broker import Broker
from tests.support.processes import wait_for
from tests.support.servers import RabbitServer

LATE_S = 1.5


@pytest.fixture
def broker():
    """A node that closes a channel whose consumer holds a message for three seconds."""
    server = RabbitServer("consumer_timeout = 3000")
    yield Broker("rabbitmq", f"{server.url}/gw0", f"q{uuid.uuid4().hex[:10]}")
    server.stop()


@pytest.mark.parametrize("custody", ["broker"], indirect=True)
def test_a_delay_is_longer_than_the_consumer_timeout(worker, publish, probes):
    """Three timeouts long: no 406, no restart, one run on time. Without re-parking: a 406."""
    held = worker(conf={"wheel_broker_lease": 2})
    patient = worker(queues=["patient"], conf={"wheel_broker_lease": 600})
    sent = [publish("probe", "label", countdown=10, priority=3).id for _ in range(5)]
    publish("probe", "patient", countdown=10, queue="patient")
    wait_for(lambda: held.wheel()["received"] >= 5, what="they were received")
    runs = probes.wait("label", 5, timeout_s=30)
    assert max(run.late_s for run in runs) < LATE_S
    assert min(run.late_s for run in runs) >= 0
    assert sorted(run.task_id for run in runs) == sorted(sent)
    held.wait_held(0)
    assert held.wheel()["duplicates"] == 0
    assert held.wheel()["received"] > 5  # they came again
    assert "PRECONDITION_FAILED" not in held.log()
    assert "Connection to broker lost" not in held.log()
    assert "PRECONDITION_FAILED" in patient.log()
    assert len(probes.runs("label")) == 5
