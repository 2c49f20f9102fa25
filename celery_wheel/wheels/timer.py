"""The standalone engine: run functions later, in an executor, by relative or absolute time.

Knows nothing of Celery. One thread waits for what is due next; an executor does the work.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from datetime import datetime
from types import TracebackType
from typing import Any

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.errors import WheelStopped
from celery_wheel.wheels.base import Node, Wheel
from celery_wheel.wheels.make import make_wheel
from celery_wheel.wheels.thread import Ticks, Waiter, WheelThread, wait

__all__ = ("RECHECK_S", "Handle", "WheelTimer")

logger = logging.getLogger(__name__)

#: While anything waits for a wall-clock time, the clock is looked at this often, in seconds.
RECHECK_S = 1.0


class Handle:
    """One function to be called, once or again and again. Made by :class:`WheelTimer`.

    *Thread-safety:* every method, from any thread.
    """

    __slots__ = (
        "begun", "busy", "cancelled", "fn", "interval_s", "next_s", "node", "skipped", "timer",
        "turn", "wall",
    )  # fmt: skip

    def __init__(
        self, timer: WheelTimer, fn: Callable[[], Any], interval_s: float | None = None
    ) -> None:
        self.timer = timer
        #: ``None`` once it will not be called any more.
        self.fn: Callable[[], Any] | None = fn
        self.interval_s = interval_s
        self.node: Node[Handle] | None = None
        #: It waits for wall-clock time.
        self.wall = False
        #: Monotonic seconds of the coming run of a repeated one.
        self.next_s = 0.0
        #: Handed to the executor, and not ended.
        self.busy = False
        #: The executor has begun it.
        self.begun = False
        self.cancelled = False
        #: Runs of a repeated one that were left out, because the last one was still busy or
        #: their time had passed.
        self.skipped = 0
        # What was handed to the executor under an earlier turn is not run.
        self.turn = 0

    def cancel(self) -> bool:
        """See to it that it does not run (again), and free the function.

        Returns ``False`` if nothing could be prevented: a single run has begun, or it was
        cancelled before.
        """
        return self.timer.cancel(self)

    def reschedule(
        self, *, delay_s: float | None = None, at: datetime | float | None = None
    ) -> bool:
        """Move the (next) run; arguments as in :meth:`WheelTimer.submit`.

        A repeated one goes on from there by its interval. Returns ``False`` if a single run
        has begun, or it was cancelled.

        Raises:
            TypeError: not exactly one of ``delay_s`` and ``at`` is given.
            ValueError: a time that is not finite, or a datetime without a timezone.
            WheelStopped: the timer was shut down.
        """
        return self.timer.reschedule(self, delay_s=delay_s, at=at)

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "begun" if self.begun else "pending"
        return f"<Handle {state} fn={self.fn!r}>"


class WheelTimer:
    """Runs functions later. Never early; late by a tick at most, plus the executor's own wait.

    A *relative* time (``delay_s``) is measured on the monotonic clock. An *absolute* one
    (``at``) follows the wall clock, also where that is set forward or back or the machine
    sleeps: it is looked at :data:`RECHECK_S` after that at the latest. An exception of a
    function is logged. An idle timer does not wake up.

    Usable as a context manager, which shuts down and waits at the end.

    *Thread-safety:* every method, from any thread and from the functions it runs, but for
    ``shutdown(wait=True)`` from such a function. *Fork-safety:* none; make it in the child.

    Args:
        executor: where functions run; it stays the caller's. Default: a thread pool of its own.
        max_workers: threads of its own pool.
        tick_s: seconds per tick.
        kind: which wheel; see :func:`~celery_wheel.wheels.make.make_wheel`.
        size: buckets per wheel.
        clock: for tests.
        waiter: for tests.
    """

    def __init__(
        self,
        executor: Executor | None = None,
        *,
        max_workers: int | None = None,
        tick_s: float = 0.01,
        kind: str = "hierarchical",
        size: int = 4096,
        clock: Clock = SYSTEM_CLOCK,
        waiter: Waiter = wait,
    ) -> None:
        self._ticks = Ticks(tick_s)
        self._clock = clock
        self._kind, self._size = kind, size
        self._relative: Wheel[Handle] = self._make(clock.monotonic())
        self._absolute: Wheel[Handle] = self._make(self._wall_s())
        self._own = None
        if executor is None:
            executor = self._own = ThreadPoolExecutor(max_workers, "WheelTimer-worker")
        self._executor = executor
        self._refused: list[Handle] = []
        #: Monotonic seconds at which the thread wakes by itself.
        self._armed_s = math.inf
        self._inside = threading.local()
        self._thread = WheelThread("WheelTimer", self._collect, self._fire, waiter)
        self._lock = self._thread.condition

    def submit(
        self,
        fn: Callable[[], Any],
        *,
        delay_s: float | None = None,
        at: datetime | float | None = None,
    ) -> Handle:
        """Run ``fn()`` once.

        Args:
            fn: what to run.
            delay_s: seconds from now; below 0 counts as 0.
            at: an aware datetime, or seconds since the epoch; what has passed runs at once.

        Raises:
            TypeError: not exactly one of ``delay_s`` and ``at`` is given.
            ValueError: a time that is not finite, or a datetime without a timezone.
            WheelStopped: the timer was shut down.
        """
        at_s = _one_time(delay_s, at)
        handle = Handle(self, fn)
        with self._lock:
            self._thread.ensure_started()
            self._schedule(handle, delay_s, at_s)
        return handle

    def every(
        self, interval_s: float, fn: Callable[[], Any], *, first_s: float | None = None
    ) -> Handle:
        """Run ``fn()`` again and again, the first time in ``first_s`` (default: the interval).

        Runs are planned at first + n × interval, so they don't drift. Never two at a time: a
        run that comes due while the last one is busy, or whose time passed unnoticed, is
        skipped and counted in :attr:`Handle.skipped`.

        Raises:
            ValueError: the interval is not a positive number, or ``first_s`` is not finite.
            WheelStopped: the timer was shut down.
        """
        if not 0 < interval_s < math.inf:
            raise ValueError(f"interval_s is {interval_s}: give a positive number of seconds")
        handle = Handle(self, fn, interval_s)
        with self._lock:
            self._thread.ensure_started()
            self._schedule(handle, interval_s if first_s is None else first_s, None)
        return handle

    @property
    def pending(self) -> int:
        """Functions that wait for their time."""
        with self._lock:
            return len(self._relative) + len(self._absolute)

    def cancel(self, handle: Handle) -> bool:
        """See :meth:`Handle.cancel`."""
        with self._lock:
            if handle.cancelled or not (handle.node or handle.busy or handle in self._refused):
                return False
            if handle.begun and handle.interval_s is None:
                return False
            handle.cancelled = True
            self._take_out(handle)
            fn, handle.fn = handle.fn, None
        # Outside the lock: freeing it may run anything.
        del fn
        return True

    def reschedule(
        self,
        handle: Handle,
        *,
        delay_s: float | None = None,
        at: datetime | float | None = None,
    ) -> bool:
        """See :meth:`Handle.reschedule`."""
        at_s = _one_time(delay_s, at)
        with self._lock:
            self._thread.ensure_started()
            if handle.fn is None:
                return False
            self._take_out(handle)
            if not handle.begun:
                handle.busy = False
            self._schedule(handle, delay_s, at_s)
        return True

    def shutdown(self, wait: bool = True) -> list[Handle]:  # noqa: FBT001, FBT002 - as Executor's
        """Begin nothing more; return the handles that did not run, by their time.

        With ``wait`` return when what was handed to the executor has ended. Its own pool is
        shut down, a given one is left alone. A second call returns nothing.

        Raises:
            WheelStopped: from a function that the timer runs, with ``wait``.
        """
        if self._thread.is_current or (wait and getattr(self._inside, "running", False)):
            raise WheelStopped("a function of the timer can't wait for its end: wait=False")
        self._thread.stop(join=True)
        with self._lock:
            now_s, wall_s = self._clock.monotonic(), self._wall_s()
            left = [handle for handle, _ in self._thread.unfired] + self._refused
            waiting = [(self._ticks.until(n.due_tick, now_s), n.item) for n in self._relative]
            waiting += [(self._ticks.until(n.due_tick, wall_s), n.item) for n in self._absolute]
            left += [handle for _, handle in sorted(waiting, key=lambda pair: pair[0])]
            # A repeated one may have been due and wait for its next run, too.
            left = [handle for handle in dict.fromkeys(left) if handle.fn is not None]
            for handle in left:
                self._take_out(handle)
            self._thread.unfired.clear()
        if self._own is not None:
            self._own.shutdown(wait=wait)
        return left

    def __enter__(self) -> WheelTimer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _make(self, now_s: float) -> Wheel[Handle]:
        return make_wheel(self._kind, self._size, self._ticks.now(now_s))

    def _wall_s(self) -> float:
        return self._clock.wall_ms() / 1000

    def _wheel(self, handle: Handle) -> Wheel[Handle]:
        return self._absolute if handle.wall else self._relative

    def _take_out(self, handle: Handle) -> None:
        handle.turn += 1
        if handle.node is not None:
            self._wheel(handle).detach(handle.node)
            handle.node = None
        elif handle in self._refused:
            self._refused.remove(handle)

    def _schedule(self, handle: Handle, delay_s: float | None, at_s: float | None) -> None:
        """Put it into the wheel of its clock, and wake the thread if it is the next one."""
        now_s = self._clock.monotonic()
        handle.wall = at_s is not None and handle.interval_s is None
        if at_s is not None:
            delay_s = max(at_s - self._wall_s(), 0.0)
        handle.next_s = now_s + max(delay_s or 0.0, 0.0)
        if handle.wall and at_s is not None:
            self._follow_wall()
            due_tick = self._ticks.due(at_s)
        else:
            due_tick = self._ticks.due(handle.next_s)
        handle.node = self._wheel(handle).schedule(due_tick, handle)
        # The first one that follows the wall clock has the thread look at it regularly.
        wakes_s = min(handle.next_s, now_s + RECHECK_S) if handle.wall else handle.next_s
        if wakes_s < self._armed_s:
            self._armed_s = wakes_s
            self._thread.wake()

    def _follow_wall(self) -> int:
        """The wall clock's tick. Where it was set back, the wheel starts again from there."""
        tick = self._ticks.now(self._wall_s())
        if tick < self._absolute.now_tick:
            old, self._absolute = self._absolute, self._make(self._wall_s())
            for node in sorted(old, key=lambda node: node.due_tick):
                node.item.node = self._absolute.schedule(node.due_tick, node.item)
        return tick

    def _collect(self) -> tuple[list[tuple[Handle, int]], float | None]:
        now_s = self._clock.monotonic()
        due = self._absolute.advance(self._follow_wall())
        due += self._relative.advance(self._ticks.now(now_s))
        handed = []
        for handle in due:
            handle.node = None
            if handle.interval_s is not None:
                self._plan_next(handle, handle.interval_s, now_s)
                if handle.busy:
                    handle.skipped += 1
                    continue
            handle.busy = True
            handed.append((handle, handle.turn))
        if due or self._absolute.behind or self._relative.behind:
            return handed, 0.0
        waits = []
        if (tick := self._relative.next_expiry()) is not None:
            waits.append(self._ticks.until(tick, now_s))
        if (tick := self._absolute.next_expiry()) is not None:
            waits.append(min(self._ticks.until(tick, self._wall_s()), RECHECK_S))
        self._armed_s = now_s + min(waits) if waits else math.inf
        return handed, min(waits, default=None)

    def _plan_next(self, handle: Handle, interval_s: float, now_s: float) -> None:
        missed = max(math.ceil((now_s - handle.next_s) / interval_s) - 1, 0)
        handle.skipped += missed
        handle.next_s += (missed + 1) * interval_s
        handle.node = self._relative.schedule(self._ticks.due(handle.next_s), handle)

    def _fire(self, due: tuple[Handle, int]) -> None:
        handle, turn = due
        try:
            self._executor.submit(self._run, handle, turn)
        except RuntimeError as exc:
            logger.error("the executor refused %r: %s", handle, exc)
            with self._lock:
                handle.busy = False
                if handle.interval_s is None:
                    self._refused.append(handle)

    def _run(self, handle: Handle, turn: int) -> None:
        """In the executor: run it unless it was cancelled or moved since it was handed over."""
        with self._lock:
            fn = handle.fn
            if fn is None or handle.turn != turn:
                return
            handle.begun = True
            if handle.interval_s is None:
                handle.fn = None
        self._inside.running = True
        try:
            fn()
        except (Exception, SystemExit):
            logger.exception("a timer's function failed: %r", fn)
        finally:
            self._inside.running = False
            with self._lock:
                handle.busy = False
                handle.begun = handle.interval_s is None


def _one_time(delay_s: float | None, at: datetime | float | None) -> float | None:
    """Check what was given; seconds since the epoch, or ``None`` for a delay."""
    if (delay_s is None) == (at is None):
        raise TypeError("give either delay_s or at, and not both")
    at_s = at
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise ValueError(f"{at!r} has no timezone: give one, for example datetime.now(UTC)")
        at_s = at.timestamp()
    for given in (delay_s, at_s):
        if isinstance(given, (int, float)) and not math.isfinite(given):
            raise ValueError(f"{given} is no time to wait for: give a finite number of seconds")
    return at_s if isinstance(at_s, (int, float)) else None
