"""Memory of the worker's main process: for what is far away, and for what is due soon."""

from __future__ import annotations

import time

from benchmarks.support import rss_kb, wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part
from benchmarks.worker.site import OURS, Node, Site

__all__ = ("BACKLOG", "NEAR")


def near(lab: Lab, side: str) -> dict[str, float]:
    """The same tasks from the broker, all of them resident (a horizon of two hours).

    As many before them fill what is bounded (SQLite's page cache, what a first task imports).
    """
    count = lab.pick(5000, 20_000)
    with lab.site(side, wheel_horizon=7200) as site:
        node = site.start()
        filled = _filled(site, node, count)
        return {"kb": (_filled(site, node, count) - filled) / count}


def _filled(site: Site, node: Node, count: int) -> int:
    site.publish(count, lambda i: time.time() + 3600 + i / 10)
    wait_for(site.taken, 120, what="all are taken in")
    wait_idle(node.pid)
    return rss_kb(node.pid)


def backlog(lab: Lab, side: str) -> dict[str, float]:
    """RSS with few and with many rows pending; stock has nowhere to keep them but RAM."""
    if side != OURS:
        return {}
    few, many = _pending_mb(lab, 10_000), _pending_mb(lab, lab.pick(100_000, 1_000_000))
    return {"few": few, "many": many, "apart": many - few}


def _pending_mb(lab: Lab, count: int) -> float:
    with lab.site(OURS) as site:
        site.put(count, lambda i: time.time() + 86_400 + i / 10)
        node = site.start()
        wait_for(lambda: node.wheel().get("held") == count, 60, what="all are held")
        wait_idle(node.pid)
        return rss_kb(node.pid) / 1024


NEAR = Part(
    "memory-near",
    "memory per task that is resident, with its message",
    near,
    (Metric("kb", "KB/task", at_most=1.5),),
)
BACKLOG = Part(
    "memory-backlog",
    "RSS of the main process with 10 000 and with 1 000 000 pending (--quick: 100 000), SQLite",
    backlog,
    (
        Metric("few", "few, MB"),
        Metric("many", "many, MB"),
        Metric("apart", "apart, MB", at_most=30),
    ),
    rounds=1,
)
