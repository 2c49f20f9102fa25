"""A row in Redis, and back: a msgpack array that scripts read, too (``lua/lib.lua``).

Every number is one that Lua holds exactly, and every text is bytes. What no script looks at is
one opaque field: retries, priority and the envelope. The envelope is deflated where that makes
it smaller, with a dictionary of what nearly every Celery message has in it: a message of 800
bytes takes about 300.
"""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgpack

from celery_wheel.stores.base import Owner
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask

__all__ = (
    "decode_owner",
    "encode",
    "encode_owner",
    "member_of",
    "pack",
    "row_of",
    "text",
    "values_of",
)

_STATES = (PENDING, DISPATCHED)
_REST = struct.Struct(">Bqq")
_PLAIN, _DEFLATED = 0, 1

# Part of the format: another dictionary needs another number beside _DEFLATED. What is most
# common stands last, where references to it are shortest.
_DICTIONARY = (
    b"\xabx-death\xa6x-opt-redelivered\xa5kwargs\xa4args\xa9sentry-trace\xa7baggage"
    b"\xabtraceparent\xaatracestate\xb0application/data\xb4application/x-python-serialize"
    b"\xb1application/x-msgpack\xa6binary\xa4true\xa5falseexceptionredeliveredx-max-priority"
    b"\xa6chord\xa5chain\xa9callbacks\xa8errbacksbodydefaultcelery.chord_unlock"
    b'{"task": "", "args": [], "kwargs": {}, "options": {"task_id": "", "reply_to": ""}, '
    b'"subtask_type": null, "immutable": false}\xadcelery_delayed'
    b"\xa6periodic\xacdelivery_tag\xb1x-celery-priority0123456789abcdef-00:00.000000"
    b"\x96\xde\x00\x13\xa4lang\xa2py\xa4task\xb9tasks.\xa2id\xd9$"
    b"\xa6shadow\xc0\xa3eta\xd9 2025-12-2026-01-T00:00:00.000000+00:00\xa7expires\xc0"
    b"\xa5group\xc0\xabgroup_index\xc0\xa7retries\x00\xa9timelimit\x92\xc0\xc0\xa7root_id\xd9$"
    b"\xa9parent_id\xc0\xa8argsrepr\xa2()\xaakwargsrepr\xa2{}\xa6origin\xafgen1@localhost"
    b"\xadignore_result\xc2\xb5replaced_task_nesting\x00\xafstamped_headers\xc0\xa6stamps\x80"
    b"\x87\xaecorrelation_id\xd9$\xa8reply_to\xd9$\xaddelivery_mode\x02\xa8priority\x00"
    b"\xadbody_encoding\xa6base64\xacdelivery_tag\xd9$\xaddelivery_info\x82\xa8exchange\xa0"
    b"\xabrouting_key\xa6celery\x82\xa8exchange\xa0\xabrouting_key\xa6celery"
    b"\xb0application/json\xa5utf-8\xc4"
    b'[[], {}, {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'
)


def text(value: str) -> bytes:
    """A text as it is kept; of any content, lone surrogates included."""
    return value.encode("utf-8", "surrogatepass")


def _text_of(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def pack(value: Any) -> bytes:
    """Write arguments or a row for a script."""
    packed: bytes = msgpack.packb(value, use_bin_type=False)
    return packed


def _fit(number: int) -> int:
    """The nearest number of 64 bits: these come from headers, so may be anything."""
    return max(-(2**63), min(number, 2**63 - 1))


def member_of(arrival: int, key: bytes) -> bytes:
    """What stands for a row in the order of its line: arrival, then key."""
    return (_fit(arrival) + 2**63).to_bytes(8, "big") + key


def encode(task: DelayedTask) -> bytes:
    """Write a task that is put: pending."""
    return pack(
        (
            0,
            False if task.owner is None else text(task.owner),
            task.due_ms,
            task.version,
            int(task.redelivered),
            text(task.queue),
            text(task.id),
            text(task.name),
            False if task.expires_ms is None else task.expires_ms,
            [text(stamp) for stamp in task.stamps] or False,
            member_of(task.arrival, b""),
            _rest(task),
        )
    )


def _rest(task: DelayedTask) -> bytes:
    how, envelope = _PLAIN, task.envelope
    deflate = zlib.compressobj(1, wbits=-12, memLevel=5, zdict=_DICTIONARY)
    smaller = deflate.compress(envelope) + deflate.flush()
    if len(smaller) < len(envelope):
        how, envelope = _DEFLATED, smaller
    return _REST.pack(how, _fit(task.retries), _fit(task.priority)) + envelope


def values_of(packed: bytes) -> list[Any]:
    """The fields of a row as scripts see them."""
    fields: list[Any] = msgpack.unpackb(packed, raw=True)
    return fields


def row_of(key: bytes, packed: bytes) -> DelayedTask:
    """Read a row."""
    state, owner, due_ms, version, redelivered, queue, *more = values_of(packed)
    task_id, name, expires_ms, stamps, arrival, rest = more
    how, retries, priority = _REST.unpack_from(rest)
    envelope = rest[_REST.size :]
    if how == _DEFLATED:
        envelope = zlib.decompressobj(-12, zdict=_DICTIONARY).decompress(envelope)
    return DelayedTask(
        bytes(key),
        _text_of(task_id),
        _text_of(name),
        _text_of(queue),
        due_ms,
        envelope,
        retries,
        priority,
        None if expires_ms is False else expires_ms,
        int.from_bytes(arrival, "big") - 2**63,
        tuple(_text_of(stamp) for stamp in stamps or ()),
        version,
        _STATES[state],
        None if owner is False else _text_of(owner),
        bool(redelivered),
    )


def encode_owner(owner: Owner) -> bytes:
    """Write who an owner is; the name is kept beside it."""
    return pack((text(owner.node), text(owner.boot), owner.pid, text(owner.started)))


def decode_owner(name: bytes, packed: bytes) -> Owner:
    """Read who an owner is."""
    node, boot, pid, started = values_of(packed)
    return Owner(_text_of(name), _text_of(node), _text_of(boot), pid, _text_of(started))
