"""The standalone engine: run functions later, without Celery. ``python examples/engine.py``."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timedelta, timezone

from celery_wheel.wheels import WheelTimer

STARTED = time.monotonic()


def say(text: str) -> None:
    """Print with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:5.2f} s  {text}")


def main() -> None:
    """Show relative and absolute times, cancel, reschedule, a series, shutdown."""
    last = threading.Event()
    with WheelTimer(max_workers=2) as timer:
        timer.submit(lambda: say("after half a second"), delay_s=0.5)
        at = datetime.now(timezone.utc) + timedelta(seconds=1)
        timer.submit(lambda: say("at a time of the wall clock"), at=at)

        never = timer.submit(lambda: say("never printed"), delay_s=0.7)
        say(f"cancelled one: {never.cancel()}, again: {never.cancel()}")

        moved = timer.submit(lambda: say("moved from an hour to 1.3 s"), delay_s=3600)
        moved.reschedule(delay_s=1.3)

        series = timer.every(0.25, lambda: say("every quarter of a second"))
        timer.submit(series.cancel, delay_s=1.1)

        timer.submit(last.set, delay_s=1.5)
        tomorrow = timer.submit(lambda: say("tomorrow"), delay_s=86400)
        last.wait()

        left = timer.shutdown()
        say(f"shutdown returned what did not run: {left == [tomorrow]}")

    with WheelTimer() as timer:
        done = threading.Semaphore(0)
        began = time.monotonic()
        for _ in range(100_000):
            timer.submit(done.release, delay_s=60).cancel()
        say(f"100,000 submitted and cancelled in {time.monotonic() - began:.2f} s")
        for _ in range(10_000):
            timer.submit(done.release, delay_s=0.2)
        for _ in range(10_000):
            done.acquire()
        say("10,000 due together have run")


if __name__ == "__main__":
    main()
