"""Broker custody on SQS, against moto's server: a stand-in for Amazon's with its API."""

from __future__ import annotations

import sys
import time
import uuid

import pytest

from tests.support.broker import Broker
from tests.support.processes import Process, leash_folder, wait_for
from tests.support.servers import free_port

boto3 = pytest.importorskip("boto3", reason="not among what a run against a release needs")
pytest.importorskip("moto")
LATE_S = 2.0
TIMEOUT_S = 3


class Sqs:
    """A server with one account."""

    def __init__(self) -> None:
        self.port = free_port()
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = Process(argv, leash_folder() / f"sqs-{self.port}.log")
        self.client = boto3.client(
            "sqs",
            region_name="us-east-1",
            endpoint_url=f"http://127.0.0.1:{self.port}",
            aws_access_key_id="test",
            aws_secret_access_key="test",
        )
        wait_for(self._answers, 30, what="the stand-in for SQS answers")

    def _answers(self) -> bool:
        return f"Running on http://127.0.0.1:{self.port}" in self.process.log()

    def waiting(self, queue: str) -> tuple[int, int]:
        """Messages of a queue that are visible, and that are with somebody."""
        url = self.client.get_queue_url(QueueName=queue)["QueueUrl"]
        found = self.client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"])["Attributes"]
        return (
            int(found["ApproximateNumberOfMessages"]),
            int(found["ApproximateNumberOfMessagesNotVisible"]),
        )


@pytest.fixture(scope="module")
def sqs():
    """The server."""
    server = Sqs()
    yield server
    server.client.close()
    server.process.kill()


@pytest.fixture
def broker(sqs):
    """A queue whose messages are hidden for three seconds."""
    options = {
        "region": "us-east-1",
        "is_secure": False,
        "visibility_timeout": TIMEOUT_S,
        "wait_time_seconds": 1,
        "polling_interval": 0.1,
    }
    url = f"sqs://test:test@127.0.0.1:{sqs.port}"
    return Broker("sqs", url, f"q{uuid.uuid4().hex[:10]}", options)


@pytest.fixture
def conf(conf):
    """No broadcasts: SQS has none."""
    conf["worker_enable_remote_control"] = False
    return conf


@pytest.mark.parametrize("custody", ["broker"], indirect=True)
def test_a_delay_is_longer_than_the_visibility_timeout(sqs, broker, worker, publish, probes):
    """Three timeouts long, more messages than one call renews: one run each, on time."""
    one, two = worker(ready=False), worker()
    one.wait_ready()
    for _ in range(15):
        publish("probe", "label", countdown=10)
    wait_for(lambda: sqs.waiting(broker.queue) == (0, 15), what="all are held")
    runs = probes.wait("label", 15, timeout_s=25)
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < LATE_S
    time.sleep(TIMEOUT_S + 1)  # a copy would come now
    assert len(probes.runs("label")) == 15
    assert sqs.waiting(broker.queue) == (0, 0)
    logs = one.log() + two.log()
    assert logs.count(" received\n") == 15
    assert "The wheel's turn failed" not in logs


@pytest.mark.parametrize("custody", ["broker"], indirect=True)
def test_a_delay_is_longer_than_sqs_allows(sqs, broker, worker, publish, probes):
    """Before the most that SQS allows a message is given back, and held anew; one run, on time."""
    held = worker(conf={"imports": ["tests.support.hurry"]})
    publish("probe", "label", countdown=12)
    publish("probe", "far", countdown=3600)
    (run,) = probes.wait("label", timeout_s=25)
    assert 0 <= run.late_s < LATE_S
    assert held.log().count(" received\n") > 4
    held.stop()
    wait_for(lambda: sqs.waiting(broker.queue) == (1, 0), what="one is with the broker")
    assert len(probes.runs()) == 1
