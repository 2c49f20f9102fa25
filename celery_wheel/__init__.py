"""Delayed tasks in Celery, held in a timing wheel over a durable store.

Importing this module does no I/O and patches nothing.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ("Backlog", "Consumer", "WheelMixin", "__version__")


def __getattr__(name: str) -> Any:
    # Celery's worker is imported only where it is used: publishers import this package too.
    if name in ("Consumer", "WheelMixin"):
        from celery_wheel.worker import consumer

        return getattr(consumer, name)
    if name == "Backlog":
        from celery_wheel.backlog import Backlog

        return Backlog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
