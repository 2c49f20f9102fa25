"""The slots of the pool: whether there is a semaphore, and how many are free."""

from __future__ import annotations

from typing import Any

from celery.worker import state

from celery_wheel import _compat

__all__ = ("Slots",)


class Slots:
    """Looks at the pool as it is now: it grows, shrinks and restarts."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    @property
    def semaphore(self) -> Any | None:
        """What requests acquire before they reach the pool, where the pool has that."""
        return _compat.slot_semaphore(self._consumer.controller)

    @property
    def count(self) -> int:
        """How many tasks the pool runs at once."""
        return int(self._consumer.pool.num_processes or 1)

    def free(self) -> int:
        """How many tasks the pool would start now."""
        semaphore = self.semaphore
        if semaphore is not None:
            return int(semaphore.value)
        return self.count - len(state.reserved_requests)

    def release(self) -> None:
        """Give back a slot of the semaphore that nobody needs."""
        _compat.release_slot(self._consumer.controller)
