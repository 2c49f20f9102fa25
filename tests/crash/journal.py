"""Tasks that write down when they begin and when they end; imported by the workers of a storm."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from celery import shared_task

from tests.support import orphans  # noqa: F401 (children finish what they have)

__all__ = ("JOURNAL_VARIABLE",)

JOURNAL_VARIABLE = "CELERY_WHEEL_TEST_JOURNAL"


def _write(task: Any, event: str) -> None:
    line = {
        "id": task.request.id,
        "event": event,
        "at": time.time(),
        "eta": task.request.eta,
        "child": os.getpid(),
        # The main process leads the group, also after its death.
        "main": os.getpgid(0),
    }
    path = os.environ[JOURNAL_VARIABLE]
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


@shared_task(bind=True, name="journal")
def journal(self: Any, seconds: float) -> None:
    _write(self, "start")
    time.sleep(seconds)
    _write(self, "end")


@shared_task(bind=True, name="late_journal", acks_late=True, reject_on_worker_lost=True)
def late_journal(self: Any, seconds: float) -> None:
    _write(self, "start")
    time.sleep(seconds)
    _write(self, "end")
