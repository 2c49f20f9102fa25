"""Which tasks the demo publishes: ids, delays, and which of them it revokes. Pure."""

from __future__ import annotations

import math
import random
import uuid
from dataclasses import dataclass

__all__ = ("Planned", "make_plan")

#: The part of the tasks that come due while the demo watches.
NEAR_PART = 0.6
#: Seconds from the start of publishing until the first is due.
LEAD_S = 3.0
#: Tasks come due in the first part of each period, so that moments come in which none runs.
PERIOD_S, BUSY_PART = 3.0, 0.6
#: Every how manieth is revoked, of those that are due late enough for it and of the far ones.
REVOKE_EVERY = 10
#: The far ones are spread from a minute to a year, as many in each power of ten.
FAR_S = (60.0, 365 * 86_400.0)


@dataclass(frozen=True, slots=True)
class Planned:
    """One task. ``offset_s`` counts from the start of publishing."""

    id: str
    offset_s: float
    near: bool
    revoke: bool


def make_plan(tasks: int, seconds: float, dice: random.Random) -> list[Planned]:
    """``tasks`` tasks in due order; the near ones are due within ``seconds``."""
    near = math.ceil(tasks * NEAR_PART)
    last_s = max(LEAD_S + 1, seconds)
    offsets = sorted(_in_busy_part(dice.uniform(LEAD_S, last_s)) for _ in range(near))
    planned = [
        Planned(_new_id(dice), at, near=True, revoke=_chosen(number) and at > last_s * 0.7)
        for number, at in enumerate(offsets)
    ]
    low, high = (math.log(limit) for limit in FAR_S)
    far = sorted(last_s + math.exp(dice.uniform(low, high)) for _ in range(tasks - near))
    return planned + [
        Planned(_new_id(dice), at, near=False, revoke=_chosen(number))
        for number, at in enumerate(far)
    ]


def _new_id(dice: random.Random) -> str:
    return str(uuid.UUID(int=dice.getrandbits(128), version=4))


def _in_busy_part(at_s: float) -> float:
    begin_s = math.floor(at_s / PERIOD_S) * PERIOD_S
    return begin_s + (at_s - begin_s) * BUSY_PART


def _chosen(number: int) -> bool:
    return number % REVOKE_EVERY == REVOKE_EVERY - 1
