"""A thread for what the broker has to be asked and the loop must not wait for.

Calls run one after another in the order of submission; their answers come back through
:meth:`Errands.drain`, run by whoever owns the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from celery.utils.log import get_logger

__all__ = ("Errands",)

logger = get_logger(__name__)

Call = Callable[[], Any]
Done = Callable[[Any], None]


class Errands:
    """Runs calls; ``done`` gets the answer, or the exception that came instead.

    The thread is started by the first call. :attr:`wake` is called from it when an answer
    waits, ``on_idle`` when nothing is left to run.

    Thread-safety: :meth:`submit` from any thread, :meth:`drain` and :meth:`stop` by one.
    """

    def __init__(self, wake: Callable[[], None], on_idle: Callable[[], object]) -> None:
        self.wake, self._on_idle = wake, on_idle
        self._changed = threading.Condition()
        self._calls: deque[tuple[Call, Done]] = deque()
        self._answers: deque[tuple[Done, Any]] = deque()
        self._open = 0
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an answer is outstanding."""
        return self._open > 0

    @property
    def stopping(self) -> bool:
        """Whether nothing is to be tried again."""
        return self._stopping

    def submit(self, call: Call, done: Done) -> None:
        """Have ``call()`` run in the thread; ``done(answer)`` runs later, in :meth:`drain`."""
        with self._changed:
            self._open += 1
            self._calls.append((call, done))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="celery-wheel-errands", daemon=True
                )
                self._thread.start()

    def drain(self) -> bool:
        """Run the callbacks of what was answered; whether there were any."""
        some = False
        while self._answers:
            done, answer = self._answers.popleft()
            with self._changed:
                self._open -= 1
            some = True
            done(answer)
        return some

    def pause(self, seconds: float) -> bool:
        """Wait, in a call that tries again; ``False`` where the worker stops."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._stopping, seconds)

    def stop(self, timeout_s: float) -> None:
        """Let the thread run what was submitted; nothing is tried again any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                waits = bool(self._calls)
            if not waits:
                self._rest()
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._stopping)
                if not self._calls:
                    return
                call, done = self._calls.popleft()
            try:
                answer = call()
            except Exception as exc:  # noqa: BLE001 - the answer is for who asked
                answer = exc
            self._answers.append((done, answer))
            self.wake()

    def _rest(self) -> None:
        try:
            self._on_idle()
        except Exception as exc:  # noqa: BLE001 - transports raise their own errors
            logger.debug("After the last errand: %r", exc)
