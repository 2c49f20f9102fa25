"""What the timer schedules: a call, and the handle to cancel it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kombu.asynchronous.timer import Entry as KombuEntry

from celery_wheel.wheels.bucket import WheelNode

if TYPE_CHECKING:
    from celery_wheel.timer.schedule import Schedule

__all__ = ("Entry", "Item")

#: (eta, priority, order of entering, entry)
Item = tuple[float, int, int, Any]


class Entry(KombuEntry):
    """A call to come, and the handle to cancel it. Thread-safe."""

    __slots__ = ("_canceled", "_node", "_timer")

    def __init__(
        self,
        fun: Callable[..., Any] | None,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.fun = fun
        self.args = args or []
        self.kwargs = kwargs or {}
        self._last_run: float | None = None
        self._canceled = False
        self._timer: Schedule | None = None
        self._node: WheelNode[Item] | None = None

    @property
    def tref(self) -> Entry:  # type: ignore[override]
        """The entry itself; Kombu keeps a weak proxy here."""
        return self

    @property
    def canceled(self) -> bool:
        """Set it to ``True`` to cancel."""
        return self._canceled

    @canceled.setter
    def canceled(self, value: bool) -> None:
        if value:
            self.cancel()

    def cancel(self) -> None:
        """Never run it (again), and let go of the function and its arguments now."""
        timer = self._timer
        if timer is None:
            self.release()
        else:
            timer.drop(self)

    def release(self) -> WheelNode[Item] | None:
        """Mark it as cancelled; the timer's half of :meth:`cancel`."""
        self._canceled = True
        self.fun, self.args, self.kwargs = None, [], {}
        node, self._node = self._node, None
        return node

    def bind(self, timer: Schedule, node: WheelNode[Item] | None) -> None:
        """Note where it is scheduled."""
        self._timer = timer
        self._node = node

    def __call__(self) -> Any:
        """Call the function; a cancelled entry does nothing."""
        fun, args, kwargs = self.fun, self.args, self.kwargs
        return None if fun is None else fun(*args, **kwargs)

    def __repr__(self) -> str:
        name = "cancelled" if self.fun is None else getattr(self.fun, "__name__", self.fun)
        return f"<TimerEntry: {name}(*{self.args!r}, **{self.kwargs!r})>"
