"""Fixtures of the crash tests: cheap workers, and the store as the test sees it."""

from __future__ import annotations

import json

import pytest

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter
from tests.crash.journal import JOURNAL_VARIABLE
from tests.crash.nursery import Nursery


@pytest.fixture
def store(custody):
    """The test's own eye on the store."""
    made = open_store(custody["wheel_store"], custody["wheel_namespace"])
    made.open()
    yield made
    made.close()


@pytest.fixture
def owned(store):
    """``owned("node@test")``: how many rows workers of that name own."""

    def count(node):
        rows = store.find(Filter(), 1000).rows
        return sum((row.owner or "").startswith(f"{node}/") for row in rows)

    return count


@pytest.fixture
def sow(app, conf, custody, tmp_path):
    """``sow("node@test", wheel_lease_ttl=3)``: start a worker with the solo pool."""
    nurseries = {}

    def start(name, *, ready=True, **more):
        kind = json.dumps(more, sort_keys=True)
        if kind not in nurseries:
            env = {JOURNAL_VARIABLE: str(tmp_path / "journal")}
            told = {**conf, **custody, **more}
            nurseries[kind] = Nursery(app, tmp_path, conf=told, env=env)
        made = nurseries[kind].start(name)
        return made.wait_ready() if ready else made

    yield start
    for nursery in nurseries.values():
        nursery.close()
