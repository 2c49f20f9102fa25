"""The Celery app of the benchmarked workers, configured by one environment variable of JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

__all__ = ("CONF", "MARKS", "READY", "app", "make_app")

CONF, MARKS, READY = "WHEEL_BENCH_CONF", "WHEEL_BENCH_MARKS", "WHEEL_BENCH_READY"

_descriptors: dict[int, int] = {}


def make_app(conf: dict[str, Any]) -> Celery:
    """An app with the benchmarks' tasks."""
    made = Celery("benchmarks", set_as_current=False)
    made.conf.update(conf)
    made.task(name="mark", bind=True, ignore_result=True)(mark)
    return made


def mark(self: Any) -> None:
    """Append which task began when, in one write."""
    at = time.time()
    pid = os.getpid()
    if pid not in _descriptors:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        _descriptors[pid] = os.open(os.environ[MARKS], flags, 0o644)
    os.write(_descriptors[pid], f"{self.request.id} {at:.6f}\n".encode())


app = make_app(json.loads(os.environ.get(CONF, "{}")))


@worker_ready.connect
def say_ready(**_: Any) -> None:
    """Tell the benchmark, which looks for the file, that the worker consumes."""
    if READY in os.environ:
        Path(os.environ[READY]).touch()
