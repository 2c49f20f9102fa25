"""Broker custody on SQS: held messages stay invisible to others.

SQS hands a message out again once its visibility timeout has passed, and lets it be renewed, ten
messages a call, until twelve hours after it was received. Before that the message is given back
to its queue, and whoever receives it next holds it. The calls are made by a thread.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger

from celery_wheel import _compat
from celery_wheel.worker.renewal import FIRST_S, Renewal

if TYPE_CHECKING:
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.engine import Engine
    from celery_wheel.worker.keeper import Keeper
    from celery_wheel.worker.messages import Delivery

__all__ = ("SqsRenewal",)

logger = get_logger(__name__)

#: Seconds after which a message is given back: SQS allows twelve hours.
MOST_S = 11 * 3600.0
#: The part of the visibility timeout after which it is started anew.
EVERY = 1 / 3
#: Messages of one call; what SQS allows.
BATCH = 10
#: Seconds until the next try after one that failed.
RETRY_S = 1.0


class SqsRenewal(Renewal):
    """Starts the visibility timeout of what is held anew, again and again."""

    def __init__(self, engine: Engine, keeper: Keeper) -> None:
        super().__init__(engine, keeper)
        #: Queue URL → its visibility timeout in seconds; read once. Of the thread.
        self._timeouts: dict[str, int] = {}
        self._asking = False

    @property
    def renew_at(self) -> float | None:
        """When to renew next, monotonic seconds."""
        if self._asking or not self._keeper.messages:
            return None
        if self._at is None:
            self._at = self._engine.clock.monotonic() + FIRST_S
        return self._at

    def renew(self) -> None:
        """Renew if it is time."""
        at, now = self.renew_at, self._engine.clock.monotonic()
        if at is None or now < at:
            return
        held = list(self._keeper.messages.items())
        for key, delivery in held:
            if delivery.at + MOST_S > now:
                break  # in the order of their age
            if self._let_go(key) is not None:
                delivery.requeue()
        self._asking = True
        self._engine.errands.submit(partial(self._renewed, held), partial(self._answered, now))

    def _answered(self, began_at: float, answer: Any) -> None:
        self._asking = False
        if self._engine.renewal is not self:
            return  # the connection is another, and so is what is held
        if isinstance(answer, Exception):
            logger.warning("Held messages could not be renewed (%r); tried again.", answer)
            self._at = self._engine.clock.monotonic() + RETRY_S
            return
        timeout_s, gone = answer
        self._at = began_at + timeout_s * EVERY
        for key, delivery in gone:
            if self._keeper.messages.get(key) is delivery and self._gone(key):
                logger.info("A held message was given to another worker.")

    def returned(self, task: DelayedTask, delivery: Delivery) -> bool:
        """A message that was visible again comes with another receipt; the latest one counts."""
        held = self._keeper.messages.get(task.key)
        if held is None or _sqs(held)["MessageId"] != _sqs(delivery)["MessageId"]:
            return False
        self._take_over(task.key, delivery)
        held.lower_window()
        _compat.forget_delivery(held.message)
        return True

    # -- the thread ----------------------------------------------------------------------------

    def _renewed(
        self, held: list[tuple[bytes, Delivery]]
    ) -> tuple[float, list[tuple[bytes, Delivery]]]:
        """Renew; returns the shortest timeout, and what SQS does not count as received by us."""
        gone: list[tuple[bytes, Delivery]] = []
        timeouts = []
        for url, group in groupby(sorted(held, key=_url), key=_url):
            entries = list(group)
            client = _compat.sqs_client(entries[0][1].message)
            timeouts.append(self._timeout(client, url))
            for start in range(0, len(entries), BATCH):
                some = entries[start : start + BATCH]
                gone += _change(client, url, some, timeouts[-1])
        return float(min(timeouts)), gone

    def _timeout(self, client: Any, url: str) -> int:
        if url not in self._timeouts:
            answer = client.get_queue_attributes(QueueUrl=url, AttributeNames=["VisibilityTimeout"])
            self._timeouts[url] = max(1, int(answer["Attributes"]["VisibilityTimeout"]))
        return self._timeouts[url]


def _change(
    client: Any, url: str, some: list[tuple[bytes, Delivery]], timeout_s: int
) -> list[tuple[bytes, Delivery]]:
    """One call; returns the entries that are not ours any more."""
    answer = client.change_message_visibility_batch(
        QueueUrl=url,
        Entries=[
            {
                "Id": str(number),
                "ReceiptHandle": _sqs(delivery)["ReceiptHandle"],
                "VisibilityTimeout": timeout_s,
            }
            for number, (_, delivery) in enumerate(some)
        ],
    )
    # What failed through no fault of ours is tried again with the others.
    return [some[int(one["Id"])] for one in answer.get("Failed", ()) if one.get("SenderFault")]


def _sqs(delivery: Delivery) -> dict[str, Any]:
    found: dict[str, Any] = delivery.message.delivery_info["sqs_message"]
    return found


def _url(entry: tuple[bytes, Delivery]) -> str:
    return str(entry[1].message.delivery_info["sqs_queue"])
