"""What a part of the benchmark is: a measurement of one side, and what it is held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.worker.site import Site

__all__ = ("Lab", "Metric", "Part")


@dataclass(frozen=True)
class Metric:
    """One measured thing.

    Attributes:
        key: its name in what a measurement returns.
        text: its name for people, with the unit.
        at_most, at_least: the target for ours, or (``as_ratio``) for ours ÷ stock's.
    """

    key: str
    text: str
    at_most: float | None = None
    at_least: float | None = None
    as_ratio: bool = False

    def meets(self, value: float) -> bool | None:
        """Whether the target is met; ``None`` where there is none."""
        if self.at_most is not None:
            return value <= self.at_most
        return None if self.at_least is None else value >= self.at_least


@dataclass(frozen=True)
class Lab:
    """Where to measure."""

    redis: str
    amqp: str
    folder: Path
    quick: bool

    def pick(self, quick: Any, full: Any) -> Any:
        """The size for this run."""
        return quick if self.quick else full

    def site(self, side: str, *, amqp: bool = False, **conf: Any) -> Site:
        """A fresh site."""
        return Site(side, self.amqp if amqp else self.redis, self.folder, conf)


@dataclass(frozen=True)
class Part:
    """A named measurement: ``measure(lab, side)`` returns a value per metric key."""

    name: str
    about: str
    measure: Callable[[Lab, str], dict[str, float]]
    metrics: tuple[Metric, ...]
    rounds: int = 3
