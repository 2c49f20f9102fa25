"""The command line, and the end of the demo, whatever the cause.

The show runs in a thread; the main thread waits for it or for a signal and then ends
everything. So Ctrl-C works while the show hangs in a driver, and a second one changes nothing.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import threading
from collections.abc import Sequence
from typing import Any

from celery_wheel.demo.brokers import FILESYSTEM, BrokerError
from celery_wheel.demo.plan import make_plan
from celery_wheel.demo.screen import Screen, make_screen
from celery_wheel.demo.show import Show
from celery_wheel.demo.stage import Closed, Stage, WorkerFailed

__all__ = ("main",)

#: Exit codes. What is wrong with the command line, the broker's URL included, is argparse's 2.
GOOD, BAD, WRONG_USE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str]) -> int:
    """Run the demo; the result is the exit code."""
    options = _parser().parse_args(arguments)
    return _Run(options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m celery_wheel.demo",
        description="A real Celery worker with the wheel: delayed tasks, revokes, a kill -9, "
        "and the sum at the end. Exit code 0 only if nothing was lost, doubled or early.",
    )
    parser.add_argument(
        "--broker",
        metavar="URL",
        default=os.environ.get("BROKER") or FILESYSTEM,
        help="redis://… or amqp://… (default: $BROKER, else a temporary folder)",
    )
    parser.add_argument("--tasks", type=_from(20), default=3000, help="default: %(default)s")
    parser.add_argument(
        "--seconds",
        type=_from(4),
        default=20,
        help="how far ahead the near ones are due (default: %(default)s)",
    )
    parser.add_argument("--plain", action="store_true", help="lines instead of a live picture")
    return parser


def _from(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= 1_000_000:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to 1000000")
        return int(text)

    return number


class _Run:
    """One run of the demo."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._interrupted = False
        self._code = BAD
        self._screen: Screen = make_screen(plain=options.plain)

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._interrupt)
        try:
            # In this thread: a signal can't fall between the folder and the note of it.
            stage = Stage(self._options.broker)
        except BrokerError as exc:
            self._screen.error(f"error: {exc}")
            return WRONG_USE
        show = threading.Thread(target=self._guarded, args=(stage,), daemon=True)
        show.start()
        while show.is_alive() and not self._interrupted:
            show.join(0.1)
        # From here on a signal only sets a flag that was read already.
        interrupted = show.is_alive()
        self._screen.close()
        stage.close()
        if interrupted:
            self._screen.error("interrupted: the worker is killed, the temporary files are removed")
            # The show may hang in a driver; there is nothing left that it could leave behind.
            os._exit(INTERRUPTED)
        return self._code

    def _interrupt(self, *_: Any) -> None:
        self._interrupted = True

    def _guarded(self, stage: Stage) -> None:
        try:
            self._show(stage)
        except Exception as exc:  # noqa: BLE001 - told in one line, and everything is ended
            # When the stage is pulled away from under the show, anything may fail.
            if self._interrupted or isinstance(exc, Closed):
                return
            told = isinstance(exc, (BrokerError, WorkerFailed))
            self._screen.error(f"error: {exc if told else f'the demo failed: {exc!r}'}")
            if isinstance(exc, BrokerError):
                self._code = WRONG_USE

    def _show(self, stage: Stage) -> None:
        stage.broker.check()
        dice = random.Random()  # noqa: S311 - delays, no secrets
        plan = make_plan(self._options.tasks, self._options.seconds, dice)
        summary = Show(stage, self._screen, plan, self._options.seconds).run()
        self._screen.summary(summary)
        self._code = GOOD if summary.good else BAD
