"""From the due line to the pool: tokens, the fence, slots, and the request's end.

Nothing of ours waits in the pool's semaphore or buffers. A *ticket* waits there instead, a
callback that is not tied to a task: when a slot comes free, the ticket takes whichever
confirmed task is first by then.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker.state import task_reserved

from celery_wheel import _compat
from celery_wheel.worker.limits import RateLimits
from celery_wheel.worker.parking import Parking
from celery_wheel.worker.residents import (
    CONFIRMING,
    GONE,
    IN_FLIGHT,
    READY,
    Item,
)
from celery_wheel.worker.slots import Slots

if TYPE_CHECKING:
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper

__all__ = ("Dispatcher",)

logger = get_logger(__name__)

#: Seconds between two looks for a free slot where the pool does not tell (no semaphore).
SLOT_POLL_S = 0.02
#: Seconds until the next confirm after one that the store refused with an error.
FAILED_PAUSE_S = 1.0
#: Tasks confirmed ahead per process where the prefetch multiplier is 0 (no limit).
AHEAD_WITHOUT_LIMIT = 4


class Dispatcher:
    """Hands due tasks to the pool, in order, each after it was confirmed.

    Args:
        engine: shared state and its lock.
        consumer: Celery's consumer; its pool and controller are used.
    """

    def __init__(self, engine: Engine, consumer: Any) -> None:
        self._engine, self._consumer = engine, consumer
        self.slots = Slots(consumer)
        self._limits = RateLimits(consumer, engine.residents)
        self._ready: list[tuple[tuple[int, int, int], int, Item]] = []
        self._ready_count = 0
        self._count = 0
        self._confirming = 0
        self.confirm_at = 0.0
        self._tickets = 0
        self.parking = Parking(engine)
        self._ended: deque[tuple[Item, Any]] = deque()
        self.in_flight: dict[bytes, Item] = {}

    # -- the fence -----------------------------------------------------------------------------

    def confirm(self) -> None:
        """Confirm as many of the first due tasks as the pool can take soon."""
        engine = self._engine
        if not all(engine.lease_holds(keeper) for keeper in engine.keepers):
            return
        if self._confirming or engine.sharing.stuck or engine.clock.monotonic() < self.confirm_at:
            return
        ahead = self.ahead()
        if self._ready_count > ahead // 2:
            return  # the pool has enough for now, and a few at a time cost a write each
        room = ahead - self._ready_count
        picked: dict[Keeper, list[Item]] = {}
        for item in self._limits.take(room):
            picked.setdefault(item.keeper, []).append(item)
            room -= 1
        while room > 0:
            first = self._pick()
            if first is None:
                break
            self._engine.residents.move(first, CONFIRMING)
            picked.setdefault(first.keeper, []).append(first)
            room -= 1
        for keeper, items in picked.items():
            self._confirm(keeper, items)

    def ahead(self) -> int:
        """How many tasks may be confirmed and wait for a slot."""
        if not self._engine.dispatching:
            return 0  # a cold shutdown may have ended the pool in the middle of this turn
        multiplier = self._consumer.prefetch_multiplier or AHEAD_WITHOUT_LIMIT
        return max(1, int(self.slots.count * multiplier))

    def _pick(self) -> Item | None:
        """The first of the due line that may run now; others are put where they belong."""
        engine = self._engine
        now_ms = engine.clock.wall_ms()
        while True:
            item = engine.residents.first_due()
            if item is None:
                return None
            task = item.task
            if item.expired(now_ms):
                engine.residents.move(item, CONFIRMING)
                engine.announcer.expire(item)
            elif task.due_ms > now_ms:
                engine.residents.place(item, now_ms)
            elif self.parking.holds(item) or self._limits.hold(item):
                continue
            else:
                return item

    def _confirm(self, keeper: Keeper, items: list[Item]) -> None:
        self._confirming += 1
        refs = [(item.task.key, item.task.version) for item in items]
        refused: list[Item] = []

        def confirmed(keys: set[bytes]) -> None:
            self._confirming -= 1
            for item in items:
                if item.place != CONFIRMING:
                    continue  # revoked meanwhile; the store was told after this call
                if item.task.key in keys:
                    self._push(item)
                elif item.task.due_ms > self._engine.clock.wall_ms():
                    # The clock was set back since it was due.
                    self._engine.residents.place(item, self._engine.clock.wall_ms())
                else:
                    self._engine.residents.remove(item)
                    refused.append(item)
            if refused:
                self._engine.announcer.refused(keeper, refused)

        def failed(_: Exception) -> None:
            self._confirming -= 1
            self.confirm_at = self._engine.clock.monotonic() + FAILED_PAUSE_S
            for item in items:
                if item.place == CONFIRMING:
                    self._engine.residents.to_due(item)

        keeper.confirm(refs, confirmed, failed)

    def _push(self, item: Item) -> None:
        task = item.task
        item.place = READY
        rank = task.priority if self._engine.residents.low_first else -task.priority
        self._count += 1
        self._ready_count += 1
        heapq.heappush(self._ready, ((rank, task.due_ms, task.arrival), self._count, item))

    def unready(self) -> None:
        """A confirmed item was taken out (revoked); its entry is skipped later."""
        self._ready_count -= 1

    def _pop(self) -> Item | None:
        while self._ready:
            item = heapq.heappop(self._ready)[2]
            if item.place == READY:
                self._ready_count -= 1
                return item
        return None

    # -- slots ---------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Ask for slots for what is confirmed. With a lock held only where a loop runs this."""
        semaphore = self.slots.semaphore
        if semaphore is None:
            while self._engine.dispatching and self._may_hand_over():
                with self._engine.lock:
                    item = self._pop()
                if item is None or not self._hand_over(item, self._consumer.on_task_request):
                    break
            return
        while self._tickets < self._ready_count:
            self._tickets += 1
            semaphore.acquire(self._granted)

    def _granted(self) -> None:
        self._tickets = max(0, self._tickets - 1)
        process = _compat.released_on_accept(self._consumer.controller)
        while self._engine.dispatching:
            item = self._pop()
            if item is None:
                break
            if self._hand_over(item, process):
                return
        self.slots.release()
        self._engine.wake()

    def _may_hand_over(self) -> bool:
        """By counting. At most one of ours waits behind a full pool, so that a stream of
        immediate tasks can't starve those that are due."""
        return self.slots.free() > 0 or not self.in_flight

    def give_back_waiting(self) -> None:
        """Let others have what is confirmed and waits behind a stuck pool."""
        items = [i for i in self.waiting() if i.place == READY and not i.keeper.holds_messages]
        self._ready_count -= len(items)
        self._engine.give_back(items)

    @property
    def polling_at(self) -> float | None:
        """When to look for a free slot again, where the pool tells nobody."""
        if not self._ready_count or self.slots.semaphore is not None:
            return None
        return self._engine.clock.monotonic() + SLOT_POLL_S

    @property
    def next_token_at(self) -> float | None:
        """When a rate limit lets the next task through, monotonic seconds."""
        return self._limits.next_at(self._engine.clock.monotonic())

    # -- handing over --------------------------------------------------------------------------

    def _hand_over(self, item: Item, process: Callable[[Any], None]) -> bool:
        """Give one task to the pool; ``False`` where that was not to be."""
        engine = self._engine
        # Not due any more: the clock was set back since it was confirmed.
        early = item.task.due_ms > engine.clock.wall_ms()
        if early or not engine.lease_holds(item.keeper):
            with engine.lock:
                self.give_back(item)
            return False
        try:
            request = engine.build(item, self._acked, self._rejected)
        except Exception as exc:  # noqa: BLE001 - whatever a body can do when decoded
            with engine.lock:
                self.parking.unreadable(item, f"its message can't be read ({exc!r})")
            return False
        item.place, item.request = IN_FLIGHT, request
        request.wheel_item = item
        self.in_flight[item.task.key] = item
        engine.stats.counts["dispatched"] += 1
        engine.stats.late(engine.clock.wall_ms() - item.task.due_ms)
        task_reserved(request)
        try:
            process(request)
        except Exception:
            logger.exception("The pool did not take %s[%s].", item.task.name, item.task.id)
            self._ended.append((item, None))
            return False
        return True

    # -- the end of a request (any thread) -----------------------------------------------------

    def _acked(self, item: Item) -> None:
        item.keeper.settle(item)
        self._ended.append((item, True))
        self._engine.wake()

    def _rejected(self, item: Item, *, requeue: bool) -> None:
        if requeue:
            self._engine.stats.counts["requeued"] += 1
            item.keeper.requeue(item)
        else:
            item.keeper.reject(item)
        self._ended.append((item, True))
        self._engine.wake()

    def finished(self, request: Any) -> None:
        """The pool is done with a request. One that was not answered goes back."""
        item = getattr(request, "wheel_item", None)
        if item is not None:
            self._ended.append((item, request.acknowledged or None))
        self._engine.wake()

    def reap(self) -> bool:
        """Forget what has ended, give back what ended without an answer."""
        some = False
        while self._ended:
            item, answered = self._ended.popleft()
            if self.in_flight.get(item.task.key) is not item:
                continue  # it was reaped, or its message came again and is another item now
            del self.in_flight[item.task.key]
            some = True
            if answered is None:
                self._engine.stats.counts["requeued"] += 1
                item.keeper.requeue(item)
            self._engine.residents.remove(item)
            item.request = None
            self._engine.pager.look_soon()
        return some

    # -- the connection ------------------------------------------------------------------------

    def survive(self) -> list[Any]:
        """The connection is gone, or the worker stops: take back what no child has.

        Returns the requests that a child has: those run on and are answered as always.
        """
        self._tickets = 0
        written = []
        for item in list(self.in_flight.values()):
            if item.keeper.holds_messages:
                continue  # as stock: the broker delivers it again
            if _compat.job_was_written(item.request):
                written.append(item.request)
            else:
                del self.in_flight[item.task.key]
                item.request = None
                self.give_back(item)
        return written

    def give_back(self, item: Item) -> None:
        """Confirmed, but not to be run here and now: pending again, for whoever claims it."""
        self._engine.residents.remove(item)
        item.keeper.requeue(item, redelivered=False)

    def doubt(self, keeper: Keeper) -> None:
        """The lease was lost: what the store confirmed may be others' by now.

        What waits in the wheel is asked for when it is due, and dropped then if it was taken.
        """
        for item in [i for i in self._engine.residents if i.keeper is keeper]:
            if item.place == READY:
                self.unready()
                self.give_back(item)
            elif item.place == CONFIRMING:
                self._engine.residents.to_due(item)

    def waiting(self) -> list[Item]:
        """Confirmed or being confirmed, not handed over."""
        return [item for item in self._engine.residents if item.place in (READY, CONFIRMING)]

    def drop(self, keeper: Keeper) -> None:
        """Forget every item of a keeper that is not with the pool."""
        for item in [i for i in self._engine.residents if i.keeper is keeper]:
            if item.place == READY:
                self.unready()
            if item.place != IN_FLIGHT:
                self._engine.residents.remove(item)
                item.place = GONE
            elif keeper.holds_messages:
                self.in_flight.pop(item.task.key, None)
                self._engine.residents.remove(item)

    @property
    def waiting_count(self) -> int:
        """Confirmed tasks without a slot."""
        return self._ready_count
