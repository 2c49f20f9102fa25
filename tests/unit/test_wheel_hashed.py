"""The hashed wheel: rounds, bounded visits, and what it shares with the other one."""

from __future__ import annotations

import pytest

from celery_wheel.wheels import hashed
from celery_wheel.wheels.base import Level
from celery_wheel.wheels.hashed import SCAN_LIMIT, HashedWheel
from celery_wheel.wheels.make import make_wheel


@pytest.mark.parametrize(("asked", "got"), [(1, 1), (2, 2), (3, 4), (512, 512), (513, 1024)])
def test_the_size_is_rounded_up_to_a_power_of_two(asked: int, got: int) -> None:
    """Any size from 1 is accepted and normalised."""
    assert HashedWheel[int](asked).size == got


@pytest.mark.parametrize("size", [0, -1, 1 << 31])
def test_sizes_that_cannot_be_are_refused(size: int) -> None:
    """The message names the size and the range."""
    with pytest.raises(ValueError, match="give 1 to"):
        HashedWheel(size)


def test_an_entry_waits_out_its_rounds() -> None:
    """Entries of one bucket expire each in its own turn of the wheel."""
    wheel: HashedWheel[str] = HashedWheel(512, start_tick=100)
    near = wheel.schedule(110, "this turn")
    far = wheel.schedule(110 + 2 * 512, "two turns on")
    assert (wheel.rounds(near), wheel.rounds(far)) == (0, 2)
    assert wheel.advance(109) == []
    assert wheel.advance(110) == ["this turn"]
    assert wheel.next_expiry() == 110 + 1024
    assert wheel.advance(110 + 512) == []
    assert wheel.rounds(far) == 1
    assert wheel.advance(110 + 1023) == []
    assert wheel.advance(110 + 1024) == ["two turns on"]


def test_a_jump_over_many_turns_keeps_the_order() -> None:
    """Items of several turns and buckets come out by tick, then by scheduling."""
    wheel: HashedWheel[int] = HashedWheel(8)
    dues = [5, 13, 21, 6, 5, 10**12, 8, 13]
    for due in dues:
        wheel.schedule(due, due)
    assert wheel.advance(10**13) == sorted(dues)


def test_turns_in_which_nothing_is_due_are_not_visited() -> None:
    """An entry centuries away costs one visit, at its tick."""
    wheel: HashedWheel[int] = HashedWheel(8)
    wheel.schedule(10**12, 1)
    assert wheel.next_expiry() == 10**12
    assert wheel.advance(10**12 - 1) == []
    assert not wheel.behind


def test_one_call_looks_at_a_bounded_number_of_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket of a hundred thousand entries is visited over many calls."""
    seen: list[int] = []
    take = hashed._take_due

    def counting(part: hashed.Part[int], tick: int, limit: int, out: list[int]) -> int | None:
        seen.append(len(part))
        return take(part, tick, limit, out)

    monkeypatch.setattr(hashed, "_take_due", counting)
    wheel: HashedWheel[int] = HashedWheel(4)
    for i in range(100_000):
        wheel.schedule(40 + 4 * (i % 2), i)
    out: list[int] = []
    while len(wheel) > 50_000 or wheel.behind:
        seen.clear()
        got = wheel.advance(40, 700)
        assert len(got) <= 700
        assert sum(seen) <= SCAN_LIMIT + hashed.PART_SIZE
        out += got
    assert out == list(range(0, 100_000, 2))
    wheel.check()


def test_scheduling_during_a_visit_is_consistent() -> None:
    """What is put into a bucket whose visit stopped for its limit comes out in its place."""
    wheel: HashedWheel[str] = HashedWheel(4)
    for i in range(4):
        wheel.schedule(8, f"n{i}")
    assert wheel.advance(8, 2) == ["n0", "n1"]
    wheel.schedule(8, "same tick")
    wheel.schedule(4, "earlier, same bucket")
    wheel.schedule(12, "next turn")
    wheel.check()
    assert wheel.advance(8, 3) == ["earlier, same bucket", "n2", "n3"]
    assert wheel.behind
    assert wheel.advance(8) == ["same tick"]
    assert wheel.advance(12) == ["next turn"]
    assert wheel.next_expiry() is None


def test_detached_entries_leave_nothing_behind() -> None:
    """A wheel whose entries were all detached is empty, also to next_expiry."""
    wheel: HashedWheel[int] = HashedWheel(8)
    nodes = [wheel.schedule(i, i) for i in range(100)]
    assert wheel.occupancy() == [Level(0, 1, 8, 100)]
    assert [node.item for node in wheel.farthest(2)] == [99, 98]
    for node in nodes:
        assert wheel.detach(node)
        assert not wheel.detach(node)
    assert wheel.next_expiry() is None
    assert wheel.occupancy() == []
    assert not wheel._buckets


def test_it_can_be_made_by_its_name() -> None:
    """wheel_kind="hashed" gives this wheel, with the size and the tick asked for."""
    wheel = make_wheel("hashed", size=100, start_tick=7)
    assert isinstance(wheel, HashedWheel)
    assert (wheel.size, wheel.now_tick) == (128, 7)
