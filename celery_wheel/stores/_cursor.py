"""The cursor of :meth:`Store.find`: where the last page ended, as text."""

from __future__ import annotations

__all__ = ("decode_cursor", "encode_cursor")


def encode_cursor(due_ms: int, arrival: int, tie: str) -> str:
    """Write down the order of a page's last row; ``tie`` is the store's own tie-breaker."""
    return f"{due_ms}:{arrival}:{tie}"


def decode_cursor(cursor: str) -> tuple[int, int, str]:
    """Read a cursor.

    Raises:
        ValueError: it is not one of :func:`encode_cursor`.
    """
    try:
        due_ms, arrival, tie = cursor.split(":")
        return int(due_ms), int(arrival), tie
    except ValueError:
        raise ValueError(
            f"{cursor!r} is no cursor: pass the cursor of the previous page, or none"
        ) from None
