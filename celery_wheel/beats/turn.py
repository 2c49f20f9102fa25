"""One entry in one tick: which of its runs are sent, by the policy for missed runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery.utils.log import get_logger

from celery_wheel.beats.settings import BeatSettings
from celery_wheel.beats.timing import Timing, is_interval, moved

__all__ = ("Turn", "choose_runs")

logger = get_logger("celery_wheel.beat")


@dataclass(slots=True)
class Turn:
    """An entry that is due.

    Attributes:
        entry: as it is now; each run that is sent replaces it.
        runs: the instants it stands for, UTC seconds, oldest first.
        after_s: seconds after which its schedule wants to be asked again.
        in_step: the rhythm of an interval goes on from its last run, instead of from now.
        retry_s: set where a run was not made: it stays due, and is tried again after this many
            seconds.
    """

    entry: Any
    runs: list[float] = field(default_factory=list)
    after_s: float | None = None
    in_step: bool = False
    retry_s: float | None = None


def choose_runs(
    turn: Turn, settings: BeatSettings, timing: Timing, now_at: float, missed_until: float
) -> None:
    """Fill in the runs of an entry that is due.

    A run was *missed* if it was due at or before ``missed_until``, the last instant at which
    beat is known to have been away, or if a later run of the entry is due, too. One-offs are
    sent late rather than never, whatever the policy.
    """
    entry = turn.entry
    interval = is_interval(entry.schedule)
    if settings.missed == "stock" or getattr(entry, "one_off", False):
        run_at = timing.run_at(entry, now_at) if entry.last_run_at else None
        turn.runs = [now_at if run_at is None else min(run_at, now_at)]
        every_s = entry.schedule.run_every.total_seconds() if interval else 0.0
        # Celery counts from now after a delay. So do we, but for delays of our own making:
        # those would add up.
        on_time = turn.runs[0] > missed_until and now_at - turn.runs[0] < every_s
        turn.in_step = interval and on_time
        return
    runs = timing.missed(entry, now_at, settings.missed_cap) or [now_at]
    turn.in_step = interval
    if settings.missed == "all":
        turn.runs = runs
    elif settings.missed == "once" or runs[-1] > missed_until:
        turn.runs = runs[-1:]
    else:
        # Nothing is sent, but these runs are over.
        entry.last_run_at = moved(entry.last_run_at, runs[-1] if interval else now_at)
    if len(turn.runs) < len(runs):
        logger.info(
            "beat: %d missed runs of %r are not sent", len(runs) - len(turn.runs), entry.name
        )
