"""Instants as people write them, to UTC milliseconds and back."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo

__all__ = ("LATEST_MS", "iso", "to_ms")

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
#: The last instant that can be written down: the end of the year 9999, less a day for zones.
LATEST_MS = 253_402_214_400_000


def to_ms(at: datetime | str, zone: tzinfo) -> int:
    """UTC milliseconds, rounded up.

    Args:
        at: a datetime or a text in ISO 8601.
        zone: where one without an offset is.

    Raises:
        ValueError: the text is no date, or too far away; the message says what to write.
    """
    try:
        # Python 3.10 does not read the Z.
        moment = at if isinstance(at, datetime) else datetime.fromisoformat(_offset(at.strip()))
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=zone)
        return -((_EPOCH - moment) // timedelta(milliseconds=1))
    except (ValueError, OverflowError):
        raise ValueError(
            f"{at!s} is no date in ISO 8601: write 2030-01-31T18:00:00+00:00 (or end in Z; "
            f"without an offset it is taken in the app's timezone, {zone})"
        ) from None


def _offset(text: str) -> str:
    return f"{text[:-1]}+00:00" if text[-1:] in ("Z", "z") else text


def iso(at_ms: int, zone: tzinfo = timezone.utc) -> str:
    """An instant in ISO 8601, with its offset from UTC."""
    at_ms = max(-62_135_510_400_000, min(at_ms, LATEST_MS))
    return (_EPOCH + timedelta(milliseconds=at_ms)).astimezone(zone).isoformat()
