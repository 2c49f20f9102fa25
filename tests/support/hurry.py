"""A worker for which hours are seconds. Imported by a worker process (``conf={"imports": …}``)."""

from __future__ import annotations

from celery_wheel.worker import sqs

__all__ = ()

sqs.MOST_S = 4.0
