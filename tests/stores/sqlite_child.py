"""What another process does to a SQLite store: ``python -m tests.stores.sqlite_child``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from celery_wheel.errors import StoreError
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Store
from tests.stores.rows import LATER, NOW, task


def wait_for_go() -> None:
    """Tell the test that everything is imported, and wait for its word."""
    print("ready", flush=True)
    sys.stdin.readline()


def claim(store: Store, name: str) -> None:
    """Claim until nothing is left; print each id."""
    store.open()
    wait_for_go()
    while rows := store.claim(name, LATER, 7):
        print(*(row.id for row in rows), sep="\n", flush=True)


def first(store: Store, name: str) -> None:
    """Open a file that is not there yet, put one row."""
    wait_for_go()
    store.open()
    store.put([task(name)], NOW)


def put(store: Store, name: str) -> None:
    """Put without end; print the number of rows after each put."""
    store.open()
    number = 0
    while True:
        batch = [task(f"{name}-{number + n}", stamps=(f"s={n}",)) for n in range(20)]
        store.put(batch, NOW)
        number += 20
        print(number, flush=True)


def fork(store: Store, name: str) -> None:
    """Fork with the store open; print what the child found, then go on in the parent."""
    store.open()
    store.put([task("before")], NOW)
    child = os.fork()
    if child == 0:
        in_child(store)
        os._exit(0)
    os.waitpid(child, 0)
    store.put([task("after")], NOW)
    print(store.count().pending, flush=True)
    store.close()


def in_child(store: Store) -> None:
    """Close, which must close nothing, and try to use what was inherited."""
    held = open_files()
    store.close()
    print("kept" if held and open_files() == held else "closed")
    for inherited in (store, store.sibling()):
        try:
            inherited.open()
            print("used")
        except StoreError as exc:
            print("refused", exc)
    sys.stdout.flush()


def open_files() -> list[str]:
    """Paths of open database files."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(link.readlink()))
        except OSError:
            continue  # the descriptor of the listing itself
    return sorted(name for name in names if "wheel.db" in name)


if __name__ == "__main__":
    act, path, who = sys.argv[1:]
    {"claim": claim, "first": first, "put": put, "fork": fork}[act](
        open_store(f"sqlite:///{path}"), who
    )
