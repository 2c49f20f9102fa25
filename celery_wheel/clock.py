"""The two clocks. Everything that asks for the time asks one of these.

*Wall* time (UTC milliseconds) is what ETAs and stores are written in; *monotonic* time
(seconds) is what waiting is measured in. No other module calls :mod:`time`.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ("SYSTEM_CLOCK", "Clock", "FakeClock", "SystemClock")


class Clock(Protocol):
    """What the wheel needs to know about time."""

    def wall_ms(self) -> int:
        """UTC milliseconds since the epoch; may step in either direction."""

    def monotonic(self) -> float:
        """Seconds that only go forward; the zero means nothing."""


class SystemClock:
    """The machine's clocks. Thread-safe."""

    def wall_ms(self) -> int:
        """See :meth:`Clock.wall_ms`."""
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        """See :meth:`Clock.monotonic`."""
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()


class FakeClock:
    """A clock that moves only when told, for tests. Not thread-safe.

    Args:
        wall_ms: where wall time starts, UTC milliseconds.
    """

    def __init__(self, wall_ms: int = 1_000_000_000_000) -> None:
        self._wall_ms = wall_ms
        self._monotonic = 0.0

    def wall_ms(self) -> int:
        """See :meth:`Clock.wall_ms`."""
        return self._wall_ms

    def monotonic(self) -> float:
        """See :meth:`Clock.monotonic`."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let both clocks go forward together."""
        self._monotonic += seconds
        self._wall_ms += round(seconds * 1000)

    def step_wall(self, seconds: float) -> None:
        """Set the wall clock forward or back, as an operator or NTP does."""
        self._wall_ms += round(seconds * 1000)
