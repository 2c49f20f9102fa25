"""The single hashed wheel with rounds. Pure: ticks in, items out."""
# ruff: noqa: S101 - check() is made of asserts

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace, nlargest
from typing import Generic, TypeVar

from celery_wheel.wheels.base import Level
from celery_wheel.wheels.bucket import PART_SIZE, Part, WheelNode, kill

__all__ = ("SCAN_LIMIT", "HashedWheel")

T = TypeVar("T")

#: Entries that one ``advance`` looks at, at most but for one part of a bucket.
SCAN_LIMIT = 5000


class _Bucket(Generic[T]):
    """Entries whose ticks are equal modulo the size.

    ``visit`` is the smallest tick in it; entries detached since may have made it too small.
    A visit may stop for its limits: ``scanned`` parts are done, ``low`` is the smallest tick
    that was left in them.
    """

    __slots__ = ("low", "parts", "scanned", "visit")

    def __init__(self, visit: int) -> None:
        self.visit = visit
        self.parts: list[Part[T]] = []
        self.restart()

    def restart(self) -> None:
        self.scanned = 0
        self.low: int | None = None

    def left(self, low: int | None) -> None:
        """Note that the next part is scanned, and the smallest tick that stays in it."""
        self.scanned += 1
        if low is not None and (self.low is None or low < self.low):
            self.low = low


class HashedWheel(Generic[T]):
    """One wheel; an entry beyond the present turn waits out its **rounds** in its bucket.

    The bucket of a tick is the tick modulo the size. With 512 buckets an entry due in 1 300
    ticks lies in bucket ``(now + 1300) % 512`` and has 2 rounds to wait. Netty keeps a
    counter in every entry and visits a bucket in every turn to count it down; here rounds
    follow from the tick (:meth:`rounds`), and a bucket remembers the smallest tick in it, so
    that turns in which nothing of it is due cost nothing and a clock that jumps by years
    costs no more than what became due.

    **Complexity.** ``schedule`` and ``detach`` O(1), but for O(log size) where the bucket's
    smallest tick changes. A tick that expires looks at *all* entries of its bucket: that is
    fine while delays are within a turn or two, and is what the hierarchical wheel is there
    to avoid when they are not. One ``advance`` looks at :data:`SCAN_LIMIT` entries or so.

    **Order.** By tick, then by scheduling. *Unit*, *thread-safety* and use are those of
    :class:`~celery_wheel.wheels.hierarchical.HierarchicalWheel`.

    *Source:* Varghese & Lauck, scheme 6; Netty's HashedWheelTimer.

    Args:
        size: buckets; rounded up to a power of two.
        start_tick: now.

    Raises:
        ValueError: the size is not within 1 to 2**30.
    """

    def __init__(self, size: int = 512, start_tick: int = 0) -> None:
        if not 1 <= size <= 1 << 30:
            raise ValueError(f"the wheel size is {size}: give 1 to {1 << 30} buckets")
        self.size = 1 << (size - 1).bit_length()
        self._mask = self.size - 1
        self._now = start_tick
        self._behind = False
        self._live = 0
        self._buckets: dict[int, _Bucket[T]] = {}
        #: Ticks at which a bucket is to be visited; stale ones stay until they come up.
        self._visits: list[int] = []

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
        slot = due_tick & self._mask
        bucket = self._buckets.get(slot)
        if bucket is None:
            bucket = self._buckets[slot] = _Bucket(due_tick)
            heappush(self._visits, due_tick)
        elif due_tick < bucket.visit:
            # A visit that has begun goes on: what it scanned holds nothing this early, and the
            # new entry joins the last part, which is not scanned yet.
            bucket.visit = due_tick
            heappush(self._visits, due_tick)
        parts = bucket.parts
        if not parts or len(parts[-1]) >= PART_SIZE:
            parts.append(Part())
            parts[-1].dead = 0
        node: WheelNode[T] = WheelNode()
        node.due_tick = due_tick
        node.item = item
        node.part = parts[-1]
        parts[-1].append(node)
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
        target = max(now_tick, self._now)
        out: list[T] = []
        scans = SCAN_LIMIT
        while (visit := self._next_visit()) is not None and visit <= target:
            if scans <= 0 or len(out) >= limit:
                break
            scans -= self._scan(self._buckets[visit & self._mask], limit, out, scans)
        self._live -= len(out)
        self._behind = visit is not None and visit <= target
        self._now = max(self._now, visit - 1) if visit is not None and self._behind else target
        return out

    def next_expiry(self) -> int | None:
        """The smallest tick of an entry, or one that was detached; ``None`` when empty."""
        while (visit := self._next_visit()) is not None:
            if any(self._buckets[visit & self._mask].parts):
                return visit
            del self._buckets[visit & self._mask]
        return None

    def rounds(self, node: WheelNode[T]) -> int:
        """Turns of the wheel that the entry still has to wait out before its last one."""
        return max(node.due_tick - self._now, 0) // self.size

    def occupancy(self) -> list[Level]:
        """The one level, or nothing when empty. O(buckets)."""
        live = [sum(len(part) - part.dead for part in b.parts) for b in self._buckets.values()]
        return [Level(0, 1, sum(map(bool, live)), self._live)] if self._live else []

    def farthest(self, limit: int) -> list[WheelNode[T]]:
        """At most ``limit`` nodes, farthest first; they stay scheduled. O(entries)."""
        return nlargest(limit, self, key=lambda node: node.due_tick)

    def __iter__(self) -> Iterator[WheelNode[T]]:
        """Every live node, in no order. Do not change the wheel meanwhile."""
        for bucket in self._buckets.values():
            for part in bucket.parts:
                yield from part.live()

    def __len__(self) -> int:
        """Live entries."""
        return self._live

    def check(self) -> None:
        """Assert the invariants. For tests: O(entries)."""
        live = 0
        for slot, bucket in self._buckets.items():
            assert bucket.visit in self._visits, "a bucket waits for its visit"
            assert bucket.scanned <= len(bucket.parts), "what was scanned is there"
            for part in bucket.parts:
                nodes = part.live()
                assert part.dead * 2 <= len(part), "half of a part lives"
                assert part.dead == len(part) - len(nodes), "the dead are counted"
                for node in nodes:
                    assert node.part is part, "a node knows its part"
                    assert node.due_tick & self._mask == slot, "an entry is in its bucket"
                    assert node.due_tick >= bucket.visit, "no entry is overlooked"
                live += len(nodes)
        assert live == self._live, "live entries are counted"

    def _next_visit(self) -> int | None:
        visits = self._visits
        while visits:
            bucket = self._buckets.get(visits[0] & self._mask)
            if bucket is not None and bucket.visit == visits[0]:
                return visits[0]
            heappop(visits)
        return None

    def _scan(self, bucket: _Bucket[T], limit: int, out: list[T], scans: int) -> int:
        """Visit the bucket that is next, as far as the limits allow; the work done, from 1."""
        done = 1
        parts = bucket.parts
        while bucket.scanned < len(parts):
            if done > scans:
                return done
            part = parts[bucket.scanned]
            done += len(part)
            low = _take_due(part, bucket.visit, limit, out)
            if low == bucket.visit:
                return done
            bucket.left(low)
        if bucket.low is None:
            heappop(self._visits)
            del self._buckets[bucket.visit & self._mask]
        else:
            bucket.parts = [part for part in parts if part]
            bucket.visit = bucket.low
            bucket.restart()
            heapreplace(self._visits, bucket.visit)
        return done


def _take_due(part: Part[T], tick: int, limit: int, out: list[T]) -> int | None:
    """Move the items due at ``tick`` to ``out``; the smallest tick that stays."""
    keep: list[WheelNode[T]] = []
    low: int | None = None
    for node in part:
        if node.part is None:
            continue
        due = node.due_tick
        if due == tick and len(out) < limit:
            out.append(node.item)
            node.item = node.part = None  # type: ignore[assignment]
        else:
            keep.append(node)
            if low is None or due < low:
                low = due
    part[:] = keep
    part.dead = 0
    return low
