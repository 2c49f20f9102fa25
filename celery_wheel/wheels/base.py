"""What every timing wheel of this package offers: integer ticks in, items out.

A wheel is pure: no clock, no lock, no I/O, no callback. Its owner holds those. Not
thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

__all__ = ("Level", "Node", "Wheel")

T = TypeVar("T")


class Node(Protocol[T]):
    """The handle of one scheduled item."""

    due_tick: int
    item: T

    @property
    def detached(self) -> bool:
        """``True`` once the item expired or was detached."""


@dataclass(frozen=True, slots=True)
class Level:
    """Occupancy of one wheel.

    Attributes:
        level: 0 is the wheel of single ticks.
        bucket_ticks: how many ticks one bucket spans.
        buckets: how many buckets are not empty.
        entries: how many live entries they hold.
    """

    level: int
    bucket_ticks: int
    buckets: int
    entries: int


class Wheel(Protocol[T]):
    """Holds items until their tick. ``now_tick`` only goes forward."""

    @property
    def now_tick(self) -> int:
        """The tick up to which everything was handed out, but for :attr:`behind`."""

    @property
    def behind(self) -> bool:
        """``True`` while the last :meth:`advance` left work because of its limit."""

    def schedule(self, due_tick: int, item: T) -> Node[T]:
        """Hold ``item`` until ``due_tick``. A tick that has passed expires at the next
        :meth:`advance`, whatever tick that one is given. O(1)."""

    def detach(self, node: Node[T]) -> bool:
        """Take an item out. O(1); frees the item at once. ``False`` if it is out already."""

    def advance(self, now_tick: int, limit: int = 1000) -> list[T]:
        """Items due at or before ``now_tick``, by due tick, then in order of scheduling.

        At most ``limit`` items, and bounded work in all (demotion included). While
        :attr:`behind` is ``True``, call again with the same tick for the rest. A tick before
        :attr:`now_tick` is taken for :attr:`now_tick`.
        """

    def next_expiry(self) -> int | None:
        """The tick at which :meth:`advance` next has something to do, or ``None`` when empty.

        It may be earlier than the earliest due tick (a bucket to be demoted), never later.
        """

    def occupancy(self) -> list[Level]:
        """Levels that hold something, nearest first."""

    def farthest(self, limit: int) -> list[Node[T]]:
        """About ``limit`` nodes from the farthest buckets; they stay scheduled."""

    def __iter__(self) -> Iterator[Node[T]]:
        """Every live node, in no order. Do not change the wheel meanwhile."""

    def __len__(self) -> int:
        """Live entries."""
