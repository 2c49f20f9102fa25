"""Draining a store: what comes out is what went in, and nothing is in two places."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from celery import Celery
from kombu.compression import compress

from celery_wheel import Backlog, drain
from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.envelope import pack
from celery_wheel.errors import StoreUnavailable, WheelError
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Owner
from celery_wheel.task import DelayedTask, task_key

HOUR_MS = 3_600_000
ETA = "2040-01-01T00:00:00+00:00"
ETA_MS = 2_208_988_800_000


def row(number: int, queue: str, due_ms: int = ETA_MS, **headers: Any) -> DelayedTask:
    """A row as a worker's intake makes it."""
    task_id = f"id-{number}"
    headers = {"id": task_id, "task": "t", "eta": ETA, "lang": "py", "number": number, **headers}
    info = {"exchange": "", "routing_key": queue, "redelivered": True}
    properties = {
        "priority": number % 10,
        "correlation_id": task_id,
        "delivery_tag": "old",
        "delivery_info": info,
        "body_encoding": "base64",
    }
    body = b'[[%d], {}, {"chord": null}]' % number
    return DelayedTask(
        task_key(queue, task_id, 0, 0, ETA),
        task_id,
        "t",
        queue,
        due_ms,
        pack(headers, properties, info, "application/json", "utf-8", body),
        priority=number % 10,
        arrival=number,
    )


@pytest.fixture
def queue() -> str:
    """In-memory queues outlive their app."""
    return uuid.uuid4().hex


@pytest.fixture
def app(tmp_path):
    made = Celery("t", broker="memory://", set_as_current=False)
    made.conf.wheel_store = f"sqlite:///{tmp_path / 'wheel.db'}"
    yield made
    made.close()


@pytest.fixture
def store(app):
    opened = open_store(app.conf.wheel_store)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def backlog(app):
    with Backlog(app) as made:
        yield made


def received(app: Celery, queue: str) -> list[Any]:
    """Take every message out of a queue."""
    with app.connection_for_read() as connection:
        get = connection.default_channel.basic_get
        return list(iter(lambda: get(queue, no_ack=True), None))


def test_messages_come_out_as_they_came(app, store, backlog, queue):
    """Queue, order of arrival, priority, headers and body are those of the message."""
    other = f"{queue}-b"
    rows = [row(n, (queue, other)[n % 2], ETA_MS - n) for n in range(20)]
    store.put(rows, 0)
    drained = backlog.drain()
    assert drained.queues == {queue: 10, other: 10}
    assert (drained.left, drained.unreadable, drained.revoked) == (0, 0, [])
    assert store.count().pending == 0
    for name, first in ((queue, 0), (other, 1)):
        messages = received(app, name)
        assert [m.headers["number"] for m in messages] == list(range(first, 20, 2))
        for message in messages:
            number = message.headers["number"]
            assert message.headers["eta"] == ETA
            assert message.properties["priority"] == number % 10
            assert message.properties["correlation_id"] == f"id-{number}"
            assert message.payload == [[number], {}, {"chord": None}]
            assert message.delivery_tag != "old"
            assert message.delivery_info == {"exchange": "", "routing_key": name}


def test_a_rescheduled_task_has_its_new_eta(app, store, backlog, queue):
    """The ETA on the wire is the one that was given last."""
    store.put([row(1, queue)], 0)
    assert backlog.reschedule("id-1", eta="2041-02-03T04:05:06.789+00:00") == "rescheduled"
    backlog.drain()
    (message,) = received(app, queue)
    assert message.headers["eta"] == "2041-02-03T04:05:06.789000+00:00"


def test_compressed_bodies_are_compressed_again(app, store, backlog, queue):
    """The header `compression` is true of the body on the wire."""
    _, kind = compress(b"", "gzip")
    store.put([row(1, queue, compression=kind), row(2, queue, compression="no/such")], 0)
    backlog.drain()
    gzip, unknown = received(app, queue)
    assert gzip.headers["compression"] == kind
    assert gzip.payload[0] == [1]
    assert "compression" not in unknown.headers
    assert unknown.payload[0] == [2]


def test_living_workers_are_named(app, store, backlog, queue):
    """While a worker holds a lease nothing is drained, unless it is forced."""
    store.heartbeat(Owner("w1/abc", node="w1"), 60)
    store.put([row(1, queue)], 0)
    store.claim("w1/abc", ETA_MS, 1)
    store.put([row(2, queue)], 0)
    with pytest.raises(WheelError, match="held by w1: stop the workers first"):
        backlog.drain()
    assert received(app, queue) == []
    assert [owner.name for owner in store.owners()] == ["w1/abc"]
    drained = backlog.drain(force=True)
    assert (drained.queues, drained.left) == ({queue: 1}, 1)
    assert [message.headers["number"] for message in received(app, queue)] == [2]


def test_what_was_revoked_is_not_published(app, store, backlog, queue):
    """A row that a revoke on record keeps from running is deleted and announced."""
    app.conf.result_backend = "cache+memory://"
    due = row(1, queue, SYSTEM_CLOCK.wall_ms() - 1000)
    store.put([due, row(2, queue)], 0)
    store.claim("w1", due.due_ms, 1)
    store.confirm("w1", [(due.key, 0)], due.due_ms)
    assert backlog.cancel("id-1") == {"id-1": "dispatched"}
    store.release("w1")
    drained = backlog.drain()
    assert [one.id for one in drained.revoked] == ["id-1"]
    assert drained.left == 0
    assert app.AsyncResult("id-1").state == "REVOKED"
    assert [message.headers["number"] for message in received(app, queue)] == [2]


def test_an_unreadable_row_stays(app, store, backlog, queue):
    """What can't be read is kept, and the rest goes."""
    broken = row(1, queue)
    broken.envelope = b"not an envelope"
    store.put([broken, row(2, queue)], 0)
    drained = backlog.drain()
    assert (drained.unreadable, drained.left) == (1, 1)
    assert len(received(app, queue)) == 1
    assert backlog.list()[0].owner is None


def test_what_the_broker_can_not_take_stays(app, store, backlog, queue, monkeypatch):
    """A message that this transport can't write down keeps its row, and no other."""
    store.put([row(1, queue), row(2, queue), row(3, queue)], 0)
    publish = drain.SourceQueues._publish

    def failing(self: Any, message: Any, name: str) -> None:
        if message["headers"]["number"] == 2:
            raise TypeError("no such type on the wire")
        publish(self, message, name)

    monkeypatch.setattr(drain.SourceQueues, "_publish", failing)
    drained = backlog.drain()
    assert (drained.queues, drained.unreadable, drained.left) == ({queue: 2}, 1, 1)
    assert [message.headers["number"] for message in received(app, queue)] == [1, 3]
    assert [(one.id, one.state) for one in backlog.list()] == [("id-2", "pending")]


def test_what_a_killed_drain_left_is_drained(app, store, backlog, queue):
    """Rows that were confirmed and not settled are free when its lease has run out."""
    rows = [row(n, queue) for n in range(3)]
    store.put(rows, 0)
    store.heartbeat(Owner("drain/dead", node="drain"), 0.0)
    store.claim("drain/dead", ETA_MS, 2)
    store.confirm("drain/dead", [(one.key, 0) for one in rows[:2]], ETA_MS)
    assert backlog.drain().left == 0
    assert [message.headers["number"] for message in received(app, queue)] == [0, 1, 2]


def test_a_broker_that_fails_in_between(app, store, backlog, queue, monkeypatch):
    """What was not taken is free in the store again, without a copy of what was."""
    store.put([row(n, queue) for n in range(5)], 0)
    monkeypatch.setattr(drain, "BATCH", 2)
    send = drain.SourceQueues.send

    def failing(self: Any, messages: Any) -> Any:
        if messages[0][0].id == "id-4":
            raise ConnectionResetError("gone")
        return send(self, messages)

    monkeypatch.setattr(drain.SourceQueues, "send", failing)
    with pytest.raises(WheelError, match=r"the broker memory://.* does not take messages: gone"):
        backlog.drain()
    (left,) = backlog.list()
    assert (left.id, left.owner, left.state) == ("id-4", None, "pending")
    assert len(received(app, queue)) == 4
    assert store.owners() == []


def test_a_lost_lease_ends_the_drain(app, store, backlog, queue, monkeypatch):
    """Without its lease a drain publishes nothing more: others may run the rows."""
    store.put([row(n, queue) for n in range(4)], 0)
    monkeypatch.setattr(drain, "BATCH", 2)
    answers = iter([True, True, False])
    monkeypatch.setattr(drain.Lease, "holds", lambda self: next(answers))
    with pytest.raises(StoreUnavailable, match="lease"):
        backlog.drain()
    assert len(received(app, queue)) == 2
    assert sorted(one.id for one in backlog.list()) == ["id-2", "id-3"]


def test_progress_is_told(store, backlog, queue, monkeypatch):
    """From nothing to all, batch by batch; windows follow each other."""
    store.put([row(n, queue) for n in range(7)], 0)
    monkeypatch.setattr(drain, "BATCH", 2)
    monkeypatch.setattr(drain, "WINDOW", 4)
    told: list[tuple[int, int]] = []
    backlog.drain(progress=lambda done, total: told.append((done, total)))
    assert told == [(0, 7), (2, 7), (4, 7), (6, 7), (7, 7)]


def test_a_queue_that_the_app_may_not_make(app, store, backlog, queue):
    """A queue that is gone, where the app makes none: one line, and the rows stay."""
    app.conf.task_create_missing_queues = False
    store.put([row(1, queue)], 0)
    with pytest.raises(WheelError, match=r"is gone.*task_queues"):
        backlog.drain()
    assert store.count().pending == 1
