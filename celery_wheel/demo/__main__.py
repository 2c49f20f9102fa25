"""The way in. Ctrl-C is caught before anything that takes time is imported."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

INTERRUPTED = 130


def _leave(*_: Any) -> NoReturn:
    """Nothing is running yet, so there is nothing to end."""
    os.write(2, b"\ninterrupted\n")
    os._exit(INTERRUPTED)


def _main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    from celery_wheel.demo.command import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    try:
        code = _main()
    except KeyboardInterrupt:  # before the handler was in place
        _leave()
    sys.exit(code)
