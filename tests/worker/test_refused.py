"""Rows that the fence refuses because a revoke is on record are forgotten and announced."""

from __future__ import annotations

from celery_wheel.stores.memory import MemoryStore
from celery_wheel.worker.announcer import _forget_revoked
from tests.stores.rows import LATER, NOW, dispatched, ids, task
from tests.support.fixtures import on
from tests.support.processes import wait_for


@on("redis-sqlite", "rabbitmq-sqlite")
def test_a_revoked_task_that_comes_back_is_announced(app, worker, publish, probes):
    """Revoked while it runs, its worker killed: the next one forgets it and says so, once."""
    first = worker(name="same@test")
    result = publish("late_probe", "label", 60, countdown=1)
    probes.wait("label")
    app.control.revoke(result.id)
    first.wait_held(0)
    wait_for(lambda: first.inspect("revoked") == [result.id], what="the revoke was taken")
    first.kill()
    second = worker(name="same@test")
    wait_for(lambda: result.state == "REVOKED", what="it is revoked")
    second.wait_held(0)
    second.wait_log(f"signal task_revoked {result.id}")
    assert second.log().count(f"signal task_revoked {result.id}") == 1
    assert second.wheel()["revoked"] == 1
    assert len(probes.runs("label")) == 1


def test_only_what_a_tombstone_refuses_is_forgotten():
    """Of rows that were refused, those that would pass now are freed, others' are left."""
    store = MemoryStore()
    dispatched(store, task("revoked"), task("live"), task("theirs"))
    store.cancel(["revoked"], [], LATER)
    store.release("w1")
    rows = {row.id: row for row in store.claim("w1", LATER, 9)}
    store.release("w1", [rows["theirs"].key])
    store.claim("w2", LATER, 1)
    assert ids(_forget_revoked(store, "w1", list(rows.values()), NOW)) == ["revoked"]
    assert ids(store.claim("w3", LATER, 9)) == ["live"]
