"""The standalone engine, on a fake clock and, where threads race, on the real one."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_wheel.errors import WheelStopped
from celery_wheel.wheels.timer import RECHECK_S, Handle, WheelTimer
from tests.support.waiter import FakeWaiter

TICK = 0.125  # a power of two: sums of it are exact


class Inline(Executor):
    """Runs at once, in the thread that submits: what ran is known when the timer is idle."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Held(Inline):
    """Keeps what is submitted until told to run it."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls.append(lambda: fn(*args, **kwargs))
        return Future()

    def run(self) -> None:
        calls, self.calls = self.calls, []
        for call in calls:
            call()


@pytest.fixture
def waiter() -> FakeWaiter:
    return FakeWaiter()


@pytest.fixture
def timer(waiter: FakeWaiter) -> Iterator[WheelTimer]:
    timer = WheelTimer(Inline(), tick_s=TICK, clock=waiter.clock, waiter=waiter)
    yield timer
    timer.shutdown()


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def slow_timer(waiter: FakeWaiter, held: Held) -> Iterator[WheelTimer]:
    timer = WheelTimer(held, tick_s=TICK, clock=waiter.clock, waiter=waiter)
    yield timer
    timer.shutdown()


def wall_s(waiter: FakeWaiter) -> float:
    return waiter.clock.wall_ms() / 1000


@pytest.mark.parametrize("kind", ["hierarchical", "hashed"])
def test_relative_times_are_never_early_and_at_most_a_tick_late(
    waiter: FakeWaiter, kind: str
) -> None:
    """Each function runs at the first tick at or after its time, on either wheel."""
    timer = WheelTimer(Inline(), tick_s=TICK, kind=kind, size=8, clock=waiter.clock, waiter=waiter)
    ran: list[tuple[float, float]] = []
    for i in range(100):
        delay = i * 0.11
        timer.submit(lambda d=delay: ran.append((d, waiter.clock.monotonic())), delay_s=delay)
    for _ in range(100):
        waiter.advance(TICK)
    assert len(ran) == 100
    assert all(0 <= at - delay < TICK for delay, at in ran)
    assert timer.shutdown() == []


def test_it_sleeps_until_what_is_next(timer: WheelTimer, waiter: FakeWaiter) -> None:
    """The thread waits for the next bucket exactly, and without end when idle."""
    timer.submit(int, delay_s=30.0)
    waiter.advance()
    assert waiter.asked == 30.0
    waiter.advance(30.0)
    assert waiter.asked is None


def test_absolute_times_by_datetime_and_by_seconds(timer: WheelTimer, waiter: FakeWaiter) -> None:
    """An absolute time is an aware datetime of any timezone or epoch seconds; the past is now."""
    now = datetime.fromtimestamp(wall_s(waiter), timezone(timedelta(hours=5)))
    ran: list[str] = []
    timer.submit(lambda: ran.append("datetime"), at=now + timedelta(seconds=2))
    timer.submit(lambda: ran.append("seconds"), at=wall_s(waiter) + 1)
    timer.submit(lambda: ran.append("past"), at=now - timedelta(days=1))
    waiter.advance()
    assert ran == ["past"]
    waiter.advance(0.99)
    assert ran == ["past"]
    waiter.advance(0.01)
    assert ran == ["past", "seconds"]
    waiter.advance(1.0)
    assert ran == ["past", "seconds", "datetime"]


def test_absolute_times_follow_a_clock_that_is_set_forward(
    timer: WheelTimer, waiter: FakeWaiter
) -> None:
    """After a jump (or a suspend) what is overdue by the wall clock runs; delays don't move."""
    ran: list[str] = []
    timer.submit(lambda: ran.append("wall"), at=wall_s(waiter) + 3600)
    timer.submit(lambda: ran.append("delay"), delay_s=3600)
    waiter.advance()
    assert waiter.asked == RECHECK_S
    waiter.advance(3600, wall_only=True)
    assert ran == ["wall"]
    waiter.advance(3600)
    assert ran == ["wall", "delay"]


def test_absolute_times_follow_a_clock_that_is_set_back(
    timer: WheelTimer, waiter: FakeWaiter
) -> None:
    """After a step back nothing runs before the wall clock says so, old or new."""
    ran: list[str] = []
    start = wall_s(waiter)
    timer.submit(lambda: ran.append("old"), at=start + 60)
    waiter.advance(10)
    waiter.advance(-100, wall_only=True)
    timer.submit(lambda: ran.append("new"), at=start + 5)
    waiter.advance(94.5)
    assert ran == []
    waiter.advance(0.5)
    assert ran == ["new"]
    waiter.advance(54.875)
    assert ran == ["new"]
    waiter.advance(TICK)
    assert ran == ["new", "old"]


def test_the_clock_is_not_watched_while_nothing_follows_it(
    timer: WheelTimer, waiter: FakeWaiter
) -> None:
    """Relative times alone cost no wake-ups; the first absolute one starts the watch."""
    timer.submit(int, delay_s=500)
    waiter.advance()
    assert waiter.asked == 500
    handle = timer.submit(int, at=wall_s(waiter) + 400)
    waiter.advance()
    assert waiter.asked == RECHECK_S
    handle.cancel()
    waiter.advance()
    assert waiter.asked == 500


def test_cancel_prevents_and_frees(timer: WheelTimer, waiter: FakeWaiter) -> None:
    """A cancelled function does not run and is let go; cancel is told once."""

    class Work:
        def __call__(self) -> None:
            raise AssertionError

    work = Work()
    ref = weakref.ref(work)
    handle = timer.submit(work, delay_s=1)
    del work
    assert timer.pending == 1
    assert handle.cancel()
    assert ref() is None
    assert not handle.cancel()
    assert not handle.reschedule(delay_s=1)
    assert timer.pending == 0
    waiter.advance(2)


def test_cancel_reaches_what_waits_in_the_executor(
    slow_timer: WheelTimer, waiter: FakeWaiter, held: Held
) -> None:
    """Until a function has begun it can be cancelled or moved; what has run can't."""
    ran: list[str] = []
    gone = slow_timer.submit(lambda: ran.append("gone"), delay_s=1)
    moved = slow_timer.submit(lambda: ran.append("moved"), delay_s=1)
    kept = slow_timer.submit(lambda: ran.append("kept"), delay_s=1)
    waiter.advance(1)
    assert len(held.calls) == 3
    assert gone.cancel()
    assert moved.reschedule(delay_s=1)
    held.run()
    assert ran == ["kept"]
    assert not kept.cancel()
    assert not kept.reschedule(delay_s=1)
    waiter.advance(1)
    held.run()
    assert ran == ["kept", "moved"]


def test_reschedule_moves_between_both_clocks(timer: WheelTimer, waiter: FakeWaiter) -> None:
    """A handle moved earlier, later, to an absolute time and back runs once, at the last one."""
    ran: list[float] = []
    handle = timer.submit(lambda: ran.append(waiter.clock.monotonic()), delay_s=100)
    assert handle.reschedule(delay_s=1)
    assert handle.reschedule(at=wall_s(waiter) + 50)
    assert handle.reschedule(delay_s=20)
    waiter.advance(19.875)
    assert ran == []
    waiter.advance(100)
    assert len(ran) == 1
    assert not handle.reschedule(delay_s=1)


def test_repeated_runs_do_not_drift(timer: WheelTimer, waiter: FakeWaiter) -> None:
    """Runs are planned at first + n × interval, however late each one is noticed."""
    ran: list[float] = []
    timer.every(1.0, lambda: ran.append(waiter.clock.monotonic()), first_s=0.5)
    for _ in range(40):
        waiter.advance(0.375)
    planned = [0.5 + n for n in range(len(ran))]
    assert len(ran) == 15
    assert all(0 <= at - plan < 0.375 for at, plan in zip(ran, planned, strict=True))


def test_repeated_runs_never_overlap_and_missed_ones_are_counted(
    slow_timer: WheelTimer, waiter: FakeWaiter, held: Held
) -> None:
    """While a run is busy the next is skipped; a gap in time is one run, not many."""
    ran: list[int] = []
    handle = slow_timer.every(1.0, lambda: ran.append(1))
    waiter.advance(1.0)
    waiter.advance(1.0)
    assert len(held.calls) == 1
    assert handle.skipped == 1
    held.run()
    waiter.advance(10.0)
    assert len(held.calls) == 1
    assert handle.skipped == 10
    held.run()
    assert len(ran) == 2
    assert handle.cancel()
    waiter.advance(5.0)
    assert held.calls == []


def test_a_repeated_function_may_cancel_or_move_itself(
    timer: WheelTimer, waiter: FakeWaiter
) -> None:
    """From inside: reschedule shifts the next run, cancel ends the series."""
    ran: list[float] = []
    handles: list[Handle] = []

    def work() -> None:
        ran.append(waiter.clock.monotonic())
        if len(ran) == 1:
            assert handles[0].reschedule(delay_s=5)
        if len(ran) == 3:
            assert handles[0].cancel()

    handles.append(timer.every(1.0, work))
    for _ in range(20):
        waiter.advance(1.0)
    assert ran == [1.0, 6.0, 7.0]


def test_a_function_that_raises_is_logged_and_survived(
    timer: WheelTimer, waiter: FakeWaiter, caplog: pytest.LogCaptureFixture
) -> None:
    """One log line with the traceback; the series and the others go on."""
    ran: list[int] = []

    def fail() -> None:
        ran.append(1)
        raise ValueError("bad")

    timer.every(1.0, fail)
    with caplog.at_level(logging.ERROR):
        waiter.advance(1.0)
        waiter.advance(1.0)
    assert ran == [1, 1]
    assert caplog.text.count("ValueError: bad") == 2


def test_shutdown_returns_what_did_not_run_by_time(waiter: FakeWaiter) -> None:
    """The handles come back in order, functions intact; the timer refuses more."""
    timer = WheelTimer(Inline(), tick_s=TICK, clock=waiter.clock, waiter=waiter)
    last = timer.submit(int, at=wall_s(waiter) + 9)
    first = timer.submit(int, delay_s=1)
    series = timer.every(5, int)
    timer.submit(int, delay_s=0.5)
    waiter.advance(0.5)
    assert timer.shutdown() == [first, series, last]
    assert first.fn is int
    assert timer.shutdown() == []
    with pytest.raises(WheelStopped, match="make a new one"):
        timer.submit(int, delay_s=1)
    with pytest.raises(WheelStopped, match="make a new one"):
        timer.every(1, int)


def test_an_executor_that_refuses_leaves_the_handle_unprocessed(
    waiter: FakeWaiter, caplog: pytest.LogCaptureFixture
) -> None:
    """Work that a closed executor would not take is logged, and returned by shutdown."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    timer = WheelTimer(pool, tick_s=TICK, clock=waiter.clock, waiter=waiter)
    handle = timer.submit(int, delay_s=1)
    gone = timer.submit(int, delay_s=1)
    with caplog.at_level(logging.ERROR):
        waiter.advance(1)
    assert "the executor refused" in caplog.text
    assert gone.cancel()
    assert timer.shutdown() == [handle]


def test_the_context_manager_waits_for_what_was_handed_over() -> None:
    """Leaving the block returns when running functions have ended."""
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        ended.set()

    with WheelTimer() as timer:
        timer.submit(work, delay_s=0)
        assert begun.wait(30)
    assert ended.is_set()


def test_waiting_for_its_own_end_is_refused() -> None:
    """A function of the timer may shut it down without waiting, not with."""
    errors: list[Exception] = []
    done = threading.Event()
    timer = WheelTimer(max_workers=1)

    def work() -> None:
        try:
            timer.shutdown()
        except WheelStopped as exc:
            errors.append(exc)
        timer.shutdown(wait=False)
        done.set()

    timer.submit(work, delay_s=0)
    assert done.wait(30)
    assert "wait=False" in str(errors[0])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, TypeError, "either delay_s or at"),
        ({"delay_s": 1, "at": 1}, TypeError, "not both"),
        ({"delay_s": float("nan")}, ValueError, "finite"),
        ({"at": float("inf")}, ValueError, "finite"),
        ({"at": datetime(2030, 1, 1)}, ValueError, "no timezone"),
    ],
)
def test_times_that_make_no_sense_are_refused(
    timer: WheelTimer, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    """The caller gets one clear line."""
    with pytest.raises(error, match=text):
        timer.submit(int, **arguments)


@pytest.mark.parametrize("interval_s", [0, -1, float("nan"), float("inf")])
def test_an_interval_that_makes_no_sense_is_refused(timer: WheelTimer, interval_s: float) -> None:
    """The caller gets one clear line."""
    with pytest.raises(ValueError, match="positive number"):
        timer.every(interval_s, int)


def test_racing_threads_lose_and_double_nothing() -> None:
    """Submits, cancels, moves and expiry race on the real clock; every handle ends once."""
    per_thread, threads = 1500, 4
    total = per_thread * threads
    ran = [0] * total
    prevented = [0] * total
    ends = threading.Semaphore(0)

    def note(i: int) -> None:
        ran[i] += 1
        ends.release()

    def work(base: int, timer: WheelTimer) -> None:
        for i in range(base, base + per_thread):
            handle = timer.submit(lambda i=i: note(i), delay_s=(i % 5) / 1000)
            if i % 4 == 0:
                handle.reschedule(delay_s=(i % 3) / 1000)
            if i % 3 == 0 and handle.cancel():
                prevented[i] += 1
                ends.release()

    with WheelTimer(tick_s=0.001, max_workers=3) as timer:
        workers = [
            threading.Thread(target=work, args=(n * per_thread, timer)) for n in range(threads)
        ]
        for thread in workers:
            thread.start()
        for thread in workers:
            thread.join()
        for _ in range(total):
            assert ends.acquire(timeout=60)
        assert timer.pending == 0
        assert timer.shutdown() == []
    assert all(a + b == 1 for a, b in zip(ran, prevented, strict=True))


def test_shutdown_in_the_middle_of_a_storm_accounts_for_every_handle() -> None:
    """Whatever moment shutdown comes at, each handle either ran or is returned."""
    ran: list[int] = []
    count = threading.Semaphore(0)

    def note(i: int) -> None:
        ran.append(i)
        count.release()

    timer = WheelTimer(tick_s=0.001, max_workers=2)
    handles = [timer.submit(lambda i=i: note(i), delay_s=i / 2000) for i in range(400)]
    for _ in range(100):
        assert count.acquire(timeout=60)
    left = timer.shutdown()
    assert sorted(ran + [handles.index(handle) for handle in left]) == list(range(400))
