"""A store in Redis, shared by any number of workers; as durable as the server is configured.

Each call runs scripts, and a script is atomic. Batches go in steps of at most :data:`STEP`
rows, so that a script keeps the server for some milliseconds only: where a docstring says *in
steps*, a crash (or an error) in between leaves the first steps done. Leases go by the server's
clock. How rows lie there is told in ``lua/lib.lua``.

A server whose memory is used up refuses :meth:`RedisStore.put`; all that takes tasks out goes
on. One whose ``maxmemory-policy`` is not ``noeviction`` would delete tasks: it is refused.

Thread-safety: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

from celery_wheel.stores._cursor import decode_cursor, encode_cursor
from celery_wheel.stores._filter import fits
from celery_wheel.stores.base import (
    Cancelled,
    Counts,
    Filter,
    Owner,
    Page,
    PutResult,
    Ref,
    Store,
)
from celery_wheel.stores.redis_rows import (
    decode_owner,
    encode,
    encode_owner,
    member_of,
    row_of,
    text,
)
from celery_wheel.stores.redis_server import Server
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask

__all__ = ("RedisStore",)

T = TypeVar("T")

#: Rows that one script touches.
STEP = 250
#: Bytes of rows that one script is given, unless a single row has more.
STEP_BYTES = 4_000_000

_KEY_BYTES = 16


class RedisStore(Store):
    """Rows in one namespace of a Redis database.

    Args:
        url: as :class:`~celery_wheel.stores.redis_server.Server` takes it.
        namespace: the prefix of all keys.
    """

    def __init__(self, url: str, namespace: str) -> None:
        self.server = Server(url, namespace)
        self._started: set[str] = set()

    def open(self) -> None:
        """See :meth:`Store.open`."""
        self.server.open()

    def close(self) -> None:
        """See :meth:`Store.close`."""
        self.server.close()

    def sibling(self) -> RedisStore:
        """See :meth:`Store.sibling`."""
        return RedisStore(self.server.url, self.server.namespace)

    # -- the life of a row ---------------------------------------------------------------------

    def put(self, tasks: Sequence[DelayedTask], now_ms: int) -> PutResult:
        """See :meth:`Store.put`. In steps: the broker has every message until the answer, and
        a second put of what a first step kept answers known."""
        offered: dict[bytes, DelayedTask] = {}
        for task in tasks:
            offered.setdefault(task.key, task)
        found: dict[str, set[bytes]] = {"n": set(), "k": set(), "c": set()}
        for step in _sized_steps((key, encode(task)) for key, task in offered.items()):
            answers = self.server.run("put", now_ms, step).decode()
            for (key, _), answer in zip(step, answers, strict=True):
                found[answer].add(key)
        self.server.replicated()
        return PutResult(*(frozenset(found[answer]) for answer in "nkc"))

    def claim(
        self,
        owner: str,
        until_ms: int,
        limit: int,
        *,
        queues: Sequence[str] | None = None,
        unknown: Sequence[str] = (),
    ) -> list[DelayedTask]:
        """See :meth:`Store.claim`. In steps, each of the rows that are first then."""
        wanted = None if queues is None else [text(queue) for queue in dict.fromkeys(queues)]
        skipped = [text(name) for name in unknown]
        rows: list[DelayedTask] = []
        after: tuple[int | None, bytes] = (None, b"")
        while len(rows) < limit:
            room = limit - len(rows)
            # Of what is stepped over there may be any number: look at full steps of it.
            look = STEP if skipped else min(STEP, room)
            due, member, *found = self.server.run(
                "claim", text(owner), until_ms, room, look, wanted, skipped, *after
            )
            rows += _rows(found)
            if not due:
                break
            after = (int(due), member)
        return rows

    def confirm(self, owner: str, refs: Sequence[Ref], now_ms: int) -> set[bytes]:
        """See :meth:`Store.confirm`. In steps, each of which may be repeated."""
        confirmed: set[bytes] = set()
        for step in _steps(refs):
            confirmed.update(self.server.run("confirm", text(owner), now_ms, step))
        return confirmed

    def settle(self, keys: Sequence[bytes], seen_until_ms: int | None = None) -> int:
        """See :meth:`Store.settle`. In steps: a row is deleted with its tombstone left."""
        return sum(self.server.run("settle", step, seen_until_ms) for step in _steps(keys))

    def release(
        self, owner: str, keys: Sequence[bytes] | None = None, *, redelivered: bool = False
    ) -> int:
        """See :meth:`Store.release`. In steps: what was not freed is still the owner's."""
        if keys is None:
            return self._release_all(text(owner))
        return sum(
            self.server.run("release", text(owner), step, redelivered) for step in _steps(keys)
        )

    def _release_all(self, owner: bytes, *, orphans: bool = False) -> int:
        total, count = 0, STEP
        while count == STEP:
            count = self.server.run("release_all", owner, STEP, orphans)
            total += count
        return total

    # -- leases --------------------------------------------------------------------------------

    def heartbeat(self, owner: Owner, ttl_s: float) -> bool:
        """See :meth:`Store.heartbeat`."""
        ttl_ms = round(ttl_s * 1000)
        held = self.server.run("heartbeat", text(owner.name), encode_owner(owner), ttl_ms)
        first = owner.name not in self._started
        self._started.add(owner.name)
        return bool(held) or first

    def end_lease(self, owner: str) -> None:
        """See :meth:`Store.end_lease`."""
        self.server.run("end_lease", text(owner))
        self._started.discard(owner)

    def owners(self) -> list[Owner]:
        """See :meth:`Store.owners`."""
        found = self.server.command("HGETALL", self.server.key("owners"))
        return sorted((decode_owner(*each) for each in found.items()), key=lambda o: o.name)

    def reap(self, dead: Iterable[str] = ()) -> int:
        """See :meth:`Store.reap`. In steps: leases end first, and each step frees rows only of
        an owner that has none still; another reap does the rest."""
        more, *orphans = self.server.run("reap", STEP, [text(name) for name in dead])
        freed = sum(self._release_all(owner, orphans=True) for owner in orphans)
        while more:
            more = self.server.run("reap", STEP, [])[0]
        return freed

    # -- what people ask for -------------------------------------------------------------------

    def cancel(
        self,
        ids: Sequence[str],
        stamps: Sequence[str],
        remember_until_ms: int,
    ) -> Cancelled:
        """See :meth:`Store.cancel`. In steps: an id's tombstone comes with the deletion of its
        rows; stamps' come first, and what is not deleted yet is refused by the fence."""
        found: dict[bytes, bytes] = {}

        def step(some_ids: list[bytes], some_stamps: list[bytes], keys: list[bytes]) -> None:
            answer = self.server.run("cancel", some_ids, some_stamps, keys, remember_until_ms)
            found.update(_pairs(answer))

        for names in _steps(map(text, stamps)):
            step([], names, [])
        for names in _steps(map(text, ids)):
            step(names, [], [])
        for keys in _steps(self._carriers(stamps)):
            step([], [], [key for key in keys if key not in found])
        self.server.replicated()
        rows = [row_of(*pair) for pair in found.items()]
        outcomes = dict.fromkeys(ids, "unknown")
        outcomes.update((row.id, "dispatched") for row in rows if row.state == DISPATCHED)
        gone = [row for row in rows if row.state == PENDING]
        outcomes.update((row.id, "cancelled") for row in gone)
        return Cancelled(gone, outcomes)

    def forget(self, keys: Sequence[bytes]) -> list[DelayedTask]:
        """See :meth:`Store.forget`. In steps; rows of the first are gone after an error."""
        gone: list[DelayedTask] = []
        for step in _steps(keys):
            found = _rows(self.server.run("cancel", [], [], step, 0))
            gone += [row for row in found if row.state == PENDING]
        return gone

    def reschedule(self, task_id: str, due_ms: int) -> int:
        """See :meth:`Store.reschedule`."""
        return int(self.server.run("reschedule", text(task_id), due_ms))

    def find(self, which: Filter, limit: int, cursor: str | None = None) -> Page:
        """See :meth:`Store.find`. In steps, each of which sees the rows as they are then."""
        if limit <= 0:
            return Page()
        after: tuple[int, bytes] | None = None
        if cursor is not None:
            due_ms, arrival, tie = decode_cursor(cursor)
            after = (due_ms, member_of(arrival, bytes.fromhex(tie)))
        if which.ids is None and which.stamps is None:
            rows = self._walk(which, after, limit + 1)
        else:
            named = (row for row in self._named(which) if fits(row, which))
            later = (row for row in named if after is None or _position(row) > after)
            rows = sorted(later, key=_position)
        if len(rows) <= limit:
            return Page(rows, None)
        last = rows[limit - 1]
        return Page(rows[:limit], encode_cursor(last.due_ms, last.arrival, last.key.hex()))

    def _walk(
        self, which: Filter, after: tuple[int, bytes] | None, limit: int
    ) -> list[DelayedTask]:
        """The first rows of a filter without ids and stamps, in order."""
        if which.due_from_ms is not None:
            after = max(after or (which.due_from_ms, b""), (which.due_from_ms, b""))
        owner, queue = (None if name is None else text(name) for name in (which.owner, which.queue))
        sparse = which.name is not None or which.queue is not None
        rows: list[DelayedTask] = []
        while True:
            look = STEP if sparse else min(STEP, limit - len(rows))
            bound = after or (None, b"")
            page = _rows(self.server.run("page", owner, queue, *bound, which.due_before_ms, look))
            rows += [row for row in page if fits(row, which)]
            if len(page) < look or len(rows) >= limit:
                return rows[:limit]
            after = _position(page[-1])

    def _named(self, which: Filter) -> Iterator[DelayedTask]:
        """Rows with one of the ids, or else one of the stamps."""
        if which.ids is None:
            yield from self._rows_of(self._carriers(which.stamps or ()))
            return
        for step in _steps(map(text, which.ids)):
            joined = b"".join(filter(None, self.server.command("HMGET", self._key("ids"), *step)))
            starts = range(0, len(joined), _KEY_BYTES)
            yield from self._rows_of(joined[start : start + _KEY_BYTES] for start in starts)

    def _carriers(self, stamps: Iterable[str]) -> list[bytes]:
        """Keys of the rows that carry one of the stamps."""
        sets = [self._key("stamp:").encode() + text(stamp) for stamp in stamps]
        return sorted(self.server.command("SUNION", *sets)) if sets else []

    def _rows_of(self, keys: Iterable[bytes]) -> Iterator[DelayedTask]:
        """Rows of keys, without those that are gone."""
        for step in _steps(keys):
            found = self.server.command("HMGET", self._key("rows"), *step)
            for key, packed in zip(step, found, strict=True):
                if packed is not None:
                    yield row_of(key, packed)

    def _key(self, name: str) -> str:
        return self.server.key(name)

    def count(self) -> Counts:
        """See :meth:`Store.count`."""
        pending, dispatched, owned, *_ = self.server.run("counts", [])
        return Counts(pending, dispatched, owned)

    def histogram(self, edges_ms: Sequence[int]) -> list[int]:
        """See :meth:`Store.histogram`."""
        pending, _, _, _, *below = self.server.run("counts", list(edges_ms))
        return [high - low for low, high in pairwise([0, *below, pending])]

    def remembered(self, limit: int) -> list[str]:
        """See :meth:`Store.remembered`."""
        names = self.server.command("ZREVRANGE", self.server.key("cancelled"), 0, 2 * limit)
        return [name[1:].decode("utf-8", "surrogatepass") for name in names if name[:1] == b"i"][
            :limit
        ]

    def oldest_due(self) -> int | None:
        """See :meth:`Store.oldest_due`."""
        oldest = self.server.run("counts", [])[3]
        return int(oldest) if oldest else None

    def next_expiring(self, before_ms: int, limit: int) -> list[DelayedTask]:
        """See :meth:`Store.next_expiring`."""
        if limit <= 0:
            return []
        keys = self.server.command(
            "ZRANGEBYSCORE", self._key("expires"), "-inf", f"({before_ms}", "LIMIT", 0, limit
        )
        # What was handed over since then does not expire.
        return [row for row in self._rows_of(keys) if row.state == PENDING]


def _steps(values: Iterable[T]) -> Iterator[list[T]]:
    distinct = list(dict.fromkeys(values))
    for start in range(0, len(distinct), STEP):
        yield distinct[start : start + STEP]


def _sized_steps(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    step: list[tuple[bytes, bytes]] = []
    size = 0
    for pair in pairs:
        if step and (len(step) == STEP or size + len(pair[1]) > STEP_BYTES):
            yield step
            step, size = [], 0
        step.append(pair)
        size += len(pair[1])
    if step:
        yield step


def _pairs(flat: Sequence[Any]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def _rows(flat: Sequence[Any]) -> list[DelayedTask]:
    return [row_of(key, packed) for key, packed in _pairs(flat)]


def _position(row: DelayedTask) -> tuple[int, bytes]:
    return row.due_ms, member_of(row.arrival, row.key)
