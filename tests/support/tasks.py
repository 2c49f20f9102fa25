"""The tasks that tests send. Each run appends one line of JSON to the probe file."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

from celery import shared_task
from celery.exceptions import Reject

__all__ = ("PROBE_VARIABLE",)

PROBE_VARIABLE = "CELERY_WHEEL_TEST_PROBES"


def record(task: Any, label: str) -> None:
    """Append one line, in one write: lines of several processes don't mix."""
    request = task.request
    delivery = request.delivery_info or {}
    line = {
        "label": label,
        "at": time.time(),
        "pid": os.getpid(),
        "thread": threading.current_thread().name,
        "task_id": request.id,
        "retries": request.retries,
        "eta": request.eta,
        "hostname": request.hostname,
        "priority": delivery.get("priority"),
        "routing_key": delivery.get("routing_key"),
        "redelivered": delivery.get("redelivered"),
        "headers": request.headers,
    }
    descriptor = os.open(os.environ[PROBE_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line, default=str).encode() + b"\n")
    finally:
        os.close(descriptor)


@shared_task(bind=True, name="probe")
def probe(self: Any, label: str) -> str:
    record(self, label)
    return label


@shared_task(bind=True, name="late_probe", acks_late=True, reject_on_worker_lost=True)
def late_probe(self: Any, label: str, seconds: float = 0) -> str:
    """Acknowledged when it is done, not when it begins."""
    record(self, label)
    time.sleep(seconds)
    return label


@shared_task(bind=True, name="slow")
def slow(self: Any, label: str, seconds: float) -> str:
    record(self, label)
    time.sleep(seconds)
    return label


@shared_task(bind=True, name="fails")
def fails(self: Any, label: str) -> None:
    record(self, label)
    raise ValueError(label)


@shared_task(bind=True, name="retries", max_retries=None)
def retries(self: Any, label: str, times: int, countdown: float) -> str:
    record(self, label)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return label


@shared_task(bind=True, name="late_retries", max_retries=None, acks_late=True)
def late_retries(self: Any, label: str, times: int, countdown: float) -> str:
    record(self, label)
    if self.request.retries < times:
        raise self.retry(countdown=countdown)
    return label


@shared_task(bind=True, name="rejects", acks_late=True)
def rejects(self: Any, label: str, requeue: bool) -> str:
    """Refuses its first delivery; ``requeue`` says whether it wants another."""
    record(self, label)
    if not (self.request.delivery_info or {}).get("redelivered"):
        raise Reject(label, requeue=requeue)
    return label


@shared_task(bind=True, name="slow_reject", acks_late=True)
def slow_reject(self: Any, label: str, seconds: float) -> None:
    record(self, label)
    time.sleep(seconds)
    raise Reject(label, requeue=False)


@shared_task(bind=True, name="limited", rate_limit="2/s")
def limited(self: Any, label: str) -> str:
    record(self, label)
    return label


@shared_task(bind=True, name="add")
def add(self: Any, label: str, number: int) -> int:
    record(self, label)
    return number


@shared_task(bind=True, name="total")
def total(self: Any, numbers: list[int], label: str) -> int:
    """The body of a chord."""
    record(self, label)
    return sum(numbers)


@shared_task(bind=True, name="again", max_retries=None)
def again(self: Any, label: str, countdown: float, times: int) -> None:
    """Sends itself anew under the same id from inside, as polling tasks do."""
    record(self, label)
    if times:
        self.apply_async(
            (label, countdown, times - 1), task_id=self.request.id, countdown=countdown
        )


@shared_task(bind=True, name="replaces")
def replaces(self: Any, label: str, countdown: float) -> None:
    record(self, label)
    raise self.replace(probe.si(f"{label}-replaced").set(countdown=countdown))
