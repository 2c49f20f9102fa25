"""Kombu's filesystem transport, with messages that can't be seen half written.

Kombu opens a message's file under its final name and then writes it; a worker that looks in
between takes an empty message, loses it and stops. Rare, but not among thousands of messages.
"""

from __future__ import annotations

import uuid
from itertools import count
from pathlib import Path
from typing import Any

from kombu.transport import filesystem
from kombu.utils.json import dumps

from celery_wheel.clock import SYSTEM_CLOCK

__all__ = ("Channel", "Transport")

_numbers = count()


class Channel(filesystem.Channel):
    """Writes beside, then renames."""

    def _put(self, queue: Any, payload: Any, **_: Any) -> None:  # type: ignore[override]
        # The order of names is the order of delivery.
        at_ms = round(SYSTEM_CLOCK.monotonic() * 1000)
        name = f"{at_ms:015}-{next(_numbers):09}_{uuid.uuid4()}.{queue}.msg"
        final = Path(self.data_folder_out, name)
        part = final.with_suffix(".part")
        part.write_text(dumps(payload))  # type: ignore[no-untyped-call]
        part.rename(final)


class Transport(filesystem.Transport):
    """``filesystem://`` as the demo uses it."""

    Channel = Channel
