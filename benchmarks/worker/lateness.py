"""How exactly tasks start, with a backlog behind them."""

from __future__ import annotations

import time

from benchmarks.support import cpu_s, quantile, wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part
from benchmarks.worker.site import OURS, Node, Site

__all__ = ("LATENESS",)


def lateness(lab: Lab, side: str) -> dict[str, float]:
    """A backlog an hour away, then a steady stream of tasks that come due one by one."""
    found: dict[str, float] = {}
    with lab.site(side) as site:
        backlog = lab.pick(5000, 100_000)
        site.publish(backlog, lambda i: time.time() + 7200 + i / 100)
        node = site.start()
        wait_for(site.taken, 300, what="the backlog is taken in")
        wait_idle(node.pid)
        for rate in (100, 500):
            found |= stream(lab, site, node, rate)
        if side == OURS:
            timings = node.wheel().get("store_ms", {})
            found["confirm_p99"] = timings.get("confirm", {}).get("p99", 0.0)
    return found


def stream(lab: Lab, site: Site, node: Node, rate: int) -> dict[str, float]:
    """Tasks at an even rate, all published before the first is due."""
    count = rate * lab.pick(5, 15)
    already = site.runs()
    began = time.time()
    at = began + 3 + count / 1000
    due = [at + number / rate for number in range(count)]
    ids = site.publish(count, due.__getitem__)
    wait_for(site.taken, 60, what="the stream is taken in")
    spare = at - time.time()
    time.sleep(max(0.0, at - time.time()))
    cpu_before, cpu_began = cpu_s(node.pid), time.perf_counter()
    wait_for(lambda: site.runs() >= already + count, count / rate + 60, what="the stream has run")
    busy = (cpu_s(node.pid) - cpu_before) / (time.perf_counter() - cpu_began)
    marks = site.marks()
    late = [(marks[i] - d) * 1000 for i, d in zip(ids, due, strict=True) if i in marks]
    found = {f"p50_{rate}": quantile(late, 0.5), f"p99_{rate}": quantile(late, 0.99)}
    found[f"max_{rate}"] = max(late)
    found[f"spare_{rate}"] = spare
    found[f"busy_{rate}"] = busy * 100
    found["earliest"] = min(late)
    found["lost_or_doubled"] = abs(site.runs() - already - count)
    return found


LATENESS = Part(
    "lateness",
    "ETA to the first line of the task, 100 000 pending behind (--quick: 5000), Redis, prefork 2",
    lateness,
    (
        Metric("p50_100", "p50 at 100/s, ms"),
        Metric("p99_100", "p99 at 100/s, ms", at_most=25),
        Metric("max_100", "max at 100/s, ms"),
        Metric("p50_500", "p50 at 500/s, ms"),
        Metric("p99_500", "p99 at 500/s, ms", at_most=25),
        Metric("max_500", "max at 500/s, ms"),
        Metric("spare_500", "the stream was taken in before its first ETA by, s"),
        Metric("busy_500", "one core, used by the main process at 500/s, %"),
        Metric("confirm_p99", "of it the store's confirm, p99, ms"),
        Metric("earliest", "earliest at 500/s, ms", at_least=0),
        Metric("lost_or_doubled", "lost or doubled", at_most=0),
    ),
)
