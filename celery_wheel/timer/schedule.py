"""Kombu's timer contract on the hierarchical wheel; whoever iterates runs the entries."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import wraps
from heapq import heappop, heappush
from itertools import count
from typing import Any

from kombu.asynchronous.timer import scheduled

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.timer.entry import Entry as TimerEntry
from celery_wheel.timer.entry import Item
from celery_wheel.wheels.bucket import WheelNode
from celery_wheel.wheels.hierarchical import HierarchicalWheel
from celery_wheel.wheels.thread import Ticks

__all__ = ("FOREVER_S", "Schedule")

logger = logging.getLogger(__name__)

#: Farther times wait for this many seconds of monotonic time: thirty thousand years.
FOREVER_S = 1e12

#: A loop that has more to do at once is told to wait this long: Kombu takes 0 for "a second".
_AT_ONCE_S = 0.001

#: Entries that one turn takes out of the wheel. Of one tick, so many are put in order by
#: priority; without a limit a million due together would stop the loop.
_TURN = 10_000


class _Queue:
    """What Kombu's hub looks at once per turn: true while something is scheduled."""

    def __init__(self, timer: Schedule) -> None:
        self._timer = timer

    def __len__(self) -> int:
        return len(self._timer)

    def __bool__(self) -> bool:
        return self._timer.has_entries

    def __iter__(self) -> Iterator[Any]:
        return iter(self._timer.queue)


class Schedule:
    """What is to be called when; see :class:`~celery_wheel.timer.Timer`.

    The wheel holds what is due in later ticks, a small heap what is due in this one, so times
    keep their full precision.
    """

    Entry = TimerEntry
    on_error: Callable[[Exception], Any] | None = None

    def __init__(
        self,
        max_interval: float | None = None,
        on_error: Callable[[Exception], Any] | None = None,
        *,
        tick_s: float = 0.01,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.max_interval = float(max_interval or 2)
        self.on_error = on_error or self.on_error
        self.mutex = threading.RLock()
        self.not_empty = threading.Condition(self.mutex)
        self._clock = clock
        self._ticks = Ticks(tick_s)
        start_tick = self._ticks.now(clock.monotonic())
        self._wheel: HierarchicalWheel[Item] = HierarchicalWheel(start_tick=start_tick)
        self._ready: list[Item] = []
        self._order = count()
        #: Nodes of entries of other classes, by id, for :meth:`cancel`.
        self._foreign: dict[int, WheelNode[Item]] = {}
        self._queue = _Queue(self)
        #: Monotonic seconds until which the thread, if there is one, waits.
        self._armed_s = -math.inf

    def call_at(
        self,
        eta: float | datetime | None,
        fun: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Any:
        """Call ``fun(*args, **kwargs)`` at ``eta``; returns the entry."""
        return self.enter_at(self.Entry(fun, args, kwargs), eta, priority)

    def call_after(
        self,
        secs: float,
        fun: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Any:
        """Call ``fun(*args, **kwargs)`` in ``secs`` seconds; returns the entry."""
        return self.enter_after(secs, self.Entry(fun, args, kwargs), priority)

    def call_repeatedly(
        self,
        secs: float,
        fun: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> Any:
        """Call it every ``secs`` seconds, measured from one call's start to the next one's.

        The entry stays the same; cancelling it ends the series, also from inside.
        """
        entry = self.Entry(fun, args, kwargs)
        last: float | None = None

        @wraps(fun)
        def run_and_enter_again(*args: Any, **kwargs: Any) -> Any:
            nonlocal last
            last = self._clock.monotonic()
            try:
                return fun(*args, **kwargs)
            finally:
                self.enter_at(entry, last + secs, priority)

        entry.fun = run_and_enter_again
        return self.enter_after(secs, entry, priority)

    def enter_at(
        self, entry: Any, eta: float | datetime | None = None, priority: int | None = 0
    ) -> Any:
        """Schedule an entry; ``None``: now. An entry that was cancelled is left out.

        Raises:
            WheelStopped: the timer has a thread, which was stopped.
        """
        try:
            eta_s = self._eta_s(eta)
        except Exception as exc:
            if not self.handle_error(exc):
                raise
            return None
        return self._enter(eta_s, priority or 0, entry)

    def enter_after(self, secs: float, entry: Any, priority: int | None = 0) -> Any:
        """Schedule an entry in ``secs`` seconds."""
        return self.enter_at(entry, self._clock.monotonic() + float(secs), priority)

    def enter(self, entry: Any, eta: float | datetime, priority: int | None = None) -> Any:
        """The name that Celery's timer has for :meth:`enter_at`."""
        return self.enter_at(entry, eta, priority)

    def cancel(self, tref: Any) -> None:
        """Never run the entry (again)."""
        tref.cancel()
        with self.mutex:
            node = self._foreign.pop(id(tref), None)
            if node is not None:
                self._wheel.detach(node)

    def drop(self, entry: TimerEntry) -> None:
        """See :meth:`Entry.cancel`."""
        # Kept until the lock is free: letting go of them may run anything.
        held = entry.fun, entry.args, entry.kwargs
        with self.mutex:
            node = entry.release()
            if node is not None:
                self._wheel.detach(node)
        del held

    def clear(self) -> None:
        """Forget everything that is scheduled."""
        with self.mutex:
            for node in list(self._wheel):
                self._wheel.detach(node)
            self._ready.clear()
            self._foreign.clear()

    def apply_entry(self, entry: Any) -> None:
        """Run an entry; its exception goes to ``on_error`` or to the log."""
        try:
            entry()
        except Exception as exc:
            if not self.handle_error(exc):
                logger.exception("Error in timer: %r", exc)  # noqa: TRY401 - as Kombu has it

    def handle_error(self, exc_info: Exception) -> bool:
        """Give an exception to ``on_error``; ``False`` if there is none."""
        if self.on_error is None:
            return False
        self.on_error(exc_info)
        return True

    def __iter__(self) -> Iterator[tuple[float | None, Any]]:
        """For a loop: ``(None, entry)`` to run it, ``(seconds, None)`` to wait that long and
        ask again, ``(None, None)`` when nothing is scheduled."""
        while True:
            wait_s, entry = self._poll()
            if wait_s is None:
                yield None, entry
            else:
                yield min(wait_s, self.max_interval), None

    def __next__(self) -> float | None:
        """Run one entry that is due, or return the seconds to wait."""
        wait_s, entry = self._poll()
        if entry is not None:
            self.apply_entry(entry)
        return wait_s

    next = __next__

    @property
    def queue(self) -> list[Any]:
        """``(eta, priority, entry)`` of everything scheduled, in the order it will run."""
        with self.mutex:
            items = [item for item in self._ready if not item[3].canceled]
            items += [node.item for node in self._wheel]
        items.sort(key=lambda item: item[:3])
        return [scheduled(eta, priority, entry) for eta, priority, _, entry in items]

    @property
    def schedule(self) -> Schedule:
        """The timer itself: Celery asks for ``timer.schedule.queue``."""
        return self

    @property
    def has_entries(self) -> bool:
        """Something is scheduled, or was cancelled a moment before its time."""
        return bool(self._ready) or len(self._wheel) > 0

    def empty(self) -> bool:
        """Nothing is scheduled."""
        return not len(self)

    def __len__(self) -> int:
        with self.mutex:
            return len(self._wheel) + sum(not item[3].canceled for item in self._ready)

    def __bool__(self) -> bool:
        """Always true, as Celery's timer is; ``_queue`` tells whether something is scheduled."""
        return True

    def before_enter(self) -> None:
        """For the subclass that has a thread. Called with the lock held."""

    def _eta_s(self, eta: float | datetime | None) -> float:
        if eta is None:
            return self._clock.monotonic()
        if isinstance(eta, datetime):
            if eta.tzinfo is None:
                eta = eta.replace(tzinfo=timezone.utc)
            ahead_s = eta.timestamp() - self._clock.wall_ms() / 1000
            return self._clock.monotonic() + ahead_s
        if math.isnan(eta):
            raise ValueError("an ETA of nan is no time: give seconds or a datetime")
        return eta

    def _enter(self, eta_s: float, priority: int, entry: Any) -> Any:
        with self.mutex:
            self.before_enter()
            if entry.canceled:
                return entry
            tick = self._ticks.now(max(-FOREVER_S, min(eta_s, FOREVER_S)))
            item = (eta_s, priority, next(self._order), entry)
            node = None
            if tick <= self._wheel.now_tick:
                heappush(self._ready, item)
            else:
                node = self._wheel.schedule(tick, item)
            if isinstance(entry, TimerEntry):
                entry.bind(self, node)
            elif node is not None:
                self._foreign[id(entry)] = node
            if eta_s < self._armed_s:
                self.not_empty.notify_all()
        return entry

    def _poll(self) -> tuple[float | None, Any]:
        """``(None, entry)``, ``(seconds, None)`` or ``(None, None)``, as the iterator has it."""
        with self.mutex:
            now_s = self._clock.monotonic()
            wheel, ready = self._wheel, self._ready
            for item in wheel.advance(self._ticks.now(now_s), _TURN):
                heappush(ready, item)
                if self._foreign:
                    self._foreign.pop(id(item[3]), None)
            while ready and (ready[0][0] <= now_s or ready[0][3].canceled):
                entry = heappop(ready)[3]
                if not entry.canceled:
                    return None, entry
            if wheel.behind:
                return _AT_ONCE_S, None
            if ready:
                return ready[0][0] - now_s, None
            tick = wheel.next_expiry()
            return (None if tick is None else self._ticks.until(tick, now_s)), None
