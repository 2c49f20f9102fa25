"""Workers on a Redis store: what a killed worker and a server that hangs leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from tests.support.processes import wait_for
from tests.support.servers import RedisServer

LATE_S = 1.5


@pytest.fixture
def store_server() -> Iterator[RedisServer]:
    """A server for the store alone."""
    server = RedisServer()
    yield server
    server.process.signal(signal.SIGCONT)
    server.stop()


@pytest.fixture
def custody(store_server) -> dict[str, str]:
    """Store custody in Redis."""
    store = f"{store_server.url}/0"
    return {"worker_consumer": "celery_wheel:Consumer", "wheel_store": store}


redis_and_rabbitmq = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)


@pytest.mark.smoke
@redis_and_rabbitmq
def test_a_killed_worker_loses_nothing(broker, app, worker, publish, probes):
    """After kill -9 the next worker runs what is overdue at once, the rest at its ETA."""
    first = worker(name="same@test")
    publish("probe", "overdue", countdown=2)
    publish("late_probe", "on time", countdown=8)
    revoked = publish("probe", "revoked", countdown=60)
    first.wait_held(3)
    app.control.revoke(revoked.id)
    wait_for(lambda: revoked.state == "REVOKED", 5)
    first.kill()
    assert broker.depth() == 0
    worker(name="same@test")
    (overdue,) = probes.wait("overdue")
    assert overdue.late_s >= 0
    (on_time,) = probes.wait("on time")
    assert 0 <= on_time.late_s < LATE_S


@redis_and_rabbitmq
def test_a_store_that_hangs_stalls_nothing_else(worker, store_server, publish, probes):
    """While the server does not answer immediate tasks run; then each held task runs once."""
    held = worker(concurrency=2)
    for _ in range(20):
        publish("probe", "held", countdown=3)
    held.wait_held(20)
    store_server.process.signal(signal.SIGSTOP)
    for number in range(5):
        publish("probe", "meanwhile", countdown=1)
        publish("probe", f"immediate {number}")
        probes.wait(f"immediate {number}", timeout_s=2)
    held.wait_log("does not answer", 15)
    assert probes.runs("held") == []
    store_server.process.signal(signal.SIGCONT)
    probes.wait("held", 20)
    probes.wait("meanwhile", 5)
    held.wait_held(0)
    time.sleep(1)
    assert len(probes.runs()) == 30
    assert min(run.late_s for run in probes.runs() if run.eta) >= 0


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_two_workers_share_a_redis_store(worker, publish, probes):
    """Tasks held before the second worker starts run on both, each once."""
    one = worker(conf={"wheel_horizon": 1})
    for number in range(200):
        publish("slow", "label", 0.02, countdown=7 + number / 100)
    one.wait_held(200)
    two = worker(conf={"wheel_horizon": 1})
    runs = probes.wait("label", 200, 30)
    assert len({run.task_id for run in runs}) == len(runs) == 200
    assert {run.hostname for run in runs} == {one.nodename, two.nodename}
    assert min(run.late_s for run in runs) >= 0
