"""The only module that touches private names of Celery and Kombu.

=============================  =============  ===================================================
Name                           Versions       Why
=============================  =============  ===================================================
``Hub._ready``                 5.3 – 5.7      callbacks that wait while the poller is about to sleep
``redis.QoS`` pipelines        5.3 – 5.7      all acks of a batch in one round trip
``redis.QoS.unacked_*_key``    5.3 – 5.7      renewing the visibility timeout of held messages
``SQS.Channel.sqs``            5.3 – 5.7      the client of a queue, made as the transport makes it
``virtual.QoS.ack``            5.3 – 5.7      to forget a message that the server took away
``Request._announce_revoked``  5.1 – 5.7      the announcement of a revoke, as Celery makes it
``Request._apply_result``      5.0 – 5.7      the pool's job of a request, on connection loss
``ApplyResult._accepted``      billiard 4     which jobs ``AsynPool.flush`` may throw away
``ApplyResult._cache``         billiard 4     the pool's table, which the flush of 5.5 empties
``ApplyResult._write_to``      billiard 4     whether a job was written to a child
``Consumer._basic_consume``    5.3 – 5.7      which queue a delivery came from
``Control.box``                5.0 – 5.7      this worker's own remote control handlers
``WorkController._process_*``  5.0 – 5.7      whether and how a slot of the pool is acquired
``LaxBoundedSemaphore``        5.0 – 5.7      the number of free slots after a connection loss
``Consumer._limit_task``       5.0 – 5.7      the rate limit of a task that runs at once
``worker.state`` sets          5.7            requests that Celery registered for an ETA
=============================  =============  ===================================================

``tests/compat`` has a canary for each. Supported is Celery 5.5 and later; an unknown minor
version gets a warning, not a refusal.
"""

# ruff: noqa: SLF001 - private names are what this module is for

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import celery
from celery.bootsteps import RUN
from celery.worker import state
from celery.worker.strategy import default as default_strategy
from kombu.serialization import prepare_accept_content
from kombu.transport.virtual.base import QoS as VirtualQoS

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = (
    "RUN",
    "accepted_content",
    "announce_revoked",
    "call_soon_pending",
    "control_node",
    "control_step_class",
    "correct_semaphore",
    "default_strategy",
    "forget_delivery",
    "forget_scheduled",
    "job_was_written",
    "keep_written_jobs",
    "limit_task",
    "note_sources",
    "redis_ack_many",
    "redis_renew",
    "release_slot",
    "released_on_accept",
    "slot_semaphore",
    "sqs_client",
    "uses_default_strategy",
    "warn_unknown_version",
    "without_requests",
)

KNOWN_MINORS = ("5.5", "5.6", "5.7")


def warn_unknown_version() -> None:
    """Say so when this Celery is newer than what the tests ran on."""
    minor = ".".join(celery.__version__.split(".")[:2])
    if minor not in KNOWN_MINORS:
        warnings.warn(
            f"celery-wheel was tested with Celery {', '.join(KNOWN_MINORS)}, this is "
            f"{celery.__version__}: run `make compat` of celery-wheel before you rely on it",
            RuntimeWarning,
            stacklevel=3,
        )


# -- the event loop ----------------------------------------------------------------------------


def call_soon_pending(hub: Any) -> bool:
    """Whether callbacks wait that the hub would only run after its next poll."""
    return bool(hub._ready)


def accepted_content(app: Any) -> Any:
    """The content types whose bodies this app decodes."""
    prepare: Any = prepare_accept_content
    return prepare(app.conf.accept_content)


# -- strategies and requests -------------------------------------------------------------------


def uses_default_strategy(task: Any) -> bool:
    """Whether a task takes messages as Celery does (celery-batches and others do not)."""
    return str(task.Strategy) == "celery.worker.strategy:default"


def limit_task(consumer: Any, request: Any, bucket: Any) -> None:
    """Queue an immediate task at its rate limit, as Celery's strategy does."""
    consumer._limit_task(request, bucket, 1)


def forget_scheduled(request: Any) -> None:
    """Take back what Celery 5.7 registered for a request with an ETA: 9 KB each."""
    scheduled = getattr(state, "scheduled_requests", None)
    if scheduled is not None:
        scheduled.discard(request)
    if state.requests.get(request.id) is request:
        del state.requests[request.id]


def announce_revoked(request: Any) -> None:
    """Store REVOKED, send the event and the signal, as Celery does for a revoked task."""
    request._announce_revoked("revoked", False, None, False)


@contextmanager
def without_requests(requests: Iterable[Any]) -> Iterator[None]:
    """Hide running requests from Celery for a moment."""
    hidden = [request for request in requests if request in state.active_requests]
    for request in hidden:
        state.active_requests.discard(request)
    try:
        yield
    finally:
        state.active_requests.update(hidden)


# -- the pool ----------------------------------------------------------------------------------


def slot_semaphore(controller: Any) -> Any | None:
    """The semaphore that requests acquire before they reach the pool, where there is one."""
    semaphore = getattr(controller, "semaphore", None)
    by_semaphore = getattr(controller, "_process_task_sem", None)
    return semaphore if semaphore is not None and controller.process_task == by_semaphore else None


def released_on_accept(controller: Any) -> Callable[[Any], None]:
    """How a request goes to the pool once it has its slot."""
    process: Callable[[Any], None] = controller._process_task
    return process


def release_slot(controller: Any) -> None:
    """Give a slot back that a ticket got and nobody needs."""
    controller._quick_release()


def _job(request: Any) -> Any | None:
    reference = request._apply_result
    return None if reference is None else reference()


def job_was_written(request: Any) -> bool:
    """Whether a child has a request, or a part of it, so that it will run it.

    Pools without an outbound buffer take a request as soon as they are called.
    """
    job = _job(request)
    if job is None:
        return False
    if not hasattr(job, "_write_to") or job._accepted:
        return True
    return job._write_to is not None


@contextmanager
def keep_written_jobs(requests: Iterable[Any]) -> Iterator[None]:
    """Keep ``AsynPool.flush`` from throwing away jobs that a child is going to answer.

    It discards those that are not accepted; up to 5.6 it empties the pool's table of jobs, and
    then the end of none is heard, and none gives its slot back.
    """
    found: list[Any] = [_job(request) for request in requests]
    jobs = [job for job in found if hasattr(job, "_cache") and not job.ready()]
    shielded = [job for job in jobs if not job._accepted]
    for job in shielded:
        job._accepted = True
    try:
        yield
    finally:
        for job in shielded:
            job._accepted = False
        for job in jobs:
            job._cache.setdefault(job._job, job)


def correct_semaphore(semaphore: Any, busy: int) -> None:
    """After ``clear()``: the slots that running jobs still have are not free."""
    semaphore.value = max(0, semaphore.initial_value - busy)


# -- deliveries --------------------------------------------------------------------------------


def note_sources(task_consumer: Any, note: Callable[[str], None]) -> None:
    """Have ``note(queue name)`` called right before each delivery is handled.

    Virtual transports tell exchange and routing key only; where a queue is bound more than
    once, that is not where the message came from.
    """
    basic_consume = task_consumer._basic_consume
    receive = task_consumer._receive_callback

    def consume(queue: Any, *args: Any, **kwargs: Any) -> Any:
        def received(message: Any) -> Any:
            note(queue.name)
            return receive(message)

        task_consumer._receive_callback = received
        try:
            return basic_consume(queue, *args, **kwargs)
        finally:
            task_consumer._receive_callback = receive

    task_consumer._basic_consume = consume


def _redis_qos(channel: Any) -> Any | None:
    qos = getattr(channel, "qos", None)
    return qos if hasattr(qos, "unacked_index_key") else None


def redis_ack_many(messages: list[Any]) -> set[Any]:
    """Acknowledge messages of one Redis channel in one round trip.

    Returns the tags, if the server had every one of them; nothing where it did not, and for
    other transports.
    """
    qos = _redis_qos(messages[0].channel)
    if qos is None:
        return set()
    waiting = [message for message in messages if not message.acknowledged]
    if not waiting:
        return set()
    tags = [message.delivery_tag for message in waiting]
    with qos.pipe_or_acquire() as pipe:
        pipe.zrem(qos.unacked_index_key, *tags).hdel(qos.unacked_key, *tags)
        found = pipe.execute()[1]
    for message in waiting:
        super(type(qos), qos).ack(message.delivery_tag)
        message._state = "ACK"
    return set(tags) if found == len(set(tags)) else set()


def forget_delivery(message: Any) -> None:
    """Give back the place of a message in a virtual channel's window; the server is not asked."""
    ack: Any = VirtualQoS.ack
    ack(message.channel.qos, message.delivery_tag)
    message._state = "ACK"


def sqs_client(message: Any) -> Any:
    """The client of the queue that an SQS message came from. Safe to use in another thread."""
    channel = message.channel
    return channel.sqs(queue=channel.canonical_queue_name(message.delivery_info["routing_key"]))


def redis_renew(channel: Any, tags: list[Any], now: float) -> tuple[float, list[Any]]:
    """Start the visibility timeout of held messages anew.

    Returns the timeout (seconds) and the tags that the server does not have any more: those
    were taken away.
    """
    qos = _redis_qos(channel)
    if qos is None:
        raise TypeError("not a Redis channel")
    gone = []
    for start in range(0, len(tags), 1000):
        some = tags[start : start + 1000]
        with qos.pipe_or_acquire() as pipe:
            pipe.zadd(qos.unacked_index_key, dict.fromkeys(some, now), xx=True)
            for tag in some:
                pipe.zscore(qos.unacked_index_key, tag)
            answers = pipe.execute()
        gone += [tag for tag, score in zip(some, answers[1:], strict=True) if score is None]
    return float(qos.visibility_timeout), gone


# -- remote control ----------------------------------------------------------------------------


def control_step_class() -> type:
    """The bootstep that owns the worker's mailbox."""
    from celery.worker.consumer.control import Control

    return Control


def control_node(consumer: Any) -> Any | None:
    """The mailbox node of this worker, or ``None`` where remote control is off."""
    for step in consumer.steps:
        box = getattr(step, "box", None)
        if box is not None:
            return box.node
    return None
