"""Kombu's event loop on the wheel. ``python examples/kombu_timer.py``.

For a worker without an event loop (threads, solo on ``memory://``, …) it is one setting:
``worker_timer = "celery_wheel.timer:Timer"``.
"""

from __future__ import annotations

import gc
import os
import time
import tracemalloc

from kombu.asynchronous.hub import Hub
from kombu.asynchronous.timer import Timer as KombuTimer

from celery_wheel.timer import Timer

STARTED = time.monotonic()


def say(text: str) -> None:
    """Print with the seconds since the start."""
    print(f"{time.monotonic() - STARTED:5.2f} s  {text}")


def run_a_hub() -> None:
    """call_later, call_repeatedly, priorities and cancel, in a real hub."""
    hub = Hub(timer=Timer(max_interval=10.0))
    reader, writer = os.pipe()  # a hub without anything to read only sleeps
    hub.add_reader(reader, lambda: None)
    try:
        hub.call_later(0.5, say, "call_later")
        when = time.monotonic() + 0.8
        hub.timer.call_at(when, say, ("low priority",), priority=9)
        hub.timer.call_at(when, say, ("high priority, entered after it",), priority=1)
        series = hub.call_repeatedly(0.2, say, "call_repeatedly")
        hub.call_later(0.6, series.cancel)
        end = time.monotonic() + 1.0
        hub.call_later(1.0, say, "done")
        while time.monotonic() < end:
            hub.run_once()
        hub.run_once()
    finally:
        hub.close()
        os.close(reader)
        os.close(writer)


def held_after_cancel(timer: Timer | KombuTimer) -> float:
    """MB that 50,000 cancelled entries with a payload of 1 KB still hold."""
    gc.collect()
    tracemalloc.start()
    for _ in range(50_000):
        timer.call_after(3600, print, (bytearray(1024),)).cancel()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held / 1e6


def main() -> None:
    """Run both."""
    run_a_hub()
    say(f"50,000 cancelled entries hold: kombu {held_after_cancel(KombuTimer()):.1f} MB")
    say(f"                               wheel {held_after_cancel(Timer()):.1f} MB")


if __name__ == "__main__":
    main()
