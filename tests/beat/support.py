"""Apps with a clock that is set by hand, and schedulers that send into a memory queue."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from celery import Celery

from celery_wheel.beat import WheelScheduler

_numbers = itertools.count()

#: 2025-06-02 10:00:00 UTC, a Monday.
START = datetime(2025, 6, 2, 10, tzinfo=timezone.utc).timestamp()


class HandApp(Celery):
    """An app whose ``now`` is the attribute ``wall`` (UTC seconds)."""

    wall: float = START

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.wall, self.timezone)


def make_app(zone: str = "UTC", **conf: Any) -> HandApp:
    """An app with a memory broker of its own and the task ``job``; no clean-up entry."""
    conf.setdefault("result_expires", None)
    app = HandApp(f"beat-{next(_numbers)}", broker="memory://", set_as_current=False)
    app.conf.update(timezone=zone, task_default_queue=f"q-{next(_numbers)}", **conf)

    @app.task(name="job", shared=False)
    def job(*_args: Any) -> None:
        """Is only sent."""

    return app


def sent(app: Celery) -> list[Any]:
    """Empty the queue; the first argument of each message, in order."""
    labels = []
    with app.connection_for_read() as connection:
        channel = connection.default_channel
        queue = app.amqp.queues[app.conf.task_default_queue].bind(channel)
        queue.declare()
        while (message := queue.get(no_ack=True)) is not None:
            labels.append(message.payload[0][0])
    return labels


def job(label: str, schedule: Any, **more: Any) -> dict[str, Any]:
    """An entry of ``beat_schedule`` that sends its label."""
    return {"task": "job", "schedule": schedule, "args": (label,), **more}


@contextlib.contextmanager
def scheduler(app: Celery, path: Path, **kwargs: Any) -> Iterator[WheelScheduler]:
    """A scheduler with its file in ``path``, closed at the end."""
    made = WheelScheduler(app=app, schedule_filename=str(path / "schedule"), **kwargs)
    try:
        yield made
    finally:
        made.close()


def run_until(made: Any, end: float, *, least_s: float = 0.0) -> None:
    """Do what beat's loop does, with the clock set by hand: tick, then sleep as told."""
    app = made.app
    while app.wall < end:
        app.wall = min(app.wall + max(made.tick(), least_s), end)
