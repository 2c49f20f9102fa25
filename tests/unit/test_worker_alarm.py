"""The alarm: when it is due, and how long its thread may sleep."""

from __future__ import annotations

import threading

import pytest

from celery_wheel.clock import SYSTEM_CLOCK, FakeClock
from celery_wheel.worker.alarm import WATCH_S, Alarm


@pytest.fixture
def clock():
    """A clock that moves when told."""
    return FakeClock()


def test_it_is_due_at_its_instant_and_not_before(clock):
    """Not a moment early; asleep exactly until then, and at most a second at a time."""
    alarm = Alarm(clock, lambda: None)
    assert alarm._patience_s() is None
    alarm.arm(0.25)
    assert alarm._patience_s() == 0.25
    clock.advance(0.249)
    assert not alarm._due()
    assert alarm._patience_s() == pytest.approx(0.001)
    clock.advance(0.001)
    assert alarm._due()
    alarm.arm(60.0)
    assert not alarm._due()
    assert alarm._patience_s() == WATCH_S
    alarm.arm(None)
    clock.advance(1000)
    assert not alarm._due()


@pytest.mark.parametrize("step_s", [3600, -3600, 0.2, -0.2])
def test_a_step_of_the_wall_clock_is_due_once(clock, step_s):
    """A clock that was set, or a resume from suspend, moves every ETA."""
    alarm = Alarm(clock, lambda: None)
    alarm.arm(60.0)
    clock.advance(1)
    assert not alarm._due()
    clock.step_wall(step_s)
    assert alarm._due()
    assert not alarm._due()


def test_drift_is_no_step(clock):
    """A clock that is slewed by some milliseconds rings nothing."""
    alarm = Alarm(clock, lambda: None)
    alarm.arm(60.0)
    for _ in range(5):
        clock.step_wall(0.005)
        assert not alarm._due()


def test_an_earlier_instant_replaces_a_later_one_while_it_sleeps():
    """The thread is woken for what comes sooner, and a kick rings at once, one for several."""
    rung = threading.Semaphore(0)
    alarm = Alarm(SYSTEM_CLOCK, rung.release)
    alarm.start()
    alarm.arm(SYSTEM_CLOCK.monotonic() + 3600)
    alarm.arm(SYSTEM_CLOCK.monotonic() + 0.01)
    assert rung.acquire(timeout=10)
    alarm.arm(SYSTEM_CLOCK.monotonic() + 3600)
    alarm.kick()
    assert rung.acquire(timeout=10)
    alarm.stop(10)
    assert not alarm._thread.is_alive()
    alarm.kick()
    assert not rung.acquire(blocking=False)


def test_a_ring_that_fails_ends_nothing(caplog):
    """The error is logged, and the next ring comes."""
    rung = threading.Semaphore(0)
    errors = [RuntimeError("once")]

    def ring():
        rung.release()
        if errors:
            raise errors.pop()

    alarm = Alarm(SYSTEM_CLOCK, ring)
    alarm.start()
    alarm.kick()
    assert rung.acquire(timeout=10)
    for _ in range(200):
        if not errors and not alarm._kicked:
            break
        alarm._thread.join(0.01)
    alarm.kick()
    assert rung.acquire(timeout=10)
    alarm.stop(10)
    assert "The wheel's turn failed." in caplog.text
