"""A deploy: the end of a worker that holds much, and the start of the next one."""

from __future__ import annotations

import time

from benchmarks.support import wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part
from benchmarks.worker.site import OURS

__all__ = ("STOP",)


def stop(lab: Lab, side: str) -> dict[str, float]:
    """Start empty, load, SIGTERM, start anew; for us also with all of it due within a minute."""
    count = lab.pick(10_000, 100_000)
    with lab.site(side) as site:
        empty = site.start()
        empty_exit = empty.stop()
        empty = site.start()
        site.publish(count, lambda i: time.time() + 3600 + i / 100)
        wait_for(site.taken, 400, what="all are taken in")
        wait_idle(empty.pid)
        found = {"empty": empty.ready_s, "exit_empty": empty_exit, "exit": empty.stop()}
        found["next"] = site.start().ready_s
    found["later"] = found["next"] - found["empty"]
    if side == OURS:
        with lab.site(side, wheel_horizon=600) as site:
            site.put(count, lambda i: time.time() + 500 + i / 1000)
            node = site.start()
            found["next_near"] = node.ready_s
            limit = min(count, 50_000)
            wait_for(lambda: node.wheel().get("resident", 0) >= limit, 60, what="RAM is full")
            found["exit_near"] = node.stop()
            found["next_near"] = max(found["next_near"], site.start().ready_s)
    return found


STOP = Part(
    "stop",
    "SIGTERM with 100 000 held (--quick: 10 000), then the next worker; Redis, prefork 2",
    stop,
    (
        Metric("exit_empty", "an empty one: SIGTERM to exit, s"),
        Metric("exit", "SIGTERM to exit, s", at_most=1.5),
        Metric("exit_near", "the same, 50 000 of them in RAM, s", at_most=1.5),
        Metric("empty", "empty start to ready, s"),
        Metric("next", "next start to ready, s"),
        Metric("later", "next later than empty, s", at_most=1),
        Metric("next_near", "next start, all within the horizon, s"),
    ),
    rounds=2,
)
