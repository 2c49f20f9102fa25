"""Broker custody on RabbitMQ: what is held for long goes back to the end of its queue.

RabbitMQ closes a channel whose consumer holds a message for longer than ``consumer_timeout``,
and no message says "I am still at it". So a message that was held for most of
``wheel_broker_lease`` is published to its source queue once more, as it is, through the default
exchange, and acknowledged when the broker has confirmed the copy. Whoever gets the copy holds
it; here it is a new message, but for a copy that overtakes its own confirmation.

A task is out of the wheel while its copy is on the way, so it can't run twice.

On crash: between publishing and acknowledging, the broker has two copies. One worker drops the
second by its key; two workers may run one each.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from celery_wheel.worker.courier import letter_of
from celery_wheel.worker.messages import key_of
from celery_wheel.worker.renewal import Renewal
from celery_wheel.worker.residents import DUE, LIMITED, PARKED, REPARKING, WAITING, Item

if TYPE_CHECKING:
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper
    from celery_wheel.worker.messages import Delivery

__all__ = ("Reparking",)

logger = get_logger(__name__)

#: Parts of the lease: how old a held message gets, and how often it is looked for.
AGE, LOOK = 0.75, 1 / 16
#: Messages that are published and confirmed together.
BATCH = 200


class Reparking(Renewal):
    """Publishes held messages again in time, a batch after the other."""

    def __init__(self, engine: Engine, keeper: Keeper) -> None:
        super().__init__(engine, keeper)
        self._lease_s = engine.settings.broker_lease_s
        #: What is on the way: published perhaps, not confirmed.
        self._out: dict[bytes, tuple[Item, Delivery]] = {}
        #: Revoked while they were on the way: their copies are acknowledged, no more.
        self._orphans: set[bytes] = set()

    @property
    def renew_at(self) -> float | None:
        """When to look next, monotonic seconds."""
        if self._out or not self._keeper.messages:
            return None
        if self._at is None:
            self._at = self._engine.clock.monotonic() + self._lease_s * LOOK
        return self._at

    @property
    def busy(self) -> bool:
        """While copies are on the way: closing the connection would leave two of each."""
        return bool(self._out)

    def forget(self) -> None:
        """The connection is new: what was held on it comes again, and the copies, too."""
        super().forget()
        self._out.clear()
        self._orphans.clear()

    def renew(self) -> None:
        """Send the next batch, if it is time."""
        at = self.renew_at
        now = self._engine.clock.monotonic()
        if at is None or now < at:
            return
        self._at = now + self._lease_s * LOOK
        batch = {}
        letters = []
        for item, delivery in self._old(now):
            message = delivery.message
            letter = letter_of(message, "", item.task.queue, mandatory=True)
            letter.headers.pop("x-death", None)
            letters.append(letter)
            batch[item.task.key] = (item, delivery)
            self._engine.residents.move(item, REPARKING)
        if batch:
            self._out = dict(batch)
            self._engine.errands.submit(
                partial(self._engine.courier.publish, letters), partial(self._answered, batch)
            )

    def _old(self, now: float) -> list[tuple[Item, Delivery]]:
        """Held for long, and not about to be acknowledged anyway; the oldest first."""
        found: list[tuple[Item, Delivery]] = []
        wall_ms = self._engine.clock.wall_ms()
        for key, delivery in self._keeper.messages.items():
            left_s = delivery.at + self._lease_s - now
            if left_s > self._lease_s * (1 - AGE) or len(found) == BATCH:
                break  # in the order of their age
            item = self._engine.residents.by_key.get(key)
            if item is None:
                continue
            if item.place == WAITING:
                stays = item.wake_ms() > wall_ms + left_s * 1000
            else:
                overdue_ms = wall_ms - item.task.due_ms
                stays = overdue_ms > self._lease_s * LOOK * 1000
                stays = stays and item.place in (DUE, LIMITED, PARKED)
            if stays:
                found.append((item, delivery))
        return found

    def _answered(self, batch: dict[bytes, tuple[Item, Delivery]], answer: Any) -> None:
        taken = [False] * len(batch) if isinstance(answer, Exception) else answer
        for (key, entry), there in zip(batch.items(), taken, strict=True):
            if self._out.get(key) is not entry:
                continue  # its copy was faster, or the connection was lost
            del self._out[key]
            if there:
                self._parked(key, *entry)
            else:
                self._back(entry[0])
        self._engine.dispatcher.parking.forget_parked()
        if isinstance(answer, Exception):
            logger.warning(
                "Held messages could not be published again (%r); tried again before "
                "wheel_broker_lease (%g s) has passed twice.",
                answer,
                self._lease_s,
            )
        elif not all(taken):
            logger.warning(
                "The broker did not take %s held messages again: is a queue gone or full?",
                taken.count(False),
            )
        elif len(batch) == BATCH:
            self._at = self._engine.clock.monotonic()  # there are more
        logger.debug("%s held messages went back to their queues.", sum(taken))

    def _parked(self, key: bytes, item: Item, delivery: Delivery) -> None:
        if item.place != REPARKING:
            self._orphans.add(key)
            return
        self._let_go(key)
        delivery.ack_log_error()

    def _back(self, item: Item) -> None:
        if item.place == REPARKING:
            self._engine.residents.place(item, self._engine.clock.wall_ms())

    def unwanted(self, message: Any) -> bool:
        """The copy of a task that was revoked while it was on the way."""
        if not self._out and not self._orphans:
            return False
        key = key_of(message.headers, self._engine.sources.current)
        entry = self._out.get(key)
        if key not in self._orphans and (entry is None or entry[0].place == REPARKING):
            return False
        self._out.pop(key, None)
        self._orphans.discard(key)
        return True

    def returned(self, task: DelayedTask, delivery: Delivery) -> bool:
        """A copy that is faster than its confirmation takes the place of what is held."""
        entry = self._out.pop(task.key, None)
        orphan = task.key in self._orphans
        if entry is None and not orphan:
            return False
        self._orphans.discard(task.key)
        if entry is None or entry[0].place != REPARKING:
            self._keeper.settle_key(task.key, acked=True)
            delivery.ack_log_error()
            return True
        item, _ = entry
        before = self._take_over(task.key, delivery)
        if before is not None:
            before.ack_log_error()
        self._back(item)
        return True
