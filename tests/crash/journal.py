"""What the workers of a storm write down, who import this: when tasks begin and end, and which
messages were acknowledged because the store has them.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import shared_task

from celery_wheel.worker import intake
from celery_wheel.worker.messages import acknowledge
from tests.support import orphans  # noqa: F401 (children finish what they have)

__all__ = ("JOURNAL_VARIABLE",)

JOURNAL_VARIABLE = "CELERY_WHEEL_TEST_JOURNAL"


def _write(line: dict[str, Any]) -> None:
    descriptor = os.open(os.environ[JOURNAL_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def _write_task(task: Any, event: str) -> None:
    _write(
        {
            "id": task.request.id,
            "event": event,
            "at": time.time(),
            "eta": task.request.eta,
            "redelivered": bool((task.request.delivery_info or {}).get("redelivered")),
            "child": os.getpid(),
            # The main process leads the group, also after its death.
            "main": os.getpgid(0),
        }
    )


def _acknowledge(deliveries: Any) -> set[Any]:
    deliveries = list(deliveries)
    for delivery in deliveries:
        _write({"id": delivery.message.headers["id"], "event": "ack"})
    return acknowledge(deliveries)


if JOURNAL_VARIABLE in os.environ:
    intake.acknowledge = _acknowledge


@shared_task(bind=True, name="journal")
def journal(self: Any, seconds: float) -> None:
    _write_task(self, "start")
    time.sleep(seconds)
    _write_task(self, "end")


@shared_task(bind=True, name="late_journal", acks_late=True, reject_on_worker_lost=True)
def late_journal(self: Any, seconds: float) -> None:
    _write_task(self, "start")
    time.sleep(seconds)
    _write_task(self, "end")
