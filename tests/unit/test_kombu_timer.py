"""The Kombu-compatible timer: the contract, a real hub, the thread, a real worker."""

from __future__ import annotations

import json
import logging
import random
import subprocess
import sys
import threading
import time
import weakref
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kombu.asynchronous.hub import Hub
from kombu.asynchronous.timer import Entry as KombuEntry
from kombu.asynchronous.timer import Timer as KombuTimer

from celery_wheel.clock import FakeClock
from celery_wheel.errors import WheelStopped
from celery_wheel.timer import Entry, Timer
from tests.support.waiter import FakeWaiter


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def timer(clock: FakeClock) -> Timer:
    return Timer(max_interval=10, clock=clock)


def fire(timer: Timer) -> float | None:
    """Run what is due as a loop does; how long the loop is to wait."""
    for wait_s, entry in timer:
        if entry is None:
            return wait_s
        timer.apply_entry(entry)
    raise AssertionError


def test_entries_run_at_their_time_with_arguments(timer: Timer, clock: FakeClock) -> None:
    """Exactly at the ETA, not a moment before; the loop is told how long to wait."""
    ran: list[Any] = []
    timer.call_after(1.0, lambda *a, **k: ran.append((a, k)), (1, 2), {"three": 3})
    timer.call_at(2.0005, ran.append, ("second",))
    assert fire(timer) == pytest.approx(1.0)
    clock.advance(0.999)
    fire(timer)
    assert ran == []
    clock.advance(0.001)
    fire(timer)
    assert ran == [((1, 2), {"three": 3})]
    clock.advance(1.0)
    assert fire(timer) == pytest.approx(0.0005)
    clock.advance(0.0005)
    assert fire(timer) is None
    assert ran[1:] == ["second"]


def test_waits_are_capped_by_max_interval(timer: Timer) -> None:
    """The loop is never asked to wait longer than max_interval."""
    timer.call_after(10_000, int)
    assert fire(timer) == 10
    assert Timer().max_interval == KombuTimer().max_interval


def test_one_instant_runs_by_priority_then_in_order(timer: Timer, clock: FakeClock) -> None:
    """Low priority numbers first, as in Kombu; equal ones as they were entered."""
    ran: list[str] = []
    for name, priority in (("b1", 5), ("b2", 5), ("c", 9), ("a", 1), ("b3", 5)):
        timer.call_at(3.0, ran.append, (name,), priority=priority)
    timer.call_at(2.9999, ran.append, ("before",), priority=99)
    assert [item.entry.args[0] for item in timer.queue] == ["before", "a", "b1", "b2", "b3", "c"]
    clock.advance(3.0)
    fire(timer)
    assert ran == ["before", "a", "b1", "b2", "b3", "c"]


@pytest.mark.parametrize("how", ["entry.cancel", "timer.cancel", "canceled", "cancelled"])
@pytest.mark.parametrize("delay", [0.0, 100.0])
def test_cancel_frees_at_once(timer: Timer, clock: FakeClock, how: str, delay: float) -> None:
    """However it is cancelled, function and arguments are let go, and it does not run."""

    class Payload:
        pass

    payload = Payload()
    ref = weakref.ref(payload)
    entry = timer.call_after(delay, lambda _: pytest.fail("ran"), (payload,))
    del payload
    assert ref() is not None
    if how == "entry.cancel":
        entry.cancel()
    elif how == "timer.cancel":
        timer.cancel(entry)
    else:
        setattr(entry, how, True)
    assert ref() is None
    assert entry.canceled
    assert entry.cancelled
    assert len(timer) == 0
    assert timer.queue == []
    assert "cancelled" in repr(entry)
    assert entry() is None
    clock.advance(200)
    assert fire(timer) is None
    entry.cancel()


def test_cancelled_entries_do_not_pile_up(timer: Timer) -> None:
    """A million entered and cancelled leave nothing in the timer; Kombu keeps them all."""
    for _ in range(5000):
        timer.call_after(3600, int).cancel()
    assert len(timer) == 0
    assert fire(timer) is None


def test_repeated_entries_go_on_until_cancelled(timer: Timer, clock: FakeClock) -> None:
    """One entry for the whole series; it goes on after an exception; cancel ends it."""
    ran: list[float] = []

    def work(n: int) -> None:
        ran.append(clock.monotonic())
        if len(ran) == 2:
            raise ValueError(n)
        if len(ran) == 4:
            entry.cancel()

    entry = timer.call_repeatedly(1.5, work, (7,))
    for _ in range(20):
        clock.advance(0.5)
        fire(timer)
    assert ran == [1.5, 3.0, 4.5, 6.0]
    assert len(timer) == 0


def test_datetimes_are_etas(timer: Timer, clock: FakeClock) -> None:
    """Aware ones of any zone, naive ones as UTC, past ones at once."""
    ran: list[str] = []
    now = datetime.fromtimestamp(clock.wall_ms() / 1000, timezone.utc)
    east = timezone(timedelta(hours=9))
    timer.call_at(now.astimezone(east) + timedelta(seconds=2), ran.append, ("aware",))
    timer.call_at(now.replace(tzinfo=None) + timedelta(seconds=1), ran.append, ("naive",))
    timer.call_at(now - timedelta(days=1), ran.append, ("past",))
    timer.enter_at(Entry(ran.append, ("now",)))
    fire(timer)
    assert ran == ["past", "now"]
    clock.advance(1)
    fire(timer)
    assert ran[2:] == ["naive"]
    clock.advance(1)
    fire(timer)
    assert ran[3:] == ["aware"]


def test_etas_that_make_no_sense_go_to_on_error_or_raise(clock: FakeClock) -> None:
    """Without on_error the caller gets the error; with it the entry is dropped, as in Kombu."""
    errors: list[Exception] = []
    with pytest.raises(ValueError, match="nan"):
        Timer(clock=clock).call_at(float("nan"), int)
    timer = Timer(clock=clock, on_error=errors.append)
    assert timer.call_at(float("nan"), int) is None
    assert "nan" in str(errors[0])
    timer.call_at(float("inf"), int)
    timer.call_at(float("-inf"), errors.append, (ValueError("ran"),))
    fire(timer)
    assert str(errors[1]) == "ran"
    assert len(timer) == 1


def test_exceptions_go_to_on_error_or_the_log(
    clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that fails stops nothing."""
    errors: list[Exception] = []
    for timer in (Timer(clock=clock), Timer(clock=clock, on_error=errors.append)):
        timer.call_after(0, lambda: 1 / 0)
        with caplog.at_level(logging.ERROR):
            fire(timer)
    assert len(errors) == 1
    assert caplog.text.count("Error in timer: ZeroDivisionError") == 1


def test_what_looks_at_a_timer_sees_what_it_expects(timer: Timer) -> None:
    """queue, schedule.queue, len, empty, truth, and a _queue that stays the same object."""
    cached = timer._queue
    assert not cached
    assert timer
    assert timer.empty()
    late = timer.call_at(100, int, ("late",), priority=6)
    soon = timer.call_at(1, int, ("soon",))
    assert cached
    assert len(cached) == len(timer) == 2
    assert timer._queue is cached
    assert [tuple(item) for item in timer.queue] == [(1, 0, soon), (100, 6, late)]
    assert timer.schedule.queue[1].eta == 100
    assert timer.schedule.queue[1].priority == 6
    assert timer.schedule.queue[1].entry.args == ("late",)
    assert {item.entry for item in cached} == {soon, late}
    timer.clear()
    assert not cached
    assert timer.queue == []
    late.cancel()
    assert len(timer) == 0


def test_entries_of_kombu_are_accepted(timer: Timer, clock: FakeClock) -> None:
    """A plain Kombu Entry runs and can be cancelled by the timer or by its flag."""
    ran: list[str] = []
    entries = [KombuEntry(ran.append, (name,)) for name in ("ran", "timer", "flag")]
    for entry in entries:
        assert timer.enter_after(1.0, entry) is entry
    timer.cancel(entries[1])
    assert len(timer) == 2
    entries[2].cancel()
    clock.advance(1.0)
    fire(timer)
    assert ran == ["ran"]
    assert len(timer) == 0


def test_an_entry_cancelled_before_it_is_entered_is_left_out(timer: Timer) -> None:
    """As in Kombu it never runs; here it takes no room either."""
    entry = Entry(int)
    entry.cancel()
    assert timer.enter_after(1, entry) is entry
    assert len(timer) == 0


def test_it_agrees_with_kombus_timer_on_random_walks() -> None:
    """Entered, cancelled and run at random, both timers run the same in the same order."""
    for seed in range(60):
        rng = random.Random(seed)
        clock = FakeClock()
        ours, theirs = Timer(clock=clock), KombuTimer()
        ran: list[list[int]] = [[], []]
        loop = theirs.__iter__(nowfun=clock.monotonic)
        entries = []
        for i in range(120):
            if rng.random() < 0.7:
                eta = clock.monotonic() + rng.choice([0.001, 0.1, 5.0, 4000.0]) * rng.random()
                entries.append(
                    (
                        ours.call_at(eta, ran[0].append, (i,)),
                        theirs.call_at(eta, ran[1].append, (i,)),
                    )
                )
            elif entries and rng.random() < 0.5:
                for entry in entries.pop(rng.randrange(len(entries))):
                    entry.cancel()
            else:
                clock.advance(rng.choice([0.0, 0.004, 0.05, 2.0, 3000.0]) * rng.random())
                fire(ours)
                for _, entry in loop:
                    if entry is None:
                        break
                    entry()
                assert ran[0] == ran[1]
        assert [(i.eta, i.entry.args) for i in ours.queue] == [
            (i.eta, tuple(i.entry.args)) for i in theirs.queue if not i.entry.canceled
        ]


def test_a_real_hub_runs_on_it() -> None:
    """Hub(timer=Timer()): call_later, call_at, call_repeatedly, cancel and close work."""
    timer = Timer(max_interval=10.0)
    hub = Hub(timer=timer)
    ran: list[str] = []
    try:
        hub.add_reader(hub._create_waker().fileno(), lambda *_: None)
        hub.run_once()
        hub.call_later(0.02, ran.append, "later")
        hub.call_at(time.monotonic() + 0.04, ran.append, "at")
        repeated = hub.call_repeatedly(0.01, ran.append, "repeated")
        hub.call_later(0.03, ran.append, "cancelled").cancel()
        for _ in range(200):
            hub.run_once()
            if ran.count("repeated") >= 8 and "at" in ran:
                break
        repeated.cancel()
        assert ran.count("later") == ran.count("at") == 1
        assert ran.index("later") < ran.index("at")
        assert ran.count("repeated") >= 8
        assert "cancelled" not in ran
        assert not timer._queue
    finally:
        hub.close()


def test_other_threads_may_enter_and_cancel_while_a_loop_runs() -> None:
    """Nothing is lost or run twice when many threads use the timer of a loop."""
    timer = Timer()
    per_thread, threads = 1000, 4
    ran = [0] * (per_thread * threads)
    prevented = [0] * len(ran)

    def note(i: int) -> None:
        ran[i] += 1

    def work(base: int) -> None:
        for i in range(base, base + per_thread):
            entry = timer.call_after((i % 5) / 1000, note, (i,))
            if i % 3 == 0:
                # Whether it had begun is for the counting below.
                entry.cancel()
                prevented[i] = 1

    workers = [threading.Thread(target=work, args=(n * per_thread,)) for n in range(threads)]
    for thread in workers:
        thread.start()
    while any(thread.is_alive() for thread in workers) or timer._queue:
        fire(timer)
    assert all(a == 1 or (b == 1 and a == 0) for a, b in zip(ran, prevented, strict=True))


@pytest.fixture
def waiter() -> FakeWaiter:
    return FakeWaiter()


def test_the_thread_starts_with_the_first_entry_and_wakes_exactly(waiter: FakeWaiter) -> None:
    """As worker_timer: on_tick makes it threaded, it waits for the next entry, stop ends it."""
    ticks: list[float] = []
    started: list[Timer] = []
    ran: list[float] = []
    timer = Timer(
        max_interval=1.0,
        on_tick=ticks.append,
        on_start=started.append,
        clock=waiter.clock,
        waiter=waiter,
    )
    assert not timer.is_alive()
    timer.call_after(30.0, lambda: ran.append(waiter.clock.monotonic()))
    assert started == [timer]
    assert timer.running
    waiter.advance()
    assert waiter.asked == 30.0
    assert ticks[-1] == 30.0
    timer.call_after(2.0, lambda: ran.append(waiter.clock.monotonic()))
    waiter.advance()
    assert waiter.asked == 2.0
    waiter.advance(2.0)
    waiter.advance(28.0)
    assert ran == [2.0, 30.0]
    assert waiter.asked is None
    timer.stop()
    assert not timer.is_alive()
    assert not timer.running
    with pytest.raises(WheelStopped, match="make a new one"):
        timer.call_after(1, int)
    timer.stop()


def test_the_thread_survives_errors_and_may_stop_itself(
    waiter: FakeWaiter, caplog: pytest.LogCaptureFixture
) -> None:
    """An entry that raises is logged; one that stops its own timer does not wait for itself."""
    with (
        caplog.at_level(logging.ERROR),
        Timer(threaded=True, clock=waiter.clock, waiter=waiter) as timer,
    ):
        timer.call_after(1, lambda: 1 / 0)
        timer.enter(Entry(timer.stop), waiter.clock.monotonic() + 2)
        waiter.advance(1)
        with timer.mutex:
            waiter.clock.advance(1)
            timer.not_empty.notify_all()
        timer.join(30)
        assert not timer.is_alive()
    assert "ZeroDivisionError" in caplog.text


def test_one_step_by_hand(timer: Timer, clock: FakeClock) -> None:
    """next() runs one entry that is due, or tells how long to wait."""
    ran: list[int] = []
    timer.call_after(1.0, ran.append, (1,))
    assert next(timer) == pytest.approx(1.0)
    clock.advance(1.0)
    assert next(timer) is None
    assert ran == [1]


def test_exit_after_raises_where_the_entries_run(timer: Timer, clock: FakeClock) -> None:
    """SystemExit is not swallowed."""
    timer.exit_after(1.0)
    clock.advance(1.0)
    with pytest.raises(SystemExit):
        fire(timer)


WORKER = """
import json, sys, time
from types import SimpleNamespace
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.worker import control

app = Celery("t", broker="memory://", backend="cache+memory://", set_as_current=True)
app.conf.worker_timer = "celery_wheel.timer:Timer"
app.conf.worker_hijack_root_logger = False
ran = []

@app.task
def probe(label, due):
    ran.append((label, time.time() - due))

def until(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)

with start_worker(app, pool=sys.argv[1], concurrency=2, perform_ping_check=False) as worker:
    far = probe.apply_async(("far", time.time() + 600), countdown=600)
    until(lambda: len(worker.timer.queue))
    listed = control.scheduled(SimpleNamespace(consumer=worker.consumer))
    for i in range(5):
        probe.apply_async((f"near{i}", time.time() + 3), countdown=3)
    until(lambda: len(ran) == 5)
    held = len(worker.timer)
print(json.dumps({
    "kind": type(worker.timer).__module__,
    "listed": [item["request"]["id"] for item in listed] == [far.id],
    "priority": listed[0]["priority"],
    "ran": ran,
    "held": held,
    "alive": worker.timer.is_alive(),
}))
"""


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_real_worker_runs_on_it(pool: str, tmp_path: Path) -> None:
    """worker_timer: ETA tasks run on time, inspect lists them, the worker stops cleanly."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    result = subprocess.run(
        [sys.executable, str(script), pool],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": ".", "PATH": ""},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    assert report["kind"] == "celery_wheel.timer"
    assert report["listed"]
    assert report["priority"] == 6
    assert sorted(label for label, _ in report["ran"]) == [f"near{i}" for i in range(5)]
    assert all(late >= 0 for _, late in report["ran"])
    assert report["held"] >= 1
    assert not report["alive"]
