"""A sorted collection for the in-memory store: lists of bounded length, each sorted.

It keeps references to items and asks them for their sort key, so an entry costs eight bytes.
Knows nothing of tasks. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

__all__ = ("Ordered",)

T = TypeVar("T")

_CHUNK = 512


class Ordered(Generic[T]):
    """Items in the order of ``key(item)``, a tuple that is unique and must not change.

    ``add``, ``remove`` and a step of iteration are O(log n) and a move of at most one chunk.
    """

    __slots__ = ("_chunks", "_key", "_last")

    def __init__(self, key: Callable[[T], tuple[Any, ...]]) -> None:
        self._key = key
        self._chunks: list[list[T]] = []

        def last(chunk: list[T]) -> tuple[Any, ...]:
            return key(chunk[-1])

        self._last = last

    def add(self, item: T) -> None:
        """Put an item in its place."""
        chunks = self._chunks
        if not chunks:
            chunks.append([item])
            return
        at_key = self._key(item)
        at = min(bisect_left(chunks, at_key, key=self._last), len(chunks) - 1)
        chunk = chunks[at]
        chunk.insert(bisect_left(chunk, at_key, key=self._key), item)
        if len(chunk) > 2 * _CHUNK:
            # Rising keys are the usual case; a split in the middle keeps half-full chunks,
            # which is what a later burst of inserts between them wants.
            chunks.insert(at + 1, chunk[_CHUNK:])
            del chunk[_CHUNK:]

    def remove(self, item: T) -> None:
        """Take an item out that is in.

        Raises:
            KeyError: it is not in.
        """
        at_key = self._key(item)
        at = bisect_left(self._chunks, at_key, key=self._last)
        if at < len(self._chunks):
            chunk = self._chunks[at]
            place = bisect_left(chunk, at_key, key=self._key)
            if place < len(chunk) and chunk[place] is item:
                del chunk[place]
                if not chunk:
                    del self._chunks[at]
                return
        raise KeyError(at_key)

    def after(self, bound: tuple[Any, ...]) -> Iterator[T]:
        """Iterate over items with a key above ``bound``. Do not change the collection then."""
        first = bisect_right(self._chunks, bound, key=self._last)
        for at in range(first, len(self._chunks)):
            chunk = self._chunks[at]
            start = bisect_right(chunk, bound, key=self._key) if at == first else 0
            for place in range(start, len(chunk)):
                yield chunk[place]

    def rank(self, bound: tuple[Any, ...]) -> int:
        """How many items have a key below ``bound``. O(chunks)."""
        at = bisect_left(self._chunks, bound, key=self._last)
        if at == len(self._chunks):
            return len(self)
        before = sum(map(len, self._chunks[:at]))
        return before + bisect_left(self._chunks[at], bound, key=self._key)

    def __iter__(self) -> Iterator[T]:
        for chunk in self._chunks:
            yield from chunk

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __len__(self) -> int:
        return sum(map(len, self._chunks))
