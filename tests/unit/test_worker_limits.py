"""Rate limits of held tasks: Celery's buckets, asked when a task is due."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kombu.utils.limits import TokenBucket

from celery_wheel.task import DelayedTask
from celery_wheel.worker.limits import RateLimits
from celery_wheel.worker.residents import CONFIRMING, DUE, LIMITED, Item, Residents

NOW_MS = 1_000_000_000_000


@pytest.fixture
def residents():
    """Empty residents."""
    return Residents("hierarchical", 64, 10, NOW_MS)


@pytest.fixture
def consumer():
    """Buckets: two tokens a day for "slow", none for "free"."""
    bucket = TokenBucket(1 / 86_400, capacity=2)
    return SimpleNamespace(disable_rate_limits=False, task_buckets={"slow": bucket, "free": None})


def due(residents, count, name="slow"):
    items = []
    for number in range(count):
        key = f"{name}-{number}".encode().rjust(16)
        task = DelayedTask(key, key.decode(), name, "queue", NOW_MS, b"", arrival=number)
        items.append(Item(task, None))
        residents.add(items[-1], NOW_MS)
    return items


def test_tokens_are_taken_in_order_and_the_rest_waits(residents, consumer):
    """As many pass as there are tokens; once one waits, those behind it wait too."""
    limits = RateLimits(consumer, residents)
    items = due(residents, 4)
    assert [limits.hold(item) for item in items] == [False, False, True, True]
    assert [item.place for item in items] == [DUE, DUE, LIMITED, LIMITED]
    assert list(limits.take(10)) == []
    assert limits.next_at(100.0) > 100.0 + 3600
    consumer.task_buckets["slow"]._tokens = 2
    assert limits.hold(due(residents, 5)[4])
    taken = list(limits.take(1))
    assert taken == [items[2]]
    assert items[2].place == CONFIRMING


def test_a_limit_that_was_lifted_lets_all_through(residents, consumer):
    """A rate set by remote control holds for what waits already."""
    limits = RateLimits(consumer, residents)
    items = due(residents, 5)
    waiting = [item for item in items if limits.hold(item)]
    assert len(waiting) == 3
    consumer.task_buckets["slow"] = None
    assert limits.next_at(100.0) == 100.0
    assert list(limits.take(10)) == waiting
    assert limits.next_at(100.0) is None


def test_one_that_left_its_line_takes_no_token(residents, consumer):
    """A revoked one is passed over, and the next one gets the token."""
    limits = RateLimits(consumer, residents)
    items = due(residents, 4)
    for item in items:
        limits.hold(item)
    residents.remove(items[2])
    consumer.task_buckets["slow"]._tokens = 1
    assert list(limits.take(10)) == [items[3]]


def test_no_limit_and_limits_switched_off(residents, consumer):
    """Tasks without a rate, and a worker without rate limits, never wait."""
    limits = RateLimits(consumer, residents)
    assert not any(limits.hold(item) for item in due(residents, 5, "free"))
    consumer.disable_rate_limits = True
    assert not any(limits.hold(item) for item in due(residents, 5))
