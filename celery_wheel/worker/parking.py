"""Due tasks that this worker can't run: not registered here, or not readable."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery.utils.log import get_logger

from celery_wheel.worker.residents import PARKED

if TYPE_CHECKING:
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.residents import Item

__all__ = ("Parking",)

logger = get_logger(__name__)


class Parking:
    """Keeps what can't run, says so once, and lets others have it where that helps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._unknown: set[str] = set()
        self._unreadable: set[bytes] = set()
        self._parked: list[Item] = []

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of due tasks that are not registered here: not to be claimed."""
        return tuple(self._unknown)

    def holds(self, item: Item) -> bool:
        """Whether the item can't run here; then it is put where it belongs."""
        if item.task.key in self._unreadable:
            # Pending in the store, so that it can be steered; and ours, so that it is not
            # claimed again and again.
            self._engine.residents.move(item, PARKED)
            return True
        if self._engine.requests.knows(item.task.name):
            return False
        self._unregistered(item)
        return True

    def _unregistered(self, item: Item) -> None:
        name = item.task.name
        if name not in self._unknown:
            self._unknown.add(name)
            logger.error(
                "Task %s is due but not registered in this worker: its delayed tasks wait for a "
                "worker that knows it (is the module in `imports`/`include`?).",
                name,
            )
        self._engine.stats.counts["parked"] += 1
        if item.keeper.holds_messages:
            # Given back, the broker would deliver it here again at once.
            self._engine.residents.move(item, PARKED)
            self._parked.append(item)
        else:
            self._engine.dispatcher.give_back(item)

    def unreadable(self, item: Item, why: str) -> None:
        """A confirmed item whose message can't be read."""
        logger.error(
            "Delayed task %s[%s] waits and is kept: %s.", item.task.name, item.task.id, why
        )
        self._engine.stats.counts["parked"] += 1
        self._engine.residents.move(item, PARKED)
        if not item.keeper.holds_messages:
            self._unreadable.add(item.task.key)
            self._engine.residents.remove(item)
            item.keeper.requeue(item, redelivered=False)

    def unpark(self) -> None:
        """Tasks were registered: look again at those that were not."""
        parked, self._parked = self._parked, []
        known = {name for name in self._unknown if self._engine.requests.knows(name)}
        if known:
            self._unknown -= known
            self._engine.pager.look_now()
        for item in parked:
            if item.place == PARKED:
                self._engine.residents.to_due(item)

    def forget_parked(self) -> None:
        """Let go of those that are not parked any more."""
        self._parked = [item for item in self._parked if item.place == PARKED]
