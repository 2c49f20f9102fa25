"""Taking delayed tasks in: how fast on RabbitMQ, and for how much CPU on Redis."""

from __future__ import annotations

import time

from benchmarks.support import cpu_s, wait_for, wait_idle
from benchmarks.worker.part import Lab, Metric, Part
from benchmarks.worker.site import OURS, STOCK

__all__ = ("CPU", "RABBITMQ")


def rabbitmq(lab: Lab, side: str) -> dict[str, float]:
    """Fill the queue, start a worker, see how fast the queue empties; stock gets ten seconds."""
    count = lab.pick(3000, 10_000)
    with lab.site(side, amqp=True) as site:
        site.publish(count, lambda i: time.time() + 3600 + i)
        node = site.start()
        began, before = time.perf_counter(), site.ready()
        wait_for(lambda: site.ready() == 0, 10 if side == STOCK else 60)
        took, after = time.perf_counter() - began, site.ready()
        if side == OURS:
            wait_for(lambda: node.wheel().get("held") == count, 10, what="all are held")
        return {"rate": (before - after) / took}


def cpu(lab: Lab, side: str) -> dict[str, float]:
    """CPU of the worker's main process per task: taken in, then the whole life of near ones."""
    count = lab.pick(5000, 20_000)
    with lab.site(side) as site:
        node = site.start()
        wait_idle(node.pid)
        found = {}
        before = cpu_s(node.pid)
        site.publish(count, lambda i: time.time() + 3600 + i)
        wait_for(site.taken, 120, what="all are taken in")
        wait_idle(node.pid)
        found["intake_us"] = (cpu_s(node.pid) - before) / count * 1e6

        before, at = cpu_s(node.pid), time.time() + 4
        runs = count // 5
        site.publish(runs, lambda i: at + i / 300)
        wait_for(lambda: site.runs() >= runs, 120, what="all have run")
        wait_idle(node.pid)
        found["life_us"] = (cpu_s(node.pid) - before) / runs * 1e6
        return found


RABBITMQ = Part(
    "intake-rabbitmq",
    "ETA tasks taken in per second on RabbitMQ, prefork 2, default prefetch (8)",
    rabbitmq,
    (Metric("rate", "tasks/s", at_least=1000),),
)
CPU = Part(
    "intake-cpu",
    "CPU of the worker's main process on Redis, prefork 2",
    cpu,
    (
        Metric("intake_us", "taking in, due in an hour, µs/task", at_most=1.6, as_ratio=True),
        Metric("life_us", "arrival to end, due in seconds, µs/task", at_most=1.6, as_ratio=True),
    ),
)
