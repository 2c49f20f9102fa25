"""Runs that came due while beat was away, and clocks that are set."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery.beat import Scheduler
from celery.schedules import BaseSchedule, crontab, schedstate, schedule

from celery_wheel.beat import BeatSettings, WheelScheduler, WheelSchedulerMixin, clocked
from celery_wheel.errors import ConfigError
from tests.beat.support import START, job, make_app, run_until, scheduler, sent

AWAY_S = 5 * 60 + 10


def _restart_after(path: Path, plan: Any, away_s: float, **conf: Any) -> Any:
    """An app whose beat ran, wrote its file, and was away for a while."""
    app = make_app(beat_schedule=plan, **conf)
    app.wall = START - away_s
    with scheduler(app, path) as made:
        made.tick()
    sent(app)
    app.wall = START
    return app


@pytest.mark.parametrize(("policy", "runs"), [("skip", 0), ("once", 1), ("all", 5), ("stock", 1)])
@pytest.mark.parametrize(("when", "away_s"), [(60.0, AWAY_S), (crontab(), 295)])
def test_five_missed_runs(policy: str, runs: int, when: Any, away_s: float, tmp_path: Path) -> None:
    """Away for five runs: ``skip`` sends none of them, ``once`` one, ``all`` five."""
    plan = {"a": job("a", when)}
    app = _restart_after(tmp_path, plan, away_s, wheel_beat_missed=policy)
    with scheduler(app, tmp_path) as made:
        made.tick()
        assert sent(app) == ["a"] * runs
        assert made.schedule["a"].total_run_count == runs
        made.tick()
        assert sent(app) == []


@pytest.mark.parametrize("policy", ["skip", "once", "all"])
def test_an_interval_keeps_its_rhythm_over_missed_runs(policy: str, tmp_path: Path) -> None:
    """But for Celery's own policy, the next run is a multiple of the interval from before."""
    app = _restart_after(tmp_path, {"a": job("a", 60.0)}, AWAY_S, wheel_beat_missed=policy)
    with scheduler(app, tmp_path) as made:
        assert made.tick() == pytest.approx(50, abs=0.01)


def test_by_default_an_interval_counts_from_the_late_run(tmp_path: Path) -> None:
    """Celery's way: one run at once, the next an interval later."""
    app = _restart_after(tmp_path, {"a": job("a", 60.0)}, AWAY_S)
    with scheduler(app, tmp_path) as made:
        assert made.tick() == pytest.approx(60, abs=0.01)


def test_missed_runs_of_several_entries_go_out_in_order_of_time(tmp_path: Path) -> None:
    """``all`` interleaves the entries by when each run was due."""
    plan = {"two": job("two", 120.0), "three": job("three", 180.0)}
    app = _restart_after(tmp_path, plan, 7 * 60, wheel_beat_missed="all")
    with scheduler(app, tmp_path) as made:
        made.tick()
    # Due after minutes 2, 3, 4, 6 and 6.
    assert sent(app)[:3] == ["two", "three", "two"]


@pytest.mark.parametrize("when", [60.0, crontab(), schedule(timedelta(minutes=1), relative=True)])
def test_all_is_capped_to_the_latest(when: Any, tmp_path: Path) -> None:
    """After a month away, ``all`` sends the latest runs up to the cap, quickly."""
    app = _restart_after(
        tmp_path,
        {"a": job("a", when)},
        30 * 86400,
        wheel_beat_missed="all",
        wheel_beat_missed_cap=7,
    )
    with scheduler(app, tmp_path) as made:
        made.tick()
        assert sent(app) == ["a"] * 7
        assert made.schedule["a"].last_run_at.timestamp() >= START - 60


def test_all_reaches_back_over_uneven_gaps(tmp_path: Path) -> None:
    """A cron with nights and weekends between its runs gets all of them, none twice."""
    office = crontab(minute=0, hour="9-17", day_of_week="mon-fri")
    app = _restart_after(tmp_path, {"a": job("a", office)}, 7 * 86400, wheel_beat_missed="all")
    with scheduler(app, tmp_path) as made:
        made.tick()
    assert sent(app) == ["a"] * 45


@pytest.mark.parametrize("policy", ["skip", "once", "all"])
def test_what_is_due_now_is_not_missed(policy: str, tmp_path: Path) -> None:
    """While beat is up, every policy sends every run."""
    app = make_app(beat_schedule={"a": job("a", 2.0)}, wheel_beat_missed=policy)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 20.1)
    assert sent(app) == ["a"] * 10


@pytest.mark.parametrize(("policy", "runs"), [("skip", 0), ("once", 1), ("all", 5)])
def test_a_machine_that_slept_has_missed_runs(policy: str, runs: int, tmp_path: Path) -> None:
    """A tick long after the time it was asked for counts as an absence, too."""
    app = make_app(beat_schedule={"a": job("a", 60.0)}, wheel_beat_missed=policy)
    with scheduler(app, tmp_path) as made:
        made.tick()
        app.wall += AWAY_S
        made.tick()
    assert sent(app) == ["a"] * runs


@pytest.mark.parametrize(("policy", "runs"), [("skip", 1), ("once", 1), ("all", 4)])
def test_a_slow_tick_is_no_absence(policy: str, runs: int, tmp_path: Path) -> None:
    """Runs that pile up behind a slow broker: ``skip`` sends the latest, ``all`` each."""
    app = make_app(beat_schedule={"a": job("a", 1.0)}, wheel_beat_missed=policy)

    class Slow(WheelScheduler):
        def apply_entry(self, entry: Any, producer: Any = None) -> None:
            super().apply_entry(entry, producer=producer)
            if entry.total_run_count == 0:
                app.wall += 4.5

    made = Slow(app=app, schedule_filename=str(tmp_path / "s"))
    made.tick()
    app.wall += 1.0
    made.tick()
    made.tick()
    made.close()
    assert sent(app) == ["a"] * (1 + runs)


@pytest.mark.parametrize("policy", ["stock", "skip", "once", "all"])
def test_a_one_off_is_sent_late_rather_than_never(policy: str, tmp_path: Path) -> None:
    """Whatever the policy, a one-off that beat was away for is sent, once."""
    at = datetime.fromtimestamp(START - 60, timezone.utc)
    plan = {"a": job("a", clocked(at))}
    app = _restart_after(tmp_path, plan, 120, wheel_beat_missed=policy)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 10)
    assert sent(app) == ["a"]


@pytest.mark.parametrize(("policy", "runs"), [("skip", 0), ("once", 1), ("all", 1)])
def test_a_schedule_that_can_not_count_its_runs_has_one(
    policy: str, runs: int, tmp_path: Path
) -> None:
    """A custom schedule that knows only ``is_due`` has missed one run where it says so."""

    class Simple(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> Any:
            return schedstate(self.now() - last_run_at >= timedelta(minutes=1), 60.0)

        def __reduce__(self) -> Any:
            return Simple, ()

    app = _restart_after(tmp_path, {"a": job("a", Simple())}, AWAY_S, wheel_beat_missed=policy)
    with scheduler(app, tmp_path) as made:
        made.tick()
    assert sent(app) == ["a"] * runs


def test_settings_under_a_namespace() -> None:
    """``CELERY_WHEEL_BEAT_MISSED`` is read where Django keeps it."""
    app = make_app()
    app.config_from_object({"CELERY_WHEEL_BEAT_MISSED": "all"}, namespace="CELERY")
    assert BeatSettings.from_app(app) == BeatSettings("all", 100)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("wheel_beat_missed", "never", "write one of stock, skip, once, all"),
        ("wheel_beat_missed_cap", 0, "whole number from 1"),
        ("wheel_beat_missed_cap", "many", "whole number from 1"),
        ("wheel_beat_missed_cap", 1.5, "whole number from 1"),
        ("wheel_beat_missed_cap", True, "whole number from 1"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(
    name: str, value: Any, says: str, tmp_path: Path
) -> None:
    """A value that means nothing stops beat with the name, the value and what to write."""
    app = make_app(**{name: value})
    with pytest.raises(ConfigError, match=f"{name} is {value!r}.*{says}"):
        WheelScheduler(app=app, schedule_filename=str(tmp_path / "s"))


def test_a_clock_set_back_does_not_stop_an_interval(tmp_path: Path) -> None:
    """After an hour back, an interval of a minute runs within a minute (Celery: in an hour)."""
    app = make_app(beat_schedule={"a": job("a", 60.0)})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 90)
        assert sent(app) == ["a"]
        app.wall -= 3600
        run_until(made, START + 90 - 3600 + 61)
    assert sent(app) == ["a"]


def test_a_clock_set_back_does_not_repeat_a_cron(tmp_path: Path) -> None:
    """The hour that is gone through twice fires its crons once, and then they go on."""
    app = make_app(beat_schedule={"a": job("a", crontab(minute="*/10"))})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 3605)
        assert sent(app) == ["a"] * 6
        app.wall -= 3600
        run_until(made, START + 3605)
        assert sent(app) == []
        run_until(made, START + 4205)
    assert sent(app) == ["a"]


def test_a_clock_that_was_wrong_by_a_year_does_not_silence_a_cron(tmp_path: Path) -> None:
    """Set back by more than three hours, crons count from the new time."""
    app = make_app(beat_schedule={"a": job("a", crontab(minute="*/10"))})
    app.wall += 365 * 86400
    with scheduler(app, tmp_path) as made:
        made.tick()
    app.wall = START
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 1205)
    assert sent(app) == ["a", "a"]


def test_a_clock_set_forward_fires_once(tmp_path: Path) -> None:
    """What the step jumped over is due at once, one run each, as with Celery."""
    plan = {"cron": job("cron", crontab(minute="*/10")), "interval": job("interval", 60.0)}
    app = make_app(beat_schedule=plan)
    with scheduler(app, tmp_path) as made:
        made.tick()
        app.wall += 7200
        made.tick()
        assert sorted(sent(app)) == ["cron", "interval"]
        assert made.tick() == pytest.approx(60, abs=0.01)


def test_a_clock_that_falls_back_by_milliseconds_is_waited_out(tmp_path: Path) -> None:
    """A small step back neither repeats nor loses a run."""
    app = make_app(beat_schedule={"a": job("a", 1.0)})
    with scheduler(app, tmp_path) as made:
        for _ in range(10):
            run_until(made, app.wall + 1.0)
            app.wall -= 0.05
        made.tick()
        count = made.schedule["a"].total_run_count
    assert count == 9
    assert sent(app) == ["a"] * 9


def test_the_policy_holds_for_the_mixin() -> None:
    """A scheduler that the mixin was put before follows the setting as well."""

    class Mine(WheelSchedulerMixin, Scheduler):
        pass

    app = make_app(wheel_beat_missed="all")
    made = Mine(app=app)
    made.add(name="a", last_run_at=app.now() - timedelta(seconds=AWAY_S), **job("a", 60.0))
    made.tick()
    made.close()
    assert sent(app) == ["a"] * 5
