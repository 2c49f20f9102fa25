"""The demo's Celery app: the same in the demo (which publishes) and in its worker.

The worker's configuration comes in one environment variable. Its standard input is a pipe from
the demo: when that closes, in whatever way the demo ended, the worker and its children end.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_ready
from kombu.transport import TRANSPORT_ALIASES

from celery_wheel.clock import SYSTEM_CLOCK

__all__ = ("CONF_VARIABLE", "READY_VARIABLE", "RECORD_VARIABLE", "TASK", "app", "make_app")

CONF_VARIABLE = "CELERY_WHEEL_DEMO_CONF"
RECORD_VARIABLE = "CELERY_WHEEL_DEMO_RECORD"
READY_VARIABLE = "CELERY_WHEEL_DEMO_READY"
TASK = "demo.note"


def note(self: Any) -> None:
    """The task: append "id, ETA, now" to the record, in one write, so that lines don't mix."""
    now_ms = SYSTEM_CLOCK.wall_ms()
    eta_ms = round(datetime.fromisoformat(self.request.eta).timestamp() * 1000)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    descriptor = os.open(os.environ[RECORD_VARIABLE], flags, 0o600)
    try:
        os.write(descriptor, f"{self.request.id} {eta_ms} {now_ms}\n".encode())
    finally:
        os.close(descriptor)


def make_app(conf: dict[str, Any]) -> Celery:
    """An app with the one task."""
    made = Celery("celery_wheel_demo", set_as_current=False)
    made.conf.update(conf)
    made.task(name=TASK, bind=True, ignore_result=True)(note)
    return made


def _end_with_the_demo() -> None:
    # Not sys.stdin: its lock, held while reading, would be inherited by the pool's children.
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _watch_the_demo(**_: Any) -> None:
    if RECORD_VARIABLE in os.environ:
        threading.Thread(target=_end_with_the_demo, name="leash", daemon=True).start()


def _say_ready(**_: Any) -> None:
    if READY_VARIABLE in os.environ:
        Path(os.environ[READY_VARIABLE]).touch()


TRANSPORT_ALIASES["filesystem"] = "celery_wheel.demo.folder:Transport"
worker_init.connect(_watch_the_demo)
worker_ready.connect(_say_ready)

app = make_app(json.loads(os.environ.get(CONF_VARIABLE, "{}")))
