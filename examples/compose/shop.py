"""The app of the containers: broker and store come from the environment."""

from __future__ import annotations

import os
import random

from celery import Celery

app = Celery("shop", broker=os.environ["BROKER_URL"])
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_consumer = "celery_wheel:Consumer"
app.conf.wheel_store = os.environ["WHEEL_STORE"]
app.conf.task_ignore_result = True


@app.task
def remind(number: int) -> None:
    """Run once, at its time."""
    print(f"reminder {number}")


def publish(count: int = 100) -> None:
    """Delayed tasks, from a second to ten minutes ahead."""
    for number in range(count):
        remind.apply_async([number], countdown=random.uniform(1, 600))


if __name__ == "__main__":
    publish()
