"""Revoking thousands: is it done at once, does the worker answer meanwhile, who is delayed."""

from __future__ import annotations

import time

from benchmarks.support import quantile, wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part
from benchmarks.worker.site import OURS

__all__ = ("DELAY", "MANY")


def many(lab: Lab, side: str) -> dict[str, float]:
    """Revoke half of what is held in one call; ping in turn until it is gone."""
    count = lab.pick(4000, 20_000)
    with lab.site(side) as site:
        node = site.start()
        ids = site.publish(count, lambda i: time.time() + 3600 + i / 10)
        wait_for(site.taken, 120, what="all are taken in")
        wait_idle(node.pid)
        began = time.perf_counter()
        site.app.control.revoke(ids[: count // 2], destination=[node.name])
        if side == OURS:
            freed: list[float] = []

            def gone() -> bool:
                if node.wheel().get("held") == count - count // 2:
                    freed.append(time.perf_counter() - began)
                return bool(freed)

            pings = [node.ask("ping")[1], *node.pings(gone, 60)]
            return {"freed": freed[0] if freed else 60.0, "ping": max(pings)}
        pings = list(node.pings(lambda: time.perf_counter() - began > 5, 6))
        left = len(node.ask("scheduled")[0] or ())
        return {"ping": max(pings), "left": left}


def delay(lab: Lab, side: str) -> dict[str, float]:
    """Revoked tasks due just before live ones."""
    revoked, live = lab.pick((300, 150), (1000, 500))
    with lab.site(side) as site:
        node = site.start()
        at = time.time() + lab.pick(6, 10)
        dead = site.publish(revoked, lambda _: at)
        ids = site.publish(live, lambda i: at + 0.1 + i / 250)
        wait_for(site.taken, 60, what="all are taken in")
        site.app.control.revoke(dead, destination=[node.name])
        node.ask("ping")
        wait_for(lambda: site.runs() >= live, 120, what="the live have run")
        marks = site.marks()
        due = {i: at + 0.1 + number / 250 for number, i in enumerate(ids)}
        late = [marks[i] - due[i] for i in ids if i in marks]
        ran = sum(i in marks for i in dead)
        return {"p99": quantile(late, 0.99), "max": max(late), "ran": ran}


MANY = Part(
    "revoke-many",
    "10 000 of 20 000 held revoked in one call (--quick: 2000 of 4000), Redis, prefork 2",
    many,
    (
        Metric("freed", "rows gone after, s", at_most=2),
        Metric("left", "still held five seconds later"),
        Metric("ping", "slowest ping meanwhile, s", at_most=0.5),
    ),
)
DELAY = Part(
    "revoke-delay",
    "1000 revoked due just before 500 live ones (--quick: 300, 150), Redis, prefork 2",
    delay,
    (
        Metric("p99", "live ones late, p99, s", at_most=0.1),
        Metric("max", "live ones late, max, s"),
        Metric("ran", "revoked ones that ran", at_most=0),
    ),
)
