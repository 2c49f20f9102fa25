"""The Celery app of the worker processes, configured by one environment variable of JSON."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import task_revoked, worker_ready
from celery.utils.log import get_logger
from kombu import Exchange, Queue
from kombu.common import Broadcast

from tests.support import tasks  # noqa: F401 (registers the shared tasks)

__all__ = ("CONF_VARIABLE", "READY_VARIABLE", "app", "make_app")

CONF_VARIABLE = "CELERY_WHEEL_TEST_CONF"
READY_VARIABLE = "CELERY_WHEEL_TEST_READY"


def make_app(conf: dict[str, Any]) -> Celery:
    """An app with the tests' tasks; the same in the worker and in the test."""
    made = Celery("tests", set_as_current=False)
    made.conf.update({name: value for name, value in conf.items() if name != "test_queues"})
    if "test_queues" in conf:
        made.conf.task_queues = [_queue(**queue) for queue in conf["test_queues"]]
    return made


def _queue(*, kind: str = "direct", exchange: str | None = None, **options: Any) -> Queue:
    """A queue as JSON can tell it: ``kind`` is the exchange's type, or ``broadcast``."""
    if kind == "broadcast":
        return Broadcast(**options)
    name = exchange or options["name"]
    return Queue(exchange=Exchange(name, type=kind), routing_key=options["name"], **options)


def _configured() -> Celery:
    conf = json.loads(os.environ.get(CONF_VARIABLE, "{}"))
    unregistered = conf.pop("test_unregistered", ())
    made = make_app(conf)
    for name in unregistered:
        made.tasks.unregister(name)
    return made


app = _configured()


@worker_ready.connect
def say_ready(**_: Any) -> None:
    """Tell the test, which polls for the file, that the worker consumes."""
    if READY_VARIABLE in os.environ:
        Path(os.environ[READY_VARIABLE]).touch()


@task_revoked.connect
def say_revoked(request: Any, **_: Any) -> None:
    """Leave a line in the log for each signal."""
    get_logger(__name__).info("signal task_revoked %s", request.id)
