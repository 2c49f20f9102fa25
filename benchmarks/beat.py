"""``python -m benchmarks beat [--quick]``: Celery's scheduler and the wheel's, side by side.

Both get the same entries, one after the other in one process, so the ratio is what to read.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from celery import Celery
from celery.beat import PersistentScheduler
from celery.schedules import crontab

from celery_wheel.beat import WheelScheduler

#: Celery sends one entry per tick, each at the cost of all entries: a few tell it all.
STOCK_SENDS = 10
IDLE_TICKS = 5


def _app(broker: str) -> Celery:
    app = Celery("bench", broker=broker, set_as_current=False)
    app.conf.update(result_expires=None, task_default_queue="celery-wheel-bench-beat")

    @app.task(name="job", shared=False)
    def job() -> None:
        """Is only sent."""

    return app


def _plan(kind: str, count: int) -> dict[str, Any]:
    def when(number: int) -> Any:
        if kind == "interval":
            return 3600.0 + number % 997
        return crontab(minute=str(number % 60), hour=str(number // 60 % 24))

    return {f"entry-{number}": {"task": "job", "schedule": when(number)} for number in range(count)}


_clock = time.perf_counter


def _timed(call: Callable[[], Any]) -> float:
    begin = _clock()
    call()
    return _clock() - begin


def _edit(made: Any) -> None:
    """Give one entry another time, and tick, which is when a scheduler finds out."""
    made.schedule["entry-7"] = made.Entry(name="entry-7", task="job", schedule=1800.0, app=made.app)
    made.tick()


def _make_due(made: Any, count: int) -> None:
    for number in range(count):
        name = f"due-{number}"
        made.schedule[name] = made.Entry(
            name=name,
            task="job",
            schedule=1000.0,
            app=made.app,
            last_run_at=made.app.now() - timedelta(seconds=1001),
        )


def _sends(made: Any, count: int) -> float:
    """Seconds for one of ``count`` entries that are due together."""
    _make_due(made, count)
    made.producer  # noqa: B018  (connect before the watch starts)
    made.tick()  # Celery: finds out, and sends the first
    sent = sum(made.schedule[f"due-{n}"].total_run_count for n in range(count))
    if sent == count:
        _make_due(made, count)
        return _timed(made.tick) / count
    return _timed(lambda: [made.tick() for _ in range(count - sent)]) / (count - sent)


def measure(cls: Any, app: Celery, due: int) -> dict[str, float]:
    """Every figure of one scheduler, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        made: Any = None

        def make() -> None:
            nonlocal made
            made = cls(app=app, schedule_filename=str(Path(folder) / "schedule"))

        figures = {"start": _timed(make), "first tick": _timed(made.tick)}
        ticks = [_timed(made.tick) for _ in range(IDLE_TICKS)]
        figures["idle tick"] = sorted(ticks)[len(ticks) // 2]
        figures["edit one, and tick"] = _timed(lambda: _edit(made))
        figures["send one of many due"] = _sends(made, due)
        figures["close"] = _timed(made.close)
    return figures


def _raw_send(app: Celery, count: int) -> float:
    """Seconds that a bare ``apply_async`` takes: the rate of the broker."""
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection, auto_declare=False)
        task = app.tasks["job"]
        task.apply_async(producer=producer)
        took = _timed(lambda: [task.apply_async(producer=producer) for _ in range(count)])
        connection.default_channel.queue_purge(app.conf.task_default_queue)
    return took / count


def _show(title: str, stock: dict[str, float], ours: dict[str, float]) -> None:
    print(f"\n{title}\n{'':24}{'Celery':>14}{'wheel':>14}{'ratio':>10}")
    for name, seconds in ours.items():
        before = stock[name]
        print(f"{name:24}{before * 1e3:11.3f} ms{seconds * 1e3:11.3f} ms{before / seconds:9.1f}x")


def _million(broker: str, count: int) -> None:
    """A very large schedule starts and ticks."""
    app = _app(broker)
    app.conf.beat_schedule = _plan("interval", count)
    with tempfile.TemporaryDirectory() as folder:
        begin = _clock()
        made = WheelScheduler(app=app, schedule_filename=str(Path(folder) / "schedule"))
        ready = _clock()
        first, idle, edit = _timed(made.tick), _timed(made.tick), _timed(lambda: _edit(made))
        made.close()
    print(
        f"\n{count:,} entries on the wheel: start {ready - begin:.1f} s, first tick {first:.2f} s, "
        f"idle tick {idle * 1e3:.3f} ms, edit one {edit * 1e3:.3f} ms"
    )


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks beat", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--broker", default="memory://", help="where the due ones are sent")
    parser.add_argument(
        "--cpu", action="store_true", help="count the process's CPU time: for a busy machine"
    )
    options = parser.parse_args(argv)
    if options.cpu:
        global _clock  # noqa: PLW0603
        _clock = time.process_time
    logging.getLogger("celery.beat").setLevel(logging.WARNING)
    scale = 10 if options.quick else 1
    entries, due = 100_000 // scale, 1000 // scale
    print(f"{datetime.now().astimezone():%Y-%m-%d %H:%M} {options.broker}: {entries:,} entries")
    for kind in ("interval", "crontab"):
        app = _app(options.broker)
        app.set_current()
        app.conf.beat_schedule = _plan(kind, entries)
        stock = measure(PersistentScheduler, app, STOCK_SENDS)
        ours = measure(WheelScheduler, app, due)
        _show(f"{kind} ({due:,} due together)", stock, ours)
        raw = _raw_send(app, due)
        print(f"{'a bare apply_async':24}{'':14}{raw * 1e3:11.3f} ms")
    _million(options.broker, 1_000_000 // scale)


if __name__ == "__main__":
    main()
