"""The schedule file: what is kept, what is written, and what a broken one costs."""

from __future__ import annotations

import copy
import logging
import pickle
import sqlite3
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from celery import current_app
from celery.beat import PersistentScheduler, Service
from celery.schedules import crontab, solar
from kombu.exceptions import OperationalError

from celery_wheel.beat import WheelEntry, WheelScheduler, clocked
from celery_wheel.beats.entries import fingerprint
from celery_wheel.errors import ConfigError
from tests.beat.support import START, job, make_app, run_until, scheduler, sent

IN_FIVE_S = datetime.fromtimestamp(START + 5, timezone.utc)


@pytest.fixture(autouse=True)
def _current_app() -> Iterator[None]:
    """Celery's own scheduler, reading its file, takes the current app for the schedules'."""
    before = current_app._get_current_object()
    yield
    before.set_current()


def _rows(path: Path) -> dict[str, Any]:
    with sqlite3.connect(path / "schedule") as conn:
        rows = {row[0]: row[1:] for row in conn.execute("SELECT * FROM runs")}
    conn.close()
    return rows


def _killed(made: WheelScheduler) -> None:
    """What is left of a scheduler whose process was killed: its file, not closed properly."""
    made._store.close()


def test_runs_are_remembered_over_a_restart(tmp_path: Path) -> None:
    """Last run and count carry over; the next run is an interval after the last one."""
    app = make_app("Europe/Berlin", beat_schedule={"a": job("a", 60.0)})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 130)
    app.wall += 20
    with scheduler(app, tmp_path) as made:
        entry = made.schedule["a"]
        assert entry.total_run_count == 2
        assert entry.last_run_at.timestamp() == START + 120
        assert entry.last_run_at.tzinfo == app.timezone
        assert made.tick() == pytest.approx(30, abs=0.01)


def test_a_restart_takes_the_definition_from_the_configuration(tmp_path: Path) -> None:
    """As with Celery: new entries come, missing ones go, changed ones keep their last run."""
    app = make_app(beat_schedule={"a": job("a", 60.0), "gone": job("gone", 60.0)})
    with scheduler(app, tmp_path) as made:
        made.add(name="by hand", **job("by hand", 60.0))
        run_until(made, START + 61)
    app.conf.beat_schedule = {"a": job("new a", 90.0), "b": job("b", 60.0)}
    with scheduler(app, tmp_path) as made:
        assert set(made.schedule) == {"a", "b"}
        assert made.schedule["a"].total_run_count == 1
        assert made.schedule["a"].args == ("new a",)
    assert set(_rows(tmp_path)) == {"a", "b"}


def test_a_sync_writes_what_changed(tmp_path: Path) -> None:
    """With 5 000 entries, one run writes one row, at the end of its tick."""
    plan = {f"e{i}": job(f"e{i}", 3600.0) for i in range(5000)}
    app = make_app(beat_schedule={**plan, "soon": job("soon", 1.0)})
    with scheduler(app, tmp_path) as made:
        made.tick()
        changes = made._store._conn.total_changes
        app.wall += 1.01
        made.tick()
        assert made._store._conn.total_changes - changes <= 2
        assert made.schedule.dirty == set()
        changes = made._store._conn.total_changes
        made.sync()
        assert made._store._conn.total_changes == changes


def test_a_kill_repeats_nothing_that_an_earlier_tick_sent(tmp_path: Path) -> None:
    """What was sent is in the file at the end of the tick, not three minutes later."""
    app = make_app(beat_schedule={"a": job("a", 60.0)})
    made = WheelScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    run_until(made, START + 61)
    _killed(made)
    with scheduler(app, tmp_path) as made:
        made.tick()
    assert sent(app) == ["a"]


@pytest.mark.parametrize("entry", [{"schedule": clocked(IN_FIVE_S)}, {"schedule": 5.0}])
def test_a_one_off_killed_before_its_send_is_not_sent_again(
    entry: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The intent is in the file before the message leaves; after a kill it stands, with a word."""
    app = make_app(beat_schedule={"a": {"task": "job", "one_off": True, **copy.copy(entry)}})

    class Killed(WheelScheduler):
        def apply_entry(self, entry: Any, producer: Any = None) -> None:
            raise SystemExit

    made = Killed(app=app, schedule_filename=str(tmp_path / "schedule"))
    with pytest.raises(SystemExit):
        run_until(made, START + 6)
    _killed(made)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 60)
        assert "'a' was being sent when beat was killed" in caplog.text
    caplog.clear()
    with scheduler(app, tmp_path) as made:
        made.tick()
    assert sent(app) == []
    assert caplog.text == ""


def test_a_one_off_is_remembered(tmp_path: Path) -> None:
    """Sent once, it is not sent after a restart, a kill, or a change of the timezone."""
    plan = {"a": job("a", clocked(IN_FIVE_S)), "b": job("b", 5.0, one_off=True)}
    app = make_app(beat_schedule=plan)
    made = WheelScheduler(app=app, schedule_filename=str(tmp_path / "schedule"))
    run_until(made, START + 6)
    _killed(made)
    assert sorted(sent(app)) == ["a", "b"]
    for zone in ("UTC", "Europe/Berlin", "Asia/Tokyo"):
        other = make_app(zone, beat_schedule=plan)
        other.wall = START + 3600
        with scheduler(other, tmp_path) as made:
            made.tick()
        assert sent(other) == []


def test_a_one_off_moved_in_the_configuration_is_sent_again(tmp_path: Path) -> None:
    """Another instant under the same name is another one-off."""
    app = make_app(beat_schedule={"a": job("a", clocked(IN_FIVE_S))})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 6)
    app.conf.beat_schedule = {"a": job("b", clocked(IN_FIVE_S + timedelta(seconds=5)))}
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 11)
    assert sent(app) == ["a", "b"]


def test_an_entry_that_becomes_a_one_off_is_sent_once_more(tmp_path: Path) -> None:
    """Runs from before it was a one-off do not count as its run."""
    app = make_app(beat_schedule={"a": job("a", 5.0)})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 6)
        made.merge_inplace({"a": job("once", 5.0, one_off=True)})
        run_until(made, START + 60)
    app.conf.beat_schedule = {"a": job("a", 5.0)}
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 66)
    app.conf.beat_schedule = {"a": job("again", 5.0, one_off=True)}
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 90)
    assert sent(app) == ["a", "once", "a", "a", "again"]


def test_a_one_off_the_broker_refuses_is_tried_again(tmp_path: Path) -> None:
    """An error of the broker leaves a one-off due; it is sent once the broker answers."""
    app = make_app(beat_schedule={"a": job("a", clocked(IN_FIVE_S))})

    class Refused(WheelScheduler):
        tries = 0

        def send_task(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("the task is registered")

        @property
        def producer(self) -> Any:
            Refused.tries += 1
            if Refused.tries < 4:
                return _Refusing()
            return app.amqp.Producer(self.connection)

    class _Refusing:
        def __getattr__(self, name: str) -> Any:
            raise OperationalError("connection refused")

    made = Refused(app=app, schedule_filename=str(tmp_path / "schedule"))
    run_until(made, START + 19)
    assert Refused.tries == 3
    run_until(made, START + 60)
    made.close()
    assert Refused.tries == 4
    assert sent(app) == ["a"]
    with scheduler(app, tmp_path) as made:
        made.tick()
    assert sent(app) == []


def test_a_one_off_is_not_sent_while_the_file_can_not_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No record, no send: other entries go on, and the one-off follows when the disk is back."""
    plan = {"once": job("once", clocked(IN_FIVE_S)), "often": job("often", 1.0)}
    app = make_app(beat_schedule=plan)
    with scheduler(app, tmp_path) as made:
        made.tick()
        made._store._conn.execute("PRAGMA query_only = ON")
        run_until(made, START + 9.5)
        assert sent(app) == ["often"] * 9
        made._store._conn.execute("PRAGMA query_only = OFF")
        run_until(made, START + 15.5)
        assert sent(app).count("once") == 1
    assert caplog.text.count("can't be written (") == 1
    assert _rows(tmp_path)["once"][1:] == (1, fingerprint(clocked(IN_FIVE_S)), 0)


def test_a_stop_in_the_middle_of_a_send_loses_nothing(tmp_path: Path) -> None:
    """Celery closes the scheduler from a signal handler: the run in hand is sent after it."""
    app = make_app(beat_schedule={"a": job("a", 1.0), "b": job("b", 1.0)})

    class Stopped(WheelScheduler):
        stop = True

        def apply_entry(self, entry: Any, producer: Any = None) -> None:
            if self.stop:
                self.close()
                raise SystemExit
            super().apply_entry(entry, producer=producer)

    made = Stopped(app=app, schedule_filename=str(tmp_path / "schedule"))
    with pytest.raises(SystemExit):
        run_until(made, START + 2)
    made.close()
    with scheduler(app, tmp_path) as made:
        made.tick()
    assert sorted(sent(app)) == ["a", "b"]


def test_a_stock_file_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last runs that Celery's scheduler noted carry over; its file is kept beside ours."""
    file = str(tmp_path / "schedule")
    app = make_app(beat_schedule={"a": job("a", 3600.0), "b": job("b", crontab(minute=0))})
    app.set_current()
    stock = PersistentScheduler(app=app, schedule_filename=file)
    stock.schedule["a"].last_run_at = app.now() - timedelta(minutes=50)
    stock.schedule["a"].total_run_count = 42
    stock.close()
    with caplog.at_level(logging.INFO), scheduler(app, tmp_path) as made:
        assert made.schedule["a"].total_run_count == 42
        assert made.tick() <= 300
        assert "Took over 2 entries of stock schedule file" in caplog.text
        run_until(made, START + 601)
    assert sent(app) == ["a"]
    again = PersistentScheduler(app=app, schedule_filename=file + ".stock")
    assert again.schedule["a"].total_run_count == 42
    again.close()


def test_a_stock_file_of_another_timezone_is_reset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Taking over a file and changing the timezone at once forgets the runs, as Celery would."""
    file = str(tmp_path / "schedule")
    app = make_app("Asia/Tokyo", beat_schedule={"a": job("a", 3600.0)})
    app.set_current()
    stock = PersistentScheduler(app=app, schedule_filename=file)
    stock.schedule["a"].total_run_count = 42
    stock.close()
    other = make_app("UTC", beat_schedule={"a": job("a", 3600.0)})
    with scheduler(other, tmp_path) as made:
        assert made.schedule["a"].total_run_count == 0
    assert "Timezone changed from 'Asia/Tokyo' to 'UTC'" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ({"timezone": "UTC"}, {"timezone": "Europe/Berlin"}, "Timezone changed"),
        ({"enable_utc": True}, {"enable_utc": False}, "UTC changed"),
    ],
)
def test_another_timezone_resets_the_runs(
    before: Any, after: Any, says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with Celery, last runs noted under another timezone or UTC setting are forgotten."""
    app = make_app(beat_schedule={"a": job("a", 60.0)})
    app.conf.update(before)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 61)
    other = make_app(beat_schedule={"a": job("a", 60.0)})
    other.conf.update(after)
    with scheduler(other, tmp_path) as made:
        assert made.schedule["a"].total_run_count == 0
    assert f"Reset: {says}" in caplog.text
    assert _rows(tmp_path)["a"][1] == 0


@pytest.mark.parametrize("damage", ["garbage", "empty", "half", "pickle"])
def test_a_broken_file_is_replaced(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that can't be read is removed with one clear line, and beat starts anew."""
    file = tmp_path / "schedule"
    plan = {"a": job("a", 60.0), **{f"e{i}": job(f"e{i}", 3600.0) for i in range(500)}}
    app = make_app(beat_schedule=plan)
    with scheduler(app, tmp_path):
        pass
    whole = file.read_bytes()
    content = {
        "garbage": b"this is no database" * 500,
        "empty": b"",
        "half": whole[:100] + b"\xff" * 4000 + whole[4100 : len(whole) // 2],
        "pickle": pickle.dumps({"a": 1}),
    }[damage]
    file.write_bytes(content)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 61)
        assert made.schedule["a"].total_run_count == 1
    assert sent(app) == ["a"]
    assert caplog.text.count("Removing corrupted schedule file") == 1


def test_after_the_loss_of_the_file_a_past_one_off_is_not_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether it was sent is not known any more, so it isn't sent; one that is to come is."""
    plan = {
        "past": job("past", clocked(IN_FIVE_S)),
        "to come": job("to come", clocked(IN_FIVE_S + timedelta(minutes=1))),
    }
    app = make_app(beat_schedule=plan)
    (tmp_path / "schedule").write_bytes(b"no database" * 1000)
    app.wall += 10
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 70)
    assert sent(app) == ["to come"]
    assert "one-off 'past' is past and the file" in caplog.text


def test_a_file_has_one_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second beat with the same file stops with a clear error; after a close it may start."""
    monkeypatch.setattr("celery_wheel.beats.file._LOCK_WAIT_S", 0.05)
    app = make_app(beat_schedule={"a": job("a", 60.0)})
    with (
        scheduler(app, tmp_path),
        pytest.raises(ConfigError, match="is in use by another beat"),
        scheduler(app, tmp_path),
    ):
        pass
    with scheduler(app, tmp_path) as made:
        assert set(made.schedule) == {"a"}


def test_a_file_that_can_not_be_made_is_a_clear_error(tmp_path: Path) -> None:
    """A directory that does not exist is named, with what to do."""
    app = make_app()
    with (
        pytest.raises(ConfigError, match="in a directory that exists"),
        scheduler(app, tmp_path / "missing"),
    ):
        pass


def test_a_file_of_a_newer_release_is_left_alone(tmp_path: Path) -> None:
    """Its schema is not guessed at; the error says to upgrade."""
    app = make_app()
    with scheduler(app, tmp_path):
        pass
    with sqlite3.connect(tmp_path / "schedule") as conn:
        conn.execute("UPDATE meta SET value = '9' WHERE key = 'schema'")
    conn.close()
    with (
        pytest.raises(ConfigError, match="made by a newer release"),
        scheduler(app, tmp_path),
    ):
        pass
    assert (tmp_path / "schedule").exists()


def test_closing_twice_and_syncing_afterwards_is_harmless(tmp_path: Path) -> None:
    """Celery closes from the signal handler and again at the end of the loop."""
    app = make_app(beat_schedule={"a": job("a", 60.0)})
    with scheduler(app, tmp_path) as made:
        made.close()
        made.schedule["a"].total_run_count = 7
        made.schedule.touch("a")
        made.sync()
        made.close()


def test_a_lazy_scheduler_opens_nothing(tmp_path: Path) -> None:
    """The banner of beat makes a lazy one only to name it."""
    app = make_app(beat_schedule={"a": job("a", 60.0)})
    with scheduler(app, tmp_path, lazy=True) as made:
        assert made.info == f"    . db -> {tmp_path / 'schedule'}"
    assert list(tmp_path.iterdir()) == []


def test_beats_service_makes_it_by_path_and_by_alias(tmp_path: Path) -> None:
    """``-S celery_wheel.beat:WheelScheduler`` is resolved by Celery's own service."""
    app = make_app()
    service = Service(
        app,
        max_interval=9,
        schedule_filename=str(tmp_path / "schedule"),
        scheduler_cls="celery_wheel.beat:WheelScheduler",
    )
    made = service.get_scheduler()
    assert type(made) is WheelScheduler
    assert isinstance(made, PersistentScheduler)
    assert made.max_interval == 9
    made.close()


def test_entries_survive_copies_and_pickles() -> None:
    """An entry that is copied or pickled, as tools do, is the same entry, one-off or not."""
    app = make_app()
    entry = WheelEntry(name="a", app=app, **job("a", clocked(IN_FIVE_S)))
    for other in (copy.copy(entry), pickle.loads(pickle.dumps(entry))):
        assert other == entry
        assert other.one_off
        assert other.last_run_at == entry.last_run_at
    assert dict(entry)["one_off"] is True


def test_fingerprints_tell_schedules_apart() -> None:
    """Equal schedules have equal texts in every process, others don't."""
    app = make_app()
    plans = [
        lambda: WheelEntry(name="a", task="t", schedule=60.2, app=app).schedule,
        lambda: WheelEntry(name="a", task="t", schedule=60.1, app=app).schedule,
        lambda: crontab(minute=1),
        lambda: crontab(minute=2),
        lambda: clocked(IN_FIVE_S),
        lambda: clocked(IN_FIVE_S + timedelta(seconds=1)),
    ]
    texts = [fingerprint(plan()) for plan in plans]
    assert len(set(texts)) == len(plans)
    assert texts == [fingerprint(plan()) for plan in plans]
    assert "0x" not in "".join(texts)


def test_a_solar_fingerprint_is_stable() -> None:
    """Solar schedules have one, too."""
    pytest.importorskip("ephem", reason="solar schedules need the ephem package")
    assert fingerprint(solar("sunset", 1.0, 2.0)) == "solar ('sunset', 1.0, 2.0)"
