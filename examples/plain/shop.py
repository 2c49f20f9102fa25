"""A Celery app with the wheel: two lines of configuration, and tasks as ever."""

from __future__ import annotations

import os

from celery import Celery

app = Celery("shop", broker=os.environ.get("BROKER_URL", "redis://localhost:6379/0"))
app.conf.worker_consumer = "celery_wheel:Consumer"  # the wheel
app.conf.wheel_store = os.environ.get("WHEEL_STORE", "sqlite:///wheel.db")


@app.task(ignore_result=True)
def remind(who: str) -> None:
    """Run once, at its time."""
    print(f"time to go, {who}")


@app.task(bind=True, max_retries=3, ignore_result=True)
def charge(self, order: int) -> None:
    """A retry with a countdown is a delayed task, too: it waits in the store."""
    if self.request.retries < 2:
        raise self.retry(countdown=2)
    print(f"order {order} is paid after {self.request.retries} retries")
