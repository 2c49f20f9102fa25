"""``inspect scheduled`` with much held."""

from __future__ import annotations

import json
import time

from benchmarks.support import wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part

__all__ = ("INSPECT",)


def scheduled(lab: Lab, side: str) -> dict[str, float]:
    """Ask five times; the middle counts."""
    count = lab.pick(5000, 50_000)
    with lab.site(side) as site:
        node = site.start()
        site.publish(count, lambda i: time.time() + 3600 + i / 100)
        wait_for(site.taken, 300, what="all are taken in")
        wait_idle(node.pid)
        asked = [node.ask("scheduled") for _ in range(5)]
        took = sorted(seconds for _, seconds in asked)
        return {"s": took[2], "kb": len(json.dumps(asked[0][0])) / 1024}


INSPECT = Part(
    "inspect",
    "inspect scheduled with 50 000 held (--quick: 5000), Redis, prefork 2",
    scheduled,
    (
        Metric("s", "answer after, s", at_most=0.2),
        Metric("kb", "answer, KB", at_most=300),
    ),
)
