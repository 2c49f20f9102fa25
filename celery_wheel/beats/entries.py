"""Entries, the dict that holds them, and a schedule for one instant.

The dict notes which names were touched, so that an edit costs one entry and nothing has to be
copied or compared to find it.
"""

# Celery ships no types.
# mypy: disallow-subclassing-any=False, warn-return-any=False

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from celery.beat import ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedstate, schedule, solar

from celery_wheel.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ("Schedule", "WheelEntry", "clocked", "fingerprint")

#: What ``is_due`` answers for an entry that is done: look again in three years.
NEVER_S = 1e8


class clocked(BaseSchedule):  # noqa: N801  (a sibling of crontab and solar)
    """One instant. An entry with this schedule is sent once, then never again.

    Args:
        clocked_time: when; one without a timezone is in the app's.
        nowfun: returns now, in place of the app's clock.
        app: the Celery app.

    Raises:
        ConfigError: ``clocked_time`` is no datetime.
    """

    def __init__(self, clocked_time: datetime, nowfun: Any = None, app: Any = None) -> None:
        if not isinstance(clocked_time, datetime):
            raise ConfigError(f"clocked({clocked_time!r}): give a datetime")
        super().__init__(nowfun=nowfun, app=app)
        self.clocked_time = clocked_time

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:  # noqa: ARG002
        """Time left; less than nothing once the instant has passed."""
        at = self.clocked_time
        if at.tzinfo is None:
            at = at.replace(tzinfo=self.tz)
        now = self.maybe_make_aware(self.now())
        return at.astimezone(timezone.utc) - now.astimezone(timezone.utc)

    def is_due(self, last_run_at: datetime) -> tuple[bool, float]:
        """``(True, never)`` from the instant on; that it is sent once is the entry's business."""
        left_s = self.remaining_estimate(last_run_at).total_seconds()
        return schedstate(True, NEVER_S) if left_s <= 0 else schedstate(False, left_s)

    def __repr__(self) -> str:
        return f"<clocked: {self.clocked_time}>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, clocked):
            return bool(self.clocked_time == other.clocked_time)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.clocked_time)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.clocked_time, self.nowfun)


def fingerprint(plan: Any) -> str:
    """A text that tells one schedule from another, the same in every process."""
    if isinstance(plan, clocked):
        return f"clocked {plan.clocked_time.isoformat()}"
    if isinstance(plan, schedule):
        return f"every {plan.run_every!r} {plan.relative}"
    if isinstance(plan, (crontab, solar)):
        return f"{type(plan).__name__} {plan.__reduce__()[1]!r}"
    return type(plan).__qualname__


class _Reported:
    """An attribute of an entry whose change moves the entry in the wheel.

    The value stays in the entry's ``__dict__``, where Celery looks when it copies an entry.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, entry: Any, owner: type | None = None) -> Any:
        return None if entry is None else entry.__dict__.get(self.name)

    def __set__(self, entry: Any, value: Any) -> None:
        entry.__dict__[self.name] = value
        if entry.owner is not None:
            entry.owner.touch(entry.name)


class WheelEntry(ScheduleEntry):
    """A schedule entry that may be a one-off, and that reports changes to its dict.

    Args:
        one_off: send it once and never again; :class:`clocked` schedules are one-offs anyway.
    """

    schedule = _Reported()
    last_run_at = _Reported()

    #: The :class:`Schedule` it is in.
    owner: Schedule | None
    #: ``True`` from the durable record of a one-off's intent until it was sent.
    sending: bool

    def __init__(self, *args: Any, one_off: bool = False, **kwargs: Any) -> None:
        self.owner = None
        self.sending = False
        super().__init__(*args, **kwargs)
        self.one_off = one_off or isinstance(self.schedule, clocked)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """The arguments that make a copy, as of its base."""
        return (item for item in vars(self).items() if item[0] not in {"owner", "sending"})

    @property
    def done(self) -> bool:
        """Whether it is a one-off that had its run."""
        return bool(self.one_off and self.total_run_count > 0)

    def is_due(self) -> tuple[bool, float]:
        """See :meth:`celery.beat.ScheduleEntry.is_due`; a one-off that is done is not."""
        return schedstate(False, NEVER_S) if self.done else super().is_due()

    def update(self, other: Any) -> None:
        """Take over the editable fields; a one-off whose schedule changes is a new one."""
        before = (self.one_off, fingerprint(self.schedule))
        super().update(other)
        self.one_off = getattr(other, "one_off", self.one_off)
        if self.one_off and before != (True, fingerprint(self.schedule)):
            self.total_run_count = 0
        if self.owner is not None:
            self.owner.touch(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = super().__reduce__()
        return (_rebuilt, (plain[0], plain[1], self.one_off))

    __hash__ = None  # type: ignore[assignment]  # as its base, which compares by value


def _rebuilt(cls: Any, args: tuple[Any, ...], one_off: Any) -> Any:
    return cls(*args, one_off=one_off)


class Schedule(dict[str, Any]):
    """Name → entry. Every mutation notes the names it touched, in O(1) for each.

    Attributes:
        touched: names whose place in the wheel is to be found again.
        dirty: names whose row in the file is to be written again.
    """

    __slots__ = ("dirty", "touched")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.touched: set[str] = set()
        self.dirty: set[str] = set()
        super().__init__()
        self.update(*args, **kwargs)

    def touch(self, name: str) -> None:
        """Say that an entry was changed in place."""
        self.touched.add(name)
        self.dirty.add(name)

    def __setitem__(self, name: str, entry: Any) -> None:
        super().__setitem__(name, entry)
        if isinstance(entry, WheelEntry):
            entry.owner = self
        self.touched.add(name)
        self.dirty.add(name)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.touch(name)

    def pop(self, name: str, *default: Any) -> Any:
        """See :meth:`dict.pop`."""
        if name in self:
            self.touch(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        """See :meth:`dict.popitem`."""
        name, entry = super().popitem()
        self.touch(name)
        return name, entry

    def clear(self) -> None:
        """See :meth:`dict.clear`."""
        self.touched.update(self)
        self.dirty.update(self)
        super().clear()

    def setdefault(self, name: str, default: Any = None) -> Any:
        """See :meth:`dict.setdefault`."""
        if name not in self:
            self[name] = default
        return self[name]

    def update(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`dict.update`."""
        for name, entry in dict(*args, **kwargs).items():
            self[name] = entry

    def __ior__(self, other: Mapping[str, Any] | Iterable[Any]) -> Self:  # type: ignore[override,misc]
        self.update(other)
        return self

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self)

    __copy__ = copy

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)
