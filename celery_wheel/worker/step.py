"""The bootstep: the wheel's life within the life of Celery's consumer."""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from celery import bootsteps
from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.consumer.tasks import Tasks

from celery_wheel import _compat
from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.errors import ConfigError, WheelError
from celery_wheel.metrics import serve
from celery_wheel.places import BROKER, broker_store_url, in_place
from celery_wheel.stores import open_store
from celery_wheel.stores.memory import MemoryStore
from celery_wheel.worker import checks, control
from celery_wheel.worker.engine import Engine
from celery_wheel.worker.incarnation import new_owner
from celery_wheel.worker.keeper import Keeper
from celery_wheel.worker.lease import Lease
from celery_wheel.worker.renewal import RedisRenewal, Renewal
from celery_wheel.worker.reparking import Reparking
from celery_wheel.worker.sqs import SqsRenewal
from celery_wheel.worker.store_thread import InlineExecutor, StoreThread

__all__ = ("WheelStep",)

logger = get_logger(__name__)

#: Seconds a worker that stops waits for a store that does not answer.
STOP_PATIENCE_S = 3.0
#: Seconds a worker that starts waits for what was revoked before.
RECALL_PATIENCE_S = 5.0


class WheelStep(bootsteps.StartStopStep):
    """Starts the engine once, and joins and parts it with each connection."""

    label = "Wheel"
    requires = (Tasks, _compat.control_step_class())

    def __init__(self, c: Any, **kwargs: Any) -> None:
        c.wheel = None
        super().__init__(c, **kwargs)

    def start(self, c: Any) -> None:
        """On each connection; the first opens the store, which must not be shared by a fork."""
        first = c.wheel is None
        if first:
            try:
                c.wheel = build_engine(c)
                if c.wheel_settings.metrics_port:
                    serve(partial(control.brief, c.wheel), c.wheel_settings.metrics_port)
            except WheelError as exc:
                logger.critical("celery-wheel can't start: %s", exc)
                raise SystemExit(1) from exc
        engine: Engine = c.wheel
        engine.connected(c.connection, renewal_for(c.connection.transport.driver_type))
        engine.sources.watch(c.task_consumer)
        c.wrap_strategies()
        control.install(c, engine)
        if first:
            checks.run(c, engine)
            if c.hub is not None:
                c.hub.on_tick.add(engine.on_tick)
            engine.alarm.start()
        engine.wake()

    def register_with_event_loop(self, c: Any, hub: Any) -> None:
        """The loop was reset with the connection: listen to the bell again."""
        if c.wheel is not None:
            c.wheel.bell.register(hub)
            c.wheel.bell.ring()

    def stop(self, c: Any) -> None:
        """The connection is gone, or the worker stops."""
        if c.wheel is None:
            return
        if c.wheel_stops():
            c.wheel.close()
        else:
            c.wheel.connection_lost()

    def shutdown(self, c: Any) -> None:
        """The pool is done: the last settles, then the store is closed."""
        engine, c.wheel = c.wheel, None
        if engine is not None:
            if c.hub is not None:
                c.hub.on_tick.discard(engine.on_tick)
            engine.close()
            engine.finish(STOP_PATIENCE_S)

    def info(self, c: Any) -> dict[str, Any]:
        """For ``inspect stats``."""
        return {} if c.wheel is None else {"wheel": control.brief(c.wheel)}


def renewal_for(driver: str) -> type[Renewal]:
    """How messages are held for long, by the driver type of the transport."""
    kinds: dict[str, type[Renewal]] = {
        "amqp": Reparking,
        "redis": RedisRenewal,
        "sqs": SqsRenewal,
    }
    return kinds.get(driver, Renewal)


def start_store(c: Any) -> StoreThread | None:
    """Open the store that is named, or the broker's own Redis; ``None`` for broker custody.

    What was found is put into the consumer's settings.

    Raises:
        WheelError: the store that is named can't be used.
    """
    named = c.wheel_settings.store_url
    c.wheel_settings = in_place(c.wheel_settings, named or broker_store_url(c.app) or BROKER)
    url = c.wheel_settings.store_url
    if url == BROKER:
        return None
    try:
        thread = StoreThread(open_store(url, c.wheel_settings.namespace), SYSTEM_CLOCK)
        thread.start()
    except ConfigError as exc:
        if named:
            raise
        logger.warning("celery-wheel: delayed tasks stay with the broker, unacknowledged: %s", exc)
        c.wheel_settings = replace(c.wheel_settings, store_url=BROKER)
        return None
    return thread


def recall_revokes(thread: StoreThread) -> None:
    """Tell Celery's own check of the ids that were revoked before this worker started.

    A message whose ETA passed before a worker received it runs at once and asks no store.
    """
    found: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    thread.submit("remembered", lambda store: found.put(store.remembered(state.REVOKES_MAX)))
    with suppress(queue.Empty):
        state.revoked.update(found.get(timeout=RECALL_PATIENCE_S))


def build_engine(c: Any) -> Engine:
    """Open the store named by the settings and build an engine over it.

    Raises:
        WheelError: the store can't be used.
    """
    owner = new_owner(c.hostname)
    thread = start_store(c)
    settings = c.wheel_settings
    broker = InlineExecutor(MemoryStore())
    broker.start()
    broker_keeper = Keeper(broker, owner.name, SYSTEM_CLOCK, settings, holds_messages=True)
    if thread is None:
        return Engine(c, settings, store_keeper=None, broker_keeper=broker_keeper, lease=None)
    keeper = Keeper(thread, owner.name, SYSTEM_CLOCK, settings, holds_messages=False)
    lease = Lease(thread.store.sibling(), owner, settings.lease_ttl_s, SYSTEM_CLOCK)
    engine = Engine(c, settings, store_keeper=keeper, broker_keeper=broker_keeper, lease=lease)
    lease.on_lost, lease.on_freed = engine.lost_lease, engine.rows_freed
    lease.on_renewed, lease.on_peers = engine.wake, engine.peers_seen
    thread.on_recovered = engine.store_recovered
    recall_revokes(thread)
    lease.start()
    return engine
