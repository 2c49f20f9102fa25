"""Pools of greenlets: no event loop, and every thread of ours is a greenlet, too."""

from __future__ import annotations

import time

import pytest

from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 2.0
#: With heartbeats Celery 5.7 waits a tenth of a second after each message of RabbitMQ on these
#: pools: its own tasks, delayed or not, are taken in at ten per second.
CONF = {"wheel_broker_lease": 2, "broker_heartbeat": 0}


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker", "rabbitmq-broker")
def test_a_pool_of_greenlets_runs_delayed_tasks(pool, custody, app, worker, publish, probes):
    """On time, once, at once where nothing is delayed; a revoke takes effect, and it stops."""
    pytest.importorskip(pool)
    if pool == "eventlet" and custody["wheel_store"] == "broker://":
        pytest.skip("gevent runs on this")
    held = worker(pool=pool, concurrency=10, conf=CONF)
    before = held.prefetch()
    for _ in range(30):
        publish("probe", "early", countdown=4)
        publish("late_probe", "late", 0.05, countdown=4)
    publish("retries", "again", 1, 1, countdown=2)
    publish("fails", "failed", countdown=2)
    revoked = publish("probe", "revoked", countdown=5)
    wait_for(lambda: held.wheel()["received"] >= 63, 20, what="they were received")
    asked = time.time()
    publish("probe", "at once")
    (run,) = probes.wait("at once")
    assert run.at - asked < LATE_S
    app.control.revoke(revoked.id)
    wait_for(lambda: revoked.state == "REVOKED", 5)
    runs = probes.wait("early", 30) + probes.wait("late", 30) + probes.wait("again", 2)
    held.wait_held(0)
    wait_for(lambda: held.wheel()["in_flight"] == 0, what="nothing is in flight")
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < LATE_S
    assert len(probes.runs()) == 64
    assert held.wheel()["dispatched_rows"] == 0
    assert held.prefetch() == before
    publish("probe", "far", countdown=3600)
    held.wait_held(1)
    assert held.stop(10) == 0
    assert "The wheel's turn failed" not in held.log()


@on("rabbitmq-sqlite")
def test_a_pool_of_greenlets_survives_a_lost_connection(proxied, worker, publish, probes):
    """The broker is away for two seconds: what falls due then and later runs once."""
    pytest.importorskip("gevent")
    held = worker(pool="gevent", concurrency=4)
    publish("probe", "meanwhile", countdown=2)
    publish("probe", "later", countdown=8)
    held.wait_held(2)
    proxied.cut()
    time.sleep(3)
    proxied.mend()
    for label in ("meanwhile", "later"):
        (run,) = probes.wait(label, timeout_s=30)
        assert run.late_s >= 0
    held.wait_held(0, 30)
    publish("probe", "after")
    probes.wait("after")
    assert len(probes.runs()) == 3
    assert held.stop(10) == 0
