"""The kinds of store that every test of the contract runs over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from celery_wheel.stores import open_store
from celery_wheel.stores.base import Store

__all__ = ("KINDS",)

#: What makes an unopened, empty store, by kind. A new kind of store is one more line.
KINDS: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: open_store("memory://"),
    "sqlite": lambda directory: open_store(f"sqlite:///{directory / 'wheel.db'}"),
}
