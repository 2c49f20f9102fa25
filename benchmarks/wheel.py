"""The wheels beside Kombu's timer and a heap: ``python -m benchmarks.wheel [--quick]``.

Every round runs every subject in turn, so that a change of the machine's speed hits all of
them. Times are CPU time of the thread, with the garbage collector off but where said; numbers
are nanoseconds per operation: median (min … max) over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import itertools
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

from kombu.asynchronous.timer import Timer as KombuTimer

from benchmarks.support import Values, conditions
from celery_wheel.wheels.hashed import HashedWheel
from celery_wheel.wheels.hierarchical import HierarchicalWheel

__all__ = ("main",)

TICK_S = 0.01
TURN = 4096
DAY = 24 * 3600 * 100


def nothing() -> None:
    """What entries call, if anybody ran them."""


class Kombu:
    """kombu.asynchronous.timer.Timer; its entries are iterated, not called."""

    name = "kombu Timer"

    def __init__(self) -> None:
        self.timer = KombuTimer(max_interval=1e12)
        self.now_s = 0.0
        self.loop = self.timer.__iter__(nowfun=lambda: self.now_s)

    @staticmethod
    def times(ticks: list[int]) -> list[float]:
        return [tick * TICK_S for tick in ticks]

    def insert(self) -> Callable[[Any], Any]:
        call_at = self.timer.call_at
        return lambda due: call_at(due, nothing)

    def cancel(self) -> Callable[[Any], Any]:
        return self.timer.cancel

    def poll(self, tick: int) -> int:
        self.now_s = tick * TICK_S
        count = 0
        for _, entry in self.loop:
            if entry is None:
                break
            count += 1
        return count

    def one_by_one(self) -> int:
        """Wake for each expiry exactly, as an idle loop does."""
        count = 0
        for wait_s, entry in self.loop:
            if entry is not None:
                count += 1
            elif wait_s is None:
                break
            else:
                self.now_s += wait_s
        return count


class Heap:
    """heapq of tuples; a cancelled one is marked and skipped when it comes up."""

    name = "heapq, lazy cancel"

    def __init__(self) -> None:
        self.heap: list[Any] = []
        self.order = itertools.count()

    @staticmethod
    def times(ticks: list[int]) -> list[int]:
        return ticks

    def insert(self) -> Callable[[Any], Any]:
        heap, order, push = self.heap, self.order, heapq.heappush

        def insert(due: int) -> list[Any]:
            entry = [nothing]
            push(heap, (due, next(order), entry))
            return entry

        return insert

    def cancel(self) -> Callable[[Any], Any]:
        return list.clear

    def poll(self, tick: int) -> int:
        heap, pop = self.heap, heapq.heappop
        count = 0
        while heap and heap[0][0] <= tick:
            if pop(heap)[2]:
                count += 1
        return count

    def one_by_one(self) -> int:
        count = 0
        while self.heap:
            count += self.poll(self.heap[0][0])
        return count


class Hierarchical:
    """Our wheel."""

    name = "hierarchical wheel"
    make: Callable[[], Any] = HierarchicalWheel

    def __init__(self) -> None:
        self.wheel = type(self).make()

    @staticmethod
    def times(ticks: list[int]) -> list[int]:
        return ticks

    def insert(self) -> Callable[[Any], Any]:
        schedule = self.wheel.schedule
        return lambda due: schedule(due, nothing)

    def cancel(self) -> Callable[[Any], Any]:
        return self.wheel.detach  # type: ignore[no-any-return]

    def poll(self, tick: int) -> int:
        wheel = self.wheel
        count = len(wheel.advance(tick))
        while wheel.behind:
            count += len(wheel.advance(tick))
        return count

    def one_by_one(self) -> int:
        wheel = self.wheel
        count = 0
        while (tick := wheel.next_expiry()) is not None:
            count += self.poll(tick)
        return count


class Hashed(Hierarchical):
    """One wheel of as many buckets."""

    name = "hashed wheel"
    make = staticmethod(lambda: HashedWheel(TURN))


SUBJECTS: tuple[type[Any], ...] = (Kombu, Heap, Hierarchical, Hashed)


def clocked(work: Callable[[], Any], operations: int) -> float:
    """Nanoseconds per operation."""
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / operations


def filled(subject: type[Any], ticks: list[int]) -> tuple[Any, list[Any]]:
    made = subject()
    insert = made.insert()
    return made, [insert(due) for due in made.times(ticks)]


def measure_insert(subject: type[Any], ticks: list[int]) -> float:
    made = subject()
    insert, times = made.insert(), made.times(ticks)

    def work() -> None:
        for due in times:
            insert(due)

    return clocked(work, len(ticks))


def measure_cancel(subject: type[Any], ticks: list[int]) -> float:
    made, handles = filled(subject, ticks)
    cancel = made.cancel()

    def work() -> None:
        for handle in handles:
            cancel(handle)

    return clocked(work, len(handles))


def measure_expire(subject: type[Any], ticks: list[int], cancelled: int = 0) -> float:
    """A thousand looks at the timer over the horizon; per entry that expires."""
    made, handles = filled(subject, ticks)
    cancel = made.cancel()
    for handle in handles[:cancelled]:
        cancel(handle)
    del handles
    horizon = max(ticks)
    left = len(ticks) - cancelled

    def work() -> None:
        expired = sum(made.poll(horizon * step // 1000) for step in range(1001))
        assert expired == left, (subject.name, expired, left)

    return clocked(work, left)


def measure_one_by_one(subject: type[Any], ticks: list[int]) -> float:
    made, handles = filled(subject, ticks)
    del handles

    def work() -> None:
        assert made.one_by_one() == len(ticks)

    return clocked(work, len(ticks))


def measure_churn(subject: type[Any], ticks: list[int]) -> float:
    """Timeouts of 30 s, each cancelled a thousand later ones after it; ten per tick."""
    made = subject()
    insert, cancel = made.insert(), made.cancel()
    count = len(ticks)
    times = made.times([i // 10 + 3000 for i in range(count)])

    def work() -> None:
        handles = []
        for i, due in enumerate(times):
            handles.append(insert(due))
            if i >= 1000:
                cancel(handles[i - 1000])
                handles[i - 1000] = None
            if i % 10 == 0:
                made.poll(i // 10)

    return clocked(work, count)


def measure_bytes(subject: type[Any], ticks: list[int]) -> float:
    """Per entry, without what the caller brings (the time, the function)."""
    made = subject()
    insert, times = made.insert(), made.times(ticks)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for due in times:
        insert(due)
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / len(ticks)


def longest_advance(ticks: Iterator[int], total: int, *, collect: bool) -> tuple[float, float]:
    """Milliseconds of the longest ``advance`` over a big bucket, and of the last one.

    The last one by itself: of entries that lie in memory by one order and expire by another,
    it frees the last of every arena, and Python gives all of them back to the system.
    """
    wheel: HierarchicalWheel[int] = HierarchicalWheel()
    for due in ticks:
        wheel.schedule(due, 0)
    gc.collect()
    gc.freeze()
    if collect:
        gc.enable()
    longest = last = 0.0
    seen = 0
    while (tick := wheel.next_expiry()) is not None:
        # CPU time: another process that gets the core for a time slice is not our work.
        began = time.thread_time()
        out = wheel.advance(tick)
        longest, last = max(longest, last), time.thread_time() - began
        seen += len(out)
    gc.disable()
    gc.unfreeze()
    assert seen == total
    return longest * 1000, last * 1000


def table(
    title: str,
    measure: Callable[[type[Any], list[int]], float],
    ticks: list[int],
    *,
    rounds: int,
    subjects: tuple[type[Any], ...] = SUBJECTS,
    target: float | None = None,
) -> None:
    """Measure the subjects in turn, and print them with their ratio to Kombu's timer."""
    values = {subject: Values() for subject in subjects}
    for _ in range(rounds):
        for subject in subjects:
            gc.collect()
            values[subject].values.append(measure(subject, ticks))
    print(f"\n{title}")
    for subject, value in values.items():
        pairs = zip(values[Kombu].values, value.values, strict=True)
        ratio = statistics.median(kombu / own for kombu, own in pairs)
        verdict = ""
        if target is not None and subject is Hierarchical:
            verdict = f"  target {target}x: {'met' if ratio >= target else 'MISSED'}"
        print(f"  {subject.name:20} {value.text():>28}  {ratio:5.2f}x{verdict}")


def run(entries: int, rounds: int, rng: random.Random) -> None:
    day = [rng.randrange(1, DAY) for _ in range(entries)]
    turn = [rng.randrange(1, TURN) for _ in range(entries)]
    # Every expiry looks at a whole bucket: a million over a day would take it minutes.
    sparse = SUBJECTS if entries <= 200_000 else SUBJECTS[:3]
    half = entries // 2
    print(f"\n== {entries:,} entries; ns per operation, and how many times as fast as kombu")
    table("insert, due within a day", measure_insert, day, rounds=rounds, target=1.5)
    table("cancel", measure_cancel, day, rounds=rounds)
    table("expire, a day in 1000 looks", measure_expire, day, rounds=rounds, target=2,
          subjects=sparse)  # fmt: skip
    table("the same, half were cancelled (per entry that expires)",
          lambda subject, ticks: measure_expire(subject, ticks, half), day,
          rounds=rounds, target=4, subjects=sparse)  # fmt: skip
    table("expire, a day, one wake-up each", measure_one_by_one, day, rounds=rounds,
          subjects=sparse)  # fmt: skip
    table("expire, all within one turn (41 s)", measure_expire, turn, rounds=rounds)
    table("churn: insert, cancel, look", measure_churn, day, rounds=rounds)
    table("bytes per entry", measure_bytes, day, rounds=1)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, nargs="+", default=[100_000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small numbers, three rounds")
    options = parser.parse_args(argv)
    rng = random.Random(1)
    print("\n".join(f"{name}: {value}" for name, value in conditions().items()))
    gc.disable()
    for entries in [20_000] if options.quick else options.entries:
        run(entries, 3 if options.quick else options.rounds, rng)
    total = 100_000 if options.quick else 1_000_000
    print(f"\n== {total:,} entries in one bucket: the longest advance, ms (target <= 5)")
    for title, spread in (("all on one tick", 1), ("spread over the bucket", TURN)):
        for collect in (False, True):
            ticks = (3 * TURN + i % spread for i in range(total))
            longest, last = longest_advance(ticks, total, collect=collect)
            state = "on " if collect else "off"
            print(f"  {title:24} collector {state} {longest:7.2f}  (the last one: {last:.2f})")


if __name__ == "__main__":
    main()
