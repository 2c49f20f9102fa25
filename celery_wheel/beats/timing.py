"""When an entry is due next, worked out without asking its schedule where that is safe.

Celery's schedules take some 40 µs to answer ``is_due``. To *place* an entry in the wheel a
cheaper answer does, because ``is_due`` is asked again, and decides, when the slot is taken.
Plain intervals are an addition; plain crontabs with one specification share one answer per
minute of their last run. Everything else is asked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedule, solar
from celery.utils.time import remaining

from celery_wheel.beats.entries import WheelEntry, clocked

__all__ = ("Timing", "instant", "is_interval", "moved")

#: A cron's last run may lie this many seconds ahead of the clock: the hours that a clock set
#: back goes through twice are not run twice. Farther ahead, the earlier clock was wrong.
_CRON_AHEAD_S = 3 * 3600
_INTERVAL_AHEAD_S = 0.1
_MAX_ANSWERS = 100_000


def instant(at: datetime) -> float:
    """UTC seconds of a datetime; Celery takes one without a timezone for UTC."""
    return (at.replace(tzinfo=timezone.utc) if at.tzinfo is None else at).timestamp()


def is_interval(plan: Any) -> bool:
    """Whether a schedule is a plain interval: not rounded, not somebody's subclass."""
    return type(plan) is schedule and not plan.relative


class Timing:
    """Works out due instants for one scheduler. Not thread-safe.

    Args:
        asks: ``True`` to always ask, for a scheduler with an ``is_due`` of its own.
    """

    def __init__(self, *, asks: bool = False) -> None:
        self._asks = asks
        self._plain: dict[type, bool] = {}
        self._answers: dict[tuple[Any, ...], float] = {}

    def due_at(self, entry: Any, now_at: float) -> float | None:
        """When an entry is due, UTC seconds; ``None`` if only its ``is_due`` can tell.

        A last run that lies in the future, because the clock was set back, is moved to now:
        an interval waits one interval at most, not as long as the clock was set back.
        """
        cls = type(entry)
        plain = self._plain.get(cls)
        if plain is None:
            plain = not self._asks and cls.is_due in (ScheduleEntry.is_due, WheelEntry.is_due)
            self._plain[cls] = plain
        plan = entry.schedule
        if not plain or getattr(plan, "nowfun", None) is not None:
            return None
        kind = type(plan)
        if kind is schedule and not plan.relative:
            last_at = instant(entry.last_run_at)
            if last_at > now_at + _INTERVAL_AHEAD_S:
                last_at = _pull_back(entry, now_at)
            return last_at + max(float(plan.run_every.total_seconds()), 0.0)
        if kind is crontab:
            last_at = instant(entry.last_run_at)
            if last_at > now_at + _CRON_AHEAD_S:
                last_at = _pull_back(entry, now_at)
            return self._cron(plan, entry.last_run_at, int(last_at) // 60)
        return None

    def _cron(self, plan: Any, last_run_at: datetime, minute: int) -> float:
        """The answer of a crontab depends on its fields and the minute of the last run."""
        # ``plan.tz`` is that of the app unless somebody set it, and slow to make for each plan.
        zone = plan.__dict__.get("tz") or plan.app.timezone
        key = (plan.__reduce__()[1], zone, last_run_at.tzinfo, minute)
        try:
            known = self._answers.get(key)
        except TypeError:  # fields given as lists or sets
            return _next_run(plan, last_run_at)
        if known is None:
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            known = self._answers[key] = _next_run(plan, last_run_at)
        return known

    def run_at(self, entry: Any, now_at: float) -> float | None:
        """The first run after the last one, due or not; ``None`` if the schedule can't tell."""
        due_at = self.due_at(entry, now_at)
        return next(_runs(entry.schedule, entry.last_run_at), None) if due_at is None else due_at

    def missed(self, entry: Any, now_at: float, cap: int) -> list[float]:
        """The runs up to now that were not sent, oldest first; the latest ``cap`` of them."""
        plan, last_run_at = entry.schedule, entry.last_run_at
        last_at = instant(last_run_at)
        if is_interval(plan):
            every_s = plan.run_every.total_seconds()
            if every_s <= 0:
                return [now_at]
            count = max(int((now_at - last_at) / every_s + 1e-9), 1)
            return [last_at + k * every_s for k in range(max(1, count - cap + 1), count + 1)]
        first = self.run_at(entry, now_at)
        if first is None:
            return [now_at]
        # Runs can only be counted forward. Begin where about ``cap`` of them are left.
        gap_s = max(first - last_at, 1.0)
        while True:
            start_at = max(now_at - gap_s * (cap + 1), last_at)
            start = last_run_at if start_at == last_at else moved(last_run_at, start_at)
            runs = deque(_up_to(_runs(plan, start), now_at), maxlen=cap)
            if len(runs) == cap or start_at == last_at:
                return list(runs)
            gap_s *= 2


def _pull_back(entry: Any, now_at: float) -> float:
    entry.last_run_at = moved(entry.last_run_at, now_at)
    return now_at


def moved(like: datetime, at: float) -> datetime:
    """The instant ``at`` in the timezone of another datetime, or without one."""
    if like.tzinfo is None:
        return datetime.fromtimestamp(at, timezone.utc).replace(tzinfo=None)
    return datetime.fromtimestamp(at, like.tzinfo)


def _next_run(plan: Any, last_run_at: datetime) -> float:
    last, delta, now = plan.remaining_delta(last_run_at)
    return instant(now) + float(remaining(last, delta, now).total_seconds())


def _runs(plan: Any, last_run_at: datetime) -> Iterator[float]:
    """Instants at which a schedule runs, as far as it can tell."""
    if not isinstance(plan, BaseSchedule):
        return
    while True:
        if isinstance(plan, crontab):
            run_at = _next_run(plan, last_run_at)
        else:
            try:
                left = plan.remaining_estimate(last_run_at)
            except NotImplementedError:
                return
            run_at = instant(plan.maybe_make_aware(plan.now())) + left.total_seconds()
        yield run_at
        if isinstance(plan, clocked) or run_at <= instant(last_run_at):
            return
        # An event in the sky is found to the microsecond or so: step over it.
        last_run_at = moved(last_run_at, run_at + (60 if isinstance(plan, solar) else 0))


def _up_to(runs: Iterator[float], now_at: float) -> Iterator[float]:
    for run_at in runs:
        if run_at > now_at:
            return
        yield run_at
