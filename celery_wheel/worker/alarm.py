"""One thread that sleeps exactly until the next thing to do, then rings.

With an event loop ringing wakes the loop; without one, it runs the engine's turn in this
thread. While something is held it looks at the wall clock once a second: a step of the clock,
or a resume from suspend, moves every ETA.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery.utils.log import get_logger

from celery_wheel.clock import Clock

__all__ = ("Alarm",)

logger = get_logger(__name__)

#: Seconds between two looks at the wall clock while armed.
WATCH_S = 1.0
#: A wall clock that moved this much against the monotonic one was stepped (seconds).
STEP_S = 0.05


class Alarm:
    """Rings at an instant of the monotonic clock, or when kicked.

    Thread-safety: :meth:`arm`, :meth:`kick` and :meth:`stop` from any thread; ``ring`` runs in
    the alarm's own thread, without a lock held.
    """

    def __init__(self, clock: Clock, ring: Callable[[], None]) -> None:
        self._clock, self._ring = clock, ring
        self._changed = threading.Condition()
        self._at: float | None = None
        self._kicked = False
        self._stopping = False
        self._offset_s = self._offset()
        self._thread = threading.Thread(target=self._run, name="celery-wheel-alarm", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def arm(self, at: float | None) -> None:
        """Ring at this instant (monotonic seconds) instead of the one set before."""
        if at == self._at:
            return
        with self._changed:
            sooner = at is not None and (self._at is None or at < self._at)
            self._at = at
            if sooner:
                self._changed.notify()

    def kick(self) -> None:
        """Ring now. Several kicks before the ring make one."""
        if self._kicked:
            return
        with self._changed:
            self._kicked = True
            self._changed.notify()

    def stop(self, timeout_s: float | None = None) -> None:
        """End the thread; waits for a ring under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _offset(self) -> float:
        return self._clock.wall_ms() / 1000 - self._clock.monotonic()

    def _stepped(self) -> bool:
        offset_s = self._offset()
        if abs(offset_s - self._offset_s) < STEP_S:
            return False
        self._offset_s = offset_s
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._due():
                    if self._stopping:
                        return
                    self._changed.wait(self._patience_s())
                if self._stopping:
                    return
                self._kicked, self._at = False, None
            try:
                self._ring()
            except Exception:
                logger.exception("The wheel's turn failed.")

    def _due(self) -> bool:
        if self._kicked or self._stopping:
            return True
        at = self._at
        return at is not None and (self._clock.monotonic() >= at or self._stepped())

    def _patience_s(self) -> float | None:
        if self._at is None:
            return None
        return max(0.0, min(self._at - self._clock.monotonic(), WATCH_S))
