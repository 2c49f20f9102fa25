"""The thread behind a timer: it waits exactly for what is due next, and hands it over.

Also how seconds become ticks: deadlines up, the present down, so nothing is ever early.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from celery_wheel.errors import WheelStopped

__all__ = ("Ticks", "Waiter", "WheelThread", "wait")

D = TypeVar("D")


class Waiter(Protocol):
    """How a thread waits. Called with the condition held; may return early."""

    def __call__(self, condition: threading.Condition, timeout_s: float | None) -> None:
        """Wait until the condition is notified or the time is over (``None``: no end)."""


def wait(condition: threading.Condition, timeout_s: float | None) -> None:
    """Wait on the machine's clock; see :class:`Waiter`."""
    condition.wait(timeout_s if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))


class Ticks:
    """Seconds to ticks and back.

    Raises:
        ValueError: a tick that is not a positive number of seconds.
    """

    __slots__ = ("tick_s",)

    def __init__(self, tick_s: float) -> None:
        if not 0 < tick_s < math.inf:
            raise ValueError(f"the tick is {tick_s} s: give a positive number of seconds")
        self.tick_s = tick_s

    def due(self, at_s: float) -> int:
        """The first tick that begins at or after this instant.

        Raises:
            ValueError: it is not a finite number.
        """
        if not math.isfinite(at_s):
            raise ValueError(f"{at_s} is no time to wait for: give a finite number of seconds")
        tick = math.ceil(at_s / self.tick_s)
        return tick + 1 if tick * self.tick_s < at_s else tick

    def now(self, now_s: float) -> int:
        """The last tick that begins at or before this instant."""
        tick = math.floor(now_s / self.tick_s)
        if tick * self.tick_s > now_s:
            return tick - 1
        return tick + 1 if (tick + 1) * self.tick_s <= now_s else tick

    def until(self, tick: int, now_s: float) -> float:
        """Seconds from now to the beginning of a tick, from 0."""
        return max(tick * self.tick_s - now_s, 0.0)


class WheelThread(Generic[D]):
    """One daemon thread, started when it is first needed.

    In a loop: call ``collect`` under the lock for what is due and how long to wait
    (``None``: until :meth:`wake`), and ``fire`` for each without it. ``fire`` must not raise.

    *Thread-safety:* :attr:`condition` is the lock of the owner's state, too. It is re-entrant,
    because freeing a callback may run code that comes back to the timer.

    *Fork-safety:* a child has no thread; make the timer there.
    """

    def __init__(
        self,
        name: str,
        collect: Callable[[], tuple[list[D], float | None]],
        fire: Callable[[D], None],
        waiter: Waiter = wait,
    ) -> None:
        self.condition = threading.Condition(threading.RLock())
        self.stopped = False
        #: What was collected but not fired when it was stopped.
        self.unfired: list[D] = []
        self._name = name
        self._collect = collect
        self._fire = fire
        self._waiter = waiter
        self._thread: threading.Thread | None = None

    def ensure_started(self) -> None:
        """Start the thread if it is not running. Call with the condition held.

        Raises:
            WheelStopped: it was stopped.
        """
        if self.stopped:
            raise WheelStopped(f"{self._name} was stopped: make a new one")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Have it collect again, because something is due earlier. Call with the condition held."""
        self.condition.notify_all()

    def stop(self, *, join: bool) -> None:
        """Begin nothing more. With ``join`` return when what is being fired has ended."""
        with self.condition:
            self.stopped = True
            thread = self._thread
            self.wake()
        if join and thread is not None and thread is not threading.current_thread():
            thread.join()

    @property
    def is_current(self) -> bool:
        """``True`` in the thread itself."""
        return self._thread is threading.current_thread()

    def _run(self) -> None:
        while True:
            with self.condition:
                if self.stopped:
                    return
                due, wait_s = self._collect()
                if not due and (wait_s is None or wait_s > 0):
                    self._waiter(self.condition, wait_s)
                    continue
            for index, item in enumerate(due):
                if self.stopped:
                    self.unfired = due[index:]
                    return
                self._fire(item)
