"""The app, configured the way Celery's documentation does it for Django.

With Django the first argument of ``config_from_object`` is ``"django.conf:settings"``, and
``app.autodiscover_tasks()`` follows.
"""

from __future__ import annotations

from celery import Celery

app = Celery("shop")
app.config_from_object("settings", namespace="CELERY")


@app.task
def remind(who: str) -> None:
    """Run once, at its time."""
    print(f"time to go, {who}")
