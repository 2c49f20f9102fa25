"""The envelope: what goes in comes out, and what is damaged is noticed."""

from __future__ import annotations

import enum
import math
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_wheel.envelope import Envelope, EnvelopeError, pack, unpack
from celery_wheel.errors import CorruptRow

OFFSETS = st.integers(-86_399, 86_399).map(lambda s: timezone(timedelta(seconds=s)))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**200), 2**200)
    | st.floats(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.datetimes()
    | st.datetimes(timezones=OFFSETS)
)
KEYS = st.text() | st.integers(-(2**31), 2**31)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)
TEXT = st.none() | st.text()
TABLES = st.dictionaries(st.text(), VALUES, max_size=5)


def header(value: object) -> object:
    """Send one value through an envelope as a header."""
    return unpack(pack({"x": value}, {}, {}, None, None, b"")).headers["x"]


def types(value: object) -> object:
    """The value with each leaf replaced by its type."""
    if isinstance(value, dict):
        return {key: types(item) for key, item in value.items()}
    if isinstance(value, list):
        return [types(item) for item in value]
    return type(value)


@settings(deadline=None, derandomize=True)
@given(TABLES, TABLES, TABLES, TEXT, TEXT, st.binary() | st.text())
def test_round_trip(headers, properties, info, content_type, encoding, body):
    """Every field comes back equal and of the same types."""
    envelope = unpack(pack(headers, properties, info, content_type, encoding, body))
    assert envelope == Envelope(headers, properties, info, content_type, encoding, body)
    assert types(envelope.headers) == types(headers)
    assert type(envelope.body) is type(body)


@pytest.mark.parametrize(
    "number", [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 10**400, -(10**400)]
)
def test_integers_of_any_size(number):
    """Integers at and beyond the edges of 64 bits are exact."""
    assert header(number) == number


def test_instants_keep_their_microseconds_and_offset():
    """Naive stays naive; aware keeps its offset, even one with seconds."""
    naive = datetime(2031, 2, 3, 4, 5, 6, 789)
    aware = naive.replace(tzinfo=timezone(timedelta(hours=-3, minutes=-30, seconds=-7)))
    assert header(naive) == naive
    assert header(naive).tzinfo is None
    assert header(aware).isoformat() == aware.isoformat()


@pytest.mark.parametrize("text", ["NaN", "sNaN", "-Infinity", "1.10", "-0", "1E+999"])
def test_decimals_keep_their_digits(text):
    """A Decimal comes back digit by digit, special values included."""
    assert str(header(Decimal(text))) == str(Decimal(text))


def test_a_float_that_is_no_number():
    """A NaN header survives."""
    assert math.isnan(header(math.nan))


def test_a_lone_surrogate_survives():
    """Text that is not valid UTF-8, as a broken client sends it, is kept as it is."""
    assert header("a\ud800b") == "a\ud800b"


def test_subclasses_come_back_as_their_base():
    """Tuples become lists, enums and other subclasses the built-in value beneath them."""

    class Colour(str, enum.Enum):
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 2**70

    class Table(dict):
        pass

    found = header(Table(a=(1, Colour.RED), b=Level.HIGH, c=bytearray(b"x"), d=memoryview(b"y")))
    assert found == {"a": [1, "red"], "b": 2**70, "c": b"x", "d": b"y"}
    assert types(found) == {"a": [int, str], "b": int, "c": bytes, "d": bytes}


def test_a_body_from_a_buffer_becomes_bytes():
    """The body of a buffer type is kept as bytes."""
    assert unpack(pack({}, {}, {}, None, None, memoryview(b"raw"))).body == b"raw"


def test_uuid_survives():
    """A UUID is a UUID again."""
    value = UUID("12345678123456781234567812345678")
    assert header([value]) == [value]


def test_an_unknown_type_is_named_with_its_place():
    """The error tells which header of the message holds what can't be kept."""
    with pytest.raises(EnvelopeError, match=r"headers\['deep'\]\[1\]\['x'\].*type object"):
        pack({"ok": 1, "deep": [0, {"x": object()}]}, {}, {}, None, None, b"")
    with pytest.raises(TypeError, match=r"delivery_info\['tags'\].*type set"):
        pack({}, {}, {"tags": {1}}, None, None, b"")


def test_a_structure_without_end_is_refused():
    """A list that holds itself is an error, not a crash."""
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(EnvelopeError, match=r"properties\['loop'\]"):
        pack({}, {"loop": loop}, {}, None, None, b"")


@settings(deadline=None, derandomize=True)
@given(st.data())
def test_one_changed_byte_is_noticed(data):
    """Whatever byte of an envelope is changed or cut off, reading it says so."""
    good = pack({"id": "a", "n": Decimal(1)}, {"priority": 3}, {}, "application/json", None, b"{}")
    at = data.draw(st.integers(0, len(good) - 1))
    flipped = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    for bad in (flipped, good[:at]):
        with pytest.raises(CorruptRow):
            unpack(bad)


@settings(deadline=None, derandomize=True)
@given(st.binary())
def test_any_bytes_are_read_or_refused(noise):
    """Noise is refused with the one error, whatever it is."""
    with pytest.raises(CorruptRow):
        unpack(b"\x01" + noise)
