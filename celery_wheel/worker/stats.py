"""What the worker counts: for ``inspect wheel`` and ``inspect stats``."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any

__all__ = ("Stats", "Timings", "quantiles")

#: How many of the latest values the quantiles are taken over.
WINDOW = 1000


def quantiles(values: list[float]) -> dict[str, float]:
    """p50, p99 and the largest of some values; empty for none."""
    if not values:
        return {}
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "p50": round(ordered[last // 2], 3),
        "p99": round(ordered[last * 99 // 100], 3),
        "max": round(ordered[-1], 3),
    }


class Timings:
    """How long calls took, by name, in milliseconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._latest: dict[str, deque[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Note one call."""
        with self._lock:
            self._counts[name] += 1
            self._latest.setdefault(name, deque(maxlen=WINDOW)).append(seconds * 1000)

    def report(self) -> dict[str, dict[str, float]]:
        """Per name the number of calls and the quantiles of the latest, in ms."""
        with self._lock:
            return {
                name: {"calls": self._counts[name], **quantiles(list(values))}
                for name, values in self._latest.items()
            }


class Stats:
    """Counters of one worker, and the lateness of what it handed over (ms)."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lateness_ms: deque[float] = deque(maxlen=WINDOW)

    def late(self, lateness_ms: float) -> None:
        """Note how long after its ETA a task was handed to the pool."""
        self._lateness_ms.append(lateness_ms)

    def report(self) -> dict[str, Any]:
        """The counters and the quantiles of lateness."""
        names = ("received", "duplicates", "dispatched", "revoked", "expired", "requeued", "parked")
        return {
            **{name: self.counts[name] for name in names},
            "lateness_ms": quantiles(list(self._lateness_ms)),
        }
