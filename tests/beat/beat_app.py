"""The app that the beat processes of the tests run; its schedule comes from a file."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path

from celery import Celery

from celery_wheel.beat import clocked

FOLDER = Path(os.environ["BEAT_TEST_FOLDER"])

for _name in ("queue", "control", "processed"):
    (FOLDER / _name).mkdir(exist_ok=True)

app = Celery("beat_app", broker="filesystem://", set_as_current=False)
app.conf.update(
    broker_transport_options={
        "data_folder_in": str(FOLDER / "queue"),
        "data_folder_out": str(FOLDER / "queue"),
        "control_folder": str(FOLDER / "control"),
    },
    result_expires=None,
    beat_schedule_filename=str(FOLDER / "schedule"),
)


@app.task(name="job")
def job(label: str) -> None:
    """Leave a line in a file."""
    with (FOLDER / "ran").open("a") as file:
        file.write(label + "\n")


def _entry(label: str, when: float, *, once: bool) -> dict[str, object]:
    at = clocked(datetime.fromtimestamp(when, timezone.utc)) if once else when
    return {"task": "job", "schedule": at, "args": (label,)}


if (FOLDER / "plan.json").exists():
    _plan = json.loads((FOLDER / "plan.json").read_text())
    app.conf.beat_schedule = {
        name: _entry(name, when, once=name.startswith("once")) for name, when in _plan.items()
    }
