"""The hierarchical wheel: edges, order, bounded work."""

from __future__ import annotations

import gc
import weakref

import pytest

from celery_wheel.wheels import hierarchical
from celery_wheel.wheels.base import Level
from celery_wheel.wheels.bucket import PART_SIZE
from celery_wheel.wheels.hierarchical import DEMOTE_LIMIT, PRESETS, HierarchicalWheel
from celery_wheel.wheels.make import make_wheel

YEAR_TICKS = 365 * 86400 * 100


def drain(wheel: HierarchicalWheel[int], limit: int = 1000) -> list[tuple[int, list[int]]]:
    """Advance from expiry to expiry; (tick, items) where there were any."""
    seen = []
    while (tick := wheel.next_expiry()) is not None:
        out = wheel.advance(max(tick, wheel.now_tick), limit)
        wheel.check()
        if out:
            seen.append((tick, out))
    return seen


@pytest.mark.parametrize("size", [2, 3, 4, 8, 60, 4096])
@pytest.mark.parametrize("start", [0, 1, -7, 4095, 170_000_000_001])
def test_every_edge_of_every_wheel_is_exact(size: int, start: int) -> None:
    """Entries around each power of the size come out at their own tick, never another."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=size, start_tick=start)
    turns = [size**power for power in range(1, 5)]
    edges = [start + turn for turn in turns] + [start - start % turn + turn for turn in turns]
    dues = sorted({edge + offset for edge in edges for offset in (-1, 0, 1)})
    for due in reversed(dues):
        wheel.schedule(due, due)
    wheel.check()
    assert wheel.advance(start) == [due for due in dues if due <= start]
    assert drain(wheel) == [(due, [due]) for due in dues if due > start]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_hand_out_every_entry_at_its_tick(name: str) -> None:
    """Second, minute and hour wheels and the other presets are exact at their edges."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(sizes=PRESETS[name], start_tick=59)
    edges = [60, 61, 119, 3599, 3600, 3601, 86399, 86400, 86401, 5 * 86400, 400 * 86400]
    for due in edges:
        wheel.schedule(due, due)
    assert drain(wheel) == [(due, [due]) for due in edges]


def test_the_worked_example_of_the_class() -> None:
    """3 725 s waits in hour 1, then in minute 2, then in second 5."""
    wheel: HierarchicalWheel[str] = HierarchicalWheel(sizes=PRESETS["clock"])
    wheel.schedule(3725, "x")
    assert wheel.occupancy() == [Level(2, 3600, 1, 1)]
    assert wheel.next_expiry() == 3600
    assert wheel.advance(3600) == []
    assert wheel.occupancy() == [Level(1, 60, 1, 1)]
    assert wheel.next_expiry() == 3720
    assert wheel.advance(3720) == []
    assert wheel.occupancy() == [Level(0, 1, 1, 1)]
    assert wheel.next_expiry() == 3725
    assert wheel.advance(3724) == []
    assert wheel.advance(3725) == ["x"]
    assert wheel.occupancy() == []


def test_items_of_one_tick_come_in_order_of_scheduling_by_whatever_level() -> None:
    """An entry that waited on a far wheel goes before one put straight into the tick."""
    wheel: HierarchicalWheel[str] = HierarchicalWheel(size=4)
    due = 70
    for now, item in ((0, "far"), (60, "nearer"), (64, "near"), (68, "next"), (69, "last")):
        assert wheel.advance(now) == []
        wheel.schedule(due, item)
        wheel.schedule(due + 1, item + "+1")
    order = ["far", "nearer", "near", "next", "last"]
    assert wheel.advance(due) == order
    assert wheel.advance(due + 1) == [item + "+1" for item in order]


def test_a_tick_between_two_of_a_run_keeps_its_place() -> None:
    """What is put between entries that were demoted together comes out between them."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=8)
    for due in (15, 9, 11, 13):
        wheel.schedule(due, due)
    assert wheel.advance(8) == []
    wheel.schedule(12, 12)
    wheel.schedule(10, 10)
    assert wheel.advance(14) == [9, 10, 11, 12, 13]
    assert wheel.advance(15) == [15]


def test_ticks_that_have_passed_come_at_the_next_advance() -> None:
    """A past tick is handed out whatever tick the next advance is given."""
    wheel: HierarchicalWheel[str] = HierarchicalWheel(start_tick=100)
    wheel.schedule(100, "now")
    wheel.schedule(-5, "long ago")
    assert wheel.next_expiry() == -5
    assert wheel.advance(3) == ["long ago", "now"]
    assert wheel.now_tick == 100


def test_the_owner_may_change_the_wheel_while_it_works_through_the_items() -> None:
    """Scheduling and detaching between two calls, also of what is due, is consistent."""
    wheel: HierarchicalWheel[str] = HierarchicalWheel(size=4)
    nodes = [wheel.schedule(20, f"n{i}") for i in range(6)]
    seen = []
    for item in wheel.advance(20, 2):
        seen.append(item)
        wheel.schedule(20, f"again {item}")
        wheel.schedule(19, f"past {item}")
        wheel.schedule(30, f"later {item}")
    assert wheel.behind
    assert wheel.detach(nodes[3])
    assert not wheel.detach(nodes[0])
    while wheel.behind:
        seen += wheel.advance(20, 2)
        wheel.check()
    expected = "n0 n1 past-n0 past-n1 n2 n4 n5 again-n0 again-n1"
    assert [item.replace(" ", "-") for item in seen] == expected.split()
    assert wheel.advance(30) == ["later n0", "later n1"]


def test_detaching_frees_the_item_at_once_and_its_bucket_later() -> None:
    """A detached item is garbage at once, though its handle lives; its bucket is dropped."""

    class Item:
        pass

    wheel: HierarchicalWheel[Item] = HierarchicalWheel()
    item = Item()
    ref = weakref.ref(item)
    node = wheel.schedule(10**6, item)
    del item
    assert not node.detached
    assert wheel.detach(node)
    assert ref() is None
    assert node.detached
    assert not wheel.detach(node)
    assert len(wheel) == 0
    assert wheel.next_expiry() is None
    assert wheel.occupancy() == []


def test_an_expired_handle_holds_no_item() -> None:
    """A handle that is kept after the expiry does not keep the item."""
    wheel: HierarchicalWheel[object] = HierarchicalWheel()
    node = wheel.schedule(1, object())
    wheel.advance(1)
    assert node.detached
    assert node.item is None


def test_cancelled_nodes_do_not_pile_up() -> None:
    """However many are scheduled and detached, a bucket holds no more dead than live."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel()
    keep = wheel.schedule(5000, -1)
    for i in range(20_000):
        wheel.detach(wheel.schedule(5000, i))
    gc.collect()
    assert sum(len(part) for part in wheel._buckets.values()) <= 2
    assert wheel.farthest(5) == [keep]


def test_next_expiry_is_exact_within_the_present_turn() -> None:
    """The next tick with something in it, also after the first entry was detached."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=16)
    nodes = {due: wheel.schedule(due, due) for due in (18, 20, 25)}
    assert wheel.next_expiry() == 16
    wheel.advance(16)
    assert wheel.next_expiry() == 18
    wheel.detach(nodes[18])
    assert wheel.next_expiry() == 20
    wheel.schedule(19, 19)
    assert wheel.next_expiry() == 19


def test_a_clock_that_jumps_by_years_costs_by_entries_not_by_ticks() -> None:
    """Forty years in a few calls hand out all that became due, in order."""
    start = 170_000_000_000
    wheel: HierarchicalWheel[int] = HierarchicalWheel(start_tick=start)
    dues = [start + i * YEAR_TICKS // 10 + i for i in range(1, 500)]
    for due in reversed(dues):
        wheel.schedule(due, due)
    for now, expected in ((dues[398], dues[:399]), (start + 90 * YEAR_TICKS, dues[399:])):
        out = wheel.advance(now)
        calls = 1
        while wheel.behind:
            out += wheel.advance(now)
            calls += 1
        assert out == expected
        assert calls <= 3


def test_beyond_the_last_wheel_is_still_exact() -> None:
    """A tick far beyond the last wheel's turn is held and handed out at its tick."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=2)
    for due in (1 << 70, (1 << 70) + 1, 1 << 62):
        wheel.schedule(due, due)
    assert [tick for tick, _ in drain(wheel)] == [1 << 62, 1 << 70, (1 << 70) + 1]


class Counted(HierarchicalWheel[int]):
    """Counts what one call moves."""

    moved = 0

    def _deal_out(self, key: int, moves: int) -> int:
        done = super()._deal_out(key, moves)
        self.moved += done
        return done


def test_a_million_nodes_in_one_bucket_never_make_one_call_long() -> None:
    """Each call moves and hands out at most its limits; the bulk is demoted ahead of time."""
    wheel = Counted(demote_ahead=200)
    total = 1_000_000
    start = 3 * 4096
    for i in range(total):
        wheel.schedule(start + i % 7, i)
    assert wheel.next_expiry() == start - 200
    wheel.advance(start - 200)
    assert wheel.behind
    calls = 1
    while wheel.behind:
        wheel.moved = 0
        assert wheel.advance(start - 200) == []
        assert wheel.moved <= DEMOTE_LIMIT
        calls += 1
    assert calls <= total / DEMOTE_LIMIT + 2
    count = 0
    first_of_call = []
    while len(wheel):
        wheel.moved = 0
        out = wheel.advance(start + 7)
        assert len(out) <= 1000
        assert wheel.moved <= DEMOTE_LIMIT
        if out:
            first_of_call.append(out[0] % 7)
        count += len(out)
    assert count == total
    assert first_of_call == sorted(first_of_call)
    assert wheel.next_expiry() is None


def test_a_huge_bucket_is_compacted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Detaching one node of a huge bucket touches at most one part of it."""
    sizes = []

    class Part(hierarchical.Part[int]):
        def compact(self) -> None:
            sizes.append(len(self))
            super().compact()

    monkeypatch.setattr(hierarchical, "Part", Part)
    wheel: HierarchicalWheel[int] = HierarchicalWheel()
    nodes = [wheel.schedule(9000, i) for i in range(50_000)]
    for node in nodes:
        wheel.detach(node)
    assert max(sizes) <= PART_SIZE
    assert wheel.next_expiry() is None


def test_demotion_of_a_small_bucket_waits_for_its_start() -> None:
    """Only big buckets are begun ahead of time."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=8, demote_ahead=5)
    wheel.schedule(17, 1)
    assert wheel.next_expiry() == 16


def test_entries_that_come_while_a_big_bucket_is_demoted_keep_the_order() -> None:
    """Scheduling for a tick whose bucket is half demoted joins behind the rest of it."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=64, demote_ahead=10)
    total = 5 * PART_SIZE
    for i in range(total):
        wheel.schedule(130, i)
    for i in range(50):
        wheel.advance(120)
        wheel.schedule(130, total + i)
    wheel.check()
    out = wheel.advance(130)
    wheel.schedule(130, total + 50)
    while len(wheel):
        out += wheel.advance(130)
    assert out == list(range(total + 51))


def test_occupancy_and_farthest_tell_what_is_held() -> None:
    """Occupancy counts buckets and entries per level; farthest gives far nodes, not all."""
    wheel: HierarchicalWheel[int] = HierarchicalWheel(size=16)
    for due in (1, 1, 2, 17, 18, 40, 300, 5000):
        wheel.schedule(due, due)
    assert wheel.occupancy() == [
        Level(0, 1, 2, 3),
        Level(1, 16, 2, 3),
        Level(2, 256, 1, 1),
        Level(3, 4096, 1, 1),
    ]
    assert [node.item for node in wheel.farthest(2)] == [5000, 300]
    assert wheel.farthest(0) == []
    assert len(wheel.farthest(100)) == len(wheel) == 8
    wheel.advance(16)
    assert wheel.occupancy()[0] == Level(0, 1, 2, 2)


@pytest.mark.parametrize("sizes", [(), (1,), (4, 0), (1 << 40,)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, ...]) -> None:
    """The message names the sizes and the range."""
    with pytest.raises(ValueError, match="give each 2 to"):
        HierarchicalWheel(sizes=sizes)


def test_a_negative_lead_is_refused() -> None:
    """The message says what to give."""
    with pytest.raises(ValueError, match="give 0 ticks or more"):
        HierarchicalWheel(demote_ahead=-1)


def test_make_wheel_names_the_kinds_it_knows() -> None:
    """An unknown kind is refused with the names of those there are."""
    assert isinstance(make_wheel("hierarchical", size=16, start_tick=3), HierarchicalWheel)
    with pytest.raises(ValueError, match="'hierarchical'"):
        make_wheel("square")
