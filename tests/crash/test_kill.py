"""kill -9 between each two writes of a worker: nothing lost, nothing early, no second run.

A second run is possible in one window alone, the one the design names: the child had begun and
the row was not settled yet.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

import pytest

from tests.support.fixtures import on
from tests.support.killing import kill_at
from tests.support.processes import wait_for

LATE_S = 2.0
#: A worker that died keeps its messages for two seconds, not for an hour.
IMPATIENT = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}


@dataclass(frozen=True)
class Point:
    """Where the first worker dies, and whether its task may have begun by then."""

    name: str
    when: str
    begun: bool = False
    task: str = "probe"

    def __str__(self) -> str:
        return f"{self.when}-{self.name}-{self.task}"


#: The ack is part of these: on every broker.
WITH_ACK = [
    Point("put", "before"),
    Point("put", "after"),
    Point("ack", "after"),
    Point("hold", "after"),
]
#: From here on the message is the store's alone.
WITHOUT_ACK = [
    Point("confirm", "before"),
    Point("confirm", "after"),
    Point("hand_over", "before"),
    Point("hand_over", "after"),
    Point("answer", "before", begun=True),
    Point("settle", "before", begun=True),
    Point("settle", "after"),
    Point("answer", "before", begun=True, task="late_probe"),
    Point("settle", "before", begun=True, task="late_probe"),
    Point("settle", "after", task="late_probe"),
]


@on("redis-sqlite", "rabbitmq-sqlite")
@pytest.mark.parametrize("point", WITH_ACK, ids=str)
def test_a_worker_killed_around_the_ack(point, broker, conf, worker, publish, probes):
    """Between arrival and residence: the broker or the store has the task, and one run comes."""
    if broker.kind == "redis":
        conf["broker_transport_options"] = IMPATIENT
    kill_and_take_over(point, worker, publish, probes)
    if broker.kind == "redis":
        wait_for(lambda: broker.unacked() == 0, 10, what="no message is held by a dead worker")
    wait_for(lambda: broker.depth() == 0, 10, what="the queue is empty")
    assert len(probes.runs("near")) == 1


@on("rabbitmq-sqlite")
@pytest.mark.parametrize("point", WITHOUT_ACK, ids=str)
def test_a_worker_killed_around_the_run(point, worker, publish, probes):
    """Between residence and settlement: one run, or a second one that knows of the first."""
    runs = kill_and_take_over(point, worker, publish, probes)
    if point.begun:
        assert 1 <= len(runs) <= 2
        assert not runs[0].redelivered
        assert all(run.redelivered for run in runs[1:])
    else:
        assert len(runs) == 1


def kill_and_take_over(point, worker, publish, probes):
    """A worker dies at the point, another one takes over; returns the runs of its task."""
    deadly = worker(
        name="same@test",
        env=kill_at(point.name, point.when),
        conf={"imports": ["tests.support.killing", "tests.support.orphans"]},
    )
    publish(point.task, "near", countdown=1)
    if point.name not in ("put", "ack", "hold"):
        publish("probe", "bystander", countdown=5)
    assert deadly.wait(15) == -signal.SIGKILL
    if point.name in ("put", "ack", "hold"):
        publish("probe", "bystander", countdown=3)
    heir = worker(name="same@test")
    ready = time.time()
    (bystander,) = probes.wait("bystander")
    assert bystander.late_s >= 0
    assert min(bystander.late_s, bystander.at - ready) < LATE_S
    runs = probes.wait("near")
    heir.wait_held(0)
    assert min(run.late_s for run in runs) >= 0
    assert heir.wheel()["dispatched_rows"] == heir.wheel()["resident"] == 0
    time.sleep(0.5)  # a run that nobody should have started would show
    assert len(probes.runs("bystander")) == 1
    return probes.runs("near")
