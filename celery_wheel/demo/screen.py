"""What is seen: a live picture where there is a terminal and rich, plain lines otherwise."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from contextlib import suppress
from typing import Protocol

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.demo.ledger import Summary
from celery_wheel.demo.watch import HORIZONS, View

__all__ = ("PlainScreen", "Screen", "make_screen")

#: Seconds between two lines about the progress.
LINE_EVERY_S = 2.0


class Screen(Protocol):
    """Where the demo speaks. Thread-safe."""

    def say(self, line: str) -> None:
        """Something has happened."""

    def show(self, view: View) -> None:
        """What there is now."""

    def summary(self, summary: Summary) -> None:
        """The end of the show."""

    def error(self, line: str) -> None:
        """What went wrong, on standard error."""

    def close(self) -> None:
        """Leave the terminal as it was. May be called twice."""


class PlainScreen:
    """One line after another."""

    def __init__(self) -> None:
        self._since = SYSTEM_CLOCK.monotonic()
        self._next_at = 0.0
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """See :meth:`Screen.say`."""
        self._write(f"{SYSTEM_CLOCK.monotonic() - self._since:5.1f} s  {line}\n")

    def show(self, view: View) -> None:
        """See :meth:`Screen.show`: a line every few seconds."""
        now = SYSTEM_CLOCK.monotonic()
        if now < self._next_at:
            return
        self._next_at = now + LINE_EVERY_S
        horizon = ", ".join(
            f"{name} {count}" for name, count in zip(HORIZONS, view.horizon, strict=True) if count
        )
        levels = " ".join(f"L{level['level']}:{level['entries']}" for level in view.levels)
        self.say(
            f"held {view.held} ({horizon or 'nothing'})  wheel {levels or '-'}  "
            f"ran {view.ran}, late p50/p99 {_ms(view.late_ms[0])}/{_ms(view.late_ms[1])}"
        )

    def summary(self, summary: Summary) -> None:
        """See :meth:`Screen.summary`."""
        self._write("\n" + "\n".join(summary.lines()) + "\n\n" + verdict(summary) + "\n")

    def error(self, line: str) -> None:
        """See :meth:`Screen.error`."""
        with suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """See :meth:`Screen.close`."""

    def _write(self, text: str) -> None:
        # A reader that has gone (`| head`) is no reason to leave a worker behind.
        with self._lock, suppress(OSError, ValueError):
            sys.stdout.write(text)
            sys.stdout.flush()


def verdict(summary: Summary) -> str:
    """The last line."""
    if summary.good:
        return "Every task is accounted for: none lost, none run twice, none early."
    return "NOT GOOD: see the counts above."


def _ms(value: int | None) -> str:
    return "-" if value is None else f"{value} ms"


def make_screen(*, plain: bool) -> Screen:
    """The live picture where that can be, else plain lines."""
    terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if plain or not terminal or importlib.util.find_spec("rich") is None:
        return PlainScreen()
    from celery_wheel.demo.picture import Picture

    return Picture()
