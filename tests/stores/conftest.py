"""One store of each kind for the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_wheel.stores.base import Store
from tests.stores.stores import KINDS


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """An open, empty store of every kind in turn."""
    made = KINDS[request.param](tmp_path)
    made.open()
    yield made
    made.close()


@pytest.fixture
def other(store: Store) -> Iterator[Store]:
    """Another object of the same place, as another worker has it."""
    sibling = store.sibling()
    sibling.open()
    yield sibling
    sibling.close()
