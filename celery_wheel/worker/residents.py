"""The tasks in RAM: the wheel, the due line behind it, and the indexes over both.

Pure but for the clock readings it is given. Owned by the engine and used under its lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from celery_wheel.wheels.make import make_wheel

if TYPE_CHECKING:
    from celery_wheel.task import DelayedTask
    from celery_wheel.wheels.base import Level, Node
    from celery_wheel.worker.keeper import Keeper

__all__ = (
    "CONFIRMING",
    "DUE",
    "GONE",
    "IN_FLIGHT",
    "LIMITED",
    "PARKED",
    "READY",
    "REPARKING",
    "WAITING",
    "Item",
    "Residents",
)

#: Where an item is. Each item is in exactly one place.
WAITING = "waiting"  # in the wheel
DUE = "due"  # in the due line
LIMITED = "limited"  # waits for a token of its task's rate limit
REPARKING = "reparking"  # its message is being published again
PARKED = "parked"  # can't be run by this worker now
CONFIRMING = "confirming"  # the store is asked
READY = "ready"  # confirmed, waits for a slot of the pool
IN_FLIGHT = "in_flight"  # the pool has it
GONE = "gone"

#: Items handed from the wheel to the due line in one turn, so that a turn stays short.
ADVANCE_LIMIT = 500


class Item:
    """One resident task. ``acked`` tells that the broker is known to have taken the ack."""

    __slots__ = ("acked", "keeper", "node", "place", "request", "task")

    def __init__(self, task: DelayedTask, keeper: Keeper, *, acked: bool = False) -> None:
        self.task = task
        self.keeper = keeper
        self.acked = acked
        self.place = GONE
        self.node: Node[Item] | None = None
        self.request: Any = None

    def wake_ms(self) -> int:
        """When something has to be done: at its ETA, or when it expires if that is sooner."""
        expires = self.task.expires_ms
        due = self.task.due_ms
        return due if expires is None or expires >= due else expires + 1

    def expired(self, now_ms: int) -> bool:
        """Whether ``expires`` has passed, as Celery compares it."""
        expires = self.task.expires_ms
        return expires is not None and expires < now_ms


class Residents:
    """Every item in RAM.

    Args:
        kind, size: which wheel, and how many buckets each of its levels has.
        tick_ms: the wheel's tick.
        low_first: ``True`` where the broker takes a low number for a high priority.
    """

    def __init__(self, kind: str, size: int, tick_ms: int, now_ms: int) -> None:
        self._kind, self._size, self.tick_ms = kind, size, tick_ms
        self.low_first = False
        self._wheel = make_wheel(kind, size, now_ms // tick_ms)
        self._due: list[tuple[int, int, int, int, Item]] = []
        self._due_count = 0
        self._count = 0
        self.by_key: dict[bytes, Item] = {}
        self._by_id: dict[str, Item | list[Item]] = {}

    def __len__(self) -> int:
        return len(self.by_key)

    def __iter__(self) -> Iterator[Item]:
        return iter(self.by_key.values())

    # -- in and out ----------------------------------------------------------------------------

    def add(self, item: Item, now_ms: int) -> None:
        """Take an item in: into the wheel, or the due line if its time has come."""
        task = item.task
        self.by_key[task.key] = item
        there = self._by_id.get(task.id)
        if there is None:
            self._by_id[task.id] = item
        elif isinstance(there, list):
            there.append(item)
        else:
            self._by_id[task.id] = [there, item]
        self.place(item, now_ms)

    def place(self, item: Item, now_ms: int) -> None:
        """Put an item where its times say."""
        if item.wake_ms() <= now_ms:
            self.to_due(item)
            return
        self.leave(item)
        item.place = WAITING
        item.node = self._wheel.schedule(-(-item.wake_ms() // self.tick_ms), item)

    def to_due(self, item: Item) -> None:
        """Put an item into the due line: by priority, then due, then arrival."""
        self.leave(item)
        item.place = DUE
        task = item.task
        rank = task.priority if self.low_first else -task.priority
        self._count += 1
        self._due_count += 1
        heapq.heappush(self._due, (rank, task.due_ms, task.arrival, self._count, item))

    def move(self, item: Item, place: str) -> None:
        """Take an item out of the wheel or the due line and note where it is now."""
        self.leave(item)
        item.place = place

    def leave(self, item: Item) -> None:
        """Detach an item from the wheel or the due line; it stays in the indexes."""
        if item.node is not None:
            self._wheel.detach(item.node)
            item.node = None
        if item.place == DUE:
            self._due_count -= 1
            item.place = GONE
            if len(self._due) > 64 and len(self._due) > 2 * self._due_count:
                self._due = [entry for entry in self._due if entry[4].place == DUE]
                heapq.heapify(self._due)

    def remove(self, item: Item) -> None:
        """Forget an item."""
        self.move(item, GONE)
        if self.by_key.get(item.task.key) is not item:
            return
        del self.by_key[item.task.key]
        there = self._by_id.get(item.task.id)
        if isinstance(there, list):
            there.remove(item)
            if len(there) == 1:
                self._by_id[item.task.id] = there[0]
        elif there is item:
            del self._by_id[item.task.id]

    # -- time ----------------------------------------------------------------------------------

    def advance(self, now_ms: int) -> None:
        """Move what has come due (or has expired) from the wheel to the due line."""
        for item in self._wheel.advance(now_ms // self.tick_ms, ADVANCE_LIMIT):
            item.node = None
            self.to_due(item)

    @property
    def behind(self) -> bool:
        """Whether :meth:`advance` stopped at its limit."""
        return self._wheel.behind

    def next_wake_ms(self) -> int | None:
        """When :meth:`advance` next has something to do, UTC ms."""
        tick = self._wheel.next_expiry()
        return None if tick is None else tick * self.tick_ms

    def rebuild(self, now_ms: int) -> None:
        """Build the wheel anew: the wall clock went back, and a wheel only goes forward.

        What was due and is not any more goes back into the wheel: never early.
        """
        waiting = [item for item in self if item.place in (WAITING, DUE)]
        for item in waiting:
            item.node, item.place = None, GONE
        self._due, self._due_count = [], 0
        self._wheel = make_wheel(self._kind, self._size, now_ms // self.tick_ms)
        for item in waiting:
            self.place(item, now_ms)

    def ahead_of(self, now_ms: int) -> bool:
        """Whether the wheel has passed ``now_ms`` by more than a tick: the clock was set back."""
        return self._wheel.now_tick > now_ms // self.tick_ms + 1

    # -- looking -------------------------------------------------------------------------------

    @property
    def due_count(self) -> int:
        """Items in the due line."""
        return self._due_count

    def first_due(self) -> Item | None:
        """The item whose turn is next, left in the line."""
        while self._due:
            item = self._due[0][4]
            if item.place == DUE:
                return item
            heapq.heappop(self._due)
        return None

    def last_due(self, limit: int) -> list[Item]:
        """Items of store custody from the end of the due line, left in it."""
        line = (e for e in self._due if e[4].place == DUE and not e[4].keeper.holds_messages)
        return [entry[4] for entry in heapq.nlargest(limit, line)]

    def due_after(self, wall_ms: int) -> list[Item]:
        """Items of store custody in the wheel that are due later."""
        return [
            item
            for item in self
            if item.place == WAITING
            and item.task.due_ms > wall_ms
            and not item.keeper.holds_messages
        ]

    def waiting(self) -> list[Item]:
        """Items that the pool does not have."""
        return [item for item in self if item.place != IN_FLIGHT]

    def of_ids(self, ids: Iterable[str]) -> Iterator[Item]:
        """Residents with these ids."""
        for task_id in ids:
            there = self._by_id.get(task_id)
            if isinstance(there, list):
                yield from tuple(there)
            elif there is not None:
                yield there

    def farthest(self, limit: int) -> list[Item]:
        """Some items of the wheel that are due last."""
        return [node.item for node in self._wheel.farthest(limit)]

    def occupancy(self) -> list[Level]:
        """The wheel's levels that hold something."""
        return self._wheel.occupancy()
