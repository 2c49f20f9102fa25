"""What waits in a worker that is asked to stop is free for others before its pool is done."""

from __future__ import annotations

import signal

from tests.support.fixtures import on


@on("redis-sqlite", "rabbitmq-sqlite")
def test_what_waits_is_not_kept_by_a_task_that_runs_long(worker, publish, probes):
    """A warm shutdown that has long to go: the next worker runs what was held, at its ETA."""
    first = worker(concurrency=1)
    publish("slow", "long", 15)
    publish("probe", "held", countdown=7)
    publish("probe", "held for long", countdown=3600)
    first.wait_held(2)
    probes.wait("long")
    first.kill(signal.SIGTERM)
    second = worker(concurrency=1)
    (held,) = probes.wait("held")
    assert held.hostname == second.nodename
    assert 0 <= held.late_s < 5
    assert first.wait(30) == 0
    assert len(probes.runs("long")) == len(probes.runs("held")) == 1
    second.wait_held(1)
