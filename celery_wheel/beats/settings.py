"""The settings of beat: what to do with runs that were missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_wheel.errors import ConfigError

__all__ = ("MISSED_POLICIES", "BeatSettings")

#: What may be done with runs that came due while beat was not there to send them.
MISSED_POLICIES = ("stock", "skip", "once", "all")

_DEFAULT_CAP = 100
_MAX_CAP = 100_000


@dataclass(frozen=True, slots=True)
class BeatSettings:
    """Read once, when the scheduler is made.

    Attributes:
        missed: ``wheel_beat_missed``. ``stock``: as Celery does, one run at once, and an
            interval counts from then on. ``skip``: none. ``once``: one, the latest. ``all``:
            each, oldest first. But for ``stock``, an interval keeps its rhythm.
        missed_cap: ``wheel_beat_missed_cap``, the most runs of one entry that ``all`` sends;
            the latest are kept. 1 to 100 000.
    """

    missed: str = "stock"
    missed_cap: int = _DEFAULT_CAP

    @classmethod
    def from_app(cls, app: Any) -> BeatSettings:
        """Read the two settings of a Celery app.

        Raises:
            ConfigError: one has a value that means nothing.
        """
        missed = app.conf.get("wheel_beat_missed", "stock")
        if missed not in MISSED_POLICIES:
            names = ", ".join(MISSED_POLICIES)
            raise ConfigError(f"wheel_beat_missed is {missed!r}: write one of {names}")
        given = app.conf.get("wheel_beat_missed_cap", _DEFAULT_CAP)
        try:
            cap = int(given)
        except (TypeError, ValueError):
            cap = 0
        if isinstance(given, bool) or not 1 <= cap <= _MAX_CAP or cap != float(given):
            raise ConfigError(
                f"wheel_beat_missed_cap is {given!r}: write a whole number from 1 to {_MAX_CAP}"
            )
        return cls(missed, cap)
