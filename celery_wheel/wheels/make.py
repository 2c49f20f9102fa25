"""Which wheel a setting names."""

from __future__ import annotations

from typing import Any

from celery_wheel.wheels.base import Wheel
from celery_wheel.wheels.hashed import HashedWheel
from celery_wheel.wheels.hierarchical import HierarchicalWheel

__all__ = ("WHEEL_KINDS", "make_wheel")

#: What ``wheel_kind`` can be.
WHEEL_KINDS: dict[str, Any] = {"hierarchical": HierarchicalWheel, "hashed": HashedWheel}


def make_wheel(kind: str = "hierarchical", size: int = 4096, start_tick: int = 0) -> Wheel[Any]:
    """Make an empty wheel.

    Args:
        kind: a key of :data:`WHEEL_KINDS`.
        size: buckets per wheel.
        start_tick: the wheel's now.

    Raises:
        ValueError: no such kind, or a size that can't be.
    """
    try:
        factory = WHEEL_KINDS[kind]
    except KeyError:
        known = " or ".join(map(repr, WHEEL_KINDS))
        raise ValueError(f"wheel_kind is {kind!r}: make it {known}") from None
    wheel: Wheel[Any] = factory(size=size, start_tick=start_tick)
    return wheel
