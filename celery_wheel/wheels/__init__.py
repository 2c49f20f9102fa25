"""Timing wheels, and timers on them: standard library only."""

from __future__ import annotations

from celery_wheel.wheels.base import Level, Node, Wheel
from celery_wheel.wheels.hashed import HashedWheel
from celery_wheel.wheels.hashed_timer import HashedWheelTimer, Timeout
from celery_wheel.wheels.hierarchical import HierarchicalWheel
from celery_wheel.wheels.make import make_wheel
from celery_wheel.wheels.timer import Handle, WheelTimer

__all__ = (
    "Handle",
    "HashedWheel",
    "HashedWheelTimer",
    "HierarchicalWheel",
    "Level",
    "Node",
    "Timeout",
    "Wheel",
    "WheelTimer",
    "make_wheel",
)
