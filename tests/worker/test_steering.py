"""Delayed tasks are steered from outside, while workers run and while none does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kombu import Message, Queue

from celery_wheel import Backlog
from tests.support.app import CONF_VARIABLE
from tests.support.fixtures import on
from tests.support.processes import ROOT, wait_for

# Celery's Redis backend calls setex, which redis-py has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Call to deprecated setex:DeprecationWarning")

#: Well under the seconds between a worker's looks, on a busy machine.
PROMPT_S = 3.0


@pytest.fixture
def backlog(app, custody):
    app.conf.update(custody)
    with Backlog(app) as made:
        yield made


def celery(conf: dict[str, Any], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``celery … wheel`` as a user does."""
    return subprocess.run(
        [Path(sys.executable).parent / "celery", "-A", "tests.support.app", "wheel", *arguments],
        cwd=folder,
        env={**os.environ, CONF_VARIABLE: json.dumps(conf), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@on("redis-sqlite", "rabbitmq-sqlite")
def test_steering_beside_a_running_worker(backlog, app, worker, publish, probes):
    """Rows that a worker has in RAM are cancelled, run now, or moved; each runs once or never."""
    held = worker()
    cancelled = publish("probe", "cancelled", countdown=8)
    now = publish("probe", "now", countdown=50)
    later = publish("probe", "later", countdown=6)
    far = publish("probe", "far", countdown=86_400)
    held.wait_held(4)
    assert backlog.cancel(cancelled.id) == {cancelled.id: "cancelled"}
    assert cancelled.state == "REVOKED"
    assert backlog.reschedule(later.id, countdown=9) == "rescheduled"
    due_at = backlog.list(ids=[later.id])[0].due_ms / 1000
    asked = time.time()
    assert backlog.run_now([now.id, far.id]) == {now.id: "rescheduled", far.id: "rescheduled"}
    for label in ("now", "far"):
        (run,) = probes.wait(label)
        assert run.at - asked < PROMPT_S
        assert run.task_id in (now.id, far.id)
    (run,) = probes.wait("later", timeout_s=20)
    assert run.at >= due_at
    assert run.task_id == later.id
    held.wait_held(0)
    assert sorted(run.label for run in probes.runs()) == ["far", "later", "now"]
    assert backlog.run_now(now.id) == {now.id: "unknown"}


@on("redis-sqlite", "rabbitmq-sqlite")
def test_what_runs_is_answered_dispatched(backlog, worker, publish, probes):
    """A task that the pool has can't be cancelled nor moved, and the answer says so."""
    held = worker()
    running = publish("late_probe", "runs", 20, countdown=1)
    probes.wait("runs")
    wait_for(lambda: held.wheel()["dispatched_rows"] == 1, what="it is in the pool")
    assert backlog.run_now(running.id) == {running.id: "dispatched"}
    assert backlog.cancel([running.id, "never"]) == {running.id: "dispatched", "never": "unknown"}


@on("redis-sqlite", "rabbitmq-sqlite")
def test_drain_gives_all_back_as_it_came(  # noqa: PLR0917 - fixtures
    broker, conf, custody, backlog, app, worker, publish, probes, tmp_path
):
    """From two queues with priorities: after a drain all are in their own queue, unchanged."""
    if broker.kind == "rabbitmq":
        arguments = {"x-max-priority": 9}
        names = [f"{broker.queue}-a", f"{broker.queue}-b"]
        app.conf.task_queues = [Queue(name, queue_arguments=arguments) for name in names]
        queues_conf: dict[str, Any] = {"task_queue_max_priority": 9}
    else:
        names, queues_conf = [f"{broker.queue}-a", f"{broker.queue}-b"], {}
    held = worker(queues=names, conf=queues_conf)
    sent: dict[str, dict[str, Any]] = {}
    for number in range(60):
        result = publish(
            "probe",
            f"task {number}",
            countdown=3600 + number % 7,
            queue=names[number % 2],
            priority=number % 3 * 3,
            headers={"number": number},
            compression="gzip" if number % 5 == 0 else None,
        )
        sent[result.id] = {"queue": names[number % 2], "priority": number % 3 * 3, "number": number}
    held.wait_held(60)
    moved = next(iter(sent))
    backlog.reschedule(moved, eta="2040-01-01T00:00:00Z")
    refused = celery({**conf, **custody}, tmp_path, "drain")
    assert refused.returncode == 1
    assert held.nodename in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert held.stop() == 0
    done = celery({**conf, **custody}, tmp_path, "drain", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["queues"] == dict.fromkeys(names, 30)
    assert json.loads(done.stdout)["left"] == 0
    messages = {name: read(app, name) for name in names}
    for name, found in messages.items():
        assert len(found) == 30
        for message in found:
            headers = message.headers
            expected = sent.pop(headers["id"])
            assert expected == {
                "queue": name,
                "priority": message.properties["priority"],
                "number": headers["number"],
            }
            assert (headers["id"] == moved) == (headers["eta"] == "2040-01-01T00:00:00+00:00")
            assert message.payload[0] == [f"task {expected['number']}"]
            assert (headers.get("compression") is not None) == (expected["number"] % 5 == 0)
        for priority in (0, 3, 6):
            numbers = [m.headers["number"] for m in found if m.properties["priority"] == priority]
            assert numbers == sorted(numbers)
    assert not sent
    if broker.kind == "redis":
        assert broker.unacked() == 0
    # Without a prefetch window a stock worker is not held up by its own ETA tasks.
    no_window = {"worker_prefetch_multiplier": 0}
    stock = worker(wheel=False, queues=names, conf={**queues_conf, **no_window})
    publish("probe", "last", queue=names[0])
    probes.wait("last")
    wait_for(lambda: len(stock.scheduled()) == 60, 30, what="a stock worker has taken all")


def read(app: Any, queue: str) -> list[Any]:
    """Every message of a queue, put back afterwards."""
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        found = []
        while (message := channel.basic_get(queue)) is not None:
            known = isinstance(message, Message)
            found.append(message if known else channel.message_to_python(message))
        for message in reversed(found):
            message.requeue()
        return found
