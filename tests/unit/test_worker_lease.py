"""The lease: what a worker may believe of it, by two clocks, and when others are reaped."""

from __future__ import annotations

import pytest

from celery_wheel.clock import FakeClock
from celery_wheel.errors import StoreUnavailable
from celery_wheel.stores.base import Filter, Owner
from celery_wheel.stores.memory import MemoryStore
from celery_wheel.task import DelayedTask
from celery_wheel.worker.lease import Lease

TTL_S = 10.0


class Bench:
    """A lease over a store in memory, and what it has called."""

    def __init__(self):
        self.clock = FakeClock()
        self.store = MemoryStore(self.clock)
        self.calls = []
        self.lease = self.of("me")

    def of(self, name):
        lease = Lease(self.store.sibling(), Owner(name), TTL_S, self.clock)
        lease.on_lost = lambda: self.calls.append((name, "lost", lease.holds()))
        lease.on_freed = lambda: self.calls.append((name, "freed"))
        return lease

    def put(self, owner):
        task = DelayedTask(b"k" * 16, "id", "name", "queue", self.clock.wall_ms(), b"", owner=owner)
        self.store.put([task], self.clock.wall_ms())


def rows(store):
    return store.find(Filter(), 10).rows


@pytest.fixture
def bench():
    """A lease, its store and its clock."""
    return Bench()


def test_it_holds_for_half_its_time(bench):
    """Before the first beat and later than ttl/2 after the last, nothing may be handed over."""
    assert not bench.lease.holds()
    bench.lease.beat()
    assert bench.lease.holds()
    bench.clock.advance(TTL_S / 2)
    assert bench.lease.holds()
    bench.clock.advance(0.01)
    assert not bench.lease.holds()
    bench.lease.beat()
    assert bench.lease.holds()


@pytest.mark.parametrize("step_s", [3600, -3600])
def test_a_clock_that_was_set_ends_the_belief(bench, step_s):
    """After a step of the wall clock the lease has to be renewed before it counts."""
    bench.lease.beat()
    bench.clock.step_wall(step_s)
    assert not bench.lease.holds()
    bench.lease.beat()
    assert bench.lease.holds()


def test_a_renewal_that_was_waited_for_is_told(bench):
    """The engine that found no lease is woken when there is one again, and else is not."""
    told = []
    bench.lease.on_renewed = lambda: told.append(1)
    bench.lease.beat()
    assert told == []
    bench.clock.advance(TTL_S)
    bench.lease.holds()
    bench.lease.beat()
    bench.lease.beat()
    assert told == [1]


def test_a_lost_lease_is_told_before_it_counts_again(bench):
    """Between the renewal and the engine's hearing of the loss, nothing may be handed over."""
    bench.lease.beat()
    bench.put("me")
    bench.clock.advance(TTL_S)
    other = bench.of("other")
    other.beat()
    bench.clock.advance(TTL_S / 2)
    other.beat()
    assert ("other", "freed") in bench.calls
    bench.lease.beat()
    assert ("me", "lost", False) in bench.calls
    assert bench.lease.holds()


def test_a_late_worker_gives_others_time_before_it_reaps(bench):
    """After an outage everybody is late: the first to come back does not rob the others."""
    other = bench.of("other")
    bench.lease.beat()
    other.beat()
    bench.put("other")
    bench.clock.advance(3 * TTL_S)
    bench.lease.beat()
    assert rows(bench.store)[0].owner == "other"
    other.beat()
    bench.clock.advance(TTL_S / 2)
    bench.lease.beat()
    assert rows(bench.store)[0].owner == "other"


def test_a_step_of_the_wall_clock_is_an_outage_too(bench):
    """Leases of a store that goes by the wall clock run out for everybody at once."""
    bench.lease.beat()
    bench.clock.advance(TTL_S / 2)
    bench.lease.beat()
    other = bench.of("other")
    other.beat()
    bench.put("other")
    # As the store sees it, the lease of the other one is over.
    bench.store.end_lease("other")
    bench.clock.step_wall(3600)
    bench.lease.beat()
    assert rows(bench.store)[0].owner == "other"


def test_the_dead_are_reaped(bench):
    """Rows of an owner that does not beat are free within the ttl, and that is told."""
    dead = bench.of("dead")
    dead.beat()
    bench.put("dead")
    for _ in range(6):
        bench.lease.beat()
        bench.clock.advance(TTL_S / 5)
    assert rows(bench.store)[0].owner is None
    assert ("me", "freed") in bench.calls


def test_a_dead_store_ends_the_belief_and_its_thread_goes_on():
    """The thread keeps trying, whatever the error, and stops when asked."""
    clock = FakeClock()
    errors = [StoreUnavailable("away"), RuntimeError("odd")]

    class Failing(MemoryStore):
        def heartbeat(self, owner, ttl_s):
            if errors:
                raise errors.pop()
            return super().heartbeat(owner, ttl_s)

    lease = Lease(Failing(clock), Owner("me"), 0.5, clock)
    lease.start()
    for _ in range(200):
        lease.kick()
        lease._thread.join(0.05)
        if lease.holds():
            break
    assert lease.holds()
    assert errors == []
    lease.stop(5)
    assert not lease._thread.is_alive()
