"""Every delayed task has a keeper at every instant, and runs once."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone

import pytest

from tests.support.fixtures import SHARED, on
from tests.support.processes import wait_for

LATE_S = 1.5
#: Redis hands messages out again after two seconds, and looks for them every second.
IMPATIENT = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


@on("redis-sqlite", "redis-broker")
def test_the_visibility_timeout_makes_no_copies(conf, worker, publish, probes):
    """A delay of four visibility timeouts, two workers: one run, on time."""
    conf["broker_transport_options"] = IMPATIENT
    one = worker(ready=False)
    two = worker()
    one.wait_ready()
    publish("probe", "label", countdown=8)
    (run,) = probes.wait("label")
    assert 0 <= run.late_s < LATE_S
    wait_for(lambda: one.wheel()["held"] + two.wheel()["held"] == 0)
    time.sleep(3)  # longer than another timeout: a copy would run now
    assert len(probes.runs("label")) == 1


@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker", *SHARED)
def test_the_prefetch_window_comes_back(worker, publish, probes, app):
    """Tasks that ran, were revoked, expired or came twice leave the window as it was."""
    held = worker()
    before = held.prefetch()
    eta = datetime.now(timezone.utc) + timedelta(seconds=8)
    revoked = []
    for number in range(20):
        for name in ("probe", "late_probe"):
            publish(name, "run", eta=eta)
            revoked.append(publish(name, "revoked", countdown=60).id)
            publish(name, "expired", countdown=60, expires=8)
            twice = {"task_id": f"twice-{name}-{number}", "eta": eta}
            publish(name, "twice", **twice)
            publish(name, "twice", **twice)
    wait_for(lambda: held.wheel()["received"] == 160, 20, what="160 were received")
    app.control.revoke(revoked)
    probes.wait("run", 40)
    probes.wait("twice", 40)
    held.wait_held(0)
    wheel = held.wheel()
    assert (wheel["duplicates"], wheel["revoked"], wheel["expired"]) == (40, 40, 40)
    assert wheel["resident"] == wheel["in_flight"] == wheel["dispatched_rows"] == 0
    assert held.prefetch() == before
    assert len(probes.runs()) == 80
    assert min(run.late_s for run in probes.runs()) >= 0


@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker", *SHARED)
def test_a_copy_of_a_held_message_is_dropped(broker, worker, publish, probes):
    """The same message again: acknowledged and counted, one run. Another ETA is another one."""
    held = worker()
    eta = datetime.now(timezone.utc) + timedelta(seconds=4)
    publish("probe", "label", eta=eta, task_id="same")
    held.wait_held(1)
    publish("probe", "label", eta=eta, task_id="same")
    wait_for(lambda: held.wheel()["duplicates"] == 1, what="the copy was counted")
    if broker.kind == "redis":
        assert broker.unacked() == (held.wheel()["custody"] == "broker")
    publish("probe", "label", eta=eta + timedelta(seconds=1), task_id="same")
    held.wait_held(2)
    runs = probes.wait("label", 2)
    held.wait_held(0)
    assert [run.task_id for run in runs] == ["same", "same"]
    assert min(run.late_s for run in runs) >= 0


@pytest.mark.smoke
@on("redis-sqlite", "rabbitmq-sqlite", *SHARED)
def test_a_killed_worker_loses_nothing(broker, worker, publish, probes):
    """After kill -9 the next worker runs at once what fell due meanwhile, the rest at its ETA."""
    first = worker(name="same@test")
    publish("probe", "overdue", countdown=2)
    publish("probe", "on time", countdown=9)
    first.wait_held(2)
    first.kill()
    assert broker.depth() == 0
    time.sleep(2)
    second = worker(name="same@test")
    ready = time.time()
    (overdue,) = probes.wait("overdue")
    assert overdue.at - ready < 1 + LATE_S
    (on_time,) = probes.wait("on time")
    assert 0 <= on_time.late_s < LATE_S
    second.wait_held(0)
    assert len(probes.runs()) == 2


@on("redis-sqlite", "rabbitmq-sqlite", *SHARED)
def test_a_warm_shutdown_hands_over(worker, publish, probes):
    """SIGTERM ends a worker in moments, and the next one holds what it held."""
    first = worker()
    for _ in range(500):
        publish("probe", "far", countdown=3600)
    publish("probe", "near", countdown=15)
    first.wait_held(501, 30)
    asked = time.monotonic()
    assert first.stop() == 0
    assert time.monotonic() - asked < 6
    second = worker()
    second.wait_held(501)
    (run,) = probes.wait("near")
    assert 0 <= run.late_s < LATE_S
    second.wait_held(500)


@pytest.mark.smoke
@on("redis-sqlite", "rabbitmq-sqlite", "rabbitmq-broker")
def test_a_lost_connection_loses_and_doubles_nothing(proxied, worker, publish, probes):
    """The broker is away for two seconds: what falls due then and later runs once."""
    held = worker(concurrency=2)
    publish("probe", "meanwhile", countdown=2)
    publish("probe", "later", countdown=9)
    held.wait_held(2)
    publish("slow", "running", 4)
    probes.wait("running")
    proxied.cut()
    time.sleep(2)
    proxied.mend()
    (meanwhile,) = probes.wait("meanwhile", timeout_s=30)
    assert meanwhile.late_s >= 0
    (later,) = probes.wait("later", timeout_s=30)
    assert later.late_s >= 0
    held.wait_held(0, 30)
    publish("probe", "after")
    probes.wait("after")
    assert len(probes.runs("meanwhile")) == len(probes.runs("later")) == 1
    assert "The wheel's turn failed" not in held.log()


@on("redis-broker")
def test_redis_gives_back_what_a_lost_connection_held(conf, proxied, worker, publish, probes):
    """Broker custody on Redis: after a cut the message comes again with the timeout, one run."""
    conf["broker_transport_options"] = {**IMPATIENT, "visibility_timeout": 4}
    held = worker()
    publish("probe", "label", countdown=6)
    held.wait_held(1)
    proxied.cut()
    held.wait_log("Connection to broker lost")
    proxied.mend()
    (run,) = probes.wait("label", timeout_s=40)
    assert run.late_s >= 0
    held.wait_held(0)
    time.sleep(5)  # longer than another timeout
    assert len(probes.runs("label")) == 1


@pytest.mark.skipif("CELERY_WHEEL_LONG" not in os.environ, reason="minutes; CELERY_WHEEL_LONG=1")
@on("redis-sqlite", "rabbitmq-sqlite", *SHARED)
def test_twenty_lost_connections(proxied, worker, publish, probes):
    """Twenty cuts with tasks held and falling due: each runs once, nothing stays."""
    held = worker()
    for number in range(20):
        for _ in range(10):
            publish("probe", "label", countdown=number % 7, retry=True)
        time.sleep(0.5)
        proxied.cut()
        time.sleep(1)
        proxied.mend()
        held.wait_log("Connected to", 30)
    runs = probes.wait("label", 200, 120)
    held.wait_held(0, 30)
    assert len({run.task_id for run in runs}) == len(runs) == 200
    assert held.wheel()["resident"] == 0
