"""Rate limits, retries, acknowledgement, canvas, big backlogs, and tasks that went missing."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import pairwise
from threading import Thread

import psutil
import pytest
from celery import chain, chord

from celery_wheel.envelope import pack, unpack
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter
from celery_wheel.task import task_key
from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 1.5


@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker")
def test_a_rate_limit_holds_for_delayed_tasks(worker, publish, probes):
    """Six tasks at two a second, all due at once: spaced, none early, none lost."""
    held = worker(concurrency=2)
    for _ in range(6):
        publish("limited", "limited", countdown=1)
    publish("probe", "free", countdown=2)
    runs = probes.wait("limited", 6)
    gaps = [later.at - sooner.at for sooner, later in pairwise(runs)]
    assert min(run.late_s for run in runs) >= 0
    # A bucket lets a burst of one through, so one gap may be short.
    assert sorted(gaps)[1] >= 0.4
    assert runs[-1].at - runs[0].at >= 2
    (free,) = probes.runs("free")
    assert free.late_s < LATE_S
    held.wait_held(0)


@on("redis-sqlite", "rabbitmq-sqlite", "redis-broker")
def test_retries_chords_and_chains(app, worker, publish, probes):
    """Retries keep id, priority and late ack; a delayed chord has one body; chains go on."""
    held = worker(concurrency=2)
    retried = publish("late_retries", "retried", 3, 1, priority=3)
    tasks = app.tasks
    header = [tasks["add"].s("header", number).set(countdown=2) for number in (1, 2, 3)]
    summed = chord(header)(tasks["total"].s("body"))
    last = chain(
        tasks["add"].si("link", 1).set(countdown=1), tasks["add"].si("link", 2).set(countdown=1)
    ).apply_async()
    again = publish("again", "again", 0.5, 2)
    publish("replaces", "replaced", 0.5)

    assert retried.get(timeout=20) == "retried"
    assert summed.get(timeout=20) == 6
    assert last.get(timeout=20) == 2
    probes.wait("replaced-replaced")
    probes.wait("again", 3)
    held.wait_held(0)

    attempts = probes.runs("retried")
    assert [run.retries for run in attempts] == [0, 1, 2, 3]
    assert {run.task_id for run in attempts} == {retried.id}
    assert {run.priority for run in attempts} == {3}
    assert len(probes.runs("header")) == 3
    assert len(probes.runs("body")) == 1
    assert len(probes.runs("link")) == 2
    assert [run.task_id for run in probes.runs("again")] == [again.id] * 3
    assert len(probes.runs("replaced-replaced")) == 1
    assert all(run.late_s >= 0 for run in probes.runs() if run.eta)


@on("redis-sqlite", "rabbitmq-sqlite", "rabbitmq-broker")
def test_acknowledgement_means_what_it_means(app, worker, publish, probes):
    """Reject with and without requeue, failure, and a child killed in a late-ack task."""
    held = worker()
    publish("rejects", "requeued", True, countdown=0.5)
    publish("rejects", "dropped", False, countdown=0.5)
    failed = publish("fails", "failed", countdown=0.5)
    probes.wait("requeued", 2)
    wait_for(lambda: failed.state == "FAILURE")
    publish("late_probe", "lost", 3, countdown=0.5)
    (lost,) = probes.wait("lost")
    psutil.Process(lost.pid).kill()
    again = probes.wait("lost", 2)[1]
    assert again.redelivered
    held.wait_held(0)
    assert len(probes.runs("requeued")) == 2
    assert len(probes.runs("dropped")) == len(probes.runs("failed")) == 1
    wait_for(lambda: held.wheel()["dispatched_rows"] == 0)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_big_backlog_can_be_watched(custody, worker, publish):
    """With 100 000 held, every answer is small, exact and quick, and the loop answers pings."""
    held = worker()
    publish("probe", "first", countdown=86_400)
    held.wait_held(1)
    multiply(custody, 100_000)

    thread = Thread(target=lambda: [held.scheduled() for _ in range(5)])
    thread.start()
    slowest = max(timed(lambda: held.inspect("ping"))[0] for _ in range(10))
    thread.join()
    assert slowest < 1 + LATE_S

    took, scheduled = timed(held.scheduled)
    assert took < LATE_S
    assert len(scheduled) == 100
    assert len(json.dumps(scheduled)) < 1_000_000
    etas = [entry["eta"] for entry in scheduled]
    assert etas == sorted(etas)
    took, wheel = timed(held.wheel)
    assert took < LATE_S
    assert wheel["held"] == 100_001
    assert wheel["resident"] == 0
    took, found = timed(lambda: held.inspect("query_task", "copy-77777"))
    assert took < LATE_S
    assert found["copy-77777"][0] == "scheduled"
    assert psutil.Process(held.process.pid).memory_info().rss < 200e6


def timed(call):
    """``(seconds, answer)``."""
    before = time.monotonic()
    answer = call()
    return time.monotonic() - before, answer


def multiply(custody: dict[str, str], count: int) -> None:
    """Put copies of the one row of a store, each a task of its own, a second apart."""
    store = open_store(custody["wheel_store"], custody["wheel_namespace"])
    store.open()
    (row,) = store.find(Filter(), 1).rows
    whole = unpack(row.envelope)
    for start in range(0, count, 5000):
        rows = []
        for number in range(start, start + 5000):
            task_id = f"copy-{number}"
            headers = {**whole.headers, "id": task_id, "root_id": task_id}
            envelope = pack(
                headers,
                {**whole.properties, "correlation_id": task_id},
                whole.delivery_info,
                whole.content_type,
                whole.content_encoding,
                whole.body,
            )
            rows.append(
                replace(
                    row,
                    key=task_key(row.queue, task_id, 0, 0, whole.headers["eta"]),
                    id=task_id,
                    envelope=envelope,
                    due_ms=row.due_ms + 1000 * number,
                    owner=None,
                )
            )
        store.put(rows, int(time.time() * 1000))
    store.close()


@on("redis-sqlite")
def test_a_task_that_is_no_longer_registered_waits(worker, publish, probes):
    """After a deploy without it: one error, no spinning, and the next worker that knows it."""
    first = worker()
    publish("late_probe", "label", countdown=3)
    publish("probe", "known", countdown=3)
    first.wait_held(2)
    assert first.stop() == 0

    without = worker(conf={"test_unregistered": ["late_probe"]})
    probes.wait("known")
    without.wait_log("late_probe is due but not registered")
    process = psutil.Process(without.process.pid)
    before = process.cpu_times()
    time.sleep(2)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.5
    assert without.log().count("is due but not registered") == 1
    assert without.stop() == 0
    assert probes.runs("label") == []

    worker()
    assert len(probes.wait("label")) == 1
