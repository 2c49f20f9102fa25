"""The envelope: one whole message as bytes, and back, with nothing changed on the way.

The encoding is msgpack, never pickle: reading an envelope runs no code of its writer. What an
AMQP table can hold and msgpack can't (``Decimal``, ``datetime``, integers over 64 bits), and
``UUID``, are extension types. The body is opaque and stays what it was, ``bytes`` or ``str``.

Layout: one byte with the format's version, the CRC-32 of the rest (4 bytes, big-endian), and
a msgpack array of the six fields of :class:`Envelope` in their order.

Lossy on purpose: tuples come back as lists, subclasses of built-in types as the built-in, and
an aware ``datetime`` with a fixed offset instead of its zone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgpack

from celery_wheel.errors import CorruptRow, WheelError

__all__ = ("Envelope", "EnvelopeError", "pack", "unpack")

_VERSION = b"\x01"
_HEAD = len(_VERSION) + 4

_DECIMAL, _DATETIME, _UUID, _BIG_INT = 1, 2, 3, 4


class EnvelopeError(WheelError, TypeError):
    """A value of the message can't be kept. The message names the field and the type."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message as it came from the broker."""

    headers: dict[Any, Any]
    properties: dict[Any, Any]
    delivery_info: dict[Any, Any]
    content_type: str | None
    content_encoding: str | None
    body: bytes | str


def pack(
    headers: Mapping[Any, Any],
    properties: Mapping[Any, Any],
    delivery_info: Mapping[Any, Any],
    content_type: str | None,
    content_encoding: str | None,
    body: bytes | bytearray | memoryview | str,
) -> bytes:
    """Encode one message.

    Raises:
        EnvelopeError: a value has a type that can't be kept, or is nested too deeply.
    """
    fields = (headers, properties, delivery_info, content_type, content_encoding, body)
    try:
        payload = _encode(fields)
    except (TypeError, ValueError, OverflowError, RecursionError) as exc:
        raise EnvelopeError(_complaint(fields, exc)) from exc
    return _VERSION + zlib.crc32(payload).to_bytes(4, "big") + payload


def unpack(data: bytes) -> Envelope:
    """Decode what :func:`pack` made.

    Raises:
        CorruptRow: the bytes are damaged, or of a format this release does not know.
    """
    if data[:1] != _VERSION:
        raise CorruptRow(f"an envelope begins with {bytes(data[:1])!r}, not {_VERSION!r}")
    payload = data[_HEAD:]
    if zlib.crc32(payload) != int.from_bytes(data[1:_HEAD], "big"):
        raise CorruptRow(f"the checksum of an envelope of {len(data)} bytes does not fit")
    try:
        fields = msgpack.unpackb(
            payload,
            ext_hook=_from_extension,
            strict_map_key=False,
            unicode_errors="surrogatepass",
        )
        return Envelope(*fields)
    except Exception as exc:  # whatever a damaged payload leads to, it is a damaged payload
        raise CorruptRow(f"an envelope of {len(data)} bytes can't be read: {exc}") from exc


def _encode(value: Any) -> bytes:
    packed: bytes = msgpack.packb(
        value, default=_to_extension, strict_types=True, unicode_errors="surrogatepass"
    )
    return packed


def _to_extension(value: Any) -> Any:
    """Stand in for what msgpack does not know: an extension, or the built-in base type."""
    if isinstance(value, datetime):
        return msgpack.ExtType(_DATETIME, value.isoformat().encode())
    if isinstance(value, Decimal):
        return msgpack.ExtType(_DECIMAL, str(value).encode())
    if isinstance(value, UUID):
        return msgpack.ExtType(_UUID, value.bytes)
    if isinstance(value, int):
        return _from_int(int(value))
    for base, convert in _BASES:
        if isinstance(value, base):
            return convert(value)
    raise TypeError(f"values of type {type(value).__name__} can't be kept")


def _from_int(number: int) -> Any:
    if -(2**63) <= number < 2**64:
        return number
    size = number.bit_length() // 8 + 1
    return msgpack.ExtType(_BIG_INT, number.to_bytes(size, "big", signed=True))


#: Subclasses go in as their base: the reader need not have the subclass.
_BASES: tuple[tuple[type | tuple[type, ...], Callable[[Any], Any]], ...] = (
    (str, str.__str__),
    (float, float),
    ((bytes, bytearray, memoryview), bytes),
    (Mapping, dict),
    ((list, tuple), list),
)


def _from_extension(code: int, data: bytes) -> Any:
    if code == _DECIMAL:
        return Decimal(data.decode())
    if code == _DATETIME:
        return datetime.fromisoformat(data.decode())
    if code == _UUID:
        return UUID(bytes=data)
    if code == _BIG_INT:
        return int.from_bytes(data, "big", signed=True)
    raise ValueError(f"extension type {code} is not known")


def _complaint(fields: tuple[Any, ...], exc: Exception) -> str:
    """Say which field of the message can't be kept, and why."""
    for name, value in zip(Envelope.__slots__, fields, strict=True):
        if _fails(value):
            return f"{name}{_path(value)} can't be kept in a store: {exc}"
    return f"the message can't be kept in a store: {exc}"


def _path(value: Any, depth: int = 0) -> str:
    """The way to the deepest part that can't be encoded, as subscripts."""
    if depth < 20:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if _fails(key) or _fails(item):
                    return f"[{key!r}]{_path(item, depth + 1)}"
        elif isinstance(value, list | tuple):
            for index, item in enumerate(value):
                if _fails(item):
                    return f"[{index}]{_path(item, depth + 1)}"
    return ""


def _fails(value: Any) -> bool:
    try:
        _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return True
    return False
