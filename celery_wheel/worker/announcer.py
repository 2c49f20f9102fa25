"""Telling the world about tasks that will not run: revoked and expired ones.

Each announcement writes to the result backend, so they are made a few milliseconds' worth at a
time. Only the worker whose call deleted the row announces it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from celery_wheel import _compat
from celery_wheel.stores.base import Filter
from celery_wheel.task import PENDING
from celery_wheel.worker.residents import CONFIRMING, DUE, IN_FLIGHT, READY

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_wheel.stores.base import Cancelled, Store
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper
    from celery_wheel.worker.residents import Item

__all__ = ("Announcer",)

logger = get_logger(__name__)

#: Seconds of one turn that announcements may take.
BUDGET_S = 0.005


class Announcer:
    """Makes announcements in order, within a budget per turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._work: deque[Callable[[], object]] = deque()
        self._expired: dict[Keeper, list[Item]] = {}

    @property
    def busy(self) -> bool:
        """Whether announcements wait."""
        return bool(self._work or self._expired)

    def work(self, *, everything: bool = False) -> None:
        """Make announcements until the budget is spent."""
        expired, self._expired = self._expired, {}
        for keeper, items in expired.items():
            self.forget(keeper, [item.task.key for item in items])
        until = self._engine.clock.monotonic() + BUDGET_S
        while self._work and (everything or self._engine.clock.monotonic() < until):
            one = self._work.popleft()
            try:
                one()
            except Exception:
                logger.exception("An announcement failed.")

    def later(self, call: Callable[[], object]) -> None:
        """Do something of the same kind in its turn."""
        self._work.append(call)

    # -- expiry --------------------------------------------------------------------------------

    def expire(self, item: Item) -> None:
        """A resident's ``expires`` has passed."""
        self._expired.setdefault(item.keeper, []).append(item)

    def forget(self, keeper: Keeper, keys: list[bytes]) -> None:
        """Delete expired rows and announce those that this worker deleted."""

        def forgotten(rows: list[DelayedTask]) -> None:
            for key in keys:
                item = self._engine.residents.by_key.get(key)
                if item is not None:
                    self._engine.residents.remove(item)
            for row in rows:
                self._engine.stats.counts["expired"] += 1
                self._work.append(self._expiry(keeper, row))

        keeper.forget(keys, forgotten)

    def _expiry(self, keeper: Keeper, row: DelayedTask) -> Callable[[], None]:
        def announce() -> None:
            request = self._request(keeper, row)
            if request is None:
                self._mark(row, "expired")
            else:
                request.revoked()  # finds it expired, and says so
            keeper.discard_message(row.key)

        return announce

    # -- revokes -------------------------------------------------------------------------------

    def cancel(
        self, ids: list[str], stamps: list[str], done: Callable[[Cancelled], None] | None = None
    ) -> None:
        """Cancel in every custody; residents are detached now, rows as the stores get to it."""
        engine = self._engine
        confirmed: dict[Keeper, list[bytes]] = {}
        for item in list(engine.residents.of_ids(ids)):
            if item.place in (DUE, CONFIRMING, READY):
                confirmed.setdefault(item.keeper, []).append(item.task.key)
            if item.place != IN_FLIGHT:
                self._detach(item)
        for keeper, keys in confirmed.items():
            # These rows may be dispatched in the store, and were not handed over: take that
            # back before the cancel that follows, in the order the store sees them.
            keeper.executor.submit("release", _releasing(keeper.owner, keys))
        for keeper in engine.keepers:

            def cancelled(answer: Cancelled, keeper: Keeper = keeper) -> None:
                self._cancelled(keeper, answer)
                if done is not None:
                    done(answer)

            keeper.cancel(ids, stamps, cancelled)

    def _detach(self, item: Item) -> None:
        if item.place == READY:
            self._engine.dispatcher.unready()
        self._engine.residents.remove(item)

    def refused(self, keeper: Keeper, items: list[Item]) -> None:
        """Due rows that the fence refused: forget those whose revoke is on record.

        They were handed over when the cancel came, and were given back since.
        """
        owner, clock = keeper.owner, self._engine.clock
        tasks = [item.task for item in items]

        def deleted(rows: list[DelayedTask]) -> None:
            self._gone(keeper, rows)

        keeper.executor.submit(
            "refused", lambda store: _forget_revoked(store, owner, tasks, clock.wall_ms()), deleted
        )

    def _cancelled(self, keeper: Keeper, answer: Cancelled) -> None:
        self._gone(keeper, answer.rows)

    def _gone(self, keeper: Keeper, rows: list[DelayedTask]) -> None:
        for row in rows:
            item = self._engine.residents.by_key.get(row.key)
            if item is not None:
                self._detach(item)
            self.revoked(row, keeper)

    def revoked(self, row: DelayedTask, keeper: Keeper | None = None, message: Any = None) -> None:
        """Announce a task whose row is gone, or was refused, because it is revoked.

        ``message`` is the broker's where no row and nobody has it any more.
        """

        def announce() -> None:
            self._engine.stats.counts["revoked"] += 1
            request = self._request(keeper, row, message)
            if request is None:
                self._mark(row, "revoked")
            else:
                logger.info("Discarding revoked task: %s[%s]", row.name, row.id)
                _compat.announce_revoked(request)
            if keeper is not None:
                keeper.discard_message(row.key)

        self._work.append(announce)

    # -- both ----------------------------------------------------------------------------------

    def _request(self, keeper: Keeper | None, row: DelayedTask, message: Any = None) -> Any | None:
        delivery = None if keeper is None else keeper.messages.get(row.key)
        message = message if delivery is None else delivery.message
        try:
            return self._engine.requests.build(row, message)
        except Exception as exc:  # noqa: BLE001 - whatever a body can do when decoded
            logger.warning("%s[%s] can't be announced in full: %r", row.name, row.id, exc)
            return None

    def _mark(self, row: DelayedTask, reason: str) -> None:
        self._engine.app.backend.mark_as_revoked(row.id, reason)


def _forget_revoked(
    store: Store, owner: str, tasks: list[DelayedTask], now_ms: int
) -> list[DelayedTask]:
    """Delete and return those of some refused rows that only a tombstone keeps from running."""
    refs = [(task.key, task.version) for task in tasks]
    # Asked once more, because a row that was lost and claimed again since looks just the same.
    confirmed = store.confirm(owner, refs, now_ms)
    if confirmed:
        store.release(owner, list(confirmed))
    versions = dict(refs)
    mine = Filter(ids=tuple({task.id for task in tasks}), owner=owner, due_before_ms=now_ms + 1)
    refused = [
        row.key
        for row in store.find(mine, 1000).rows
        if row.state == PENDING
        and row.key not in confirmed
        and versions.get(row.key) == row.version
    ]
    return store.forget(refused) if refused else []


def _releasing(owner: str, keys: list[bytes]) -> Callable[[Store], int]:
    return lambda store: store.release(owner, keys)
