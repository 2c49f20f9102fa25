"""Servers that are killed, hang, lose what was said, or are full, while tasks are under way.

In mid-flight means: of the delayed tasks one runs, some fall due meanwhile, some are held for
longer, and some arrive. Afterwards each has run once, none early.
"""

from __future__ import annotations

import signal
import time
from datetime import datetime, timedelta, timezone
from functools import partial

import pytest

from tests.crash.lossy import LossyProxy
from tests.support.databases import MariaServer, PostgresServer
from tests.support.processes import wait_for
from tests.support.servers import RedisServer

IMMEDIATE_S = 3.0
#: Longer than a store may take to answer; see ``OPTIONS`` and ``tests/crash/impatient.py``.
AWAY_S = 4.0
OPTIONS = {
    "redis": "/0?socket_timeout=2&socket_connect_timeout=2",
    "postgresql": "?connect_timeout=2",
    "mysql": "?read_timeout=2&write_timeout=2&connect_timeout=2",
}
AWAY, AGAIN = "The store does not answer", "The store answers again"


def start_server(kind):
    """A server that forgets nothing when it is killed."""
    if kind == "redis":
        return RedisServer("--appendonly", "yes", "--appendfsync", "always")
    return (
        PostgresServer()
        if kind == "postgresql"
        else MariaServer("--innodb-flush-log-at-trx-commit=1")
    )


@pytest.fixture
def place(request):
    """The store's own server; ``place.kind`` says which."""
    server = start_server(request.param)
    server.kind = request.param
    yield server
    if request.param == "redis":
        server.process.signal(signal.SIGCONT)
        server.stop()
    else:
        server.remove()


@pytest.fixture
def network(place):
    """The network between the worker and the store."""
    proxy = LossyProxy(place.port)
    yield proxy
    proxy.stop()


@pytest.fixture
def custody(place, network):
    """Store custody over that network."""
    url = place.url.replace(f":{place.port}", f":{network.port}") + OPTIONS[place.kind]
    return {
        "worker_consumer": "celery_wheel:Consumer",
        "wheel_store": url,
        "imports": ["tests.crash.impatient"],
    }


each_store = pytest.mark.parametrize("place", ["redis", "postgresql", "mysql"], indirect=True)
on_redis = pytest.mark.parametrize("broker", ["redis"], indirect=True)


def stop_answering(place, number):
    if place.kind == "redis":
        place.process.signal(number)
    else:
        place.pause() if number == signal.SIGSTOP else place.go_on()


@pytest.fixture
def fault(request, place, network):
    """``begin, end``: of the fault that is asked for. A killed server ends as in a power cut; one
    that hangs keeps connections; of what goes through the network, one way is lost."""

    def swallow(what):
        network.swallows = what

    def mend():
        swallow(None)
        network.cut(refuse=False)

    return {
        "killed": (place.stop, place.start),
        "hanging": (
            partial(stop_answering, place, signal.SIGSTOP),
            partial(stop_answering, place, signal.SIGCONT),
        ),
        "requests-lost": (partial(swallow, "requests"), mend),
        "answers-lost": (partial(swallow, "answers"), mend),
    }[request.param]


@pytest.mark.slow
@on_redis
@each_store
@pytest.mark.parametrize(
    "fault", ["killed", "hanging", "requests-lost", "answers-lost"], indirect=True
)
def test_the_store_goes_away_in_mid_flight(fault, broker, worker, publish, probes):
    """Whatever way it goes: nothing delayed runs meanwhile, immediate tasks do, the log says so
    once per interval, and everything goes on by itself."""
    held = worker(concurrency=2)
    publish("late_probe", "running", 5, countdown=0.2)
    probes.wait("running")
    eta = datetime.now(timezone.utc) + timedelta(seconds=4)
    for _ in range(5):
        publish("probe", "falls due", eta=eta)
        publish("probe", "held", countdown=9)
    held.wait_held(10)
    begin, end = fault
    begin()
    away_at = time.time()
    for _ in range(5):
        publish("probe", "arrives", countdown=1)
    number = 0
    while time.time() < away_at + AWAY_S or AWAY not in held.log():
        number += 1
        publish("probe", f"immediate {number}")
        probes.wait(f"immediate {number}", timeout_s=IMMEDIATE_S)
        time.sleep(0.3)
        assert time.time() < away_at + 20, held.log()
    again_at = time.time()
    end()
    for label in ("arrives", "falls due", "held"):
        probes.wait(label, 5, 30)
    held.wait_held(0)
    wait_for(lambda: broker.unacked() == broker.depth() == 0, what="the broker is empty")
    time.sleep(0.5)  # for a run that nobody should have started
    delayed = [run for run in probes.runs() if run.eta]
    assert len({run.task_id for run in delayed}) == len(delayed) == 16
    assert min(run.late_s for run in delayed) >= 0
    assert not [run for run in delayed if away_at + 1 < run.at < again_at]
    assert 1 <= held.log().count(AWAY) <= 1 + (time.time() - away_at) // 10
    assert 1 <= held.log().count(AGAIN) <= held.log().count(AWAY)
    assert held.wheel()["dispatched_rows"] == 0
    assert "Traceback" not in held.log()


@on_redis
@each_store
def test_a_slow_store_slows_nothing_else(network, worker, publish, probes):
    """Each round trip takes 50 ms longer: immediate tasks and the rest of the loop do not."""
    held = worker(concurrency=2)
    network.delay_s = 0.05
    for _ in range(20):
        publish("probe", "delayed", countdown=1)
    for number in range(5):
        publish("probe", f"immediate {number}")
        probes.wait(f"immediate {number}", timeout_s=1.5)
    probes.wait("delayed", 20, 30)
    network.delay_s = 0
    held.wait_held(0)
    time.sleep(0.5)  # for a run that nobody should have started
    assert len(probes.runs()) == 25
    assert min(run.late_s for run in probes.runs("delayed")) >= 0
    assert AWAY not in held.log()


@on_redis
@pytest.mark.parametrize("place", ["redis"], indirect=True)
def test_a_full_store_takes_nothing_in_and_lets_all_out(
    broker, place, app, worker, publish, probes
):
    """``maxmemory`` is reached: what arrives stays with the broker, what is held runs and is
    settled, a revoke is done at once; when there is room again, all that arrived runs."""
    held = worker(concurrency=2)
    for _ in range(5):
        publish("late_probe", "held", countdown=6)
    revoked = publish("probe", "revoked", countdown=600)
    held.wait_held(6)
    memory = place.client.info("memory")["used_memory"]
    place.client.config_set("maxmemory", memory // 2)
    for _ in range(5):
        publish("probe", "arrives", countdown=1)
    held.wait_log("used memory > 'maxmemory'")
    app.control.revoke(revoked.id)
    wait_for(lambda: revoked.state == "REVOKED", 5, what="the revoke is done")
    runs = probes.wait("held", 5)
    wait_for(lambda: held.wheel()["dispatched_rows"] == 0, 5, what="those that ran are settled")
    assert min(run.late_s for run in runs) >= 0
    assert probes.runs("arrives") == []
    assert broker.unacked() == 5
    place.client.config_set("maxmemory", 0)
    probes.wait("arrives", 5)
    held.wait_held(0)
    wait_for(lambda: broker.unacked() == broker.depth() == 0, what="the broker is empty")
    time.sleep(0.5)  # for a run that nobody should have started
    assert len(probes.runs()) == 10
