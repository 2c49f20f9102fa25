"""Periodic tasks on the wheel.

Run it beside a worker, from this folder::

    celery -A beat beat -S wheel -l INFO
    celery -A beat worker -l INFO
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from celery import Celery
from celery.schedules import crontab

from celery_wheel.beat import clocked

app = Celery("beat", broker="redis://localhost")

# After an absence, send one run for all that were missed. Celery's own way is "stock".
app.conf.wheel_beat_missed = "once"


@app.task
def report(what: str) -> None:
    print(what)


app.conf.beat_schedule = {
    "every ten seconds": {"task": "beat.report", "schedule": 10.0, "args": ("tick",)},
    "on working days at seven": {
        "task": "beat.report",
        "schedule": crontab(minute=0, hour=7, day_of_week="mon-fri"),
        "args": ("good morning",),
    },
    # Sent once, even if beat is killed and started again. A fixed instant in real life: this
    # one is another one-off after each restart.
    "in half a minute": {
        "task": "beat.report",
        "schedule": clocked(datetime.now(timezone.utc) + timedelta(seconds=30)),
        "args": ("once",),
    },
}
