"""Brings the next window of the store into RAM: the far levels of the wheel are the store.

A page is a claim in due order. Another page follows at once while pages come back full and
there is room; otherwise the next look is a few seconds away, well inside the horizon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_wheel.stores.base import Filter
from celery_wheel.task import PENDING

if TYPE_CHECKING:
    from celery_wheel.stores.base import Store
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper

__all__ = ("Pager",)

#: Rows per claim, so that workers share and no call is long.
PAGE = 500
#: Seconds between looks when the window is in RAM already.
LOOK_EVERY_S = 5.0


class Pager:
    """Claims for one keeper with a durable store; does nothing without one."""

    def __init__(self, engine: Engine, keeper: Keeper | None) -> None:
        self._engine, self._keeper = engine, keeper
        self._claiming = False
        self._more = True
        self._again = False
        self._look_at = 0.0
        self._queues: list[str] = []

    @property
    def queues_changed(self) -> bool:
        """Whether this worker consumes other queues than at the last look."""
        return self._keeper is not None and self._engine.queues() != self._queues

    def look_soon(self) -> None:
        """Room was made, or rows were freed: look at the next turn if there may be more."""
        if self._more:
            self._look_at = 0.0

    def look_now(self) -> None:
        """Rows are there that were not before."""
        self._more, self._again, self._look_at = True, True, 0.0

    @property
    def look_at(self) -> float | None:
        """When to look next, monotonic seconds."""
        if self._keeper is None or self._claiming or not self._engine.open:
            return None
        if not self._has_room():
            # What makes room calls look_soon(); but a slot that another's task frees tells nobody.
            every_s = self._engine.sharing.look_every_s
            return None if every_s is None else self._engine.clock.monotonic() + every_s
        return self._look_at

    def look(self) -> None:
        """Claim a page if it is time and there is room for one."""
        engine, keeper = self._engine, self._keeper
        if self.queues_changed:
            self._queues = engine.queues()
            self.look_now()
        if keeper is None or self._claiming or engine.clock.monotonic() < self._look_at:
            return
        if not self._has_room():
            return
        limit = min(PAGE, engine.settings.resident_limit - len(engine.residents))
        if engine.sharing.peers:
            limit = min(limit, engine.sharing.page)
        now_ms = engine.clock.wall_ms()
        until_ms = now_ms + engine.sharing.horizon_ms
        owner = keeper.owner
        wanted = {"queues": self._queues, "unknown": engine.dispatcher.parking.unknown}
        self._claiming, self._again = True, False

        def claimed(rows: list[DelayedTask]) -> None:
            self._claiming = False
            # Rows that were freed while the store was asked were not seen.
            self._more = len(rows) >= limit or self._again
            every_s = min(LOOK_EVERY_S, engine.settings.horizon_ms / 2000)
            every_s = engine.sharing.look_every_s or every_s
            self._look_at = 0.0 if self._more else engine.clock.monotonic() + every_s
            for row in rows:
                engine.hold(row, keeper, acked=False)

        def failed(_: Exception) -> None:
            self._claiming = False
            self._look_at = engine.clock.monotonic() + 1.0

        keeper.executor.submit(
            "claim",
            lambda store: store.claim(owner, until_ms, limit, **wanted),
            claimed,
            failed,
        )
        keeper.executor.submit(
            "expiring", lambda store: store.next_expiring(now_ms, PAGE), self._expiring
        )

    def recover(self) -> None:
        """After an outage: take in rows that are ours without our knowing.

        A call whose answer was lost was repeated: a claim gave other rows then, a put answered
        that the rows were there already.
        """
        engine, keeper = self._engine, self._keeper
        if keeper is None:
            return
        mine = Filter(owner=keeper.owner)

        def read(store: Store) -> list[DelayedTask]:
            rows, page = [], store.find(mine, PAGE)
            while True:
                rows += [row for row in page.rows if row.state == PENDING]
                if page.cursor is None:
                    return rows
                page = store.find(mine, PAGE, page.cursor)

        def found(rows: list[DelayedTask]) -> None:
            for row in rows:
                if row.key not in engine.residents.by_key:
                    engine.hold(row, keeper, acked=False)

        keeper.executor.submit("find", read, found)

    def _has_room(self) -> bool:
        engine = self._engine
        if engine.sharing.peers and not engine.sharing.page:
            return False
        limit = engine.settings.resident_limit
        room = limit - len(engine.residents)
        worthwhile = min(100, max(1, limit // 10))
        return room >= worthwhile or (room > 0 and engine.residents.due_count == 0)

    def _expiring(self, rows: list[DelayedTask]) -> None:
        """Rows that expire while they are not in RAM."""
        residents = self._engine.residents
        keys = [row.key for row in rows if row.key not in residents.by_key]
        if keys and self._keeper is not None:
            self._engine.announcer.forget(self._keeper, keys)

    def make_room(self, due_ms: int) -> bool:
        """RAM is full: give back some that are due after ``due_ms``; whether that was done."""
        engine = self._engine
        # Either way there are rows now that are to come as soon as there is room.
        self._more = self._again = True
        some = max(1, engine.settings.resident_limit // 20)
        later = [
            item
            for item in engine.residents.farthest(some)
            if item.task.due_ms > due_ms and not item.keeper.holds_messages
        ]
        for item in later:
            engine.residents.remove(item)
            item.keeper.requeue(item, redelivered=False)
        return bool(later)
