"""Sharing one backlog with other workers: take little, give back what others could run sooner.

Alone, a worker takes in the whole window and keeps it. With peers it looks ahead only a moment,
claims little and often, and gives back what its pool can't take soon. A pool that has taken
nothing for a while keeps nothing: nobody's task waits behind a long one while another worker
is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery.utils.log import get_logger

if TYPE_CHECKING:
    from celery_wheel.stores.base import Owner
    from celery_wheel.worker.engine import Engine

__all__ = ("Sharing",)

logger = get_logger(__name__)

#: How far ahead a worker with peers claims (milliseconds).
SHARED_HORIZON_MS = 2000
#: Seconds between a worker's looks at the store while it has peers.
SHARED_LOOK_S = 0.25
#: Seconds between looks for peers while more is due than the pool takes soon.
PEERS_EVERY_S = 0.5
#: Seconds without a hand-over after which a full pool counts as stuck.
STUCK_S = 1.0
#: Rows given back in one turn, so that a turn stays short.
GIVE_BACK = 500


class Sharing:
    """What a worker with peers does differently. Owned by the engine, used in its turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.peers = 0
        self.stuck = False
        self._asked_at = float("-inf")
        self._asking = False
        self._sample = (0.0, 0)
        self._rate = 0
        self._moved_at = 0.0

    # -- what the pager asks -------------------------------------------------------------------

    @property
    def horizon_ms(self) -> int:
        """How far ahead rows are claimed."""
        horizon_ms = self._engine.settings.horizon_ms
        return min(horizon_ms, SHARED_HORIZON_MS) if self.peers else horizon_ms

    @property
    def look_every_s(self) -> float | None:
        """How often to look at the store, or ``None`` where that is not ours to say."""
        return SHARED_LOOK_S if self.peers else None

    @property
    def page(self) -> int:
        """How many rows to claim at most; 0 while the pool has enough."""
        if self.stuck:
            return 0
        room = self._keep() - self._backlog()
        return room if room * 2 > self._keep() else 0

    def _backlog(self) -> int:
        """Tasks that are due and have no slot."""
        return self._engine.residents.due_count + self._engine.dispatcher.waiting_count

    def _keep(self) -> int:
        """How many due tasks the pool takes soon: a few, or what it took in half a second."""
        return max(2 * self._engine.dispatcher.ahead(), self._rate)

    # -- the turn ------------------------------------------------------------------------------

    @property
    def turn_at(self) -> float | None:
        """When to look again by itself, monotonic seconds."""
        if self._engine.store_keeper is None or not self._backlog():
            return None
        return self._engine.clock.monotonic() + SHARED_LOOK_S

    def turn(self) -> None:
        """Measure, look for peers if there is a backlog, give back what is too much."""
        engine = self._engine
        if engine.store_keeper is None:
            return
        now = engine.clock.monotonic()
        self._measure(now)
        may_ask = not self._asking and now - self._asked_at >= PEERS_EVERY_S
        if may_ask and self._backlog() > self._keep():
            self._ask(now)
        if not self.peers:
            self.stuck = False
            return
        if engine.dispatcher.slots.free() > 0:
            self._moved_at = now
        self.stuck = now - self._moved_at >= STUCK_S
        if self.stuck:
            engine.dispatcher.give_back_waiting()
        excess = engine.residents.due_count - (0 if self.stuck else self._keep())
        if excess > 0:
            engine.give_back(engine.residents.last_due(min(excess, GIVE_BACK)))

    def _measure(self, now: float) -> None:
        at, count = self._sample
        dispatched = self._engine.stats.counts["dispatched"]
        if dispatched != count:
            self._moved_at = now
        if now - at >= PEERS_EVERY_S:
            self._rate = dispatched - count if now - at < 2 * PEERS_EVERY_S else 0
            self._sample = (now, dispatched)

    def _ask(self, now: float) -> None:
        keeper = self._engine.store_keeper
        if keeper is None:
            return
        self._asked_at, self._asking = now, True

        def answered(owners: list[Owner]) -> None:
            self._asking = False
            self.note(len(owners) - 1)

        def failed(_: Exception) -> None:
            self._asking = False

        keeper.executor.submit("owners", lambda store: store.owners(), answered, failed)

    def note(self, peers: int) -> None:
        """Others have leases in this store, or have none any more."""
        before, self.peers = self.peers, max(0, peers)
        if bool(before) == bool(self.peers):
            return
        logger.info(
            "%s in the store: %s.",
            f"{self.peers} other worker(s)" if self.peers else "No other worker",
            "tasks are shared" if self.peers else "the whole window is taken in",
        )
        self._moved_at = self._engine.clock.monotonic()
        if self.peers:
            until_ms = self._engine.clock.wall_ms() + SHARED_HORIZON_MS
            self._engine.give_back(self._engine.residents.due_after(until_ms))
        self._engine.pager.look_now()
