"""A timer for Kombu's event loop and for Celery's ``worker_timer``, on the hierarchical wheel.

It keeps the contracts of ``kombu.asynchronous.timer.Timer`` and ``celery.utils.timer2.Timer``.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.errors import WheelStopped
from celery_wheel.timer.entry import Entry
from celery_wheel.timer.schedule import FOREVER_S, Schedule
from celery_wheel.wheels.thread import Waiter, wait

__all__ = ("Entry", "Timer")


class Timer(Schedule):
    """Drop-in for Kombu's timer and, through ``worker_timer``, for Celery's timer thread.

    ::

        Hub(timer=Timer())                                      # an event loop drives it
        app.conf.worker_timer = "celery_wheel.timer:Timer"      # it has a thread of its own

    An entry is never early. In the loop it is found in the turn after its time; the thread
    wakes exactly. Entries of one instant run by priority, low numbers first, then in the
    order they were entered. A cancelled entry is gone at once, with its function and
    arguments. ETAs are seconds of the monotonic clock, or
    datetimes (naive: UTC), as Kombu's are.

    Costs: entering and cancelling O(1), ``queue`` O(n log n).

    *Thread-safety:* every method, from any thread.

    Args:
        max_interval: what the iterator asks a loop to wait at most, in seconds (default 2).
        on_error: called with an exception of an entry, instead of a log line.
        on_tick: called by the thread with the seconds it is going to wait.
        on_start: called with the timer before its thread starts.
        threaded: run in a thread, started with the first entry. Default: if ``on_tick`` or
            ``on_start`` is given, as Celery's worker does. ``start()`` does it at any time.
        tick_s: seconds per tick of the wheel.
        clock: for tests.
        waiter: for tests.
    """

    on_tick: Callable[[float], Any] | None = None
    daemon = True

    _thread_count = count(1)

    def __init__(
        self,
        max_interval: float | None = None,
        on_error: Callable[[Exception], Any] | None = None,
        *,
        on_tick: Callable[[float], Any] | None = None,
        on_start: Callable[[Timer], Any] | None = None,
        threaded: bool | None = None,
        tick_s: float = 0.01,
        clock: Clock = SYSTEM_CLOCK,
        waiter: Waiter = wait,
        **_: Any,
    ) -> None:
        super().__init__(max_interval, on_error, tick_s=tick_s, clock=clock)
        self.on_tick = on_tick or self.on_tick
        self.on_start = on_start
        self.threaded = bool(on_tick or on_start) if threaded is None else threaded
        self.running = False
        self._waiter = waiter
        self._thread: threading.Thread | None = None
        self._stopped = False

    def before_enter(self) -> None:
        """Start the thread with the first entry, where there is to be one."""
        if self.threaded:
            self.ensure_started()

    def exit_after(self, secs: float, priority: int = 10) -> None:
        """Raise ``SystemExit`` in the thread or loop that runs the entries."""
        self.call_after(secs, sys.exit, priority=priority)

    def ensure_started(self) -> None:
        """Start the thread if it is not running.

        Raises:
            WheelStopped: it was stopped.
        """
        with self.mutex:
            if self._stopped:
                raise WheelStopped("the timer was stopped: make a new one")
            if self._thread is None:
                if self.on_start:
                    self.on_start(self)
                self.threaded = self.running = True
                self._thread = threading.Thread(
                    target=self.run, name=f"Timer-{next(self._thread_count)}", daemon=self.daemon
                )
                self._thread.start()

    start = ensure_started

    def run(self) -> None:
        """What the thread does, until :meth:`stop`."""
        while True:
            with self.mutex:
                if self._stopped:
                    return
                wait_s, entry = self._poll()
                if entry is None:
                    self._armed_s = self._clock.monotonic() + (
                        FOREVER_S if wait_s is None else wait_s
                    )
                    if wait_s is not None and self.on_tick:
                        self.on_tick(wait_s)
                    self._waiter(self.not_empty, wait_s)
                    self._armed_s = -math.inf
                    continue
            self.apply_entry(entry)

    def stop(self) -> None:
        """End the thread, when the entry that runs has ended. A loop's timer goes on."""
        with self.mutex:
            thread = self._thread
            self._stopped = self.threaded
            self.not_empty.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join()
            self.running = False

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout)

    def is_alive(self) -> bool:
        """``True`` while there is a thread."""
        return self._thread is not None and self._thread.is_alive()

    def __enter__(self) -> Timer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
