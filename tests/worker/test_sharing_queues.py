"""Workers share a store and each takes what it can run: its queues, and tasks it knows."""

from __future__ import annotations

import time
from typing import Any

import pytest

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter
from tests.support.fixtures import on
from tests.support.processes import wait_for
from tests.support.worker import Worker

LATE_S = 1.5
#: Rows stay unowned in the store until a second before they are due, so that all are claimed.
SHORT = {"wheel_horizon": 1}


@pytest.fixture
def queues(broker) -> tuple[str, str]:
    """Two queues of this test alone."""
    return f"{broker.queue}-a", f"{broker.queue}-b"


def claims(made: Worker) -> int:
    """How often a worker has claimed."""
    return int(made.wheel()["store_ms"]["claim"]["calls"])


def hosts(runs: list[Any]) -> set[str]:
    """Who ran them."""
    return {run.hostname for run in runs}


@pytest.mark.smoke
@on("redis-sqlite", "rabbitmq-sqlite")
def test_a_worker_runs_the_tasks_of_its_own_queues(queues, worker, publish, probes):
    """Two workers, one file: each claims and runs the delayed tasks of its queue only."""
    one = worker(queues=queues[:1], conf=SHORT, ready=False)
    two = worker(queues=queues[1:], conf=SHORT)
    one.wait_ready()
    for number in range(20):
        for queue in queues:
            publish("probe", queue, countdown=4 + number / 20, queue=queue)
    one.wait_held(40)
    for made, queue in zip((one, two), queues, strict=True):
        runs = probes.wait(queue, 20)
        assert hosts(runs) == {made.nodename}
        assert all(0 <= run.late_s < LATE_S for run in runs)
    one.wait_held(0)
    assert len(probes.runs()) == 40


@on("redis-sqlite", "rabbitmq-sqlite")
def test_a_killed_workers_tasks_wait_for_their_queue(queues, custody, worker, publish, probes):
    """After kill -9 of one worker the other frees its rows and leaves them, overdue even; when
    it is back it runs them, each once."""
    lease = {"wheel_lease_ttl": 2}
    one = worker(queues=queues[:1], conf=lease, ready=False)
    two = worker(queues=queues[1:], conf=lease, name="two@test")
    one.wait_ready()
    for _ in range(5):
        publish("probe", "far", countdown=3600, queue=queues[0])
        for queue in queues:
            publish("probe", queue, countdown=4, queue=queue)
    one.wait_held(15)
    two.kill()
    assert hosts(probes.wait(queues[0], 5)) == {one.nodename}
    store = open_store(custody["wheel_store"])
    store.open()
    theirs = Filter(queue=queues[1])
    wait_for(lambda: not any(row.owner for row in store.find(theirs, 9).rows), what="one reaped")
    store.close()
    looks = claims(one)
    wait_for(lambda: claims(one) > looks, what="one looked again")
    assert probes.runs(queues[1]) == []
    worker(queues=queues[1:], conf=lease, name="two@test")
    assert hosts(probes.wait(queues[1], 5)) == {"two@test"}
    one.wait_held(5)
    assert len(probes.runs()) == 10


@on("redis-sqlite", "rabbitmq-sqlite")
def test_a_queue_that_is_added_is_looked_into_at_once(queues, app, worker, publish, probes):
    """After add_consumer the overdue tasks of the new queue run, without waiting for a look."""
    two = worker(queues=queues[1:])
    publish("probe", "label", countdown=3, queue=queues[1])
    two.wait_held(1)
    two.kill()
    one = worker(queues=queues[:1], conf={"wheel_lease_ttl": 5})
    one.wait_held(1)
    assert probes.runs() == []
    asked = time.time()
    app.control.add_consumer(queues[1], destination=[one.nodename])
    (run,) = probes.wait("label")
    assert run.hostname == one.nodename
    assert min(run.at - asked, run.late_s) < LATE_S
    one.wait_held(0)


@on("redis-sqlite")
def test_a_worker_gives_up_tasks_that_it_does_not_know(worker, publish, probes):
    """A due task that is not registered here runs on a worker that knows it, while both live."""
    first = worker(conf=SHORT)
    publish("late_probe", "label", countdown=6)
    first.wait_held(1)
    assert first.stop() == 0
    without = worker(conf={"test_unregistered": ["late_probe"], **SHORT})
    without.wait_log("late_probe is due but not registered")
    assert probes.runs() == []
    knows = worker(conf=SHORT)
    (run,) = probes.wait("label")
    assert run.hostname == knows.nodename
    knows.wait_held(0)
    assert without.wheel()["parked"] == 1
    assert without.log().count("is due but not registered") == 1
