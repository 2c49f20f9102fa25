"""A timer on the hashed wheel, in the shape of Netty's: coarse, cheap, for timeouts.

Most timeouts are cancelled before they expire. This timer makes both ends cheap and lets the
expiry be late by up to a tick.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.errors import TooManyPending, WheelStopped
from celery_wheel.wheels.bucket import WheelNode
from celery_wheel.wheels.hashed import HashedWheel
from celery_wheel.wheels.thread import Ticks, Waiter, WheelThread, wait

__all__ = ("INSTANCE_LIMIT", "MOVE_LIMIT", "HashedWheelTimer", "Timeout")

logger = logging.getLogger(__name__)

#: Live timers in one process from which on one warning is logged: each has a thread.
INSTANCE_LIMIT = 64

#: New timeouts that are moved into the wheel per turn of the thread.
MOVE_LIMIT = 100_000

#: New timeouts that may wait for the thread to wake by itself.
_IDLE_LIMIT = 1000

_instances: weakref.WeakSet[HashedWheelTimer] = weakref.WeakSet()
_instances_lock = threading.Lock()
_warned = False


class Timeout:
    """The handle of one call to come. Made by :meth:`HashedWheelTimer.new_timeout`."""

    __slots__ = ("cancelled", "due_tick", "expired", "fn", "node", "timer")

    def __init__(self, timer: HashedWheelTimer, fn: Callable[[], Any], due_tick: int) -> None:
        self.timer = timer
        #: ``None`` once it was called or cancelled.
        self.fn: Callable[[], Any] | None = fn
        self.due_tick = due_tick
        #: The time came: it was called or is being called.
        self.expired = False
        self.cancelled = False
        self.node: WheelNode[Timeout] | None = None

    def cancel(self) -> bool:
        """See to it that it is never called, and free the function at once.

        Returns ``False`` if it has expired or was cancelled before. Thread-safe.
        """
        return self.timer.cancel(self)

    def __repr__(self) -> str:
        state = "cancelled" if self.cancelled else "expired" if self.expired else "pending"
        return f"<Timeout {state} fn={self.fn!r}>"


class HashedWheelTimer:
    """Calls functions after a delay, in one thread of its own.

    Never early, at most a tick late (and as late as the calls before it in the same thread
    take: hand long work to an executor). Starts its thread with the first timeout; sleeps
    until a bucket has something due, so an idle timer costs nothing. An exception of a
    function is logged, and the timer goes on. Time is monotonic: steps of the wall clock
    don't matter.

    *Thread-safety:* every method, from any thread and from the functions it calls, but for
    :meth:`stop`.

    Args:
        tick: seconds per tick.
        ticks_per_wheel: buckets; rounded up to a power of two.
        max_pending: refuse more pending timeouts than this; ``None``: no limit.
        clock: for tests.
        waiter: for tests.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        tick: float = 0.1,
        ticks_per_wheel: int = 512,
        max_pending: int | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        waiter: Waiter = wait,
    ) -> None:
        if max_pending is not None and max_pending < 1:
            raise ValueError(f"max_pending is {max_pending}: give 1 or more, or None for no limit")
        self._ticks = Ticks(tick)
        self._clock = clock
        self._start_s = clock.monotonic()
        self._wheel: HashedWheel[Timeout] = HashedWheel(ticks_per_wheel)
        self._new: deque[Timeout] = deque()
        self._armed_tick: int | None = None
        self._pending = 0
        self.max_pending = max_pending
        self._thread = WheelThread("HashedWheelTimer", self._collect, self._call, waiter)
        self._lock = self._thread.condition
        _count(self)

    @property
    def tick(self) -> float:
        """Seconds per tick."""
        return self._ticks.tick_s

    @property
    def ticks_per_wheel(self) -> int:
        """Buckets of the wheel."""
        return self._wheel.size

    @property
    def pending(self) -> int:
        """Timeouts that have neither expired nor been cancelled."""
        return self._pending

    def new_timeout(self, fn: Callable[[], Any], delay: float) -> Timeout:
        """Call ``fn()`` in ``delay`` seconds; a delay below 0 counts as 0.

        Raises:
            TooManyPending: ``max_pending`` timeouts are pending.
            ValueError: the delay is not a finite number.
            WheelStopped: the timer was stopped.
        """
        due_tick = self._ticks.due(self._clock.monotonic() - self._start_s + max(delay, 0.0))
        timeout = Timeout(self, fn, due_tick)
        with self._lock:
            self._thread.ensure_started()
            if self.max_pending is not None and self._pending >= self.max_pending:
                raise TooManyPending(self._pending, self.max_pending)
            self._pending += 1
            self._new.append(timeout)
            armed = self._armed_tick
            if armed is None or due_tick < armed or len(self._new) > _IDLE_LIMIT:
                self._armed_tick = due_tick if armed is None else min(due_tick, armed)
                self._thread.wake()
        return timeout

    def stop(self) -> list[Timeout]:
        """Stop, wait for the call in progress, and return what was not processed.

        The timeouts returned are neither expired nor cancelled; by due tick. Once stopped,
        there is nothing more to return.

        Raises:
            WheelStopped: called from a function that this timer calls.
        """
        if self._thread.is_current:
            raise WheelStopped("a timer can't be stopped by its own callback: use another thread")
        self._thread.stop(join=True)
        with self._lock:
            left = [timeout for timeout in self._thread.unfired if not timeout.cancelled]
            left += [node.item for node in self._wheel]
            left += [timeout for timeout in self._new if not timeout.cancelled]
            self._wheel = HashedWheel(self._wheel.size)
            self._new.clear()
            self._thread.unfired.clear()
            self._pending = 0
            for timeout in left:
                timeout.node = None
        with _instances_lock:
            _instances.discard(self)
        return sorted(left, key=lambda timeout: timeout.due_tick)

    def cancel(self, timeout: Timeout) -> bool:
        """See :meth:`Timeout.cancel`."""
        with self._lock:
            if timeout.expired or timeout.cancelled:
                return False
            timeout.cancelled = True
            # After stop() it belongs to whoever got it.
            if not self._thread.stopped:
                self._pending -= 1
            if timeout.node is not None:
                self._wheel.detach(timeout.node)
                timeout.node = None
            fn, timeout.fn = timeout.fn, None
        # Outside the lock: freeing it may run anything.
        del fn
        return True

    def _collect(self) -> tuple[list[Timeout], float | None]:
        wheel, new = self._wheel, self._new
        for _ in range(min(len(new), MOVE_LIMIT)):
            timeout = new.popleft()
            if not timeout.cancelled:
                timeout.node = wheel.schedule(timeout.due_tick, timeout)
        now_s = self._clock.monotonic() - self._start_s
        due = wheel.advance(self._ticks.now(now_s))
        for timeout in due:
            timeout.node = None
        if due or new or wheel.behind:
            return due, 0.0
        self._armed_tick = wheel.next_expiry()
        if self._armed_tick is None:
            return due, None
        return due, self._ticks.until(self._armed_tick, now_s)

    def _call(self, timeout: Timeout) -> None:
        """Run one timeout, unless it was cancelled after it was taken out of the wheel."""
        with self._lock:
            if timeout.cancelled:
                return
            timeout.expired = True
            self._pending -= 1
            fn, timeout.fn = timeout.fn, None
        try:
            if fn is not None:
                fn()
        except (Exception, SystemExit):
            logger.exception("a timeout's function failed: %r", fn)


def _count(timer: HashedWheelTimer) -> None:
    global _warned  # noqa: PLW0603 - one warning per process is meant
    with _instances_lock:
        _instances.add(timer)
        if len(_instances) > INSTANCE_LIMIT and not _warned:
            _warned = True
            logger.warning(
                "%d HashedWheelTimers are alive, each with a thread: share one, or stop() those "
                "that are done",
                len(_instances),
            )
