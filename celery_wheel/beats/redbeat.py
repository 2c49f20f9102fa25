"""RedBeat on the wheel.

``celery beat -S celery_wheel.beats.redbeat:WheelRedBeatScheduler``. RedBeat keeps all entries
in a sorted set of Redis and reads the due ones; the wheel adds sending in order of time, the
policy for missed runs, and going on when one entry's schedule raises.
"""

# RedBeat and Celery ship no types.
# mypy: disallow-subclassing-any=False, warn-return-any=False

from __future__ import annotations

from typing import Any

from redbeat import RedBeatScheduler

from celery_wheel.beats.mixin import WheelSchedulerMixin

__all__ = ("WheelRedBeatScheduler",)


class WheelRedBeatScheduler(WheelSchedulerMixin, RedBeatScheduler):
    """Holds in the wheel what RedBeat says is due, and what is due next."""

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Renew RedBeat's lock, as its own tick does, and send what is due."""
        if self.lock_key and self.lock is not None:
            self.lock.extend(int(self.lock_timeout))
        return super().tick(*args, **kwargs)
