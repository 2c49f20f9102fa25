"""A worker that kills itself with SIGKILL at a named point, between two of its writes.

Imported by a worker process (``conf={"imports": ["tests.support.killing"]}``), which then reads
``CELERY_WHEEL_TEST_KILL``: JSON with ``point``, ``when`` (before or after the call) and ``call``
(which call of that name, from 1). The product has no hook for this: its functions are replaced
here, in the process of the test's worker alone.
"""

from __future__ import annotations

import functools
import json
import os
import signal
from collections.abc import Callable
from typing import Any

from celery_wheel.stores.sql import SqlStore
from celery_wheel.worker import intake
from celery_wheel.worker.dispatcher import Dispatcher
from celery_wheel.worker.intake import Line
from celery_wheel.worker.reparking import Reparking

__all__ = ("KILL_VARIABLE", "kill_at")

KILL_VARIABLE = "CELERY_WHEEL_TEST_KILL"

#: What a point is called → where the call is found.
POINTS: dict[str, tuple[Any, str]] = {
    "put": (SqlStore, "put"),
    "ack": (intake, "acknowledge"),
    "hold": (Line, "_kept"),
    "claim": (SqlStore, "claim"),
    "confirm": (SqlStore, "confirm"),
    "hand_over": (Dispatcher, "_hand_over"),
    "answer": (Dispatcher, "_acked"),
    "settle": (SqlStore, "settle"),
    "release": (SqlStore, "release"),
    "repark": (Reparking, "_parked"),
}


def kill_at(point: str, when: str, call: int = 1) -> dict[str, str]:
    """The environment of a worker that dies there."""
    assert point in POINTS
    return {KILL_VARIABLE: json.dumps({"point": point, "when": when, "call": call})}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _deadly(function: Callable[..., Any], when: str, call: int) -> Callable[..., Any]:
    calls = 0

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            _die()
        answer = function(*args, **kwargs)
        if calls == call and when == "after":
            _die()
        return answer

    return wrapper


def _arm() -> None:
    wanted = json.loads(os.environ.get(KILL_VARIABLE, "null"))
    if wanted is not None:
        owner, name = POINTS[wanted["point"]]
        setattr(owner, name, _deadly(getattr(owner, name), wanted["when"], wanted["call"]))


_arm()
