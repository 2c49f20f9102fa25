"""The live picture, drawn with rich."""

from __future__ import annotations

import sys
from contextlib import suppress

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.demo.ledger import Summary
from celery_wheel.demo.screen import verdict
from celery_wheel.demo.watch import HORIZONS, View

__all__ = ("Picture",)

BAR = 24


class Picture:
    """A :class:`~celery_wheel.demo.screen.Screen` for terminals."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._since = SYSTEM_CLOCK.monotonic()
        self._live: Live | None = Live(
            Text("starting …"), console=self._console, transient=True, refresh_per_second=8
        )
        self._live.start()

    def say(self, line: str) -> None:
        """See :meth:`Screen.say`: the line scrolls up above the picture."""
        self._console.print(f"[dim]{SYSTEM_CLOCK.monotonic() - self._since:5.1f} s[/]  {line}")

    def show(self, view: View) -> None:
        """See :meth:`Screen.show`."""
        live = self._live
        if live is not None:
            live.update(draw(view))

    def summary(self, summary: Summary) -> None:
        """See :meth:`Screen.summary`."""
        self.close()
        style = "bold green" if summary.good else "bold red"
        body = Group(*(Text(line) for line in summary.lines()), Text(verdict(summary), style))
        self._console.print(Panel(body, title="summary", expand=False))

    def error(self, line: str) -> None:
        """See :meth:`Screen.error`."""
        self.close()
        with suppress(OSError):
            sys.stderr.write(line + "\n")
            sys.stderr.flush()

    def close(self) -> None:
        """See :meth:`Screen.close`."""
        live, self._live = self._live, None
        if live is not None:
            with suppress(OSError):
                live.stop()


def draw(view: View) -> RenderableType:
    """The picture of one look."""
    progress = view.progress
    title = f"{view.elapsed_s:.0f} s  {progress.what} …"
    p50, p99, most = ("-" if value is None else f"{value} ms" for value in view.late_ms)
    foot = (
        f"published {progress.published} of {progress.total}   held {view.held}   "
        f"ran {view.ran}   revoked {progress.revoked}   late p50 {p50}, p99 {p99}, max {most}"
    )
    tables = Columns([_horizon(view), _levels(view)], padding=(0, 4))
    return Panel(Group(tables, Text(foot)), title=title, title_align="left", expand=False)


def _horizon(view: View) -> Table:
    table = Table("due within", "", "tasks", title="held in the store", box=None)
    most = max(1, *view.horizon)
    for name, count in zip(HORIZONS, view.horizon, strict=True):
        bar = "█" * -(-count * BAR // most)
        table.add_row(name, Text(bar.ljust(BAR), "cyan"), f"{count:>6}")
    return table


def _levels(view: View) -> Table:
    table = Table(
        "level", "bucket", "buckets", "tasks", title="in RAM: the levels of the wheel", box=None
    )
    for level in view.levels:
        table.add_row(
            str(level["level"]),
            f"{level['bucket_s']:g} s",
            str(level["buckets"]),
            str(level["entries"]),
        )
    if view.resident is None:
        word = "no answer yet" if view.progress.worker_up else "no worker"
        table.add_row(Text(word, "red"), "", "", "")
    else:
        table.add_row("store only", "", "", str(max(0, view.held - view.resident)))
    return table
