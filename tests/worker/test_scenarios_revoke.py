"""A revoke takes effect at once, is announced once, and outlives the worker."""

from __future__ import annotations

import time

import pytest

from tests.support.events import EventCatcher
from tests.support.fixtures import SHARED, on
from tests.support.processes import wait_for


@pytest.mark.smoke
@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker", *SHARED)
def test_a_revoke_of_a_held_task_takes_effect_at_once(broker, app, worker, publish, probes):
    """Gone from `inspect scheduled` and the broker, prefetch back, REVOKED, announced once."""
    held = worker(args=("--without-mingle", "--without-gossip", "-E"))
    before = held.prefetch()
    result = publish("probe", "revoked", countdown=60)
    kept = publish("probe", "kept", countdown=60)
    held.wait_held(2)
    with EventCatcher(app) as events:
        asked = time.monotonic()
        app.control.revoke(result.id)
        wait_for(lambda: result.state == "REVOKED", 5, every_s=0.02)
        assert time.monotonic() - asked < 2
        (entry,) = held.scheduled()
        assert entry["request"]["id"] == kept.id
        app.control.revoke([kept.id, "never-heard-of"])
        held.wait_held(0)
        assert held.scheduled() == []
        wait_for(lambda: events.of("task-revoked", kept.id), what="the second event")
        assert len(events.of("task-revoked", result.id)) == 1
    held.wait_log(f"signal task_revoked {kept.id}")
    assert held.log().count(f"signal task_revoked {result.id}") == 1
    assert held.prefetch() == before
    assert held.stop() == 0
    assert broker.depth() == 0
    if broker.kind == "redis":
        assert broker.unacked() == 0
    assert probes.runs() == []


@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker", *SHARED)
def test_a_revoke_outlives_a_restart(app, worker, publish, probes):
    """A task revoked before a restart without --statedb does not run; its neighbour does."""
    first = worker(name="same@test")
    revoked = publish("probe", "revoked", countdown=8)
    publish("probe", "neighbour", countdown=8)
    first.wait_held(2)
    app.control.revoke(revoked.id)
    first.wait_held(1)
    assert first.stop() == 0
    worker(name="same@test")
    (neighbour,) = probes.wait("neighbour", timeout_s=20)
    assert neighbour.late_s >= 0
    wait_for(lambda: revoked.state == "REVOKED", 5)
    assert probes.runs("revoked") == []


@on("rabbitmq-sqlite", "redis-sqlite")
def test_a_revoke_catches_what_comes_later(app, worker, publish, probes):
    """A revoke that arrives before its task, or while it runs and will retry, still counts."""
    held = worker()
    app.control.revoke("comes-later")
    running = publish("retries", "retried", 5, 1)
    probes.wait("retried")
    app.control.revoke(running.id)
    later = publish("probe", "later", countdown=1, task_id="comes-later")
    wait_for(lambda: later.state == "REVOKED", what="the later one is REVOKED")
    # Its state is a race in Celery itself: the child writes RETRY after it has sent the retry.
    held.wait_log(f"signal task_revoked {running.id}")
    held.wait_held(0)
    assert probes.runs("later") == []
    assert len(probes.runs("retried")) <= 2


@on("rabbitmq-sqlite")
def test_more_revokes_than_celery_remembers(app, worker, publish, probes):
    """200 tasks revoked in one call where Celery's own list holds 10: none runs, none stays."""
    held = worker(env={"CELERY_WORKER_REVOKES_MAX": "10"})
    ids = [publish("probe", "revoked", countdown=20).id for _ in range(200)]
    last = publish("probe", "last", countdown=20)
    held.wait_held(201, 30)
    app.control.revoke(ids)
    held.wait_held(1)
    wait_for(lambda: held.wheel()["revoked"] == 200, what="200 were announced")
    # And a second worker, which has never heard of the revoke, takes over.
    assert held.stop() == 0
    second = worker()
    wait_for(lambda: last.state == "SUCCESS", 30)
    second.wait_held(0)
    assert [run.label for run in probes.runs()] == ["last"]
