"""The hierarchical timing wheel. Pure: ticks in, items out."""
# ruff: noqa: S101 - check() is made of asserts

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from operator import attrgetter
from typing import Generic, TypeVar

from celery_wheel.wheels.base import Level
from celery_wheel.wheels.bucket import PART_SIZE, Part, WheelNode, kill
from celery_wheel.wheels.sizes import PRESETS, spans_of

__all__ = ("PRESETS", "HierarchicalWheel")

T = TypeVar("T")

#: Entries that one ``advance`` demotes at most.
DEMOTE_LIMIT = 1000

# A key is ``tick << 6 | code``. Of the buckets that begin with one tick the farthest wheel comes
# first, so it is demoted before the nearer one; then the run, whose entries were scheduled
# before those of the single tick.
_CODE_BITS = 6
_CODE = 63
_TICK = 63
_RUN = 62
_NEVER = 1 << 1000

_due_tick = attrgetter("due_tick")


class HierarchicalWheel(Generic[T]):
    """Wheels within wheels: the bucket of a farther wheel spans one turn of the nearer one.

    **Unit.** Everything is in ticks, integers of any size, also negative ones; what a tick
    lasts is the owner's business.

    **Levels** with ``size=4096`` and a tick of 10 ms:

    ===== ============ =============
    level a bucket     one turn
    ===== ============ =============
    0     10 ms        41 s
    1     41 s         1.9 days
    2     1.9 days     21.8 years
    3     21.8 years   89 000 years
    ===== ============ =============

    An entry belongs to the nearest wheel whose *present turn* contains its tick. For sizes
    that are powers of two that is the highest digit in which the tick and now differ; the turn
    rule also holds for mixed sizes such as ``(60, 60, 24)``. When now reaches the start of a
    bucket of level 1 or more, the bucket is **demoted**: its entries move to nearer wheels.
    From level 1 to level 0 a bucket of up to a thousand entries is sorted and moves as a whole
    (a *run*); a bigger one is dealt out to buckets of single ticks.

    **Worked example**, ``sizes=(60, 60, 24)``, a tick of 1 s, now 0: an entry due at 3 725
    (1 h 2 min 5 s) lies beyond the first turn of the minute wheel, so it goes to hour bucket
    1. At 3 600 that bucket is demoted and the entry moves to minute bucket 2 of that hour
    (3 720..3 779), at 3 720 to second 5 of that minute, and at 3 725 it is handed out.

    **Overflow rule.** There is no table of wheels: all buckets of all levels are in one
    sparse dict, and one heap holds the keys of those that exist. A wheel exists while it has
    a bucket. Sizes repeat the last one given, until a bucket would span more than 2**61
    ticks; that wheel takes everything beyond.

    **Complexity.** ``schedule`` O(1) plus O(log buckets) for the first entry of a bucket;
    ``detach`` O(1), amortised; an entry moves at most once per level. One ``advance`` hands
    out ``limit`` items, demotes :data:`DEMOTE_LIMIT` entries, and drops as many empty buckets.
    A bucket with over a thousand entries starts to be demoted ``demote_ahead`` ticks before it is
    due, so that the rest is short when the time comes. About 100 bytes per entry with its tick.

    **Order.** Entries of one tick come out as they were scheduled: a bucket is a FIFO, the
    sort of a run is stable, and now never reaches the start of a bucket that still has to be
    demoted, so whoever comes later can only join behind.

    *Thread-safety:* none; the owner locks. The owner's code may schedule and detach between
    any two calls, also while it works through what ``advance`` returned.

    *Source:* Varghese & Lauck, "Hashed and Hierarchical Timing Wheels" (1987), scheme 7;
    the shape (overflow wheels on demand, a queue of non-empty buckets) is that of Kafka's
    TimingWheel. Kafka rounds deadlines down to a tick, which fires early; round up here.

    Args:
        size: buckets per wheel, from 2.
        start_tick: now.
        sizes: buckets of each wheel, nearest first, instead of ``size``; see
            :data:`PRESETS`.
        demote_ahead: ticks before its start that a big bucket may be demoted; for a tick of
            10 ms the default is 2 s.
    """

    def __init__(
        self,
        size: int = 4096,
        start_tick: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        demote_ahead: int = 200,
    ) -> None:
        self.sizes = tuple(sizes) if sizes is not None else (size,)
        if demote_ahead < 0:
            raise ValueError(f"demote_ahead is {demote_ahead}: give 0 ticks or more")
        self._spans = spans_of(self.sizes)
        self._demote_ahead = demote_ahead
        self._now = start_tick
        self._behind = False
        self._live = 0
        self._heap: list[int] = []
        #: The part of each bucket that new nodes join.
        self._buckets: dict[int, Part[T]] = {}
        #: The full parts before it, oldest first, of big buckets only.
        self._full: dict[int, deque[Part[T]]] = {}
        #: Heap of the keys of big buckets that can be demoted; may hold stale ones.
        self._early: list[int] = []
        #: The bucket of level 1 that was demoted last, sorted, and the key of its first entry.
        self._run: Part[T] = Part()
        self._run.dead = 0
        self._run_key = _NEVER
        #: Before this tick single ticks may hold entries that are older than those of a bucket
        #: that begins there, so that one must not become a run.
        self._dealt_until = start_tick
        self._turn_ends = self._ends_of_turns(start_tick)

    @property
    def now_tick(self) -> int:
        """Everything due at or before this tick was handed out, but for :attr:`behind`."""
        return self._now

    @property
    def behind(self) -> bool:
        """``True`` while the last :meth:`advance` left work because of a limit."""
        return self._behind

    def schedule(self, due_tick: int, item: T) -> WheelNode[T]:
        """Hold ``item`` until ``due_tick``. A tick that has passed expires at the next advance."""
        level = bisect_right(self._turn_ends, due_tick)
        if level:
            key = (due_tick - due_tick % self._spans[level]) << _CODE_BITS | (_RUN - level)
        else:
            key = due_tick << _CODE_BITS | _TICK
        part = self._buckets.get(key)
        if part is None:
            part = self._buckets[key] = Part()
            part.dead = 0
            heappush(self._heap, key)
        elif len(part) >= PART_SIZE:
            part = self._new_part(key, part)
        node: WheelNode[T] = WheelNode()
        node.due_tick = due_tick
        node.item = item
        node.part = part
        part.append(node)
        self._live += 1
        return node

    def detach(self, node: WheelNode[T]) -> bool:
        """Take an item out and free it at once. ``False`` if it is out already."""
        if kill(node):
            self._live -= 1
            return True
        return False

    def advance(self, now_tick: int, limit: int = 1000) -> list[T]:
        """Items due at or before ``now_tick``, by due tick, then in order of scheduling.

        At most ``limit`` items, with bounded work. While :attr:`behind` is ``True``, call
        again with the same tick for the rest.
        """
        target = max(self._now, now_tick)
        bound = (target + 1) << _CODE_BITS
        heap = self._heap
        out: list[T] = []
        moves = DEMOTE_LIMIT
        while moves > 0 and len(out) < limit:
            key = heap[0] if heap else _NEVER
            if self._run_key < key:
                if self._run_key >= bound:
                    break
                self._take_run(min(target, key >> _CODE_BITS), limit, out)
            elif key >= bound:
                break
            elif not (part := self._front(key)):
                del self._buckets[heappop(heap)]
                moves -= 1
            elif key & _CODE == _TICK:
                for node in part.take_front(limit - len(out)):
                    out.append(node.item)
                    node.item = node.part = None  # type: ignore[assignment]
            else:
                moves -= self._demote(key, moves)
        self._live -= len(out)
        first = min(heap[0] if heap else _NEVER, self._run_key)
        if first < bound:
            # An overflow bucket that has to be demoted yet must stay ahead of now.
            self._move_now((first >> _CODE_BITS) - (first & _CODE < _RUN))
        elif target > self._now:
            self._move_now(target)
        self._behind = (bool(self._early) and self._demote_early(target, moves)) or first < bound
        return out

    def next_expiry(self) -> int | None:
        """The tick at which :meth:`advance` next has something to do, or ``None`` when empty.

        That is the start of the first bucket that is not empty, or the tick at which a big
        one can begin to be demoted; at or before :attr:`now_tick` means at once.
        """
        heap = self._heap
        while heap and not (self._front(heap[0]) if self._full else self._buckets[heap[0]]):
            del self._buckets[heappop(heap)]
        run = self._run
        if self._run_key != _NEVER and (not run or run[0].part is None):
            self._take_run((self._run_key >> _CODE_BITS) - 1, 1, [])
        first = min(heap[0] if heap else _NEVER, self._run_key)
        if first == _NEVER:
            return None
        if self._early and (big := self._first_big()) is not None:
            first = min(first, big - (self._demote_ahead << _CODE_BITS))
        return first >> _CODE_BITS

    def occupancy(self) -> list[Level]:
        """Levels that hold something, nearest first. O(buckets)."""
        ticks = {node.due_tick for node in self._run.live()}
        counts = {0: [len(ticks), len(self._run) - self._run.dead]} if ticks else {}
        for key in self._buckets:
            entries = sum(len(part) - part.dead for part in self._parts(key))
            if entries:
                row = counts.setdefault(_level(key), [0, 0])
                row[0] += 1
                row[1] += entries
        return [
            Level(level, self._spans[level], buckets, entries)
            for level, (buckets, entries) in sorted(counts.items())
        ]

    def farthest(self, limit: int) -> list[WheelNode[T]]:
        """At most ``limit`` nodes from the farthest buckets; they stay scheduled."""
        nodes: list[WheelNode[T]] = []
        for key in sorted(self._buckets, reverse=True):
            for part in self._parts(key):
                nodes += part.live()[: max(limit - len(nodes), 0)]
            if len(nodes) >= limit:
                return nodes
        return nodes + self._run.live()[::-1][: limit - len(nodes)]

    def __iter__(self) -> Iterator[WheelNode[T]]:
        """Every live node, in no order. Do not change the wheel meanwhile."""
        yield from self._run.live()
        for key in self._buckets:
            for part in self._parts(key):
                yield from part.live()

    def __len__(self) -> int:
        """Live entries."""
        return self._live

    def check(self) -> None:
        """Assert the invariants. For tests: O(entries)."""
        assert sorted(self._heap) == sorted(self._buckets), "a bucket and its key go together"
        assert set(self._full) <= set(self._buckets), "a big bucket is a bucket"
        big = {key for key in self._full if key & _CODE < _RUN}
        assert big <= set(self._early), "a big bucket waits for its demotion"
        for key in self._buckets:
            start, level = key >> _CODE_BITS, _level(key)
            assert level == 0 or start > self._now, "a bucket that has begun was demoted"
            for part in self._parts(key):
                _check_part(part, start, start + self._spans[level])
        ticks = [node.due_tick for node in self._run]
        assert ticks == sorted(ticks), "a run is sorted"
        assert bool(ticks) <= (self._run_key != _NEVER), "a run is not forgotten"
        _check_part(self._run, self._run_key >> _CODE_BITS, self._turn_ends[0])
        assert sum(1 for _ in self) == self._live, "live entries are counted"

    def _parts(self, key: int) -> Iterator[Part[T]]:
        yield from self._full.get(key, ())
        yield self._buckets[key]

    def _front(self, key: int) -> Part[T]:
        """The oldest part of a bucket that holds something; empty if the bucket is."""
        if self._full and (full := self._full.get(key)):
            while full:
                if full[0]:
                    return full[0]
                full.popleft()
            del self._full[key]
        return self._buckets[key]

    def _new_part(self, key: int, part: Part[T]) -> Part[T]:
        """Put a full part aside and begin another; from here on the bucket is a big one."""
        full = self._full.get(key)
        if full is None:
            full = self._full[key] = deque()
            if key & _CODE < _RUN:
                heappush(self._early, key)
        full.append(part)
        new: Part[T] = Part()
        new.dead = 0
        self._buckets[key] = new
        return new

    def _take_run(self, stop: int, limit: int, out: list[T]) -> None:
        """Hand out what of the run is due at or before ``stop``."""
        run = self._run
        room = limit - len(out)
        count = 0
        for node in run:
            if node.part is None:
                run.dead -= 1
            elif node.due_tick > stop or room <= 0:
                break
            else:
                room -= 1
                out.append(node.item)
                node.item = node.part = None  # type: ignore[assignment]
            count += 1
        del run[:count]
        if run.dead * 2 > len(run):
            run.compact()
        self._run_key = run[0].due_tick << _CODE_BITS | _RUN if run else _NEVER

    def _demote(self, key: int, moves: int) -> int:
        """Move up to ``moves`` entries to nearer wheels, oldest first; the work done, from 1."""
        if _level(key) > 1 or key in self._full or key >> _CODE_BITS < self._dealt_until:
            return self._deal_out(key, moves)
        # The last run has ended: its entries were due before this bucket began.
        run = self._run = self._buckets.pop(heappop(self._heap))
        run.sort(key=_due_tick)
        self._run_key = run[0].due_tick << _CODE_BITS | _RUN
        return len(run)

    def _deal_out(self, key: int, moves: int) -> int:
        buckets, heap, spans = self._buckets, self._heap, self._spans
        start, level = key >> _CODE_BITS, _level(key)
        ends = self._ends_of_turns(start, level)
        if level == 1:
            self._dealt_until = max(self._dealt_until, start + spans[1])
        done = 0
        while done < moves and (part := self._front(key)):
            count = min(len(part), moves - done)
            done += count
            for node in part.take_front(count):
                due = node.due_tick
                nearer = bisect_right(ends, due) if ends else 0
                if nearer:
                    to_key = (due - due % spans[nearer]) << _CODE_BITS | (_RUN - nearer)
                else:
                    to_key = due << _CODE_BITS | _TICK
                to = buckets.get(to_key)
                if to is None:
                    to = buckets[to_key] = Part()
                    to.dead = 0
                    heappush(heap, to_key)
                elif len(to) >= PART_SIZE:
                    to = self._new_part(to_key, to)
                to.append(node)
                node.part = to
        return max(done, 1)

    def _first_big(self) -> int | None:
        """Key of the nearest big bucket that can be demoted."""
        early = self._early
        while early and early[0] not in self._full:
            heappop(early)
        return early[0] if early else None

    def _demote_early(self, target: int, moves: int) -> bool:
        """Begin with big buckets that start soon; ``True`` if some of that is left."""
        soon = target + self._demote_ahead
        while (key := self._first_big()) is not None and key >> _CODE_BITS <= soon:
            if moves <= 0:
                return True
            moves -= self._deal_out(key, moves)
        return False

    def _move_now(self, now: int) -> None:
        if now > self._now:
            self._now = now
            if now >= self._turn_ends[0]:
                self._turn_ends = self._ends_of_turns(now)

    def _ends_of_turns(self, now: int, level: int | None = None) -> list[int]:
        """The tick at which the present turn of each wheel, or each below ``level``, ends."""
        return [(now // span + 1) * span for span in self._spans[1:level]]


def _level(key: int) -> int:
    return max(_RUN - (key & _CODE), 0)


def _check_part(part: Part[T], start: int, end: int) -> None:
    nodes = part.live()
    assert part.dead * 2 <= len(part), "half of a part lives"
    assert part.dead == len(part) - len(nodes), "the dead are counted"
    assert all(node.part is part for node in nodes), "a node knows its part"
    assert all(start <= node.due_tick < end for node in nodes), "an entry is within its bucket"
