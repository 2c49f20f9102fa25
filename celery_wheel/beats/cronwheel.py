"""The cron wheel: named items in slots of time.

A slot is one tick of a :class:`~celery_wheel.wheels.hierarchical.HierarchicalWheel`, counted
from the epoch; an instant goes into the slot that ends at or after it, so nothing is taken
early. Knows nothing of Celery and holds no clock: instants are UTC seconds, given by the
caller. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from celery_wheel.wheels.bucket import WheelNode
from celery_wheel.wheels.hierarchical import HierarchicalWheel

__all__ = ("TICK_S", "CronWheel")

T = TypeVar("T")

#: Seconds that a slot lasts.
TICK_S = 0.01

_TICK_US = 10_000
_SIZE = 4096

#: Names among which the next one is looked for, one by one, in some twenty microseconds.
_FEW = 1000


class CronWheel(Generic[T]):
    """Holds each name in at most one slot.

    ``put`` and ``remove`` are O(1) and touch one node; ``take`` costs by what it returns. With
    ticks of 10 ms the levels are 41 s, 1.9 days and 21.8 years wide.

    Args:
        now_at: now, UTC seconds.
    """

    def __init__(self, now_at: float) -> None:
        self._nodes: dict[str, WheelNode[tuple[str, T]]] = {}
        self.restart(now_at)

    def restart(self, now_at: float) -> None:
        """Forget everything and begin at ``now_at``, which may lie in the past of before."""
        self._nodes.clear()
        self._wheel: HierarchicalWheel[tuple[str, T]] = HierarchicalWheel(
            _SIZE, self.slot_of(now_at) - 1
        )

    @staticmethod
    def slot_for(due_at: float) -> int:
        """The slot that ends at ``due_at`` or, at most a tick, after it."""
        return -(-round(due_at * 1e6) // _TICK_US)

    @staticmethod
    def slot_of(now_at: float) -> int:
        """The last slot that has ended by ``now_at``."""
        return round(now_at * 1e6) // _TICK_US

    @property
    def now_slot(self) -> int:
        """The slot up to which everything was taken."""
        return self._wheel.now_tick

    def put(self, name: str, item: T, due_at: float) -> int:
        """Hold ``item`` for ``due_at``, instead of what the name held before; its slot."""
        node = self._nodes.get(name)
        if node is not None:
            self._wheel.detach(node)
        slot = -(-round(due_at * 1e6) // _TICK_US)
        self._nodes[name] = self._wheel.schedule(slot, (name, item))
        return slot

    def remove(self, name: str) -> bool:
        """Take one name out; ``False`` if it holds nothing."""
        node = self._nodes.pop(name, None)
        return node is not None and self._wheel.detach(node)

    def take(self, slot: int) -> list[T]:
        """Everything due in ``slot`` or before, in the order of the slots."""
        wheel, nodes = self._wheel, self._nodes
        items = []
        while True:
            for name, item in wheel.advance(slot):
                del nodes[name]
                items.append(item)
            if not wheel.behind:
                return items

    def swap(self, name: str, item: T) -> None:
        """Let a name hold another item in the slot it has."""
        self._nodes[name].item = (name, item)

    def next_at(self) -> float | None:
        """When to call :meth:`take` next, UTC seconds: never too late; ``None`` when empty.

        Exact for up to a thousand names. Beyond, it may be the instant at which a far bucket
        has to be opened: a call of ``take`` that returns nothing.
        """
        if not self._nodes:
            return None
        if len(self._nodes) <= _FEW:
            slot = min(node.due_tick for node in self._nodes.values())
        else:
            slot = self._wheel.next_expiry() or 0
        return slot * _TICK_US / 1e6

    def get(self, name: str) -> T | None:
        """What a name holds."""
        node = self._nodes.get(name)
        return None if node is None else node.item[1]

    def slots(self) -> Iterator[tuple[int, str, T]]:
        """Every ``(slot, name, item)``, in no order."""
        for name, node in self._nodes.items():
            yield node.due_tick, name, node.item[1]

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)
