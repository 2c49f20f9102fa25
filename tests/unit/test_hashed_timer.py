"""The hashed timer, on a fake clock."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from celery_wheel.errors import TooManyPending, WheelStopped
from celery_wheel.wheels import hashed_timer
from celery_wheel.wheels.hashed_timer import HashedWheelTimer
from tests.support.waiter import FakeWaiter

TICK = 0.125  # a power of two: sums of it are exact


@pytest.fixture
def waiter() -> FakeWaiter:
    return FakeWaiter()


@pytest.fixture
def timer(waiter: FakeWaiter) -> Iterator[HashedWheelTimer]:
    timer = HashedWheelTimer(TICK, 8, clock=waiter.clock, waiter=waiter)
    yield timer
    timer.stop()


def test_a_timeout_is_never_early_and_at_most_a_tick_late(
    timer: HashedWheelTimer, waiter: FakeWaiter
) -> None:
    """Each function runs at the first tick at or after its time, whatever its rounds."""
    called: list[tuple[float, float]] = []
    for i in range(100):
        delay = i * 0.07
        timer.new_timeout(lambda d=delay: called.append((d, waiter.clock.monotonic())), delay)
    waiter.advance()
    for _ in range(70):
        waiter.advance(TICK)
    assert len(called) == 100
    assert all(0 <= at - delay < TICK for delay, at in called)
    assert timer.pending == 0


def test_it_sleeps_until_something_is_due(timer: HashedWheelTimer, waiter: FakeWaiter) -> None:
    """The thread waits for the next timeout, not for the next tick, and for ever when idle."""
    first = timer.new_timeout(int, 100.0)
    waiter.advance()
    assert waiter.asked == 100.0
    waits = waiter.waits
    timer.new_timeout(int, 200.0)
    assert waiter.waits == waits
    timer.new_timeout(int, 50.0)
    waiter.advance()
    assert waiter.asked == 50.0
    assert first.cancel()
    waiter.advance(200.0)
    assert waiter.asked is None


def test_cancel_frees_the_function_and_is_told_once(
    timer: HashedWheelTimer, waiter: FakeWaiter
) -> None:
    """A cancelled timeout never runs, lets its function go, and can't be cancelled again."""

    class Work:
        def __call__(self) -> None:
            raise AssertionError

    work = Work()
    ref = weakref.ref(work)
    timeout = timer.new_timeout(work, 1.0)
    del work
    waiter.advance()
    assert (timeout.expired, timeout.cancelled, timer.pending) == (False, False, 1)
    assert timeout.cancel()
    assert ref() is None
    assert not timeout.cancel()
    assert (timeout.expired, timeout.cancelled, timer.pending) == (False, True, 0)
    waiter.advance(2.0)


def test_what_has_expired_cannot_be_cancelled(timer: HashedWheelTimer, waiter: FakeWaiter) -> None:
    """cancel() of an expired timeout is False and changes nothing."""
    timeout = timer.new_timeout(int, 0.0)
    waiter.settle()
    waiter.advance(TICK)
    assert timeout.expired
    assert not timeout.cancel()
    assert not timeout.cancelled
    assert "expired" in repr(timeout)


def test_a_callback_may_cancel_another_of_its_own_tick(
    timer: HashedWheelTimer, waiter: FakeWaiter
) -> None:
    """A timeout that is due with its canceller does not run."""
    ran: list[str] = []
    handles: list[Any] = []
    handles.append(timer.new_timeout(lambda: ran.append(str(handles[1].cancel())), 1.0))
    handles.append(timer.new_timeout(lambda: ran.append("never"), 1.0))
    waiter.advance(1.0)
    assert ran == ["True"]
    assert timer.pending == 0


def test_a_callback_may_make_timeouts(timer: HashedWheelTimer, waiter: FakeWaiter) -> None:
    """A function that schedules another, at once or later, is served."""
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        timer.new_timeout(lambda: ran.append("at once"), -1)
        timer.new_timeout(lambda: ran.append("later"), 1.0)

    timer.new_timeout(first, 0)
    waiter.settle()
    waiter.advance(TICK)
    assert ran == ["first", "at once"]
    waiter.advance(1.0)
    assert ran == ["first", "at once", "later"]


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3)])
def test_a_function_that_raises_is_logged_and_survived(
    timer: HashedWheelTimer,
    waiter: FakeWaiter,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
) -> None:
    """An exception, also sys.exit(), costs one log line; the next timeout runs."""
    ran: list[int] = []

    def fail() -> None:
        raise error

    timer.new_timeout(fail, 1.0)
    timer.new_timeout(lambda: ran.append(1), 1.0)
    with caplog.at_level(logging.ERROR):
        waiter.advance(1.0)
    assert ran == [1]
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_too_many_pending_are_refused_with_both_numbers(waiter: FakeWaiter) -> None:
    """The error says how many are pending and the limit; a cancel makes room."""
    timer = HashedWheelTimer(TICK, max_pending=2, clock=waiter.clock, waiter=waiter)
    one = timer.new_timeout(int, 1)
    timer.new_timeout(int, 1)
    with pytest.raises(TooManyPending, match="2 timeouts are pending and max_pending is 2"):
        timer.new_timeout(int, 1)
    one.cancel()
    timer.new_timeout(int, 1)
    timer.stop()


def test_stop_returns_the_unprocessed_and_refuses_what_comes_after(waiter: FakeWaiter) -> None:
    """stop() gives back what is pending, by time; later uses raise, a second stop is empty."""
    timer = HashedWheelTimer(TICK, clock=waiter.clock, waiter=waiter)
    done = timer.new_timeout(int, 1)
    waiter.advance(1)
    late = timer.new_timeout(int, 3)
    gone = timer.new_timeout(int, 2)
    soon = timer.new_timeout(int, 1)
    waiter.advance()
    queued = timer.new_timeout(int, 4)
    gone.cancel()
    assert timer.stop() == [soon, late, queued]
    assert done.expired
    assert not soon.expired
    assert timer.pending == 0
    assert timer.stop() == []
    with pytest.raises(WheelStopped, match="make a new one"):
        timer.new_timeout(int, 1)
    assert soon.cancel()
    assert timer.pending == 0


def test_stop_in_the_middle_of_a_tick_returns_the_rest_of_it(waiter: FakeWaiter) -> None:
    """What is due but not called yet when stop() comes is returned, not called."""
    timer = HashedWheelTimer(TICK, clock=waiter.clock, waiter=waiter)
    begun, go_on = threading.Event(), threading.Event()
    ran: list[int] = []

    def slow() -> None:
        begun.set()
        go_on.wait(30)
        ran.append(0)

    timer.new_timeout(slow, 0)
    rest = [timer.new_timeout(lambda: ran.append(1), 0) for _ in range(3)]
    assert begun.wait(30)
    stopped: list[Any] = []
    stopper = threading.Thread(target=lambda: stopped.extend(timer.stop()))
    stopper.start()
    while not timer._thread.stopped:
        pass
    go_on.set()
    stopper.join(30)
    assert ran == [0]
    assert stopped == rest


def test_stop_by_its_own_callback_is_refused(timer: HashedWheelTimer, waiter: FakeWaiter) -> None:
    """A function that stops its own timer gets an error that says what to do."""
    errors: list[Exception] = []

    def stop() -> None:
        try:
            timer.stop()
        except WheelStopped as exc:
            errors.append(exc)

    timer.new_timeout(stop, 0)
    waiter.settle()
    waiter.advance(TICK)
    assert "use another thread" in str(errors[0])


def test_the_thread_starts_with_the_first_timeout() -> None:
    """A timer that is only made has no thread."""
    before = threading.active_count()
    timer = HashedWheelTimer()
    assert threading.active_count() == before
    assert timer.stop() == []
    assert (timer.tick, timer.ticks_per_wheel) == (0.1, 512)


def test_ticks_per_wheel_are_rounded_up_to_a_power_of_two() -> None:
    """A size between two powers of two becomes the greater."""
    assert HashedWheelTimer(ticks_per_wheel=300).ticks_per_wheel == 512


def test_new_timeouts_are_moved_in_batches(
    waiter: FakeWaiter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come at once, one turn of the thread takes a bounded number."""
    monkeypatch.setattr(hashed_timer, "MOVE_LIMIT", 10)
    timer = HashedWheelTimer(TICK, clock=waiter.clock, waiter=waiter)
    turns: list[int] = []
    collect = timer._thread._collect

    def counting() -> Any:
        before = len(timer._new)
        result = collect()
        turns.append(before - len(timer._new))
        return result

    timer._thread._collect = counting
    with timer._lock:
        for _ in range(35):
            timer.new_timeout(int, 5.0)
    waiter.advance()
    assert [turn for turn in turns if turn] == [10, 10, 10, 5]
    assert len(timer.stop()) == 35


def test_many_live_timers_are_warned_about_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the limit of instances one warning is logged, and only one."""
    gc.collect()
    monkeypatch.setattr(hashed_timer, "_instances", weakref.WeakSet())
    monkeypatch.setattr(hashed_timer, "_warned", False)
    with caplog.at_level(logging.WARNING):
        timers = [HashedWheelTimer() for _ in range(64)]
        assert not caplog.records
        timers += [HashedWheelTimer() for _ in range(3)]
    assert len(caplog.records) == 1
    assert "65 HashedWheelTimers are alive" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [{"tick": 0}, {"tick": float("nan")}, {"ticks_per_wheel": 0}, {"max_pending": 0}],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    """The message says what to give."""
    with pytest.raises(ValueError, match="give"):
        HashedWheelTimer(**arguments)


@pytest.mark.parametrize("delay", [float("inf"), float("nan")])
def test_a_delay_without_end_is_refused(timer: HashedWheelTimer, delay: float) -> None:
    """A delay that is no finite number is an error of the caller, not of the thread."""
    with pytest.raises(ValueError, match="finite"):
        timer.new_timeout(int, delay)


def test_real_threads_lose_and_double_nothing() -> None:
    """Submitters and cancellers race the expiry on the real clock; every timeout ends once."""
    timer = HashedWheelTimer(0.001, 64)
    per_thread, threads = 2000, 4
    ran = [0] * (per_thread * threads)
    cancelled: list[int] = []
    done = threading.Semaphore(0)

    def note(i: int) -> None:
        ran[i] += 1
        done.release()

    def submit(base: int) -> None:
        for i in range(base, base + per_thread):
            timeout = timer.new_timeout(lambda i=i: note(i), (i % 7) / 1000)
            if i % 3 == 0 and timeout.cancel():
                cancelled.append(i)
                done.release()

    workers = [threading.Thread(target=submit, args=(n * per_thread,)) for n in range(threads)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    for _ in ran:
        assert done.acquire(timeout=60)
    assert timer.pending == 0
    assert timer.stop() == []
    gone = set(cancelled)
    assert len(gone) == len(cancelled)
    assert all(count == (0 if i in gone else 1) for i, count in enumerate(ran))
