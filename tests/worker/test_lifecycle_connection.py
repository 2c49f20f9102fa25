"""The broker's connection goes away and comes back: each task runs once, nothing stays behind."""

from __future__ import annotations

import re
import time

import psutil
import pytest

from tests.support.fixtures import on
from tests.support.processes import wait_for

LATE_S = 2.0


@on("redis-sqlite", "rabbitmq-sqlite")
def test_connections_are_cut_while_tasks_are_held_due_and_running(proxied, worker, publish, probes):
    """Four cuts, one of three seconds: each task once, the books even, no exception, the
    prefetch window as before."""
    held = worker(concurrency=2)
    before = held.prefetch()
    publish("slow", "running early", 5, countdown=0.2)
    publish("late_probe", "running late", 5, countdown=0.2)
    probes.wait("running early")
    probes.wait("running late")
    for seconds in range(1, 13):
        publish("probe", "falls due", countdown=seconds)
    held.wait_held(12)
    for number, pause_s in enumerate((0, 0, 3, 0), 1):
        cuts = held.log().count("Connection to broker lost")
        proxied.cut(refuse=pause_s > 0)
        wait_for(lambda n=cuts: held.log().count("Connection to broker lost") > n, 10)
        time.sleep(pause_s)
        proxied.mend()
        publish("probe", "between")
        probes.wait("between", number, timeout_s=20)
    probes.wait("falls due", 12, timeout_s=30)
    held.wait_held(0)
    for label in ("running early", "running late"):
        assert len(probes.runs(label)) == 1
    falls_due = probes.runs("falls due")
    assert len({run.task_id for run in falls_due}) == len(falls_due) == 12
    assert min(run.late_s for run in falls_due) >= 0
    wait_for(lambda: books_are_even(held), what="nothing is resident or in flight")
    wait_for(lambda: held.prefetch() == before, 10, what="the prefetch window is back")
    assert "The wheel's turn failed" not in held.log()
    # Celery 5.5 logs the traceback of every lost connection itself.
    assert not re.search('File ".*/celery_wheel/', held.log())


@pytest.mark.smoke
@on("redis-sqlite", "rabbitmq-sqlite")
def test_a_cut_between_the_write_to_a_child_and_its_accept(proxied, worker, publish, probes):
    """The child has the job and has not said so when the connection goes: it runs, once, and its
    answer is heard."""
    held = worker(concurrency=1)
    child = next(
        process for process in psutil.Process(held.process.pid).children() if process.is_running()
    )
    publish("probe", "written", countdown=1)
    publish("late_probe", "after", countdown=2)
    held.wait_held(2)
    child.suspend()
    try:
        wait_for(lambda: held.wheel()["dispatched"] == 1, what="one was handed over")
        proxied.cut(refuse=False)
        held.wait_log("Connection to broker lost")
        wait_for(lambda: held.log().count("Connected to") >= 2, 20, what="it is connected again")
        assert probes.runs() == []
    finally:
        child.resume()
    probes.wait("written")
    probes.wait("after")
    held.wait_held(0)
    wait_for(lambda: books_are_even(held), what="nothing is resident or in flight")
    for number in range(3):
        publish("probe", f"then {number}", countdown=0.2)
        probes.wait(f"then {number}")
    assert len(probes.runs("written")) == len(probes.runs("after")) == 1
    assert held.stop() == 0


@on("redis-sqlite")
def test_queues_that_are_added_and_cancelled(broker, app, worker, publish, probes):
    """A queue added by remote control is held like the others; one that was cancelled is left
    to the broker, and what was held of it runs."""
    held = worker()
    added = f"{broker.queue}-added"
    assert "ok" in held.control("add_consumer", queue=added)
    publish("probe", "added", countdown=2, queue=added)
    publish("probe", "held before", countdown=4)
    held.wait_held(2)
    assert "ok" in held.control("cancel_consumer", queue=broker.queue)
    publish("probe", "stays", countdown=1)
    (run,) = probes.wait("added")
    assert 0 <= run.late_s < LATE_S
    (run,) = probes.wait("held before")
    assert run.late_s >= 0
    assert broker.depth() == 1
    assert "ok" in held.control("add_consumer", queue=broker.queue)
    probes.wait("stays")
    held.wait_held(0)
    assert len(probes.runs()) == 3


def books_are_even(worker):
    """Whether nothing is left of what has run."""
    wheel = worker.wheel()
    return wheel["resident"] == wheel["in_flight"] == wheel["dispatched_rows"] == 0
