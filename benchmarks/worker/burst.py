"""Many tasks due at one instant."""

from __future__ import annotations

import time

from benchmarks.support import wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part

__all__ = ("PREFORK", "SOLO")


def solo(lab: Lab, side: str) -> dict[str, float]:
    """300 tasks at one instant on the solo pool: how late the last one starts."""
    count = 300
    with lab.site(side) as site:
        node = site.start("solo", 1)
        at = time.time() + 4
        ids = site.publish(count, lambda _: at)
        wait_for(lambda: site.runs() >= count, 60, what="all have run")
        marks = site.marks()
        late = [marks[i] - at for i in ids if i in marks]
        wait_idle(node.pid)
        return {"first": min(late), "last": max(late), "extra": site.runs() - count}


def prefork(lab: Lab, side: str) -> dict[str, float]:
    """Many at one instant, against the pool's own time for as many without an ETA."""
    count = lab.pick(2000, 10_000)
    with lab.site(side) as site:
        site.publish(count, lambda _: None)
        site.start()
        wait_for(lambda: site.runs() >= count, 120, every_s=0.05, what="the immediate have run")
        at_once = sorted(site.marks().values())
        pool_s = at_once[-1] - at_once[0]
    with lab.site(side) as site:
        node = site.start()
        at = time.time() + lab.pick(15, 40)
        ids = site.publish(count, lambda _: at)
        wait_for(site.taken, 60, what="all are taken in")
        spare = at - time.time()
        wait_for(lambda: site.runs() >= count, 180, every_s=0.05, what="all have run")
        marks = site.marks()
        drain_s = max(marks[i] for i in ids if i in marks) - at
        wait_idle(node.pid)
        early = sum(marks[i] < at for i in ids if i in marks)
        if spare < 0:
            print(f"    {side}: taken in {-spare:.1f} s after the instant", flush=True)
        return {
            "pool": pool_s,
            "drain": drain_s,
            "share": drain_s / pool_s,
            "extra": site.runs() - count,
            "early": early,
        }


SOLO = Part(
    "burst-solo",
    "300 tasks due at one instant, solo pool, Redis",
    solo,
    (
        Metric("first", "the first starts after, s"),
        Metric("last", "the last starts after, s", at_most=0.5),
        Metric("extra", "doubled", at_most=0),
    ),
)
PREFORK = Part(
    "burst-prefork",
    "10 000 tasks due at one instant (--quick: 2000), prefork 2, Redis",
    prefork,
    (
        Metric("pool", "as many without ETA, s"),
        Metric("drain", "drained after, s"),
        Metric("share", "drained ÷ without ETA", at_most=1.25),
        Metric("early", "early", at_most=0),
        Metric("extra", "doubled", at_most=0),
    ),
)
