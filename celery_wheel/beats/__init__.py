"""What ``celery_wheel.beat`` is made of."""

from __future__ import annotations
