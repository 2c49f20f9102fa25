"""For tests of your own: a clock that moves when told, and the in-memory twin of every store.

::

    store = MemoryStore()
    store.open()
    store.put([DelayedTask(key=..., id="1", name="send", queue="celery", due_ms=..., ...)], now_ms)

``wheel_store = "memory://"`` gives a worker of your test's own process the same store.
"""

from __future__ import annotations

from celery_wheel.clock import FakeClock
from celery_wheel.stores.memory import MemoryStore
from celery_wheel.task import DelayedTask, task_key

__all__ = ("DelayedTask", "FakeClock", "MemoryStore", "task_key")
