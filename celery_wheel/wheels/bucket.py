"""What buckets are made of: nodes, and short lists of them with tombstones.

Shared by the wheels. A node knows the part it is in, so it can be taken out in O(1); a part
forgets its dead when they are more than half of it. Parts are short so that no single
operation on a bucket is long, however many nodes the bucket holds.
"""

from __future__ import annotations

from typing import Generic, TypeVar

__all__ = ("PART_SIZE", "Part", "WheelNode", "kill")

T = TypeVar("T")

#: Nodes in one part of a bucket. Bounds the longest compaction to some twenty microseconds.
PART_SIZE = 1000


class WheelNode(Generic[T]):
    """The handle of one scheduled item; see :class:`~celery_wheel.wheels.base.Node`."""

    __slots__ = ("due_tick", "item", "part")

    due_tick: int
    item: T
    #: ``None`` once the node expired or was detached.
    part: Part[T] | None

    @property
    def detached(self) -> bool:
        """``True`` once the item expired or was detached."""
        return self.part is None

    def __repr__(self) -> str:
        state = "detached" if self.part is None else repr(self.item)
        return f"<WheelNode due_tick={self.due_tick} {state}>"


class Part(list[WheelNode[T]]):
    """Nodes in order of scheduling, some of them dead. Invariant: ``2 * dead <= len``."""

    __slots__ = ("dead",)

    #: Whoever makes a part sets this to 0: a constructor would double the cost of making one.
    dead: int

    def compact(self) -> None:
        """Forget the dead nodes."""
        self[:] = [node for node in self if node.part is not None]
        self.dead = 0

    def live(self) -> list[WheelNode[T]]:
        """The nodes that are neither detached nor expired."""
        if self.dead:
            return [node for node in self if node.part is not None]
        return list(self)

    def take_front(self, count: int) -> list[WheelNode[T]]:
        """Take the first ``count`` nodes out, and return those that live."""
        front = self[:count]
        del self[:count]
        if self.dead:
            taken = [node for node in front if node.part is not None]
            self.dead -= len(front) - len(taken)
            if self.dead * 2 > len(self):
                self.compact()
            return taken
        return front


def kill(node: WheelNode[T]) -> bool:
    """Take a node out of its part and free its item; ``False`` if it is out already."""
    part = node.part
    if part is None:
        return False
    node.part = None
    part.dead += 1
    if part.dead * 2 > len(part):
        part.compact()
    # Last, because freeing an item may run code that comes back here.
    node.item = None  # type: ignore[assignment]
    return True
