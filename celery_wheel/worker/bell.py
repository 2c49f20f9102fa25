"""A pipe that ends the event loop's sleep.

Kombu's loop sleeps until its next timer even where callbacks are waiting; a byte in this pipe
makes the poll return at once.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from celery_wheel import _compat

__all__ = ("Bell",)


class Bell:
    """Rings the loop awake. :meth:`ring` from any thread; the rest from the loop's.

    Attributes:
        rung: whether it rang since it was silenced.
    """

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self.rung = False

    def register(self, hub: Any) -> None:
        """Have the loop listen; again after each connection, since the loop is reset."""
        hub.add_reader(self._read, self.silence)

    def ring(self) -> None:
        """Wake the loop. Several rings before it looks make one."""
        if not self.rung:
            self.rung = True
            with suppress(OSError):
                os.write(self._write, b"\0")

    def silence(self, *_: object) -> None:
        """Take back the ring, in the loop's thread; a turn must follow.

        By the loop when it wakes, and by the turn itself: a ring by what the loop has just done
        has been heard then, and must not cost another round.
        """
        # Read first: a byte written after the flag was cleared must not be read here. A ring
        # between the two writes nothing, and needs nothing: the turn follows.
        with suppress(OSError):
            os.read(self._read, 4096)
        self.rung = False

    def callbacks_wait(self) -> bool:
        """Whether the loop has callbacks that it would sleep upon."""
        return _compat.call_soon_pending(self._hub)

    def close(self) -> None:
        """Close the pipe."""
        self.rung = True
        with suppress(OSError):
            os.close(self._read)
        with suppress(OSError):
            os.close(self._write)
