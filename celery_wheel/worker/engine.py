"""The worker's engine: one turn after another, each short, each by one thread at a time.

A turn takes the store's answers, commits what arrived, moves the wheel to now, confirms and
dispatches, looks for the next page, and arms the one alarm for whatever comes next. With an
event loop the loop calls it; without one the alarm's thread does.
"""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker import state

from celery_wheel.clock import SYSTEM_CLOCK, Clock
from celery_wheel.worker.alarm import Alarm
from celery_wheel.worker.announcer import Announcer
from celery_wheel.worker.bell import Bell
from celery_wheel.worker.courier import Courier
from celery_wheel.worker.dead_letters import DeadLetters
from celery_wheel.worker.dispatcher import Dispatcher
from celery_wheel.worker.errands import Errands
from celery_wheel.worker.intake import Intake
from celery_wheel.worker.pager import Pager
from celery_wheel.worker.renewal import Renewal
from celery_wheel.worker.requests import RequestFactory
from celery_wheel.worker.residents import CONFIRMING, IN_FLIGHT, READY, Item, Residents
from celery_wheel.worker.sharing import Sharing
from celery_wheel.worker.sources import Sources
from celery_wheel.worker.stats import Stats

if TYPE_CHECKING:
    from collections.abc import Callable

    from celery_wheel.settings import Settings
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.keeper import Keeper
    from celery_wheel.worker.lease import Lease

__all__ = ("Engine",)

logger = get_logger(__name__)

#: Seconds until the next turn after one that failed.
AFTER_FAILURE_S = 1.0
#: A wall clock that moved this much against the monotonic one was set (milliseconds).
STEP_MS = 50
#: Seconds a worker that stops waits for what it received to be committed.
CLOSE_PATIENCE_S = 1.0


class Engine:
    """Holds the parts together.

    Args:
        consumer: Celery's consumer.
        store_keeper: store custody, or ``None`` where the broker keeps everything.
        broker_keeper: broker custody, always there: some queues need it.
        lease: of the store's keeper.

    Thread-safety: :meth:`wake` from any thread. Everything else under :attr:`lock`, which the
    loop's thread (or, without a loop, the alarm's) takes once per turn.
    """

    def __init__(
        self,
        consumer: Any,
        settings: Settings,
        *,
        store_keeper: Keeper | None,
        broker_keeper: Keeper,
        lease: Lease | None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.app, self.clock, self.settings = consumer.app, clock, settings
        self.store_keeper, self.broker_keeper, self.lease = store_keeper, broker_keeper, lease
        self.keepers = [k for k in (store_keeper, broker_keeper) if k is not None]
        self.lock = threading.RLock()
        self.open = True
        self.stats = Stats()
        self._consumer = consumer
        self.residents = Residents(settings.kind, settings.size, settings.tick_ms, clock.wall_ms())
        self.sources = Sources(consumer.app)
        self.announcer = Announcer(self)
        self.dispatcher = Dispatcher(self, consumer)
        self.requests = RequestFactory(consumer, self.dispatcher.finished)
        self.intake = Intake(self, consumer)
        self.pager = Pager(self, store_keeper)
        self.sharing = Sharing(self)
        self.renewal = Renewal(self, broker_keeper)
        self.courier = Courier()
        self.errands = Errands(self.wake, self.courier.close)
        self.dead_letters = DeadLetters(self)
        self.bell = Bell(consumer.hub) if consumer.hub is not None else None
        self.alarm = Alarm(clock, self._alarmed)
        self._join_keepers()
        self._calls: deque[Callable[[], None]] = deque()
        self._lost = False
        self._dirty = True
        self._turn_at = 0.0
        self._offset_ms = 0.0
        self._pause = threading.Event()

    def _join_keepers(self) -> None:
        self._listen()

    def _listen(self) -> None:
        for keeper in self.keepers:
            keeper.on_gathered = keeper.executor.wake = self.wake
            keeper.answers_on_loop = self.bell is not None
            keeper.on_released = self.pager.look_now
            keeper.dead_letter = self.dead_letters.take

    @property
    def dispatching(self) -> bool:
        """Whether tasks are still handed over; there may be no pool any more where not."""
        return self.open and not self._consumer.wheel_stops()

    # -- what the parts ask --------------------------------------------------------------------

    def keeper_for(self, queue: str) -> Keeper:
        """Whose custody messages of a queue go into."""
        if self.store_keeper is None or self.sources.broker_only(queue):
            return self.broker_keeper
        return self.store_keeper

    def queues(self) -> list[str]:
        """The queues this worker consumes now, by the names that rows have."""
        return [queue.name for queue in self.app.amqp.queues.consume_from.values()]

    def wants(self, task: DelayedTask, keeper: Keeper) -> bool:
        """Whether a new task is to be resident from the start."""
        if keeper.holds_messages:
            return True
        if task.due_ms > self.clock.wall_ms() + self.sharing.horizon_ms:
            return False
        if len(self.residents) < self.settings.resident_limit:
            return True
        return self.pager.make_room(task.due_ms)

    def hold(self, task: DelayedTask, keeper: Keeper, *, acked: bool) -> None:
        """Take a row that this worker owns into RAM."""
        there = self.residents.by_key.get(task.key)
        if there is not None and there.place not in (IN_FLIGHT, READY, CONFIRMING):
            # The row was freed and claimed again; it may have been moved in between.
            acked = acked or there.acked
            self.residents.remove(there)
            there = None
        if there is None:
            self.residents.add(Item(task, keeper, acked=acked), self.clock.wall_ms())

    def give_back(self, items: list[Item]) -> None:
        """Let others have items that wait here."""
        for item in items:
            self.residents.remove(item)
            item.keeper.requeue(item, redelivered=False)

    def lease_holds(self, keeper: Keeper) -> bool:
        """Whether rows of a keeper may be handed over now without asking the store again."""
        if keeper.holds_messages or self.lease is None:
            return True
        return not self._lost and self.lease.holds()

    def build(
        self, item: Item, acked: Callable[[Item], None], rejected: Callable[..., None]
    ) -> Any:
        """The request of an item that goes to the pool."""
        delivery = item.keeper.messages.get(item.task.key)
        return self.requests.build(
            item.task,
            None if delivery is None else delivery.message,
            on_ack=lambda *_: acked(item),
            on_reject=lambda _log, _errors, requeue=False: rejected(item, requeue=requeue),
        )

    def running(self) -> list[Any]:
        """Requests of store custody that the pool has or had a moment ago."""
        return [
            request
            for request in list(state.active_requests)
            if (item := getattr(request, "wheel_item", None)) is not None
            and not item.keeper.holds_messages
        ]

    # -- waking --------------------------------------------------------------------------------

    def wake(self) -> None:
        """Have a turn soon. From any thread."""
        self._dirty = True
        if self.bell is not None:
            self.bell.ring()
        else:
            self.alarm.kick()

    def by(self, at: float) -> None:
        """Have a turn at an instant (monotonic seconds), if none comes before."""
        if at < self._turn_at:
            self._turn_at = at
            self.alarm.arm(at)

    def soon(self, call: Callable[[], None]) -> None:
        """Run a call in the next turn. From any thread."""
        self._calls.append(call)
        self.wake()

    def lost_lease(self) -> None:
        """The lease had run out: what is held may be others' by now. From the lease's thread."""
        self._lost = True
        self.wake()

    def store_recovered(self) -> None:
        """The store answers again after calls were repeated. From the store's thread."""
        self.soon(self.pager.recover)

    def peers_seen(self, peers: int) -> None:
        """How many others have leases. From the lease's thread."""
        if peers != self.sharing.peers:
            self.soon(partial(self.sharing.note, peers))

    def rows_freed(self) -> None:
        """Rows came free that this worker may claim. From the lease's thread."""
        self.soon(self.pager.look_now)

    def _alarmed(self) -> None:
        """The alarm rings: it is time, or the wall clock was set. In the alarm's thread."""
        self._dirty = True
        if self.bell is not None:
            self.bell.ring()
        else:
            self.on_tick()

    # -- the turn ------------------------------------------------------------------------------

    def on_tick(self) -> None:
        """The event loop's turn, or the alarm's where there is no loop."""
        try:
            if self.bell is not None and self.bell.rung:
                self.bell.silence()  # it rang for the turn that begins now
            self.turn()
            if self.bell is not None and self.bell.callbacks_wait():
                self.bell.ring()
        except Exception:
            # An exception here would end the worker, or the alarm's thread.
            logger.exception("The wheel's turn failed.")
            self._turn_at = float("inf")
            self.by(self.clock.monotonic() + AFTER_FAILURE_S)

    def turn(self) -> None:
        """Do what there is to do, in bounded pieces, and arm the alarm for the rest."""
        if not self.dispatching:
            return
        due = self._dirty or self.pager.queues_changed
        if not (due or self.clock.monotonic() >= self._turn_at):
            return
        self._dirty = False
        with self.lock:
            more = self._answers()
            self.intake.commit()
            now_ms = self.clock.wall_ms()
            if self.residents.ahead_of(now_ms):
                logger.warning("The clock was set back; the wheel is built anew.")
                self.residents.rebuild(now_ms)
            self._watch_clock(now_ms)
            self.residents.advance(now_ms)
            self.dispatcher.reap()
            self.dispatcher.confirm()
            more = self._answers() or more
            for keeper in self.keepers:
                keeper.flush()
            self.sharing.turn()
            self.pager.look()
            self.renewal.renew()
            self.announcer.work()
        before = self.stats.counts["dispatched"]
        self.dispatcher.dispatch()
        handed = before != self.stats.counts["dispatched"]
        if handed and self.bell is not None:
            # The pool asks the loop for writable pipes in a tick callback of its own, which may
            # have run before ours: without another round the loop would sleep on our job.
            self.bell.ring()
        with self.lock:
            if handed:
                self.dispatcher.confirm()
            self._arm(more=more)

    def _watch_clock(self, now_ms: int) -> None:
        """A clock that was set moves the window over the store's rows."""
        offset_ms = now_ms - self.clock.monotonic() * 1000
        if abs(offset_ms - self._offset_ms) > STEP_MS:
            self.pager.look_now()
        self._offset_ms = offset_ms

    def _answers(self) -> bool:
        while self._calls:
            self._calls.popleft()()
        if self._lost and self.store_keeper is not None:
            self._lost = False
            self.dispatcher.doubt(self.store_keeper)
            self.pager.look_now()
        self.errands.drain()
        left = [keeper.executor.drain() for keeper in self.keepers]
        return any(left)

    def _arm(self, *, more: bool) -> None:
        if more or self.residents.behind or self.announcer.busy or self._calls:
            self.wake()
            return
        at = self._next_at()
        self._turn_at = float("inf") if at is None else at
        self.alarm.arm(at)

    def _next_at(self) -> float | None:
        """The next instant with something to do, monotonic seconds."""
        now = self.clock.monotonic()
        instants = [
            self.pager.look_at,
            self.sharing.turn_at,
            self.renewal.renew_at,
            self.dispatcher.next_token_at,
            self.dispatcher.polling_at,
            self.dispatcher.confirm_at if self.dispatcher.confirm_at > now else None,
            *(line.due_at() for line in self.intake.lines.values()),
            *(keeper.flush_at for keeper in self.keepers),
        ]
        wake_ms = self.residents.next_wake_ms()
        if wake_ms is not None:
            instants.append(now + max(0, wake_ms - self.clock.wall_ms()) / 1000)
        return min((at for at in instants if at is not None), default=None)

    # -- the connection, and the end -----------------------------------------------------------

    def connected(self, connection: Any, renewal: type[Renewal]) -> None:
        """The broker is there, for the first time or again."""
        driver = connection.transport.driver_type
        self.residents.low_first = driver == "redis"
        self.dead_letters.possible = driver == "amqp"
        self.courier.like = connection
        self.renewal = renewal(self, self.broker_keeper)

    def connection_lost(self) -> None:
        """The broker's connection is gone: what it holds for us comes again."""
        with self.lock:
            # What was just committed counts as held, so that it is forgotten with the rest.
            self.broker_keeper.executor.drain(1_000_000)
            self.intake.drop()
            self.dispatcher.drop(self.broker_keeper)
            self.broker_keeper.forget_messages()
            self.renewal.forget()

    def close(self) -> None:
        """No more dispatching. What was received is committed, if the store answers soon."""
        if not self.open:
            return
        with self.lock:
            self.open = False
            give_up_at = self.clock.monotonic() + CLOSE_PATIENCE_S
            while (self.intake.busy or self.renewal.busy) and self.clock.monotonic() < give_up_at:
                self.intake.commit(now=True)
                self.errands.drain()
                for keeper in self.keepers:
                    keeper.executor.drain()
                self._pause.wait(0.002)
            for keeper in self.keepers:
                keeper.direct = True
                keeper.flush()
            if self.store_keeper is not None:  # the pool may have long to go with what runs
                self.store_keeper.free(self.residents.waiting())
        self.alarm.arm(None)

    def finish(self, timeout_s: float) -> None:
        """After the pool is done: send what is left, free the rows, close the stores."""
        self.alarm.stop()
        self.errands.stop(timeout_s)
        self.errands.drain()
        for keeper in self.keepers:
            keeper.executor.drain(1_000_000)
            keeper.flush()
        if self.store_keeper is not None:
            keeper, owner = self.store_keeper, self.store_keeper.owner
            keeper.executor.submit("release", lambda store: store.release(owner))
            keeper.executor.submit("end_lease", lambda store: store.end_lease(owner))
            if self.lease is not None:
                self.lease.stop(0)
            answers = keeper.executor.stop(timeout_s)
            if answers and self.lease is not None:
                self.lease.stop(timeout_s)
            if not answers:
                logger.warning(
                    "The store did not answer while the worker stopped; its tasks are free "
                    "when the lease ends (%s s).",
                    self.settings.lease_ttl_s,
                )
        self.broker_keeper.executor.stop(0)
        if self.bell is not None:
            self.bell.close()
