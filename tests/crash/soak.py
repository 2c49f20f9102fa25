"""Storms of minutes on servers of their own: ``python -m tests.crash.soak --minutes 10``.

The store is ``sqlite``, ``redis``, ``postgresql`` or ``mysql``. With ``--faults`` the broker or
the store's server is killed three times a minute, too, and comes back after some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery_wheel.errors import StoreUnavailable
from celery_wheel.stores import open_store
from tests.crash.chaos import SOLO, Books, Storm, chaos_conf
from tests.crash.journal import JOURNAL_VARIABLE
from tests.crash.nursery import Nursery
from tests.support.app import make_app
from tests.support.broker import Broker
from tests.support.databases import MariaServer, PostgresServer
from tests.support.processes import hold_leash
from tests.support.servers import RabbitServer, RedisServer
from tests.support.worker import Worker

STORES = ("sqlite", "redis", "postgresql", "mysql")
#: Redis and MariaDB as they are to be set where nothing that was answered may be forgotten.
KEEPING = ("--appendonly", "yes", "--appendfsync", "always")
FLUSHING = ("--innodb-flush-log-at-trx-commit=1",)
FAULT_EVERY_S, AWAY_S = 20, 4


def store_server(kind: str) -> Any:
    """A server for the store alone; ``None`` for a file."""
    if kind == "redis":
        return RedisServer(*KEEPING)
    if kind == "postgresql":
        return PostgresServer()
    return MariaServer(*FLUSHING) if kind == "mysql" else None


def store_url(kind: str, server: Any, folder: Path) -> str:
    """Where the store is."""
    if server is None:
        return f"sqlite:///{folder / 'wheel.db'}"
    return f"{server.url}/0" if kind == "redis" else str(server.url)


@contextlib.contextmanager
def faults(storm: Storm, servers: list[Any], seconds: float) -> Iterator[None]:
    """For so long kill one of the servers every now and then, and start it again."""
    over = threading.Event()
    dice = random.Random(storm.seed)
    until = time.monotonic() + seconds

    def torment() -> None:
        while not over.wait(FAULT_EVERY_S) and time.monotonic() < until:
            server, away_at = dice.choice(servers), time.time()
            server.stop()
            over.wait(AWAY_S)
            server.start()
            storm.outages.append((away_at, time.time()))

    thread = threading.Thread(target=torment)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def soak(told: argparse.Namespace) -> Books:
    """One storm."""
    rabbit = told.broker == "rabbitmq"
    # A message broker that forgets is not what is tested.
    server: Any = RabbitServer() if rabbit else RedisServer(*KEEPING)
    broker = Broker(told.broker, f"{server.url}/{'gw0' if rabbit else '0'}", "storm")
    place = store_server(told.store)
    folder = Path(tempfile.mkdtemp(prefix="storm-"))
    print(f"the journal and the workers' logs: {folder}", flush=True)
    url = store_url(told.store, place, folder)
    plugin = {"worker_consumer": "celery_wheel:Consumer", "wheel_store": url}
    conf = {**broker.conf(), **chaos_conf(broker), **plugin}
    app, store = make_app(conf), open_store(url)
    if rabbit:  # what it did not confirm it need not have
        app.conf.broker_transport_options = {"confirm_publish": True}
    env = {JOURNAL_VARIABLE: str(folder / "journal")}

    def left() -> int:
        with contextlib.suppress(StoreUnavailable):
            counts = store.count()
            return counts.pending + counts.dispatched
        return -1

    def prefork(name: str) -> Worker:
        return Worker(app, folder, conf=conf, name=name, concurrency=2, env=env)

    nursery = Nursery(app, folder, conf=conf, env=env)
    start, how = (prefork, {}) if told.prefork else (nursery.start, {"workers": 3, **SOLO})
    storm = Storm(app, start, folder, left, late=not told.early, seed=told.seed, **how)
    failing = [server] if place is None else [server, place]
    try:
        seconds = told.minutes * 60
        with faults(storm, failing, seconds if told.faults else 0):
            return storm.run(seconds)
    finally:
        nursery.close()
        store.close()


def main(arguments: list[str]) -> int:
    """Run one storm and print its books; 1 where they are not even."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--store", choices=STORES, default="sqlite")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="rabbitmq")
    parser.add_argument("--prefork", action="store_true", help="pools of processes")
    parser.add_argument("--early", action="store_true", help="tasks acknowledge early")
    parser.add_argument("--faults", action="store_true", help="the servers are killed, too")
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args(arguments)
    leash = hold_leash()
    try:
        books = soak(told)
    finally:
        leash.communicate()
    print(told.store, told.broker, books, flush=True)
    unread = [] if told.broker == "redis" else books.unread
    return int(bool(books.lost or unread or books.early_s or books.unexplained))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
