"""Whether a row fits a :class:`~celery_wheel.stores.base.Filter`, for stores that ask in Python."""

from __future__ import annotations

from celery_wheel.stores.base import Filter
from celery_wheel.task import DelayedTask

__all__ = ("fits",)


def fits(row: DelayedTask, which: Filter) -> bool:
    """Compare every field that is set but ``ids``, by which rows are looked up."""
    if which.due_from_ms is not None and row.due_ms < which.due_from_ms:
        return False
    if which.due_before_ms is not None and row.due_ms >= which.due_before_ms:
        return False
    if which.stamps is not None and not set(row.stamps).intersection(which.stamps):
        return False
    return (
        which.name in (None, row.name)
        and which.queue in (None, row.queue)
        and which.owner in (None, row.owner)
    )
