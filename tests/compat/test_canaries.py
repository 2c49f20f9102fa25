"""One canary for each row of the table in ``celery_wheel/_compat.py``.

A release of Celery or Kombu that moves a private name fails here first, by that name. Nothing
is started: all of it runs in this process, on ``memory://``.
"""

from __future__ import annotations

import inspect
import re
import uuid
from types import SimpleNamespace

import pytest
from billiard.pool import ApplyResult
from celery import Celery
from celery.app.task import Task
from celery.bootsteps import RUN
from celery.concurrency.asynpool import AsynPool
from celery.worker import WorkController, components, state
from celery.worker import control as stock_control
from celery.worker.consumer import Consumer as StockConsumer
from celery.worker.consumer.control import Control
from celery.worker.pidbox import Pidbox
from celery.worker.request import Request, create_request_cls
from celery.worker.strategy import default as default_strategy
from kombu import Connection, Exchange, Queue
from kombu.asynchronous import Hub
from kombu.asynchronous.semaphore import LaxBoundedSemaphore
from kombu.message import Message
from kombu.transport import redis as redis_transport
from kombu.transport.virtual import QoS as VirtualQoS

from celery_wheel import _compat

pytestmark = pytest.mark.smoke


def nothing():
    """The task of every app here: Celery has one table for all."""


@pytest.fixture
def app():
    """An app on a broker in memory, with one task."""
    made = Celery(f"canary-{uuid.uuid4().hex}", broker="memory://", set_as_current=False)
    made.task(name="canary.nothing")(nothing)

    yield made
    made.close()


def message_of(app, **headers):
    """A delivered message of that task."""
    with app.connection_for_write() as connection:
        told = app.amqp.as_task_v2("some-id", "canary.nothing", (), {}, **headers)
        body = connection.default_channel.prepare_message(
            '[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]',
            None,
            "application/json",
            "utf-8",
            told.headers,
            told.properties,
        )
        body["properties"]["delivery_tag"] = "tag"
        return connection.default_channel.Message(body, connection.default_channel)


@pytest.fixture
def request_(app):
    """A request of that task, as a worker makes it."""
    return Request(message_of(app), app=app, hostname="here", task=app.tasks["canary.nothing"])


def test_hub_ready():
    """``Hub._ready`` holds the callbacks that wait while the hub is about to sleep."""
    hub = Hub()
    try:
        assert not _compat.call_soon_pending(hub)
        hub.call_soon(print)
        assert _compat.call_soon_pending(hub)
        assert isinstance(hub.on_tick, set)
    finally:
        hub.close()


def test_redis_acks_in_one_pipeline():
    """``redis.QoS`` removes a tag by ZREM and HDEL in a pipeline of ``pipe_or_acquire``."""
    qos = redis_transport.QoS
    assert issubclass(qos, VirtualQoS)
    source = inspect.getsource(qos._remove_from_indices)
    assert re.search(r"zrem\(\s*self\.unacked_index_key", source)
    assert re.search(r"hdel\(\s*self\.unacked_key", source)
    assert inspect.isgeneratorfunction(qos.pipe_or_acquire.__wrapped__)
    # What is left of an ack besides these two is the parent's.
    assert "super().ack" in inspect.getsource(qos.ack)


def test_redis_visibility_by_score():
    """``redis.QoS`` gives messages back whose score in the index is older than the timeout."""
    qos = redis_transport.QoS
    for name in ("unacked_key", "unacked_index_key", "visibility_timeout"):
        assert isinstance(inspect.getattr_static(qos, name), property) or hasattr(
            redis_transport.Channel, name
        )
    assert re.search(r"zadd\(\s*self\.unacked_index_key", inspect.getsource(qos.append))
    assert "time() - self.visibility_timeout" in inspect.getsource(qos.restore_visible)


def test_announce_revoked(request_):
    """``Request._announce_revoked(reason, terminated, signum, expired)`` acknowledges, too."""
    names = list(inspect.signature(Request._announce_revoked).parameters)
    assert names == ["self", "reason", "terminated", "signum", "expired"]
    answered = []
    request_._on_ack = lambda *arguments: answered.append(arguments)
    _compat.announce_revoked(request_)
    assert request_.acknowledged
    assert request_._already_revoked
    assert len(answered) == 1


def test_apply_result(request_):
    """``Request._apply_result`` is a weak reference to what ``pool.apply_async`` returned."""
    assert request_._apply_result is None
    assert not _compat.job_was_written(request_)
    job = ApplyResult({}, None)
    request_.execute_using_pool(SimpleNamespace(apply_async=lambda *_, **__: job))
    assert request_._apply_result() is job


def test_jobs_of_the_pool(request_):
    """``ApplyResult._accepted``, ``_cache``, ``_job`` and ``_write_to``: what a flush looks at."""
    table = {}
    job = ApplyResult(table, None)
    request_._apply_result = lambda: job
    assert table == {job._job: job}
    assert job._cache is table
    assert job._accepted is False
    assert job._write_to is None
    assert not _compat.job_was_written(request_)
    job._write_to = object()
    assert _compat.job_was_written(request_)
    with _compat.keep_written_jobs([request_]):
        assert job._accepted is True
        table.clear()
    assert job._accepted is False
    assert table == {job._job: job}
    assert "job._write_to = proc" in inspect.getsource(AsynPool)
    assert "job._accepted" in inspect.getsource(AsynPool.flush)


def test_consumers_basic_consume():
    """``Consumer._basic_consume`` starts each queue with ``_receive_callback`` as its callback."""
    queues = [
        Queue(name, Exchange("one", type="direct"), routing_key="same")
        for name in (f"first-{uuid.uuid4().hex}", f"second-{uuid.uuid4().hex}")
    ]
    noted = []
    with Connection("memory://", transport_options={"polling_interval": 0.001}) as connection:
        channel = connection.channel()
        consumer = channel.Consumer(
            queues, on_message=lambda message: noted.append(message.payload), auto_declare=True
        )
        _compat.note_sources(consumer, noted.append)
        consumer.consume()
        connection.Producer(channel).publish("hello", exchange="one", routing_key="same")
        for _ in queues:
            connection.drain_events(timeout=1)
    assert sorted(noted) == sorted([queues[0].name, queues[1].name, "hello", "hello"])
    assert noted[1] == noted[3] == "hello"


def test_control_box():
    """``Control.box`` is the mailbox; its node's ``handlers`` and ``dispatch`` are its own."""
    assert _compat.control_step_class() is Control
    assert "self.box" in inspect.getsource(Control.__init__)
    assert "c.app.control.mailbox.Node" in inspect.getsource(Pidbox.__init__)
    for name in ("revoke", "terminate", "revoke_by_stamped_headers", "scheduled", "query_task"):
        assert name in stock_control.Panel.data
    app = Celery("canary", broker="memory://", set_as_current=False)
    node = app.control.mailbox.Node("here", handlers={"say": lambda _state, **_: "aye"}, state=0)
    node.handlers = {**node.handlers, "answer": lambda _state, **_: 42}
    assert node.dispatch("answer") == 42
    assert list(inspect.signature(type(node).dispatch).parameters)[:5] == [
        "self",
        "method",
        "arguments",
        "reply_to",
        "ticket",
    ]
    assert {"exchange", "routing_key", "ticket"} <= set(
        inspect.signature(type(node).reply).parameters
    )
    steps = SimpleNamespace(steps=[SimpleNamespace(box=SimpleNamespace(node=node))])
    assert _compat.control_node(steps) is node
    app.close()


def test_how_a_slot_is_acquired():
    """``WorkController._process_task_sem`` acquires a slot and then calls ``_process_task``."""
    asked = []
    controller = WorkController.__new__(WorkController)
    controller.semaphore = LaxBoundedSemaphore(1)
    controller._quick_acquire = controller.semaphore.acquire
    controller._quick_release = controller.semaphore.release
    controller.process_task = controller._process_task_sem
    assert _compat.slot_semaphore(controller) is controller.semaphore
    controller._process_task = asked.append
    controller._process_task_sem("request")
    assert asked == ["request"]
    assert controller.semaphore.value == 0
    assert _compat.released_on_accept(controller) == controller._process_task
    _compat.release_slot(controller)
    assert controller.semaphore.value == 1
    controller.process_task = controller._process_task
    assert _compat.slot_semaphore(controller) is None
    source = inspect.getsource(components.Pool.create)
    for name in ("w.process_task", "w._quick_acquire", "w._quick_release", "w.semaphore"):
        assert name in source


def test_semaphores_can_be_corrected():
    """``LaxBoundedSemaphore`` forgets who waits in ``clear()``; ``value`` is what is free."""
    semaphore = LaxBoundedSemaphore(3)
    called = []
    for number in range(4):
        semaphore.acquire(called.append, number)
    assert (semaphore.value, called) == (0, [0, 1, 2])
    semaphore.clear()
    assert semaphore.value == semaphore.initial_value == 3
    _compat.correct_semaphore(semaphore, 2)
    semaphore.acquire(called.append, 4)
    semaphore.acquire(called.append, 5)
    assert (semaphore.value, called) == (0, [0, 1, 2, 4])
    semaphore.release()
    assert called == [0, 1, 2, 4, 5]


def test_limit_task():
    """``Consumer._limit_task(request, bucket, tokens)`` queues a request at its rate."""
    names = list(inspect.signature(StockConsumer._limit_task).parameters)
    assert names == ["self", "request", "bucket", "tokens"]


def test_requests_that_celery_registered_for_an_eta(request_):
    """``worker.state`` has sets of requests, and lets go of one that is taken out."""
    request_.id = "canary-scheduled"
    scheduled = getattr(state, "task_scheduled", None)
    if scheduled is None:  # before 5.7
        state.requests[request_.id] = request_
    else:
        scheduled(request_)
        assert request_ in state.scheduled_requests
    _compat.forget_scheduled(request_)
    assert request_.id not in state.requests
    assert request_ not in getattr(state, "scheduled_requests", ())
    state.task_reserved(request_)
    state.active_requests.add(request_)
    with _compat.without_requests([request_]):
        assert request_ not in state.active_requests
    assert request_ in state.active_requests
    state.active_requests.discard(request_)
    state.reserved_requests.discard(request_)
    state.requests.pop(request_.id, None)


@pytest.mark.parametrize("eta", [True, False])
def test_the_strategy_schedules_on_the_timer_it_is_given(app, eta):
    """A strategy calls ``timer.call_at(eta, function, (request, …))`` for an ETA, and only then."""
    task = app.tasks["canary.nothing"]
    assert _compat.uses_default_strategy(task)
    assert str(Task.Strategy) == "celery.worker.strategy:default"
    calls = []
    consumer = SimpleNamespace(
        app=app,
        hostname="here",
        connection_errors=(),
        event_dispatcher=None,
        disable_rate_limits=True,
        task_buckets={},
        timer=SimpleNamespace(call_at=lambda *args, **kwargs: calls.append(("call_at", args))),
        qos=SimpleNamespace(increment_eventually=lambda *_: calls.append(("raise", ()))),
        on_task_request=lambda request: calls.append(("request", (request,))),
        controller=SimpleNamespace(state=state),
        pool=SimpleNamespace(apply_async=None),
        apply_eta_task=None,
        _limit_task=None,
        _limit_post_eta=None,
    )
    handler = default_strategy(task, app, consumer)
    message = message_of(app, eta="2100-01-01T00:00:00+00:00" if eta else None)
    handler(message, None, lambda *_: None, lambda *_: None, [])
    found = dict(calls)
    assert ("call_at" in found) == ("raise" in found) == eta
    assert ("request" in found) == (not eta)
    request = found["call_at"][2][0] if eta else found["request"][0]
    assert request.id == "some-id"
    assert isinstance(request, Request)
    _compat.forget_scheduled(request)


def test_request_classes(app):
    """``create_request_cls`` makes the class of a task's requests; results come by callbacks."""
    task = app.tasks["canary.nothing"]
    given = {}
    pool = SimpleNamespace(
        apply_async=lambda *_, **told: given.update(told), num_processes=1, limit=1
    )
    made = create_request_cls(Request, task, pool, "here", None, app=app)
    made(message_of(app), app=app, hostname="here", task=task).execute_using_pool(pool)
    assert {"callback", "error_callback", "accept_callback", "timeout_callback"} <= given.keys()
    assert given["callback"].__name__ == "on_success"


def test_messages_without_a_channel():
    """A message that is made of a row is decoded, and acknowledged by callbacks of its request."""
    message = Message(
        body=b"[]",
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={},
        properties={},
        headers={},
        accept={"application/json"},
    )
    assert message.payload == []
    assert not message.acknowledged


def test_the_state_of_a_blueprint():
    """``RUN`` is the state of a worker that is not stopping."""
    assert _compat.RUN == RUN
    assert {state.should_stop, state.should_terminate} <= {None, False}
