"""The thread that talks to a store, so that the worker's loop never waits for one.

Calls run one after another in the order of submission. What can't be reached is tried again
until it answers; what a full store refuses is tried again behind the others, which may make
room. Answers come back through :meth:`drain`, run by whoever owns the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from celery.utils.log import get_logger

from celery_wheel.clock import Clock
from celery_wheel.errors import StoreFull, StoreUnavailable
from celery_wheel.stores.base import Store
from celery_wheel.worker.stats import Timings

__all__ = ("Executor", "InlineExecutor", "StoreThread")

logger = get_logger(__name__)

Call = Callable[[Store], Any]
Done = Callable[[Any], None]
Failed = Callable[[Exception], None]

#: Seconds between tries while a store does not answer: first, and at most.
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 1.0
#: Seconds between two log lines about one outage.
LOG_EVERY_S = 10.0
AWAY = (
    "The store does not answer (%s). Delayed tasks wait, messages stay with the broker, immediate "
    "tasks go on; it is tried again until it answers."
)
FULL = (
    "The store is full (%s). What arrives stays with the broker until there is room; delayed "
    "tasks that the store has go on."
)
#: Seconds a store may be unreachable when the worker starts, before that is an error.
PATIENCE_AT_START_S = 10.0


class Executor(Protocol):
    """Runs calls on a store and gives their answers back in :meth:`drain`."""

    store: Store
    healthy: bool
    timings: Timings
    wake: Callable[[], None]

    def start(self) -> None:
        """Open the store."""

    def submit(
        self, name: str, call: Call, done: Done | None = None, failed: Failed | None = None, /
    ) -> None:
        """Have ``call(store)`` run; ``done(answer)`` runs later, in :meth:`drain`."""

    def drain(self, limit: int = 50) -> bool:
        """Run up to ``limit`` callbacks; whether some are left."""

    def stop(self, timeout_s: float, /) -> bool:
        """Run what was submitted, close the store; whether that was done in time."""


class InlineExecutor:
    """Runs calls at once: for a store that is a data structure of this process.

    Thread-safety: calls come from any thread, so they take a lock.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.healthy = True
        self.timings = Timings()
        self.wake: Callable[[], None] = lambda: None
        self._answers: deque[tuple[Done, Any]] = deque()
        self._lock = threading.Lock()

    def start(self) -> None:
        """See :meth:`Executor.start`."""
        self.store.open()

    def submit(
        self, _name: str, call: Call, done: Done | None = None, _failed: Failed | None = None
    ) -> None:
        """See :meth:`Executor.submit`."""
        with self._lock:
            answer = call(self.store)
        if done is not None:
            self._answers.append((done, answer))
            self.wake()

    def drain(self, limit: int = 50) -> bool:
        """See :meth:`Executor.drain`."""
        return _run_answers(self._answers, limit)

    def stop(self, _timeout_s: float) -> bool:
        """See :meth:`Executor.stop`."""
        self.store.close()
        return True


class StoreThread:
    """Runs calls in a thread of its own.

    Args:
        store: used, opened and closed by the thread alone.

    :attr:`wake` is called from the thread when an answer waits, :attr:`on_recovered` when
    the store answers again after calls had to be repeated.

    Thread-safety: :meth:`submit` and :meth:`stop` from any thread, :meth:`drain` by one.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store = store
        self.healthy = True
        self.timings = Timings()
        self.wake: Callable[[], None] = lambda: None
        self.on_recovered: Callable[[], None] = lambda: None
        self._clock = clock
        self._calls: deque[tuple[str, Call, Done | None, Failed | None]] = deque()
        self._answers: deque[tuple[Done, Any]] = deque()
        #: Calls that a full store refused, and when they are submitted again.
        self._refused: deque[tuple[str, Call, Done | None, Failed | None]] = deque()
        self._retry_at = 0.0
        self._changed = threading.Condition()
        self._opened = threading.Event()
        self._error: Exception | None = None
        self._stopping = False
        self._give_up = False
        self._logged_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="celery-wheel-store", daemon=True)

    def start(self) -> None:
        """Start the thread and wait until the store is open.

        Raises:
            ConfigError, SchemaVersionError, StoreUnavailable: as :meth:`Store.open` does.
        """
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            raise self._error

    def submit(
        self, name: str, call: Call, done: Done | None = None, failed: Failed | None = None
    ) -> None:
        """See :meth:`Executor.submit`."""
        with self._changed:
            self._calls.append((name, call, done, failed))
            self._changed.notify()

    def drain(self, limit: int = 50) -> bool:
        """See :meth:`Executor.drain`."""
        return _run_answers(self._answers, limit)

    def stop(self, timeout_s: float) -> bool:
        """Let the thread finish what was submitted; give up what a dead store keeps waiting."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return True
        with self._changed:
            self._give_up = True
            self._changed.notify()
        self._thread.join(1.0)
        return False

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
        except Exception as exc:  # noqa: BLE001 - raised again where it is waited for
            self._error = exc
            return
        finally:
            self._opened.set()
        while True:
            with self._changed:
                self._resubmit()
                while not self._calls and not self._stopping:
                    wait_s = self._retry_at - self._clock.monotonic() if self._refused else None
                    self._changed.wait(wait_s)
                    self._resubmit()
                if self._give_up or not self._calls:
                    break
                name, call, done, failed = self._calls.popleft()
            self._one(name, call, done, failed)
        self.store.close()

    def _open(self) -> None:
        give_up_at = self._clock.monotonic() + PATIENCE_AT_START_S
        while True:
            try:
                return self.store.open()
            except StoreUnavailable:
                if self._clock.monotonic() > give_up_at:
                    raise
                with self._changed:
                    self._changed.wait(RETRY_MOST_S)

    def _one(self, name: str, call: Call, done: Done | None, failed: Failed | None) -> None:
        delay_s = RETRY_FIRST_S
        while True:
            began_at = self._clock.monotonic()
            try:
                answer = call(self.store)
            except StoreFull as exc:
                self._complain(FULL, exc)
                self._refused.append((name, call, done, failed))
                self._retry_at = began_at + RETRY_MOST_S
                return
            except StoreUnavailable as exc:
                self.healthy = False
                self._complain(AWAY, exc)
                with self._changed:
                    if self._give_up:
                        return
                    self._changed.wait(delay_s)
                delay_s = min(delay_s * 2, RETRY_MOST_S)
                continue
            except Exception as exc:
                logger.exception("The store's %s failed.", name)
                if failed is not None:
                    self._answers.append((failed, exc))
                    self.wake()
                return
            break
        self.timings.add(name, self._clock.monotonic() - began_at)
        if not self.healthy:
            self.healthy = True
            logger.warning("The store answers again; delayed tasks go on.")
            self.on_recovered()
        if done is not None:
            self._answers.append((done, answer))
            self.wake()

    def _resubmit(self) -> None:
        if self._refused and self._clock.monotonic() >= self._retry_at:
            self._calls.extend(self._refused)
            self._refused.clear()

    def _complain(self, what: str, exc: Exception) -> None:
        now = self._clock.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.error(what, exc)


def _run_answers(answers: deque[tuple[Done, Any]], limit: int) -> bool:
    for _ in range(limit):
        try:
            done, answer = answers.popleft()
        except IndexError:
            return False
        done(answer)
    return bool(answers)
