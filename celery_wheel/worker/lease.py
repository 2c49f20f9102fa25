"""The worker's lease: renewed by a thread of its own, over a connection of its own.

On the solo pool a task *is* the loop, and a task of a minute must not cost the lease.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from celery.utils.log import get_logger

from celery_wheel.clock import Clock
from celery_wheel.errors import StoreError
from celery_wheel.stores.base import Owner, Store
from celery_wheel.worker.incarnation import provably_dead

__all__ = ("Lease",)

logger = get_logger(__name__)


#: Parts of the ttl: how long the store keeps the lease without renewal, and how often it is
#: renewed (and others' are looked at). Together less than one: a dead worker's tasks are
#: free within the ttl, and the worker itself stops trusting its lease before the store does.
IN_STORE, RENEW_EVERY = 0.7, 0.2


class Lease:
    """Heartbeats of one owner, and the reaping of others'.

    :attr:`on_lost` is called in the lease's thread when the lease had run out and others may
    have taken rows; :attr:`on_freed` when rows of dead owners were freed, :attr:`on_renewed`
    when :meth:`holds` had said no since the last renewal, :attr:`on_peers` with the number of
    other owners after each renewal.

    Thread-safety: :meth:`holds` and :meth:`kick` from any thread.
    """

    def __init__(self, store: Store, owner: Owner, ttl_s: float, clock: Clock) -> None:
        self._store, self.owner, self._ttl_s, self._clock = store, owner, ttl_s, clock
        self.on_lost: Callable[[], None] = lambda: None
        self.on_freed: Callable[[], None] = lambda: None
        self.on_renewed: Callable[[], None] = lambda: None
        self.on_peers: Callable[[int], None] = lambda _: None
        self._changed = threading.Condition()
        self._stopping = False
        self._kicked = False
        self._renewed = (float("-inf"), 0)
        self._reap_at = 0.0
        self._missed = False
        self._thread = threading.Thread(target=self._run, name="celery-wheel-lease", daemon=True)
        self._first = threading.Event()

    def start(self) -> None:
        """Start the thread; returns when the lease is held or its store did not answer."""
        self._thread.start()
        self._first.wait(self._ttl_s)

    def holds(self) -> bool:
        """Whether the lease was renewed within half its time, by both clocks."""
        at, wall_ms = self._renewed
        half_s = self._ttl_s / 2
        fresh = self._clock.monotonic() - at <= half_s
        if fresh and abs(self._clock.wall_ms() - wall_ms) <= half_s * 1000:
            return True
        self._missed = True
        self.kick()
        return False

    def kick(self) -> None:
        """Renew now."""
        with self._changed:
            self._kicked = True
            self._changed.notify()

    def stop(self, timeout_s: float) -> None:
        """End the thread; the lease stays on record."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        opened = False
        while True:
            try:
                if not opened:
                    self._store.open()
                    opened = True
                    self._adopt()
                self.beat()
                pause_s = self._ttl_s * RENEW_EVERY
            except StoreError as exc:
                logger.debug("The lease could not be renewed: %r", exc)
                pause_s = min(1.0, self._ttl_s / 6)
            except Exception:
                # Without this thread nothing would ever be dispatched again.
                logger.exception("The lease could not be renewed.")
                pause_s = 1.0
            self._first.set()
            with self._changed:
                if not self._kicked and not self._stopping:
                    self._changed.wait(pause_s)
                elif self._kicked and not self._stopping:
                    # Renewing costs a write: never more than some per second.
                    self._changed.wait(0.05)
                self._kicked = False
                if self._stopping:
                    break
        self._store.close()

    def beat(self) -> None:
        """Renew the lease, and reap if it is time."""
        asked_at, asked_ms = self._clock.monotonic(), self._clock.wall_ms()
        kept = self._store.heartbeat(self.owner, self._ttl_s * IN_STORE)
        if not kept:
            # Before the lease counts as held: what others may have taken must not be handed over.
            logger.warning("The lease had run out; what was confirmed is confirmed anew.")
            self.on_lost()
        # By the wall clock, too: where it was set, leases by it have run out for everybody.
        late = (
            max(asked_at - self._renewed[0], abs(asked_ms - self._renewed[1]) / 1000) > self._ttl_s
        )
        self._renewed = (asked_at, asked_ms)
        if self._missed:
            self._missed = False
            self.on_renewed()
        if late:
            # After an outage everybody is late: give the living time to renew.
            self._reap_at = asked_at + self._ttl_s / 2
        if asked_at >= self._reap_at and self._store.reap():
            self.on_freed()
        self.on_peers(len(self._store.owners()) - 1)

    def _adopt(self) -> None:
        """Free the rows of owners on this host that are certainly dead."""
        dead = [owner.name for owner in self._store.owners() if provably_dead(owner)]
        if dead and self._store.reap(dead):
            self.on_freed()
