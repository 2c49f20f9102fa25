"""django-celery-beat's ``DatabaseScheduler`` on the wheel.

``celery beat -S celery_wheel.beats.django:WheelDatabaseScheduler``. Django must be configured
before this is imported, as ``DatabaseScheduler`` demands.
"""

# Django and Celery ship no types.
# mypy: disallow-subclassing-any=False, warn-return-any=False

from __future__ import annotations

from typing import Any

from django_celery_beat.schedulers import DatabaseScheduler

from celery_wheel.beats.mixin import WheelSchedulerMixin

__all__ = ("WheelDatabaseScheduler",)

#: Columns that a run changes, not a person.
_BOOKKEEPING = {"_state", "date_changed", "no_changes", "total_run_count"}


class WheelDatabaseScheduler(WheelSchedulerMixin, DatabaseScheduler):
    """Reads the tables as ``DatabaseScheduler`` does; an edited row moves one entry."""

    def same_entry(self, held: Any, entry: Any) -> bool:
        """Whether a row that was read again says what it said before."""
        return held == entry and _columns(held.model) == _columns(entry.model)


def _columns(model: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(model).items() if name not in _BOOKKEEPING}
