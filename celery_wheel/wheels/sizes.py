"""How many buckets each wheel has, and what one of them spans."""

from __future__ import annotations

__all__ = ("PRESETS", "spans_of")

#: Wheel sizes, nearest wheel first; the last one repeats for every wheel beyond.
PRESETS: dict[str, tuple[int, ...]] = {
    "worker": (4096,),
    "clock": (60, 60, 24),
    "linux": (256, 64, 64, 64, 64),
    "kafka": (20,),
}

_MAX_SIZE = 1 << 30

#: No wheel is made whose buckets span more ticks: the last one takes everything beyond.
_MAX_SPAN = 1 << 61


def spans_of(sizes: tuple[int, ...]) -> list[int]:
    """Ticks that one bucket of each wheel spans, nearest first.

    Raises:
        ValueError: no sizes, or one that can't be.
    """
    if not sizes or min(sizes) < 2 or max(sizes) > _MAX_SIZE:
        raise ValueError(f"wheel sizes are {sizes}: give each 2 to {_MAX_SIZE} buckets")
    spans = [1]
    while True:
        span = spans[-1] * sizes[min(len(spans), len(sizes)) - 1]
        if span > _MAX_SPAN:
            return spans
        spans.append(span)
