"""Storms of killed workers, short ones; ``make soak`` has longer ones."""

from __future__ import annotations

import pytest

from celery_wheel.stores import open_store
from tests.crash.chaos import SOLO, Storm, chaos_conf
from tests.crash.journal import JOURNAL_VARIABLE
from tests.crash.nursery import Nursery
from tests.support.fixtures import on

KILLS = 50


@pytest.fixture
def left(custody):
    """``left()``: how many rows there are in the store."""
    store = open_store(custody["wheel_store"], custody["wheel_namespace"])

    def count():
        found = store.count()
        return found.pending + found.dispatched

    yield count
    store.close()


@pytest.fixture
def storm(broker, custody, conf, app, left, tmp_path):
    """A storm that needs the function that starts a worker, and what else is to be different."""
    conf.update(chaos_conf(broker), **custody)

    def make(start, **options):
        return Storm(app, start, tmp_path, left, seed=7, **options)

    return make


@pytest.fixture
def journal(tmp_path):
    """The environment of the workers."""
    return {JOURNAL_VARIABLE: str(tmp_path / "journal")}


@pytest.mark.slow
@pytest.mark.timeout(300)
@on("rabbitmq-sqlite", "redis-redis", "rabbitmq-postgresql", "rabbitmq-mysql")
def test_fifty_kills_lose_nothing(broker, conf, app, storm, journal, tmp_path):
    """Three workers of which one is killed at any moment, with the tasks that acknowledge late:
    each runs, none early, and those alone twice that a killed worker was running."""
    nursery = Nursery(app, tmp_path, conf=conf, env=journal)
    try:
        books = storm(nursery.start, late=True, workers=3, **SOLO).run(200, KILLS)
    finally:
        nursery.close()
    assert books.kills["SIGKILL"] >= KILLS
    check(books, broker)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "late"),
    [
        pytest.param("redis", False, id="redis-early-ack"),
        pytest.param("rabbitmq", True, id="rabbitmq-late-ack"),
    ],
    indirect=["broker"],
)
def test_children_of_killed_workers(late, broker, storm, worker, journal):
    """The same with pools of processes: where tasks acknowledge early, the children of a worker
    that is killed finish what they have."""

    def start(name):
        return worker(name=name, concurrency=2, ready=False, env=journal)

    books = storm(start, late=late).run(10)
    assert books.kills["SIGKILL"] >= 3
    check(books, broker)


def check(books, broker):
    print(books)
    assert books.published >= 25
    # Redis gives a message away before kombu writes down who has it.
    assert len(books.unread) <= (books.kills.total() if broker.kind == "redis" else 0)
    assert books.lost == books.early_s == books.unexplained == []
    assert max(books.late_s, default=0) < 150
