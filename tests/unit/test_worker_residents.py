"""The tasks in RAM: never early, in order, and right after a clock was set."""

from __future__ import annotations

import random

import pytest

from celery_wheel.task import DelayedTask
from celery_wheel.worker.residents import DUE, GONE, PARKED, WAITING, Item, Residents

NOW_MS = 1_000_000_000_003
TICK_MS = 10


@pytest.fixture(params=["hierarchical", "hashed"])
def residents(request):
    """Empty residents over each kind of wheel."""
    return Residents(request.param, 64, TICK_MS, NOW_MS)


def item(number, due_ms, **fields):
    key = f"{number:016d}".encode()
    task = DelayedTask(key, f"id-{number}", "name", "queue", due_ms, b"", arrival=number, **fields)
    return Item(task, None)


def drain(residents):
    """Take the whole due line, in its order."""
    taken = []
    while (first := residents.first_due()) is not None:
        residents.remove(first)
        taken.append(first)
    return taken


def test_none_is_due_before_its_time_and_all_are_due_within_a_tick(residents):
    """Whatever instants the clock shows, an item is in the due line at its ETA rounded up."""
    dice = random.Random(5)
    waiting = [item(number, NOW_MS + dice.randrange(0, 20_000)) for number in range(500)]
    for one in waiting:
        residents.add(one, NOW_MS)
    now_ms = NOW_MS
    while len(residents):
        now_ms += dice.choice((1, 3, 10, 40, 700))
        residents.advance(now_ms)
        while residents.behind:
            residents.advance(now_ms)
        due = drain(residents)
        assert all(one.task.due_ms <= now_ms for one in due)
        assert all(one.task.due_ms > now_ms - TICK_MS for one in residents)
    assert residents.next_wake_ms() is None


def test_the_next_wake_is_the_first_etas_tick(residents):
    """The alarm is set for the tick at or after the nearest ETA, or the nearest expiry."""
    residents.add(item(1, NOW_MS + 5001), NOW_MS)
    wake_ms = residents.next_wake_ms()
    assert wake_ms <= NOW_MS + 5001 + TICK_MS
    residents.add(item(2, NOW_MS + 5000, expires_ms=NOW_MS + 1000), NOW_MS)
    assert residents.next_wake_ms() <= NOW_MS + 1000 + 1 + TICK_MS


@pytest.mark.parametrize("low_first", [True, False])
def test_the_due_line_is_by_priority_then_due_then_arrival(residents, low_first):
    """Priorities are as the broker means them: Redis' low numbers, AMQP's high ones come first."""
    residents.low_first = low_first
    given = [(3, 100), (9, 50), (0, 70), (9, 20), (0, 70), (3, 10)]
    for number, (priority, before_ms) in enumerate(given):
        residents.add(item(number, NOW_MS - before_ms, priority=priority), NOW_MS)
    order = [(one.task.priority, one.task.due_ms, one.task.arrival) for one in drain(residents)]
    sign = 1 if low_first else -1
    assert order == sorted(order, key=lambda rank: (sign * rank[0], rank[1], rank[2]))


def test_a_clock_that_was_set_back_takes_tasks_out_of_the_due_line(residents):
    """After a rebuild what is not due any more waits again, and comes at its time, once."""
    residents.add(item(1, NOW_MS + 1000), NOW_MS)
    residents.add(item(2, NOW_MS + 9000), NOW_MS)
    residents.advance(NOW_MS + 2000)
    assert residents.due_count == 1
    back_ms = NOW_MS - 3_600_000
    assert residents.ahead_of(back_ms)
    residents.rebuild(back_ms)
    assert not residents.ahead_of(back_ms)
    assert residents.due_count == 0
    residents.advance(NOW_MS + 999)
    assert residents.first_due() is None
    residents.advance(NOW_MS + 1000 + TICK_MS)
    assert [one.task.id for one in drain(residents)] == ["id-1"]
    residents.advance(NOW_MS + 9000 + TICK_MS)
    assert [one.task.id for one in drain(residents)] == ["id-2"]


def test_a_small_step_back_rebuilds_nothing(residents):
    """The wheel may be a tick ahead of the clock: that is no step."""
    residents.advance(NOW_MS)
    assert not residents.ahead_of(NOW_MS - 5)


def test_a_forward_step_makes_all_due_that_is(residents):
    """What an hour's step overtakes is due at once, in bounded pieces."""
    for number in range(1200):
        residents.add(item(number, NOW_MS + 1000 + number), NOW_MS)
    later_ms = NOW_MS + 3_600_000
    calls = 0
    while calls == 0 or residents.behind:
        calls += 1
        residents.advance(later_ms)
    assert residents.due_count == 1200
    assert calls >= 3


def test_items_of_one_id_are_found_and_leave_one_by_one(residents):
    """A retry that is held beside its first message has the same id and another key."""
    first, second, other = item(1, NOW_MS + 50), item(2, NOW_MS + 60), item(3, NOW_MS + 70)
    second.task.id = first.task.id
    for one in (first, second, other):
        residents.add(one, NOW_MS)
    assert list(residents.of_ids([first.task.id])) == [first, second]
    residents.remove(first)
    assert list(residents.of_ids([first.task.id])) == [second]
    residents.remove(second)
    assert list(residents.of_ids([first.task.id, "unheard of"])) == []
    assert len(residents) == 1


def test_removing_an_item_leaves_its_successor(residents):
    """An item whose row was claimed anew is another one: the old one's end does not take it."""
    old, new = item(1, NOW_MS + 50), item(1, NOW_MS + 80)
    residents.add(old, NOW_MS)
    residents.remove(old)
    residents.add(new, NOW_MS)
    residents.remove(old)
    assert residents.by_key[new.task.key] is new
    assert list(residents.of_ids([new.task.id])) == [new]


def test_places_are_exclusive(residents):
    """An item is in the wheel, or in the due line, or elsewhere; counters follow."""
    one = item(1, NOW_MS + 50)
    residents.add(one, NOW_MS)
    assert (one.place, residents.due_count) == (WAITING, 0)
    residents.to_due(one)
    assert (one.place, residents.due_count, one.node) == (DUE, 1, None)
    residents.move(one, PARKED)
    assert (one.place, residents.due_count) == (PARKED, 0)
    assert residents.first_due() is None
    residents.remove(one)
    assert (one.place, len(residents)) == (GONE, 0)
    residents.advance(NOW_MS + 1000)
    assert residents.due_count == 0


def test_the_farthest_are_those_that_are_due_last(residents):
    """What is given back when RAM is full is what would be needed last."""
    for number in range(50):
        residents.add(item(number, NOW_MS + 100 * number), NOW_MS)
    found = residents.farthest(5)
    assert len(found) == 5
    nearest = sorted(one.task.due_ms for one in residents)[:20]
    assert min(one.task.due_ms for one in found) > nearest[-1]
