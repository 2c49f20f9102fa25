"""Settings as Django has them: capitals, and ``CELERY_`` before everything of Celery's.

In a Django project these lines stand in the project's own ``settings.py``.
"""

from __future__ import annotations

import os

CELERY_BROKER_URL = os.environ.get("BROKER_URL", "redis://localhost:6379/0")
CELERY_TASK_IGNORE_RESULT = True

CELERY_WORKER_CONSUMER = "celery_wheel:Consumer"
CELERY_WHEEL_STORE = os.environ.get("WHEEL_STORE", "sqlite:///wheel.db")
CELERY_WHEEL_HORIZON = 30
