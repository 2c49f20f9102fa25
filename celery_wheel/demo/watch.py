"""Looks at the store, the record and the worker twice a second, and has it shown."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.demo.ledger import Ledger, quantile
from celery_wheel.stores import open_store

if TYPE_CHECKING:
    from celery_wheel.demo.screen import Screen
    from celery_wheel.demo.stage import Stage
    from celery_wheel.stores.base import Store

__all__ = ("EDGES_S", "HORIZONS", "Progress", "View", "Watcher")

#: Edges of the picture's horizon, seconds from now, and the names of what lies between them.
EDGES_S = (0, 1, 5, 10, 60, 3600, 86_400, 30 * 86_400)
HORIZONS = ("overdue", "1 s", "5 s", "10 s", "1 min", "1 h", "1 day", "30 days", "later")
#: Seconds between two looks, and how long the worker's answer is waited for.
EVERY_S, ANSWER_S = 0.5, 1.0
#: How many of the latest runs the shown lateness is taken over.
LATEST = 500


@dataclass
class Progress:
    """What the show tells the watcher. Plain fields, each written by the show alone."""

    what: str = "starting"
    total: int = 0
    published: int = 0
    revoked: int = 0
    worker_up: bool = False


@dataclass(frozen=True)
class View:
    """One look. ``levels`` is the worker's own report, empty while it does not answer."""

    progress: Progress
    elapsed_s: float
    held: int
    ran: int
    horizon: list[int]
    levels: list[dict[str, Any]] = field(default_factory=list)
    resident: int | None = None
    late_ms: tuple[int | None, ...] = (None, None, None)


class Watcher:
    """A thread. :meth:`stop` ends it."""

    def __init__(self, stage: Stage, screen: Screen, progress: Progress) -> None:
        self._stage, self._screen, self._progress = stage, screen, progress
        self._stopping = threading.Event()
        self._since = SYSTEM_CLOCK.monotonic()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()
        self._thread.join(3 * ANSWER_S)

    def _run(self) -> None:
        # A look that fails (the stage is gone) is no news; the show says what went wrong.
        with suppress(Exception):
            store, ledger = open_store(self._stage.store_url), Ledger(self._stage.record)
            store.open()
            while not self._stopping.wait(EVERY_S) and not self._stage.closed:
                self._screen.show(self._look(store, ledger))
            store.close()

    def _look(self, store: Store, ledger: Ledger) -> View:
        now_ms = SYSTEM_CLOCK.wall_ms()
        ledger.read()
        latest = [run.late_ms for run in ledger.runs[-LATEST:]]
        report = self._report() if self._progress.worker_up else {}
        return View(
            progress=self._progress,
            elapsed_s=SYSTEM_CLOCK.monotonic() - self._since,
            held=store.count().pending,
            ran=ledger.ran,
            horizon=store.histogram([now_ms + edge * 1000 for edge in EDGES_S]),
            levels=report.get("levels", []),
            resident=report.get("resident"),
            late_ms=tuple(quantile(latest, part) for part in (0.5, 0.99, 1)),
        )

    def _report(self) -> dict[str, Any]:
        """What ``celery inspect wheel`` would show of this worker."""
        node = self._stage.broker.node
        control = self._stage.app.control
        answers = control.broadcast(
            "wheel", destination=[node], reply=True, timeout=ANSWER_S, limit=1
        )
        return dict(answers[0][node]) if answers else {}
