"""``celery beat -S celery_wheel.beat:WheelScheduler``: Celery's beat on a timing wheel.

Same constructor, same methods and the same firing times as Celery's ``PersistentScheduler``;
a tick costs what is due instead of what exists. For other schedulers there is
:class:`WheelSchedulerMixin`.
"""

# Celery ships no types.
# mypy: disallow-subclassing-any=False, warn-return-any=False

from __future__ import annotations

import sqlite3
from typing import Any

from celery import __version__
from celery.beat import PersistentScheduler, SchedulingError
from celery.utils.log import get_logger
from kombu.exceptions import OperationalError

from celery_wheel.beats.cronwheel import CronWheel
from celery_wheel.beats.entries import Schedule, WheelEntry, clocked, fingerprint
from celery_wheel.beats.file import Run, ScheduleFile
from celery_wheel.beats.mixin import RETRY_S, WheelSchedulerMixin, without_gc
from celery_wheel.beats.settings import BeatSettings
from celery_wheel.clock import SYSTEM_CLOCK

__all__ = (
    "BeatSettings",
    "CronWheel",
    "WheelEntry",
    "WheelScheduler",
    "WheelSchedulerMixin",
    "clocked",
)

logger = get_logger("celery_wheel.beat")

#: Seconds between two lines about a file that can't be written.
_COMPLAIN_EVERY_S = 60.0


class WheelScheduler(WheelSchedulerMixin, PersistentScheduler):
    """Celery's persistent scheduler on a timing wheel.

    Entries may have ``one_off: True`` or a :class:`clocked` schedule: sent at most once, also
    over a ``kill -9``. All other entries are sent at least once over a ``kill -9``.

    *Crash:* the runs of a tick are in the file at its end, or after 1 000 of them; those sent
    since then are sent again. A one-off is noted in the file, durably, before it is sent.
    *Thread-safety:* none.
    """

    Entry = WheelEntry

    _store: ScheduleFile | None = None
    _saved: dict[str, Run]
    _in_hand: tuple[Any, Any] | None = None
    _send_error: BaseException | None = None
    _complained_at = -_COMPLAIN_EVERY_S

    # -- set-up ---------------------------------------------------------------------------------

    def setup_schedule(self) -> None:
        """Open the file, and make entries of the app's ``beat_schedule``.

        Raises:
            ConfigError: the file can't be used, or a ``wheel_beat_*`` setting is wrong.
        """
        conf = self.app.conf
        self._settings = BeatSettings.from_app(self.app)
        self._store = ScheduleFile(self.schedule_filename or conf.beat_schedule_filename)
        self._saved = self._store.open()
        rows = set(self._saved)
        self._reset_if_moved("tz", "Timezone", conf.timezone)
        self._reset_if_moved("utc_enabled", "UTC", conf.enable_utc)
        schedule = Schedule(self.data)
        self.schedule = schedule
        # Entries given to the constructor are no part of the configuration, and Celery drops
        # what is not in it.
        with without_gc(len(conf.beat_schedule)):
            self.merge_inplace(conf.beat_schedule)
        self.install_default_entries(schedule)
        schedule.dirty.update(rows - schedule.keys())
        self._saved = {}
        self._store.set_meta("__version__", __version__)
        self.sync()

    def _reset_if_moved(self, key: str, label: str, value: Any) -> None:
        """Forget the last runs where Celery does; never that a one-off was sent."""
        store = self._store
        assert store is not None  # noqa: S101  (mypy)
        known, now = store.meta(key), str(value)
        if known is not None and known != now:
            logger.warning("Reset: %s changed from %r to %r", label, known, now)
            self._saved = {name: run for name, run in self._saved.items() if run.once is not None}
        store.set_meta(key, now)

    def merge_inplace(self, b: Any) -> None:
        """Make the schedule what ``b`` says, keeping the last runs; see Celery's."""
        schedule = self.schedule
        for name in set(schedule) ^ set(b):
            schedule.pop(name, None)
        now = self.app.now() if self.Entry is WheelEntry else None
        for name, fields in b.items():
            entry = self._make_entry(name, dict(fields), now)
            held = schedule.get(name)
            if held is not None:
                held.update(entry)
                continue
            kept = self._adopt(entry)
            schedule[name] = entry
            if kept:
                schedule.dirty.discard(name)

    def _make_entry(self, name: str, fields: dict[str, Any], now: Any) -> Any:
        """An entry of the configuration. Asking each schedule for now is half the cost of it."""
        if now is not None and getattr(fields.get("schedule"), "nowfun", None) is None:
            fields.setdefault("last_run_at", now)
        return self.Entry(**dict(fields, name=name, app=self.app))

    def _adopt(self, entry: Any) -> bool:
        """Give an entry the last run that the file has of it; whether the row stays as it is."""
        saved: Run | None = self.__dict__.get("_saved", {}).get(entry.name)
        one_off = getattr(entry, "one_off", False)
        if saved is None:
            store = self._store
            if one_off and store is not None and store.replaced:
                self._distrust(entry)
            return False
        if one_off and saved.once != fingerprint(entry.schedule):
            return False  # its schedule was changed, or it was none before: a new one-off
        if saved.sending:
            logger.warning(
                "beat: one-off %r was being sent when beat was killed; whether it arrived is not "
                "known, and it is not sent again",
                entry.name,
            )
        at = saved.last_run_at
        if at is not None:
            entry.last_run_at = at if at.tzinfo is None else at.astimezone(self.app.timezone)
        entry.total_run_count = saved.total_run_count
        return not saved.sending and (saved.once is not None) == one_off

    def _distrust(self, entry: Any) -> None:
        """The file was lost, so a one-off whose instant has passed may have been sent."""
        plan = entry.schedule
        if isinstance(plan, clocked) and plan.is_due(entry.last_run_at)[0]:
            entry.total_run_count = 1
            logger.warning(
                "beat: one-off %r is past and the file that knew whether it was sent is lost: "
                "not sent; rename the entry to have it sent",
                entry.name,
            )

    def get_schedule(self) -> Any:
        """The dict of entries; see :class:`~celery_wheel.beats.entries.Schedule`."""
        return self.data

    def set_schedule(self, schedule: Any) -> None:
        """Take other entries; the last runs of those that are gone are forgotten."""
        held = self.__dict__.get("data")
        if not isinstance(schedule, Schedule):
            schedule = Schedule(schedule)
        if isinstance(held, Schedule) and held is not schedule:
            schedule.dirty.update(held.dirty, held)
            schedule.touched.update(held.touched, held)
        self.data = schedule

    schedule = property(get_schedule, set_schedule)

    # -- sending --------------------------------------------------------------------------------

    def send_reserved(self, entry: Any, next_entry: Any, producer: Any) -> Any:
        """See :meth:`WheelSchedulerMixin.send_reserved`; a one-off the broker refused stays due."""
        one_off = getattr(entry, "one_off", False)
        self._in_hand = None if one_off else (entry, next_entry)
        self._send_error = None
        if one_off and not self.record_one_off(next_entry):
            return self._keep(entry, "the schedule file can't be written")
        self.apply_entry(entry, producer=producer)
        self._in_hand = None
        if one_off:
            next_entry.sending = False
            if isinstance(self._send_error, OperationalError):
                return self._keep(entry, "the broker did not take it")
            self.schedule.dirty.add(entry.name)
        return next_entry

    def _keep(self, entry: Any, why: str) -> Any:
        logger.error("beat: one-off %r waits %g s more: %s", entry.name, RETRY_S, why)
        self.schedule[entry.name] = entry
        return entry

    def apply_async(self, entry: Any, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`celery.beat.Scheduler.apply_async`."""
        try:
            return super().apply_async(entry, *args, **kwargs)
        except SchedulingError as exc:
            self._send_error = exc.__cause__ or exc.__context__
            raise

    def record_one_off(self, entry: Any) -> bool:
        """Note in the file, durably, that a one-off is about to be sent."""
        entry.sending = True
        return self._write({entry.name}, durable=True)

    def after_sending(self) -> None:
        """Write what was sent: a kill costs no more than this slice."""
        self.sync()

    # -- the file -------------------------------------------------------------------------------

    def sync(self) -> None:
        """Write the rows of entries that changed since the last time.

        A file that can't be written is complained about once a minute and tried again; beat
        goes on.
        """
        schedule = self.data
        if isinstance(schedule, Schedule) and schedule.dirty:
            self._write(set(schedule.dirty))

    def _write(self, names: set[str], *, durable: bool = False) -> bool:
        store, schedule = self._store, self.data
        if store is None or store.closed:
            return False
        runs = [_run_of(name, schedule[name]) for name in names if name in schedule]
        try:
            store.write(runs, [name for name in names if name not in schedule], durable=durable)
        except sqlite3.Error as exc:
            now = SYSTEM_CLOCK.monotonic()
            if now - self._complained_at >= _COMPLAIN_EVERY_S:
                self._complained_at = now
                logger.error(
                    "beat: schedule file %r can't be written (%s): runs are sent, but after a "
                    "restart they may be sent again; free disk space or name another file with -s",
                    store.path,
                    exc,
                )
            return False
        schedule.dirty -= names
        return True

    def close(self) -> None:
        """Write what is left and let go of broker and file. May be called twice.

        Celery calls this from a signal handler, possibly in the middle of a send: then the run
        counts as not sent, and is sent after the restart.
        """
        if self._in_hand is not None:
            entry, next_entry = self._in_hand
            self._in_hand = None
            if self.schedule.get(entry.name) is next_entry:
                self.schedule[entry.name] = entry
        super().close()


def _run_of(name: str, entry: Any) -> Run:
    once = fingerprint(entry.schedule) if getattr(entry, "one_off", False) else None
    sending = getattr(entry, "sending", False)
    return Run(name, entry.last_run_at, entry.total_run_count, once, sending)
