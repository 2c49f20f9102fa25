"""The scheduler's ticks, edits and slots, on a clock set by hand and a memory broker."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, ClassVar

import pytest
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import BaseSchedule, crontab, schedstate, schedule

from celery_wheel.beat import WheelEntry, WheelScheduler, WheelSchedulerMixin, clocked
from celery_wheel.beats.cronwheel import TICK_S
from celery_wheel.beats.entries import Schedule
from celery_wheel.errors import ConfigError
from tests.beat.support import START, job, make_app, run_until, scheduler, sent


def test_an_empty_schedule_sleeps_for_max_interval(tmp_path: Path) -> None:
    """With nothing to do, a tick asks to be called again after ``max_interval``."""
    app = make_app()
    with scheduler(app, tmp_path, max_interval=17) as made:
        assert made.tick() == 17
        assert sent(app) == []


def test_a_tick_never_sleeps_longer_than_max_interval(tmp_path: Path) -> None:
    """What is due in an hour is looked at every ``max_interval``; what is due before, then."""
    app = make_app(beat_schedule={"a": job("a", 3600.0)})
    with scheduler(app, tmp_path, max_interval=30) as made:
        assert made.tick() == 30
        app.wall += 3590
        assert made.tick() == pytest.approx(10, abs=TICK_S)


def test_all_that_is_due_is_sent_in_one_tick(tmp_path: Path) -> None:
    """A thousand entries due in one second need one tick, and go out in order of time."""
    plan = {f"e{i}": job(f"e{i}", 60 + (i % 7) / 10) for i in range(1000)}
    app = make_app(beat_schedule=plan)
    with scheduler(app, tmp_path) as made:
        made.tick()
        app.wall += 61
        made.tick()
        labels = sent(app)
    assert sorted(labels) == sorted(plan)
    assert [int(label[1:]) % 7 for label in labels] == sorted(int(x[1:]) % 7 for x in plan)


def test_nothing_is_sent_early_and_nothing_a_tick_late(tmp_path: Path) -> None:
    """Sleeping as told, each entry is sent within one tick of its time."""
    app = make_app(beat_schedule={f"{s}": job(f"{s}", s) for s in (0.3333, 1.0, 2.71828)})
    seen: list[tuple[str, float]] = []

    class Recorder(WheelScheduler):
        def apply_entry(self, entry: Any, producer: Any = None) -> None:
            seen.append((entry.name, app.wall))

    made = Recorder(app=app, schedule_filename=str(tmp_path / "s"))
    run_until(made, START + 100)
    made.close()
    for name, every_s in (("0.3333", 0.3333), ("1.0", 1.0), ("2.71828", 2.71828)):
        times = [at - START for label, at in seen if label == name]
        late = [at - every_s * (k + 1) for k, at in enumerate(times)]
        assert len(times) >= 100 / every_s - 1
        assert min(late) >= -1e-6
        assert max(late) <= TICK_S + 1e-6


def test_an_interval_does_not_drift(tmp_path: Path) -> None:
    """120 runs of a second, each 7 ms late, still end at the 120th second."""
    app = make_app(beat_schedule={"a": job("a", 1.0)})
    with scheduler(app, tmp_path) as made:
        while app.wall < START + 120.005:
            app.wall += made.tick() + 0.007
        made.tick()
        entry = made.schedule["a"]
    assert entry.total_run_count == 120
    assert entry.last_run_at.timestamp() == pytest.approx(START + 120, abs=1e-3)


def test_an_edit_of_one_of_many_delays_nobody(tmp_path: Path) -> None:
    """With 20 000 entries, changing one touches one node and the next send is on time."""
    plan = {f"e{i}": job(f"e{i}", 3600.0 + i) for i in range(20_000)}
    app = make_app(beat_schedule={**plan, "soon": job("soon", 5.0)})
    with scheduler(app, tmp_path) as made:
        made.tick()
        placed: list[str] = []
        hold = made._hold

        def counting(entry: Any, due_at: float, name: str | None = None) -> int:
            placed.append(entry.name)
            return hold(entry, due_at, name)

        made._hold = counting
        made.schedule["e7"] = made.Entry(name="e7", app=app, **job("e7", 3.0))
        assert made.tick() == pytest.approx(3, abs=TICK_S)
        assert placed == ["e7"]
        app.wall += 3.01
        made.tick()
        app.wall += 1.99
        made.tick()
    assert sent(app) == ["e7", "soon"]


def _replace(made: Any) -> None:
    made.schedule["a"] = made.Entry(name="a", app=made.app, **job("new", 5.0))


def _update_from_dict(made: Any) -> None:
    made.update_from_dict({"a": job("new", 5.0)})


def _update_entry(made: Any) -> None:
    made.schedule["a"].update(made.Entry(name="a", app=made.app, **job("new", 5.0)))


def _merge(made: Any) -> None:
    made.merge_inplace({"a": job("new", 5.0)})


def _set_attributes(made: Any) -> None:
    made.schedule["a"].args = ("new",)
    made.schedule["a"].schedule = schedule(5.0, app=made.app)


def _whole_dict(made: Any) -> None:
    made.schedule = {"a": made.Entry(name="a", app=made.app, **job("new", 5.0))}


def _plain_entry(made: Any) -> None:
    made.schedule |= {"a": ScheduleEntry(name="a", app=made.app, **job("new", 5.0))}


@pytest.mark.parametrize(
    "edit",
    [
        _replace,
        _update_from_dict,
        _update_entry,
        _merge,
        _set_attributes,
        _whole_dict,
        _plain_entry,
    ],
)
def test_every_way_to_edit_an_entry_is_seen(edit: Any, tmp_path: Path) -> None:
    """However an entry is changed, the new time and arguments hold from the next tick on."""
    app = make_app(beat_schedule={"a": job("old", 3600.0)})
    with scheduler(app, tmp_path) as made:
        made.tick()
        edit(made)
        assert made.tick() <= 5 + TICK_S
        app.wall += 5.01
        made.tick()
    assert sent(app) == ["new"]


@pytest.mark.parametrize(
    "remove",
    [
        lambda made: made.schedule.pop("a"),
        lambda made: made.schedule.__delitem__("a"),
        lambda made: made.schedule.clear(),
        lambda made: made.schedule.popitem(),
        lambda made: setattr(made, "schedule", {}),
        lambda made: made.merge_inplace({}),
    ],
)
def test_every_way_to_remove_an_entry_is_seen(remove: Any, tmp_path: Path) -> None:
    """A removed entry is not sent, and an empty wheel sleeps."""
    app = make_app(beat_schedule={"a": job("a", 5.0)})
    with scheduler(app, tmp_path) as made:
        made.tick()
        remove(made)
        app.wall += 10
        assert made.tick() == made.max_interval
    assert sent(app) == []


def test_add_returns_the_entry_and_places_it(tmp_path: Path) -> None:
    """``add`` works as in Celery, before and after the first tick."""
    app = make_app()
    with scheduler(app, tmp_path) as made:
        first = made.add(name="a", **job("a", 2.0))
        made.tick()
        made.add(name="b", **job("b", 1.0))
        assert first is made.schedule["a"]
        run_until(made, START + 2.1)
    assert sent(app) == ["b", "a", "b"]


def test_put_and_take_are_slots_of_the_wheel(tmp_path: Path) -> None:
    """``put`` gives the slot of an entry; ``take`` gives back what lies up to a slot, once."""
    app = make_app()
    with scheduler(app, tmp_path) as made:
        made.tick()
        cron = made.Entry(name="cron", app=app, **job("cron", crontab(minute="*/5")))
        interval = made.Entry(name="interval", app=app, **job("interval", 12.5))
        slots = {made.put(cron): cron, made.put(interval): interval}
        assert slots == {round((START + 300) * 100): cron, round((START + 12.5) * 100): interval}
        first = round((START + 12.5) * 100)
        assert made.take(first - 1) == []
        assert made.take(first) == [interval]
        assert made.take(first) == []
        assert made.take(round((START + 300) * 100)) == [cron]


def test_an_entry_that_raises_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A schedule that raises is logged and asked again after ``max_interval``."""

    class Broken(BaseSchedule):
        asked = 0

        def is_due(self, last_run_at: datetime) -> Any:
            Broken.asked += 1
            raise RuntimeError("no idea")

    app = make_app(beat_schedule={"bad": job("bad", Broken()), "good": job("good", 1.0)})
    with scheduler(app, tmp_path, max_interval=60) as made, caplog.at_level(logging.ERROR):
        run_until(made, START + 10.05)
        assert Broken.asked == 1
        run_until(made, START + 61)
        assert Broken.asked == 2
    assert sent(app).count("good") >= 60
    assert "Cannot calculate the next run of 'bad'" in caplog.text


def test_an_entry_that_can_not_be_copied_does_not_stop_the_others(tmp_path: Path) -> None:
    """A custom entry whose ``next`` raises is held back, not asked in a loop."""

    class Entry(WheelEntry):
        def _next_instance(self, last_run_at: Any = None) -> Any:
            if self.name == "bad":
                raise RuntimeError("no successor")
            return super()._next_instance(last_run_at)

        __next__ = next = _next_instance

    class Mine(WheelScheduler):
        Entry = None

    Mine.Entry = Entry
    app = make_app(beat_schedule={"bad": job("bad", 1.0), "good": job("good", 1.0)})
    made = Mine(app=app, schedule_filename=str(tmp_path / "s"))
    ticks = 0
    while app.wall < START + 3.05:
        app.wall += made.tick()
        ticks += 1
    made.close()
    assert sent(app) == ["good"] * 3
    assert ticks < 20


def test_a_custom_schedule_is_asked_as_celery_asks(tmp_path: Path) -> None:
    """A schedule that knows only ``is_due`` decides when it runs and when it is asked again."""

    class EveryOther(BaseSchedule):
        asked: ClassVar[list[float]] = []

        def is_due(self, last_run_at: datetime) -> Any:
            self.asked.append(app.wall - START)
            return schedstate(len(self.asked) % 3 == 0, 10.0)

        def __reduce__(self) -> Any:
            return EveryOther, ()

    app = make_app(beat_schedule={"a": job("a", EveryOther())})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 45)
    assert [round(at) for at in EveryOther.asked] == [0, 10, 20, 30, 40]
    assert sent(app) == ["a"]


def test_a_useless_answer_of_is_due_waits_for_max_interval(tmp_path: Path) -> None:
    """``None`` or infinity for the next time to look means ``max_interval``."""

    class Vague(BaseSchedule):
        def is_due(self, last_run_at: datetime) -> Any:
            return False, None

    app = make_app(beat_schedule={"a": job("a", Vague())})
    with scheduler(app, tmp_path, max_interval=40) as made:
        assert made.tick() == pytest.approx(40, abs=TICK_S)


def test_a_failed_send_is_logged_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Arguments that can't be encoded are one error, as with Celery."""
    plan = {"bad": job("bad", 1.0, kwargs={"x": object()}), "good": job("good", 1.0)}
    app = make_app(beat_schedule=plan)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 2.05)
        assert made.schedule["bad"].total_run_count == 2
    assert sent(app) == ["good", "good"]
    assert "Message Error" in caplog.text


def test_what_was_not_sent_when_the_broker_failed_is_due_yet(tmp_path: Path) -> None:
    """No connection in the middle of a tick: the error goes up as with Celery, nothing is lost."""
    app = make_app(beat_schedule={"a": job("a", 1.0), "b": job("b", 1.0)})

    class Flaky(WheelScheduler):
        fail = False

        @property
        def producer(self) -> Any:
            if self.fail:
                raise OSError("no broker")
            self.fail = True
            return app.amqp.Producer(self.connection)

    made = Flaky(app=app, schedule_filename=str(tmp_path / "s"))
    made.tick()
    app.wall += 1.01
    with pytest.raises(OSError, match="no broker"):
        made.tick()
    made.fail = False
    made.tick()
    made.close()
    assert sorted(sent(app)) == ["a", "b"]


def test_an_entry_removed_by_another_is_not_sent(tmp_path: Path) -> None:
    """An edit between two sends of one tick counts already."""
    app = make_app(beat_schedule={"a": job("a", 1.0), "b": job("b", 1.0)})

    class Mine(WheelScheduler):
        def apply_entry(self, entry: Any, producer: Any = None) -> None:
            super().apply_entry(entry, producer=producer)
            self.schedule.pop("b" if entry.name == "a" else "a", None)

    made = Mine(app=app, schedule_filename=str(tmp_path / "s"))
    run_until(made, START + 3.05)
    made.close()
    labels = sent(app)
    assert len(labels) == 3
    assert len(set(labels)) == 1


def test_messages_carry_what_celerys_carry(tmp_path: Path) -> None:
    """Options, lazy arguments and the header of beat are those of Celery's scheduler."""
    app = make_app(beat_schedule={"a": job("a", 1.0, options={"priority": 3, "expires": 60})})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 1.05)
    with app.connection_for_read() as connection:
        queue = app.amqp.queues[app.conf.task_default_queue].bind(connection.default_channel)
        message = queue.get(no_ack=True)
    assert message.headers["celery_beat_task"] is True
    assert message.headers["expires"]
    assert message.properties["priority"] == 3


def test_a_one_off_is_sent_once(tmp_path: Path) -> None:
    """``clocked`` and ``one_off`` entries are sent once and hold no slot afterwards."""
    at = datetime.fromtimestamp(START + 5, timezone.utc)
    plan = {
        "clocked": job("clocked", clocked(at)),
        "flagged": job("flagged", 3.0, one_off=True),
        "naive": job("naive", clocked(datetime(2025, 6, 2, 12, 0, 7))),
    }
    app = make_app("Europe/Berlin", beat_schedule=plan)
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 60)
        assert made._heap == []
    assert sent(app) == ["flagged", "clocked", "naive"]


def test_a_one_off_with_a_new_schedule_is_a_new_one_off(tmp_path: Path) -> None:
    """Moving a one-off that was sent arms it again; changing its arguments does not."""
    at = datetime.fromtimestamp(START + 5, timezone.utc)
    app = make_app(beat_schedule={"a": job("a", clocked(at))})
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 10)
        made.merge_inplace({"a": job("b", clocked(at))})
        run_until(made, START + 20)
        made.merge_inplace({"a": job("c", clocked(at + timedelta(seconds=25)))})
        run_until(made, START + 40)
    assert sent(app) == ["a", "c"]


def test_clocked_wants_a_datetime() -> None:
    """Anything else is one clear error."""
    with pytest.raises(ConfigError, match="give a datetime"):
        clocked("tomorrow")  # type: ignore[arg-type]


def test_the_schedule_is_a_dict_that_knows_what_was_touched() -> None:
    """Every mutating method notes exactly the names it changed."""
    held = Schedule(a=1, b=2)
    assert held.touched == held.dirty == {"a", "b"}
    for change, names in (
        (lambda: held.__setitem__("a", 3), {"a"}),
        (lambda: held.update({"b": 4}, c=5), {"b", "c"}),
        (lambda: held.setdefault("c", 6), set()),
        (lambda: held.setdefault("d", 6), {"d"}),
        (lambda: held.pop("missing", None), set()),
        (lambda: held.pop("d"), {"d"}),
        (lambda: held.__ior__({"e": 7}), {"e"}),
        (held.popitem, {"e"}),
        (lambda: held.__delitem__("c"), {"c"}),
        (held.clear, {"a", "b"}),
    ):
        held.touched.clear()
        held.dirty.clear()
        change()
        assert held.touched == held.dirty == names
    assert type(held.copy()) is dict


def test_the_mixin_serves_a_plain_scheduler() -> None:
    """Over Celery's in-memory ``Scheduler`` edits are seen by name, too."""

    class Mine(WheelSchedulerMixin, Scheduler):
        pass

    app = make_app(beat_schedule={"a": job("a", 2.0)})
    made = Mine(app=app)
    made.tick()
    made.schedule["b"] = made.Entry(name="b", app=app, **job("b", 1.0))
    run_until(made, START + 2.05)
    made.schedule.pop("b")
    run_until(made, START + 4.05)
    made.close()
    assert sent(app) == ["b", "a", "b", "a"]


def test_the_mixin_serves_a_scheduler_that_makes_its_dict_anew() -> None:
    """A new dict is compared entry by entry; what did not change keeps its slot and its rhythm."""
    app = make_app()
    rows = {"a": 2.0, "b": 3.0}

    class Mine(WheelSchedulerMixin, Scheduler):
        made_from: Any = None
        cache: Any = None

        @property
        def schedule(self) -> Any:
            if self.made_from != rows:
                self.made_from = dict(rows)
                old = self.cache or {}
                self.cache = {
                    name: self.Entry(
                        name=name,
                        app=app,
                        last_run_at=old[name].last_run_at if name in old else None,
                        **job(name, every_s),
                    )
                    for name, every_s in rows.items()
                }
            return self.cache

        def setup_schedule(self) -> None:
            pass

        def reserve(self, entry: Any) -> Any:
            new = next(entry)
            self.cache[entry.name] = new
            return new

    made = Mine(app=app)
    run_until(made, START + 4.05)
    rows.update(c=1.0)
    del rows["b"]
    run_until(made, START + 6.02)
    assert sent(app) == ["a", "b", "a", "c", "a"]


def test_heap_is_there_for_those_who_look() -> None:
    """``_heap`` shows Celery's events, soonest first; setting it to ``None`` places all anew."""

    class Mine(WheelSchedulerMixin, Scheduler):
        pass

    app = make_app(beat_schedule={"a": job("a", 2.0), "b": job("b", 1.0)})
    made = Mine(app=app)
    assert made._heap is None
    made.tick()
    assert [event.entry.name for event in made._heap] == ["b", "a"]
    assert made._heap[0].time == pytest.approx(START + 1)
    made._heap = None
    made.populate_heap()
    made.tick()
    assert [event.entry.name for event in made._heap] == ["b", "a"]
    made.close()


def test_solar_events_are_sent(tmp_path: Path) -> None:
    """A sunset in Greenwich is sent once a day, at the time the schedule itself gives."""
    pytest.importorskip("ephem", reason="solar schedules need the ephem package")
    from celery.schedules import solar

    app = make_app()
    app.conf.beat_schedule = {"a": job("a", solar("sunset", 51.48, 0.0, app=app))}
    with scheduler(app, tmp_path) as made:
        run_until(made, START + 3 * 86400)
    assert sent(app) == ["a"] * 3
