"""The whole engine, turn by turn, on a clock that moves when told and a pool of this test.

No broker and no thread: what a worker does with its rows is seen without waiting for it.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker import state

from celery_wheel.clock import FakeClock
from celery_wheel.envelope import pack
from celery_wheel.settings import Settings
from celery_wheel.stores.base import Filter, Owner
from celery_wheel.stores.memory import MemoryStore
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask
from celery_wheel.worker.engine import Engine
from celery_wheel.worker.keeper import Keeper
from celery_wheel.worker.lease import Lease
from celery_wheel.worker.store_thread import InlineExecutor

TTL_S = 10.0
NAME = "engine.task"


def task_function():
    """Celery has one table of tasks for all apps."""


@dataclass
class Bench:
    """A worker without Celery's worker: ``requests`` are what its pool was given."""

    settings: Settings
    slots: int = 1
    clock: FakeClock = field(default_factory=lambda: FakeClock(int(time.time() * 1000)))
    requests: list = field(default_factory=list)

    def __post_init__(self):
        self.app = Celery("engine", broker="memory://", set_as_current=False)
        self.app.task(name=NAME)(task_function)
        self.queue = f"q{uuid.uuid4().hex}"
        self.app.conf.task_default_queue = self.queue
        controller = SimpleNamespace(semaphore=None, process_task=None)
        self.consumer = SimpleNamespace(
            app=self.app,
            hub=None,
            hostname="node@here",
            pool=SimpleNamespace(
                num_processes=self.slots, apply_async=lambda *_, **__: SimpleNamespace()
            ),
            prefetch_multiplier=1,
            controller=controller,
            connection_errors=(),
            event_dispatcher=None,
            disable_rate_limits=False,
            task_buckets={NAME: None},
            on_task_request=self.requests.append,
            wheel_stops=lambda: False,
            connection=None,
        )
        self.store = MemoryStore(self.clock)
        self.owner = Owner("me")
        store_keeper = Keeper(
            InlineExecutor(self.store), "me", self.clock, self.settings, holds_messages=False
        )
        broker_keeper = Keeper(
            InlineExecutor(MemoryStore(self.clock)),
            "me",
            self.clock,
            self.settings,
            holds_messages=True,
        )
        self.lease = Lease(self.store.sibling(), self.owner, TTL_S, self.clock)
        self.engine = Engine(
            self.consumer,
            self.settings,
            store_keeper=store_keeper,
            broker_keeper=broker_keeper,
            lease=self.lease,
            clock=self.clock,
        )
        self.lease.on_lost, self.lease.on_freed = self.engine.lost_lease, self.engine.rows_freed
        self.lease.on_renewed = self.engine.wake
        self.lease.beat()

    def put(self, label, delay_s, *, owner=None, **fields):
        """A row that is due in so many seconds."""
        due_ms = self.clock.wall_ms() + round(delay_s * 1000)
        headers = {"id": label, "task": NAME, "lang": "py", "retries": 0, "eta": None}
        body = json.dumps([[], {}, {}])
        task = DelayedTask(
            key=label.encode().rjust(16),
            id=label,
            name=NAME,
            queue=self.queue,
            due_ms=due_ms,
            envelope=pack(headers, {}, {}, "application/json", "utf-8", body),
            arrival=len(self.rows()),
            owner=owner,
            **fields,
        )
        self.store.put([task], self.clock.wall_ms())

    def rows(self):
        return self.store.find(Filter(), 10_000).rows

    def row(self, label):
        (found,) = self.store.find(Filter(ids=(label,)), 1).rows
        return found

    def turn(self, times=4):
        """Turns until all answers of the store, which come at once, have been heard."""
        for _ in range(times):
            self.engine.wake()
            self.engine.turn()

    def run(self, seconds, step_s=0.05, *, beat=True):
        """Let time pass, with a turn at each step and beats as the lease's thread would."""
        for _ in range(round(seconds / step_s)):
            self.clock.advance(step_s)
            if beat:
                self.lease.beat()
            self.turn()

    def given(self):
        return [request.id for request in self.requests]

    def end(self, request):
        """The pool is done: acknowledge it, as Celery does."""
        request.acknowledge()
        request.on_success((False, None, 0.0))
        self.turn()
        self.clock.advance(0.02)  # ends go to the store in batches
        self.turn()


@pytest.fixture
def make():
    """Build a bench; ``make(slots=2, wheel_…=…)``."""
    made = []

    def build(slots=1, **settings):
        bench = Bench(replace(Settings(), **settings), slots)
        made.append(bench)
        return bench

    yield build
    for bench in made:
        for request in bench.requests:
            state.reserved_requests.discard(request)
            state.requests.pop(request.id, None)
        bench.app.close()


def test_a_task_is_handed_over_at_its_eta(make):
    """Not a millisecond before, and with the next turn at or after the tick."""
    bench = make()
    bench.put("one", 3)
    bench.turn()
    bench.run(2.95)
    assert bench.given() == []
    bench.clock.advance(0.049)
    bench.turn()
    assert bench.given() == []
    bench.clock.advance(0.011)
    bench.turn()
    assert bench.given() == ["one"]
    assert bench.row("one").state == DISPATCHED
    bench.end(bench.requests[0])
    assert bench.rows() == []
    assert len(bench.engine.residents) == 0


def test_a_full_pool_gets_one_after_the_other(make):
    """Nothing waits in the pool: the next is handed over when a slot is free."""
    bench = make()
    for number in range(4):
        bench.put(f"task {number}", 1)
    bench.turn()
    bench.run(1.1)
    assert len(bench.given()) == 1
    for number in range(1, 4):
        bench.end(bench.requests[-1])
        assert len(bench.given()) == number + 1
    assert bench.given() == [f"task {number}" for number in range(4)]


def test_without_a_lease_nothing_is_handed_over(make):
    """Once half the ttl has passed without a beat, what is due waits for one."""
    bench = make(slots=10)
    bench.put("one", TTL_S / 2 + 1)
    bench.turn()
    bench.run(TTL_S / 2 + 2, beat=False)
    assert bench.given() == []
    bench.lease.beat()
    bench.turn()
    assert bench.given() == ["one"]


def test_a_lost_lease_runs_nothing_that_another_has(make):
    """Rows that were reaped and claimed by another worker meanwhile are dropped, the rest runs."""
    bench = make(slots=10)
    bench.put("taken", 20)
    bench.put("mine", 20)
    bench.turn()
    assert bench.row("taken").owner == "me"
    bench.clock.advance(15)
    bench.store.heartbeat(Owner("other"), TTL_S)
    assert bench.store.reap() == 2
    (taken,) = bench.store.claim("other", bench.clock.wall_ms() + 60_000, 1)
    bench.lease.beat()
    bench.turn()
    for _ in range(10):
        bench.store.heartbeat(Owner("other"), TTL_S)
        bench.run(1)
    assert set(bench.given()) == {"taken", "mine"} - {taken.id}
    assert bench.row(taken.id).owner == "other"


def test_confirmed_rows_of_a_lost_lease_are_not_handed_over(make):
    """Confirmed, waiting for a slot, then reaped and run elsewhere: never run here, too."""
    bench = make()
    bench.put("first", 1)
    bench.put("second", 1)
    bench.turn()
    bench.run(1.1)
    assert bench.given() == ["first"]
    assert bench.engine.dispatcher.waiting_count == 1
    assert bench.row("second").state == DISPATCHED
    bench.clock.advance(15)
    bench.store.heartbeat(Owner("other"), TTL_S)
    assert bench.store.reap() == 2
    bench.store.claim("other", bench.clock.wall_ms(), 10)
    bench.lease.beat()
    bench.requests[0].acknowledge()
    state.reserved_requests.clear()
    bench.turn()
    assert bench.given() == ["first"]
    assert bench.row("second").owner == "other"


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_clock_set_back_makes_nothing_early_and_loses_nothing(make, confirmed):
    """Due or confirmed when an hour is taken back: they wait for the hour, and then run once."""
    bench = make(slots=1 if confirmed else 10)
    bench.put("first", 1)
    bench.put("second", 1)
    bench.turn()
    if confirmed:
        bench.run(1.1)
        assert bench.given() == ["first"]
        assert bench.engine.dispatcher.waiting_count == 1
    else:
        bench.clock.advance(1.1)
        bench.lease.beat()
        bench.engine.residents.advance(bench.clock.wall_ms())
        assert bench.engine.residents.due_count == 2
    bench.clock.step_wall(-3600)
    bench.lease.beat()
    bench.turn()
    if confirmed:
        bench.end(bench.requests[0])
    state.reserved_requests.clear()
    bench.run(5)
    assert bench.given() == (["first"] if confirmed else [])
    assert bench.row("second").state == PENDING
    bench.clock.step_wall(3600)
    bench.lease.beat()
    bench.turn(8)
    state.reserved_requests.clear()
    bench.run(1)
    assert sorted(bench.given()) == ["first", "second"]


def test_a_clock_set_forward_looks_into_the_store_at_once(make):
    """Rows beyond the window are claimed with the next turn when an hour passes in a moment."""
    bench = make(slots=10)
    bench.put("far", 1800)
    bench.turn()
    assert len(bench.engine.residents) == 0
    bench.clock.step_wall(3600)
    bench.lease.beat()
    bench.turn()
    assert bench.given() == ["far"]


def test_rows_that_became_ours_unheard_are_found_after_an_outage(make):
    """A put or claim whose answer was lost left rows that nobody else may claim."""
    bench = make(slots=10)
    bench.turn()
    bench.put("orphan", 1, owner="me")
    bench.run(2)
    assert bench.given() == []
    bench.engine.store_recovered()
    bench.turn()
    assert bench.given() == ["orphan"]


def test_memory_is_bounded_and_the_nearest_are_in_it(make):
    """No more residents than the limit, whatever is pending, and all run in order."""
    bench = make(slots=100, resident_limit=10)
    for number in range(60):
        bench.put(f"task {number:02}", 1 + number / 10)
    bench.turn()
    while len(bench.given()) < 60:
        bench.run(0.1)
        assert len(bench.engine.residents) <= 10
        for request in bench.requests:
            if not request.acknowledged:
                bench.end(request)
        state.reserved_requests.clear()
        assert bench.clock.monotonic() < 30
    assert bench.given() == [f"task {number:02}" for number in range(60)]
    assert bench.rows() == []


def test_an_unanswered_request_goes_back_and_comes_again(make):
    """A request that ended with neither ack nor reject is pending again, marked redelivered."""
    bench = make()
    bench.put("one", 1)
    bench.turn()
    bench.run(1.1)
    (request,) = bench.requests
    state.reserved_requests.clear()
    bench.engine.dispatcher.finished(request)
    bench.turn(6)
    assert bench.given() == ["one", "one"]
    assert bench.requests[1].delivery_info["redelivered"]
    bench.end(bench.requests[1])
    assert bench.rows() == []


def test_the_end_of_an_old_request_leaves_the_new_one(make):
    """The first run of a row that was run again tells of its end late: the second one stays."""
    bench = make()
    bench.put("one", 1)
    bench.turn()
    bench.run(1.1)
    state.reserved_requests.clear()
    first = bench.requests[0]
    bench.engine.dispatcher.finished(first)
    bench.turn(6)
    second = bench.requests[1]
    bench.engine.dispatcher.finished(first)
    bench.turn()
    key = second.wheel_item.task.key
    assert bench.engine.dispatcher.in_flight[key] is second.wheel_item
    assert len(bench.given()) == 2


def test_a_pool_that_refuses_costs_nothing(make, caplog):
    """A request that the pool does not take is pending again, and the next one is given."""
    bench = make()
    errors = [RuntimeError("not now")]

    def take(request):
        if errors:
            state.reserved_requests.discard(request)
            raise errors.pop()
        bench.requests.append(request)

    bench.consumer.on_task_request = take
    bench.put("one", 1)
    bench.turn()
    bench.run(1.5)
    assert bench.given() == ["one"]
    assert "The pool did not take" in caplog.text


def test_expired_rows_are_announced_and_gone(make):
    """One that expires while it waits never runs, and leaves no row."""
    bench = make()
    bench.app.conf.result_backend = "cache+memory://"
    expires_ms = bench.clock.wall_ms() + 2000
    bench.put("one", 30, expires_ms=expires_ms)
    bench.turn()
    bench.run(3)
    assert bench.rows() == []
    assert bench.engine.stats.counts["expired"] == 1
    bench.run(30, 1)
    assert bench.given() == []


def test_a_turn_that_fails_is_followed_by_another(make, caplog):
    """An error is logged, and a second later the engine tries again."""
    bench = make()
    bench.put("one", 1)
    advance = bench.engine.residents.advance
    errors = [RuntimeError("odd")]

    def failing(now_ms):
        if errors:
            raise errors.pop()
        advance(now_ms)

    bench.engine.residents.advance = failing
    bench.engine.wake()
    bench.engine.on_tick()
    assert "The wheel's turn failed." in caplog.text
    assert bench.engine.alarm._at is not None
    bench.run(2)
    assert bench.given() == ["one"]
