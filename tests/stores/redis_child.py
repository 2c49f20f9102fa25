"""What another process does to a Redis store: ``python -m tests.stores.redis_child``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from celery_wheel.stores.base import Owner
from celery_wheel.stores.redis import RedisStore
from tests.stores.rows import LATER, NOW, task

#: More than three steps of everything.
COUNT = 800


def tasks() -> list[Any]:
    """The same tasks in every process."""
    return [
        task(f"t{n}", NOW + n % 7, stamps=(f"s={n % 5}",), expires_ms=LATER, arrival=n)
        for n in range(COUNT)
    ]


def all_keys() -> list[bytes]:
    """The keys of all tasks."""
    return [row.key for row in tasks()]


ACTS: dict[str, Callable[[RedisStore], Any]] = {
    "put": lambda store: store.put(tasks(), NOW),
    "claim": lambda store: store.claim("w1", LATER, COUNT),
    "confirm": lambda store: store.confirm("w1", [(key, 0) for key in all_keys()], LATER),
    "settle": lambda store: store.settle(all_keys(), LATER),
    "release": lambda store: store.release("w1"),
    "reap": lambda store: store.reap(["w1"]),
    "cancel": lambda store: store.cancel([f"t{n}" for n in range(COUNT)], ["s=1"], LATER),
    "forget": lambda store: store.forget(all_keys()),
}


def main(act: str, url: str, namespace: str) -> None:
    """Do it, and wait for a line before each step; one is printed that names the step."""
    store = RedisStore(url, namespace)
    store.open()
    run = store.server.run

    def step(name: str, *arguments: Any) -> Any:
        print(name, flush=True)
        sys.stdin.readline()
        return run(name, *arguments)

    store.server.run = step  # type: ignore[method-assign]
    ACTS[act](store)
    store.server.run = run  # type: ignore[method-assign]
    store.heartbeat(Owner("done"), 60)


if __name__ == "__main__":
    main(*sys.argv[1:])
