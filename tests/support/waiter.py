"""A waiter on a fake clock: a timer's thread moves only when the test says so."""

from __future__ import annotations

import threading

from celery_wheel.clock import FakeClock


class FakeWaiter:
    """Give this and its clock to a timer; :meth:`advance` returns when the timer is idle again.

    ``asked`` is what the timer would have waited for last, in seconds.
    """

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self.asked: float | None = None
        self.waits = 0
        self._idle = threading.Event()
        self._condition: threading.Condition | None = None

    def __call__(self, condition: threading.Condition, timeout_s: float | None) -> None:
        """Wait until somebody notifies, however long that is."""
        self._condition = condition
        self.asked = timeout_s
        self.waits += 1
        self._idle.set()
        condition.wait()

    def advance(self, seconds: float = 0.0, *, wall_only: bool = False) -> None:
        """Let time pass, and return when the timer's thread has nothing more to do."""
        self.settle()
        assert self._condition is not None
        with self._condition:
            if wall_only:
                self.clock.step_wall(seconds)
            else:
                self.clock.advance(seconds)
            self._idle.clear()
            self._condition.notify_all()
        self.settle()

    def settle(self) -> None:
        """Return when the timer's thread waits."""
        assert self._idle.wait(30), "the timer's thread never came to wait"
