"""What a call costs with few and with many rows pending: `python -m benchmarks scale`.

Private servers of the test bench (PostgreSQL and MariaDB there run without fsync: compare
few with many, not one store with another). Each figure is the median of some calls.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Owner, Store
from celery_wheel.task import DelayedTask
from tests.support.databases import MariaServer, PostgresServer
from tests.support.processes import hold_leash
from tests.support.servers import RedisServer

BATCH, CALLS, ROWS = 128, 20, 100
FAR_MS = 4_000_000_000_000


@contextmanager
def place(name: str) -> Iterator[tuple[Store, Callable[[], int]]]:
    """A store on a server or file of its own, and what it takes there in bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/wheel.db"
        if name == "sqlite":
            yield open_store(f"sqlite:///{path}"), lambda: Path(path).stat().st_size
            return
        if name == "redis":
            redis = RedisServer()
            try:
                used = lambda: int(redis.client.info("memory")["used_memory"])  # noqa: E731
                yield open_store(f"{redis.url}/0"), used
            finally:
                redis.stop()
            return
        server = PostgresServer() if name == "postgresql" else MariaServer()
        try:
            yield open_store(server.url), lambda: 0
        finally:
            server.stop()


def rows(start: int, count: int, due_ms: int) -> list[DelayedTask]:
    """Rows like those of ordinary messages: 600 bytes of envelope."""
    return [
        DelayedTask(
            key=os.urandom(16),
            id=f"{number:036d}",
            name="shop.remind",
            queue="celery",
            due_ms=due_ms + number % 1_000_000,
            envelope=os.urandom(600),
            arrival=number,
        )
        for number in range(start, start + count)
    ]


def median_ms(calls: list[float]) -> float:
    return round(statistics.median(calls) * 1000, 1)


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def one_turn(
    store: Store, due: list[DelayedTask], turn: int, found: dict[str, list[float]]
) -> None:
    def note(name: str, call: Callable[[], object]) -> None:
        found.setdefault(name, []).append(timed(call))

    note("put", partial(store.put, due, 0))
    mine: list[DelayedTask] = []
    note("claim", lambda: mine.extend(store.claim("bench", 1_000_000, ROWS, queues=["celery"])))
    refs = [(row.key, row.version) for row in mine]
    note("confirm", partial(store.confirm, "bench", refs, 2_000_000))
    note("settle", partial(store.settle, [key for key, _ in refs]))
    gone = [f"{turn * ROWS + number:036d}" for number in range(ROWS)]
    note("cancel", partial(store.cancel, gone, [], FAR_MS))


def calls(store: Store, serial: int) -> dict[str, float]:
    """The median of each call about ROWS rows, with what is pending pending."""
    found: dict[str, list[float]] = {}
    store.heartbeat(Owner("bench"), 600)
    for turn in range(CALLS):
        one_turn(store, rows(serial + turn * ROWS, ROWS, 0), turn, found)
    found["count"] = [timed(store.count)]
    return {name: median_ms(values) for name, values in found.items()}


def measure(name: str, few: int, many: int) -> None:
    with place(name) as (store, size):
        store.open()
        results = {}
        held = 0
        for pending in (few, many):
            began = time.perf_counter()
            before = held
            while held < pending:
                store.put(rows(held, BATCH, FAR_MS), 0)
                held += BATCH
            rate = (held - before) / (time.perf_counter() - began)
            results[pending] = calls(store, 10**9 + pending)
            print(f"{name}: {pending} pending: put {rate:.0f}/s, ms per {ROWS} rows:", flush=True)
            print(f"    {results[pending]}", flush=True)
        ratios = {n: round(results[many][n] / max(results[few][n], 0.1), 2) for n in results[few]}
        print(f"    many ÷ few: {ratios}")
        if size():
            print(f"    {size() / held:.0f} bytes per row")
        store.close()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stores", nargs="+", default=["sqlite", "redis", "postgresql", "mysql"])
    parser.add_argument("--pending", type=int, default=1_000_000)
    parser.add_argument("--few", type=int, default=10_000)
    options = parser.parse_args(argv)
    print("load average", os.getloadavg())
    leash = hold_leash()
    try:
        for name in options.stores:
            measure(name, options.few, options.pending)
    finally:
        leash.communicate()


if __name__ == "__main__":
    main()
