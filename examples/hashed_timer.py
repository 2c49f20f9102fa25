"""Timeouts of many requests on one hashed timer. ``python examples/hashed_timer.py``."""

from __future__ import annotations

import threading
import time

from celery_wheel.errors import TooManyPending, WheelStopped
from celery_wheel.wheels import HashedWheelTimer


def main() -> None:
    """Most requests are answered and cancel their timeout; a few time out."""
    timer = HashedWheelTimer(tick=0.05, ticks_per_wheel=512, max_pending=50_000)
    timed_out: list[float] = []
    all_out = threading.Semaphore(0)

    def request_failed(deadline: float) -> None:
        timed_out.append(time.monotonic() - deadline)
        all_out.release()

    began = time.monotonic()
    pending = []
    for _ in range(20_000):
        deadline = time.monotonic() + 1.0
        pending.append(timer.new_timeout(lambda d=deadline: request_failed(d), 1.0))
    print(f"20,000 timeouts made in {time.monotonic() - began:.2f} s, pending: {timer.pending:,}")

    for timeout in pending[100:]:  # answered
        timeout.cancel()
    print(f"19,900 answered, their timeouts cancelled, pending: {timer.pending}")

    for _ in range(100):
        all_out.acquire()
    late = [round(seconds * 1000) for seconds in (min(timed_out), max(timed_out))]
    print(f"100 timed out, {late[0]} to {late[1]} ms late: never early, a tick (50 ms) or so")

    try:
        for _ in range(60_000):
            timer.new_timeout(print, 3600)
    except TooManyPending as exc:
        print(f"refused: {exc}")

    left = timer.stop()
    print(f"stop() returned {len(left):,} that were not processed")
    try:
        timer.new_timeout(print, 1)
    except WheelStopped as exc:
        print(f"refused: {exc}")


if __name__ == "__main__":
    main()
