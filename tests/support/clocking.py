"""A worker whose wall clock can be set: an offset in seconds, read from a file.

Imported by a worker process (``conf={"imports": ["tests.support.clocking"]}``). Only what the
package's own clock tells is moved; Celery's and the file system's are the machine's.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from celery_wheel.clock import SystemClock

__all__ = ("OFFSET_VARIABLE", "set_clock")

OFFSET_VARIABLE = "CELERY_WHEEL_TEST_OFFSET"


def set_clock(path: Path, seconds: float) -> None:
    """Step the clock of every worker that reads this file."""
    new = path.with_suffix(".new")
    new.write_text(str(seconds))
    new.rename(path)


def _wall_ms(_: Any) -> int:
    try:
        offset_s = float(Path(os.environ[OFFSET_VARIABLE]).read_text())
    except OSError:
        offset_s = 0.0
    return time.time_ns() // 1_000_000 + round(offset_s * 1000)


if OFFSET_VARIABLE in os.environ:
    SystemClock.wall_ms = _wall_ms  # type: ignore[method-assign]
