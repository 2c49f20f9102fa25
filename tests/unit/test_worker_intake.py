"""Broker custody's intake: messages that come again while their rows come and go."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from celery_wheel.clock import FakeClock
from celery_wheel.settings import Settings
from celery_wheel.stores.memory import MemoryStore
from celery_wheel.task import DelayedTask
from celery_wheel.worker.intake import Line
from celery_wheel.worker.keeper import Keeper
from celery_wheel.worker.messages import Delivery
from celery_wheel.worker.store_thread import InlineExecutor


class Message:
    """What came from the broker; notes how it is answered."""

    acknowledged = False

    def __init__(self, tag):
        self.delivery_tag = tag
        self.answers = []

    def ack(self):
        self.answers.append("ack")
        self.acknowledged = True

    def reject_log_error(self, _logger, _errors, requeue=False):
        self.answers.append("requeue" if requeue else "reject")
        self.acknowledged = True


@pytest.fixture
def clock():
    """A clock that moves when told."""
    return FakeClock()


@pytest.fixture
def keeper(clock):
    """Broker custody."""
    executor = InlineExecutor(MemoryStore())
    executor.start()
    return Keeper(executor, "me", clock, Settings(), holds_messages=True)


@pytest.fixture
def line(keeper, clock):
    """Its line, in an engine that holds nothing else."""
    engine = SimpleNamespace(
        announcer=SimpleNamespace(revoked=lambda *_, **__: None),
        by=lambda _at: None,
        clock=clock,
        hold=lambda *_, **__: None,
        renewal=SimpleNamespace(returned=lambda *_: False),
        settings=Settings(),
        stats=SimpleNamespace(counts=Counter()),
        wake=lambda: None,
    )
    made = Line(engine, keeper)
    made.counts = engine.stats.counts
    return made


def deliver(line, tag):
    """One delivery of one and the same message, on its way into the store."""
    task = DelayedTask(b"key", "id", "name", "queue", 5000, b"", owner="me")
    message = Message(tag)
    line.add(task, Delivery(message, (), None, 0.0))
    line.commit(now=True)
    return message


def test_a_copy_of_what_is_held_is_acknowledged(line, keeper):
    """Two of one message: the second is dropped and counted."""
    deliver(line, 1)
    keeper.executor.drain()
    copy = deliver(line, 2)
    keeper.executor.drain()
    assert copy.answers == ["ack"]
    assert keeper.messages[b"key"].tag == 1
    assert line.counts == {"received": 1, "duplicates": 1}


@pytest.mark.parametrize("how", ["requeue", "settle"])
def test_a_message_that_was_let_go_is_new_when_it_comes_again(how, line, keeper):
    """Its row stood when the copy was put, and is gone when that is answered: it is kept."""
    first = deliver(line, 1)
    keeper.executor.drain()
    again = deliver(line, 2)
    task = SimpleNamespace(task=SimpleNamespace(key=b"key"), acked=False)
    getattr(keeper, how)(task)
    keeper.executor.drain()
    line.commit(now=True)
    keeper.executor.drain()
    assert first.answers == ["requeue" if how == "requeue" else "ack"]
    assert again.answers == []
    assert keeper.messages[b"key"].tag == 2
    assert line.counts == {"received": 2}
