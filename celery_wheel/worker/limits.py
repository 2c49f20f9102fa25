"""Rate limits: a due task takes a token of its name before it is confirmed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from celery_wheel.worker.residents import CONFIRMING, LIMITED, Item

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_wheel.worker.residents import Residents

__all__ = ("RateLimits",)


class RateLimits:
    """The tasks that wait for a token, a line per task name.

    Celery's own buckets are asked, at the moment a task is due, so that a rate set by remote
    control holds for what is held already, and immediate tasks draw on the same tokens.
    """

    def __init__(self, consumer: Any, residents: Residents) -> None:
        self._consumer, self._residents = consumer, residents
        self._lines: dict[str, deque[Item]] = {}

    def _bucket(self, name: str) -> Any | None:
        if self._consumer.disable_rate_limits:
            return None
        return self._consumer.task_buckets[name]

    def hold(self, item: Item) -> bool:
        """Whether the item has to wait for a token; then it waits here."""
        name = item.task.name
        bucket = self._bucket(name)
        if bucket is None or (name not in self._lines and bucket.can_consume(1)):
            return False
        self._residents.move(item, LIMITED)
        self._lines.setdefault(name, deque()).append(item)
        return True

    def take(self, most: int) -> Iterator[Item]:
        """Items that have their token now, up to ``most``; each is being confirmed then."""
        for name in list(self._lines):
            line, bucket = self._lines[name], self._bucket(name)
            while line and most > 0:
                if line[0].place != LIMITED:
                    line.popleft()
                    continue
                if bucket is not None and not bucket.can_consume(1):
                    break
                item = line.popleft()
                self._residents.move(item, CONFIRMING)
                most -= 1
                yield item
            if not line:
                del self._lines[name]

    def next_at(self, now: float) -> float | None:
        """When the next token comes, monotonic seconds."""
        waits = []
        for name in self._lines:
            bucket = self._bucket(name)
            waits.append(0.0 if bucket is None else max(bucket.expected_time(1), 0.001))
        return now + min(waits) if waits else None
