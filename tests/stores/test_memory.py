"""What is particular to the store in memory: many rows, and nothing left of them."""

from __future__ import annotations

import random

from celery_wheel.clock import FakeClock
from celery_wheel.stores._ordered import Ordered
from celery_wheel.stores.memory import MemoryStore
from tests.stores.rows import LATER, NOW, claimed, owner, task


def test_nothing_is_left_of_rows_that_are_gone():
    """Once every row is settled, every index is empty, whatever the rows shared."""
    store = MemoryStore()
    tasks = [task("a", retries=n, stamps=("s=1", "s=1"), expires_ms=LATER) for n in range(3)]
    claimed(store, *tasks, task("b"))
    store.put([task("c")], NOW)
    store.settle([row.key for row in store._place.table.by_due])
    table = store._place.table
    assert table.free == {}
    indexes = (table.rows, table.by_due, table.expiring, table.owned)
    assert [len(index) for index in (*indexes, table._by_id, table._by_stamp)] == [0] * 6


def test_leases_go_by_the_monotonic_clock():
    """A step of the wall clock ends no lease; time that passes does."""
    clock = FakeClock()
    store = MemoryStore(clock)
    store.heartbeat(owner("w1"), 30)
    claimed(store, task("a"))
    clock.step_wall(3600)
    assert store.reap() == 0
    clock.advance(30)
    assert store.reap() == 1


def test_ordered_agrees_with_a_sorted_list():
    """With many chunks, adding, removing, ranks and iteration are those of a sorted list."""
    chance = random.Random(7)
    items = [(chance.randrange(500), n) for n in range(6000)]
    ordered: Ordered[tuple[int, int]] = Ordered(lambda item: item)
    for item in items:
        ordered.add(item)
    chance.shuffle(items)
    for item in items[:3000]:
        ordered.remove(item)
    rest = sorted(items[3000:])
    assert list(ordered) == rest
    assert len(ordered) == 3000
    for bound in [(-1,), (0,), (250,), (499, 9999), (500,), rest[1500]]:
        assert list(ordered.after(bound)) == [item for item in rest if item > bound]
        assert ordered.rank(bound) == sum(item < bound for item in rest)
