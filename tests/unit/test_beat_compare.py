"""Celery's own scheduler and the wheel's, given one schedule and one clock, fire alike."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from copy import copy
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import current_app
from celery.beat import PersistentScheduler
from celery.schedules import crontab, schedule

from celery_wheel.beat import WheelScheduler
from tests.beat.support import HandApp, job, make_app, run_until

#: Celery wakes 10 ms early and then asks again and again; this is how often we let it.
STEP_S = 0.004

#: It sends one entry per tick, so of those due together the last one is that much later.
LATE_S = 0.1

DAILY_FORMS = {
    "every minute": crontab(),
    "quarters": crontab(minute="*/15"),
    "an integer": crontab(minute=7),
    "a mix": crontab(minute="1,13,30-45,50-59/2", hour="1-3"),
    "a set": crontab(minute={5, 50}, hour=[1, 2, 3]),
    "every third hour": crontab(minute=0, hour="*/3"),
    "office hours": crontab(minute="10", hour="0,8-17/2", day_of_week="mon-fri"),
    "half past one": crontab(minute=30, hour=1),
    "quarter to two": crontab(minute=45, hour=1),
    "quarter past two": crontab(minute=15, hour=2),
    "half past two": crontab(minute=30, hour=2),
    "three": crontab(minute=0, hour=3),
    "midnight": crontab(minute=0, hour=0),
    "wraps around": crontab(minute="58-2", hour="22-1"),
    "sundays": crontab(minute=5, hour="*/2", day_of_week="sun"),
    "from a string": crontab.from_string("20 */4 * * 0-6/2"),
}
MONTHLY_FORMS = {
    "first and third weeks": crontab(minute=0, hour=6, day_of_month="1-7,15-21"),
    "even days": crontab(minute=0, hour=7, day_of_month="2-30/2"),
    "the 31st": crontab(minute=30, hour=2, day_of_month=31),
    "leap day": crontab(minute=0, hour=0, day_of_month=29, month_of_year=2),
    "quarters": crontab(minute=0, hour=12, day_of_month=1, month_of_year="*/3"),
    "even months": crontab(minute=0, hour=3, day_of_month=10, month_of_year="2-12/2"),
    "names": crontab(minute=0, hour=4, day_of_week="tuesday", month_of_year="january,june"),
    "mondays in the first week": crontab(minute=0, hour=5, day_of_week=1, day_of_month="1-7"),
    "divisible by two": crontab(minute=9, hour=9, day_of_week="*/2"),
    "weekly": crontab(minute=15, hour=2, day_of_week="sun"),
}
INTERVALS = {
    "a minute": 60.0,
    "seven minutes": timedelta(minutes=7),
    "13 hours": timedelta(hours=13),
}
RELATIVE = {
    "hourly, rounded": schedule(timedelta(hours=1), relative=True),
    "daily, rounded": schedule(timedelta(days=1), relative=True),
    "ten minutes, rounded": schedule(timedelta(minutes=10), relative=True),
}

DST_DAYS = [
    ("Europe/Berlin", datetime(2026, 3, 28, 20)),
    ("Europe/Berlin", datetime(2025, 10, 25, 20)),
    ("America/New_York", datetime(2026, 3, 7, 20)),
    ("America/New_York", datetime(2025, 11, 1, 20)),
    ("Australia/Lord_Howe", datetime(2025, 10, 4, 20)),
    ("Australia/Lord_Howe", datetime(2026, 4, 4, 20)),
]


@pytest.fixture(autouse=True)
def _current_app() -> Iterator[None]:
    """Celery's schedules forget their app when they come from the file: make it the current."""
    before = current_app._get_current_object()
    yield
    before.set_current()


class _Recorder:
    """Writes down what would be sent, and when."""

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self.log[entry.name].append(self.app.wall)


class _Stock(_Recorder, PersistentScheduler):
    pass


class _Wheel(_Recorder, WheelScheduler):
    pass


def _fire(cls: Any, app: HandApp, plan: dict[str, Any], path: Path, **span: Any) -> Any:
    """Every firing of each entry in a span of time."""
    app.wall = span["start"]
    # A schedule remembers the first app it was used with, and that app's timezone.
    app.conf.beat_schedule = {name: job(name, copy(when)) for name, when in plan.items()}
    app.set_current()
    cls.log = defaultdict(list)
    file = str(path / cls.__name__)
    made = cls(app=app, schedule_filename=file, max_interval=span["max_s"])
    run_until(made, span["end"], least_s=STEP_S)
    made.close()
    return cls.log


def _both(zone: str, start: datetime, days: float, plan: Any, path: Path, **conf: Any) -> Any:
    start_at = start.replace(tzinfo=ZoneInfo(zone)).timestamp() + 0.25
    span = {"start": start_at, "end": start_at + days * 86400, "max_s": days * 86400}
    conf.setdefault("result_expires", 86400)
    logs = [_fire(cls, make_app(zone, **conf), plan, path, **span) for cls in (_Stock, _Wheel)]
    assert set(logs[0]) == set(logs[1])
    assert logs[0]
    return logs


def _assert_same(stock: list[float], wheel: list[float]) -> None:
    assert len(stock) == len(wheel)
    differ = [(a, b) for a, b in zip(stock, wheel, strict=True) if abs(a - b) > LATE_S]
    assert differ == []


@pytest.mark.parametrize(("zone", "start"), DST_DAYS)
def test_every_daily_form_fires_alike_on_days_with_a_clock_change(
    zone: str, start: datetime, tmp_path: Path
) -> None:
    """On the night of a clock change each crontab fires at the instants it does with Celery."""
    stock, wheel = _both(zone, start, 1.2, {**DAILY_FORMS, **RELATIVE}, tmp_path)
    for name, times in stock.items():
        _assert_same(times, wheel[name])


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin", "Australia/Lord_Howe"])
def test_every_monthly_form_fires_alike_for_three_years(zone: str, tmp_path: Path) -> None:
    """Days of the month, months and weekdays fall on Celery's days, leap day and all."""
    stock, wheel = _both(zone, datetime(2026, 1, 1), 1000, MONTHLY_FORMS, tmp_path)
    for name, times in stock.items():
        _assert_same(times, wheel[name])


def test_intervals_keep_their_length(tmp_path: Path) -> None:
    """Between two sends of an interval lies what lies between them with Celery."""
    start = datetime(2025, 10, 25, 20)
    stock, wheel = _both("Europe/Berlin", start, 1.2, INTERVALS, tmp_path)
    for name, times in stock.items():
        ours = wheel[name]
        assert len(times) == len(ours)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        our_gaps = [b - a for a, b in itertools.pairwise(ours)]
        _assert_same(gaps, our_gaps)


def test_without_utc_the_same_holds(tmp_path: Path) -> None:
    """``enable_utc = False`` changes nothing about that."""
    stock, wheel = _both(
        "America/New_York", datetime(2025, 11, 1, 22), 0.5, DAILY_FORMS, tmp_path, enable_utc=False
    )
    for name, times in stock.items():
        _assert_same(times, wheel[name])


@pytest.mark.parametrize("deadline_s", [None, 600, 7200])
def test_runs_missed_before_the_start_are_treated_alike(
    deadline_s: int | None, tmp_path: Path
) -> None:
    """What Celery does after an hour's absence, with and without a starting deadline."""
    conf = {} if deadline_s is None else {"beat_cron_starting_deadline": deadline_s}
    logs = []
    plan = {**DAILY_FORMS, **INTERVALS}
    for cls in (_Stock, _Wheel):
        app = make_app(**conf)
        away = app.now() - timedelta(hours=1, minutes=20)
        app.conf.beat_schedule = {
            name: job(name, copy(when), last_run_at=away) for name, when in plan.items()
        }
        app.set_current()
        cls.log = defaultdict(list)
        made = cls(app=app, schedule_filename=str(tmp_path / cls.__name__), max_interval=86400)
        run_until(made, app.wall + 3600, least_s=STEP_S)
        made.close()
        logs.append(cls.log)
    assert set(logs[0]) == set(logs[1])
    for name, times in logs[0].items():
        if name in INTERVALS:
            assert len(times) == len(logs[1][name])
        else:
            _assert_same(times, logs[1][name])
