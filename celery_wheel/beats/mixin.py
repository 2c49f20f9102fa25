"""The wheel in place of the heap, for any scheduler of Celery's kind.

A tick has four steps: follow what was edited, take what is due, decide which runs to send,
send them. The entry's own ``is_due`` has the last word on whether it is due.
"""

# Celery ships no types.
# mypy: disallow-subclassing-any=False, warn-return-any=False

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery.beat import Scheduler, event_t
from celery.utils.log import get_logger
from celery.utils.time import humanize_seconds

from celery_wheel.beats.cronwheel import TICK_S, CronWheel
from celery_wheel.beats.entries import Schedule
from celery_wheel.beats.settings import BeatSettings
from celery_wheel.beats.timing import Timing, instant, moved
from celery_wheel.beats.turn import Turn, choose_runs

__all__ = ("RETRY_S", "WheelSchedulerMixin", "without_gc")

logger = get_logger("celery_wheel.beat")

#: A tick this many seconds after the instant that was asked for means that beat was away: the
#: machine slept, the process was stopped, or the clock was set forward.
OVERSLEPT_S = 2.0

#: Seconds until a run is tried again that could not be made.
RETRY_S = 5.0

#: Slots that the clock may fall back before every entry is placed anew; less is waited out.
_SLACK_SLOTS = 10

#: Entries placed in one go from which on the garbage collector waits.
_MANY = 10_000

#: Runs that are sent between two calls of ``after_sending``.
_SLICE = 1000


@contextmanager
def without_gc(count: int) -> Iterator[None]:
    """Making or placing many entries leaves no garbage; looking for it takes as long again."""
    pause = count > _MANY and gc.isenabled()
    if pause:
        gc.disable()
    try:
        yield
    finally:
        if pause:
            gc.enable()


class WheelSchedulerMixin:
    """Put it before a scheduler class: ``class Mine(WheelSchedulerMixin, DatabaseScheduler)``.

    ``tick`` costs what is due and what was edited, not what exists. Edits are seen

    - in a plain ``Scheduler``'s own dict: at once, name by name;
    - in a scheduler that makes its dict anew (a ``schedule`` property): when the dict is another
      object; the entries of both are compared, and those that differ are placed;
    - elsewhere: after :meth:`touch` of the name, or ``populate_heap()`` for all.

    *Thread-safety:* none, as Celery's. *Crash:* as the scheduler it is mixed into; a one-off of
    :class:`~celery_wheel.beat.WheelEntry`'s or django-celery-beat's kind is synced before it is
    sent.
    """

    #: Names that were touched where the dict can't tell.
    _touched: set[str]
    _wheel: CronWheel[Any] | None = None
    _timing: Timing
    _mapping: Any = None
    _replace_all = False
    _settings: BeatSettings | None = None
    #: Runs at or before this instant were missed; UTC seconds.
    _missed_until: float = -math.inf
    _wake_at: float | None = None
    #: What other schedulers expect of :class:`celery.beat.Scheduler`.
    old_schedulers: Any = None

    # -- the interface of celery.beat.Scheduler -------------------------------------------------

    def tick(self, *_args: Any, **_kwargs: Any) -> float:
        """Send everything that is due; seconds until the next call is wanted."""
        now_at = self._now_at()
        wheel = self._follow(now_at)
        if self._wake_at is None or now_at - self._wake_at > OVERSLEPT_S:
            self._missed_until = now_at
        due = self.take(wheel.slot_of(now_at))
        if due:
            self._send_due(due, now_at)
            now_at = self._now_at()
        delay_s = self._delay_s(wheel, now_at)
        self._wake_at = now_at + delay_s
        return delay_s

    def populate_heap(self, *_args: Any, **_kwargs: Any) -> None:
        """Place every entry anew at the next tick."""
        self._replace_all = True

    @property
    def _heap(self) -> list[Any] | None:
        """Celery's heap as it would be, made when asked for. Setting ``None`` places all anew."""
        if self._wheel is None:
            return None
        slots = sorted(self._wheel.slots(), key=lambda item: item[:2])
        return [event_t(slot * TICK_S, 5, entry) for slot, _, entry in slots]

    @_heap.setter
    def _heap(self, heap: list[Any] | None) -> None:
        self._replace_all = self._replace_all or heap is None

    # -- slots ----------------------------------------------------------------------------------

    def put(self, entry: Any) -> int | None:
        """Place one entry; its slot, ``None`` for an entry that will never run."""
        now_at = self._now_at()
        return self._place(self._ready_wheel(now_at), entry.name, entry, now_at)

    def take(self, slot: int) -> list[Any]:
        """Take the entries of all slots up to ``slot`` out of the wheel, in order."""
        return self._ready_wheel(self._now_at()).take(slot)

    def touch(self, name: str) -> None:
        """Say that the entry of this name was added, changed or removed."""
        self.__dict__.setdefault("_touched", set()).add(name)

    # -- hooks ----------------------------------------------------------------------------------

    def record_one_off(self, entry: Any) -> bool:  # noqa: ARG002
        """Make durable that a one-off is about to be sent; ``False`` if that can't be done."""
        self.sync()  # type: ignore[attr-defined]
        return True

    def same_entry(self, held: Any, entry: Any) -> bool:
        """Whether an entry of a dict that was made anew is due when the one before was."""
        return bool(held == entry and held.last_run_at == entry.last_run_at)

    def after_sending(self) -> None:
        """Called after each slice of runs that were sent."""

    # -- following edits and the clock ----------------------------------------------------------

    def _now_at(self) -> float:
        return self.app.now().timestamp()  # type: ignore[attr-defined]

    def _ready_wheel(self, now_at: float) -> CronWheel[Any]:
        if self._wheel is None:
            self._settings = BeatSettings.from_app(self.app)  # type: ignore[attr-defined]
            self._timing = Timing(asks=type(self).is_due is not Scheduler.is_due)  # type: ignore[attr-defined]
            self._wheel = CronWheel(now_at)
            self._replace_all = True
        return self._wheel

    def _follow(self, now_at: float) -> CronWheel[Any]:
        """Bring the wheel up to date with the schedule and the clock."""
        wheel = self._ready_wheel(now_at)
        mapping = self._current_mapping()
        if wheel.slot_of(now_at) < wheel.now_slot - _SLACK_SLOTS:
            logger.warning("beat: the clock was set back, placing every entry anew")
            self._replace_all = True
        names = self.__dict__.pop("_touched", set())
        if isinstance(mapping, Schedule):
            names, mapping.touched = names | mapping.touched, set()
        if self._replace_all:
            self._replace_all = False
            wheel.restart(now_at)
            names = set(mapping)
        elif mapping is not self._mapping:
            names |= self._differing(wheel, mapping)
        self._mapping = mapping
        with without_gc(len(names)):
            for name in names:
                entry = mapping.get(name)
                if entry is None:
                    wheel.remove(name)
                else:
                    self._place(wheel, name, entry, now_at)
        return wheel

    def _current_mapping(self) -> Any:
        mapping = self.schedule  # type: ignore[has-type]
        if type(mapping) is dict and mapping is self.__dict__.get("data"):
            self.schedule = mapping = Schedule(mapping)
        return mapping

    def _differing(self, wheel: CronWheel[Any], mapping: Any) -> set[str]:
        """Names whose entry is not what the wheel holds; the rest changes hands in its slot."""
        names = {name for _, name, _ in wheel.slots() if name not in mapping}
        for name, entry in mapping.items():
            held = wheel.get(name)
            if held is entry:
                continue
            if held is None or not self.same_entry(held, entry):
                names.add(name)
            else:
                entry.last_run_at = held.last_run_at
                wheel.swap(name, entry)
        return names

    def _place(
        self,
        wheel: CronWheel[Any],
        name: str,
        entry: Any,
        now_at: float,
        *,
        after_s: float | None = None,
    ) -> int | None:
        """Put an entry where it is due, or ``after_s`` seconds from now if it can't be told."""
        if getattr(entry, "done", False):
            wheel.remove(name)
            return None
        try:
            due_at = self._timing.due_at(entry, now_at)
            if due_at is None:
                if after_s is None:
                    is_due, next_s = self.is_due(entry)  # type: ignore[attr-defined]
                    # A slot earlier is one that has ended: this very tick takes it.
                    after_s = -TICK_S if is_due else self._seconds(next_s)
                due_at = now_at + after_s
        except Exception:  # noqa: BLE001  (a user's schedule)
            due_at = now_at + self._failed(entry)
        return self._hold(entry, due_at, name)

    def _hold(self, entry: Any, due_at: float, name: str | None = None) -> int:
        """Put an entry into the wheel; it has its place now, whatever touched it before."""
        name = entry.name if name is None else name
        if isinstance(self._mapping, Schedule):
            self._mapping.touched.discard(name)
        return self._wheel.put(name, entry, due_at)  # type: ignore[union-attr]

    def _seconds(self, next_s: Any) -> float:
        """What ``is_due`` gave for the next time to look, made usable."""
        if isinstance(next_s, (int, float)) and math.isfinite(next_s):
            return max(float(next_s), TICK_S)
        return self.max_interval  # type: ignore[attr-defined]

    def _failed(self, entry: Any) -> float:
        """Log that a schedule raised; seconds until it is asked again."""
        again_s: float = self.max_interval  # type: ignore[attr-defined]
        logger.error(
            "beat: Cannot calculate the next run of %r, trying again in %s.",
            entry.name,
            humanize_seconds(again_s),
            exc_info=True,  # noqa: LOG014  (called while an error is handled)
        )
        return again_s

    def _delay_s(self, wheel: CronWheel[Any], now_at: float) -> float:
        next_at = wheel.next_at()
        mapping = self._mapping
        if isinstance(mapping, Schedule) and mapping.touched:
            return 0
        if next_at is None:
            return self.max_interval  # type: ignore[attr-defined]
        return min(max(next_at - now_at, 0), self.max_interval)  # type: ignore[attr-defined]

    # -- sending --------------------------------------------------------------------------------

    def _send_due(self, due: list[Any], now_at: float) -> None:
        turns = [turn for entry in due if (turn := self._turn(entry, now_at)) is not None]
        queue = sorted(
            ((run_at, index) for index, turn in enumerate(turns) for run_at in turn.runs),
        )
        left = [len(turn.runs) for turn in turns]
        done = [False] * len(turns)
        try:
            for count, (run_at, index) in enumerate(queue, 1):
                turn = turns[index]
                left[index] -= 1
                self._run(turn, run_at)
                if not left[index]:
                    done[index] = True
                    self._finish(turn)
                if count % _SLICE == 0:
                    self.after_sending()
        finally:
            # Whatever stopped the loop: what was not sent is due yet.
            for index, turn in enumerate(turns):
                if not done[index]:
                    self._put_back(turn.entry, now_at)
            self.after_sending()

    def _turn(self, entry: Any, now_at: float) -> Turn | None:
        """Ask the entry whether it is due, and decide which runs to send."""
        try:
            is_due, next_s = self.is_due(entry)  # type: ignore[attr-defined]
            turn = Turn(entry, after_s=self._seconds(next_s))
            if is_due:
                settings = self._settings or BeatSettings()
                choose_runs(turn, settings, self._timing, now_at, self._missed_until)
        except Exception:  # noqa: BLE001  (a user's schedule)
            self._hold(entry, now_at + self._failed(entry))
            return None
        if not is_due:
            self._hold(entry, now_at + (turn.after_s or TICK_S))
            return None
        if turn.runs:
            return turn
        self._place(self._ready_wheel(now_at), entry.name, entry, now_at, after_s=turn.after_s)
        return None

    def _run(self, turn: Turn, run_at: float) -> None:
        """Send one run, unless the entry was changed or removed since it was taken."""
        entry = turn.entry
        if self._replaced(entry) or turn.retry_s is not None:
            return
        producer = self.producer  # type: ignore[attr-defined]  # may raise: nothing is reserved yet
        try:
            next_entry = self.reserve(entry)  # type: ignore[attr-defined]
            if turn.in_step:
                next_entry.last_run_at = moved(next_entry.last_run_at, run_at)
        except Exception:  # noqa: BLE001  (a user's schedule or entry)
            turn.retry_s = self._failed(entry)
            return
        turn.entry = self.send_reserved(entry, next_entry, producer)
        if turn.entry is entry:
            turn.retry_s = RETRY_S

    def send_reserved(self, entry: Any, next_entry: Any, producer: Any) -> Any:
        """Send an entry for which ``next_entry`` was reserved.

        Returns the entry to go on with: ``next_entry``, or ``entry`` if it is to be tried again.
        """
        if self._is_one_off(entry) and not self.record_one_off(next_entry):
            return entry
        self.apply_entry(entry, producer=producer)  # type: ignore[attr-defined]
        return next_entry

    @staticmethod
    def _is_one_off(entry: Any) -> bool:
        model = getattr(entry, "model", None)  # django-celery-beat keeps it there
        return bool(getattr(entry, "one_off", False) or getattr(model, "one_off", False))

    def _finish(self, turn: Turn) -> None:
        """Place an entry after its runs of this tick."""
        now_at = self._now_at()
        entry = turn.entry
        if self._replaced(entry):
            return  # the next tick places what is there now
        if turn.retry_s is not None:
            self._hold(entry, now_at + turn.retry_s)
            return
        after_s = turn.after_s
        if turn.in_step and after_s is not None:
            due_at = instant(entry.last_run_at) + entry.schedule.run_every.total_seconds()
            after_s = max(due_at - now_at, TICK_S)
        self._place(self._ready_wheel(now_at), entry.name, entry, now_at, after_s=after_s)

    def _replaced(self, entry: Any) -> bool:
        """Whether an entry was changed or removed since it was taken from the wheel."""
        mapping, name = self._mapping, entry.name
        if not isinstance(mapping, Schedule):
            return False
        return name not in mapping or (name in mapping.touched and mapping[name] is not entry)

    def _put_back(self, entry: Any, now_at: float) -> None:
        if self._replaced(entry):
            return
        if isinstance(self._mapping, Schedule):
            self._mapping.touched.add(entry.name)
        else:
            self._hold(entry, now_at)
