"""The tables of a SQL store, and how a row becomes a task.

Every name begins with the namespace (``celery_wheel`` unless set), so that applications can
share a database:

``<ns>_tasks``
    One row per delayed task. ``seq`` counts arrivals; ``key`` is unique. ``state`` is 0 for
    pending and 1 for dispatched. ``stamps`` repeats the row's stamps as JSON, for reading.
    Texts compare by their bytes: case, accents and spaces at the end count.

    ======================  ==============================  ==================================
    index                   on, where                       for
    ======================  ==============================  ==================================
    ``<ns>_ix_free``        queue, due, arrival; pending,   claim: costs by what it returns
                            unowned
    ``<ns>_ix_due``         due, arrival                    find, histogram, oldest due
    ``<ns>_ix_id``          id                              cancel, reschedule
    ``<ns>_ix_owner``       owner; owned                    release, reap
    ``<ns>_ix_expires``     expires; pending, that have it  next expiring
    ``<ns>_ix_dispatched``  due; dispatched                 counts
    ======================  ==============================  ==================================

    MySQL has no partial indexes: ``<ns>_ix_claim`` (owner, state, queue, due, arrival) is
    there in place of free and owner, ``<ns>_ix_state`` (state, due) in place of dispatched,
    and expires has every row.

``<ns>_stamps``
    (stamp, key) of every pending or dispatched task with stamps: cancel by stamp.
``<ns>_owners``
    One lease per owner; ``until_ms`` is of the store's own clock.
``<ns>_cancelled``
    Tombstones of ids and of stamps, until ``until_ms`` of the caller's clock.
``<ns>_seen``
    Tombstones of keys that were settled while a copy may still come.
``<ns>_meta``
    ``schema``: the version of this layout, written last. ``commits``: a number that grows
    where a database has to be given something to write (see :mod:`celery_wheel.stores.sqlite`).

Instants are UTC milliseconds.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from celery_wheel.stores._namespace import check_namespace
from celery_wheel.task import DISPATCHED, PENDING, DelayedTask

__all__ = (
    "SCHEMA_VERSION",
    "Tables",
    "make_tables",
    "shortened",
    "stamps_of",
    "task_of",
    "values_of",
)

SCHEMA_VERSION = 1

# NUL and lone surrogates, which JSON can carry but no database stores in a text, are written
# as an escape character and four hex digits; so is the escape character itself.
_ESCAPE = "\x1a"
_ANY_LENGTH = 2**32 - 1  # what MySQL calls LONGBLOB

_UNSTORABLE = re.compile("[\x00\x1a\ud800-\udfff]")
_ESCAPED = re.compile("\x1a([0-9a-f]{4})")


#: The length of a text, in bytes, that is in the key of a table: databases take no longer ones.
_LONGEST_NAME = 1600
#: The most bytes that MySQL keeps of an owner and of a queue, which share an index.
_OWNER, _QUEUE = 700, 2000


class SafeText(sa.types.TypeDecorator[str]):
    """Text of any content: one strange task id must not fail the whole batch it is in.

    MySQL, whose collations ignore case or spaces at the end, keeps it as UTF-8 bytes.

    Args:
        size: the most bytes that MySQL keeps; ``None``: any number, but not for an index.
    """

    impl = sa.Text
    cache_ok = True

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        self.size = size

    def load_dialect_impl(self, dialect: sa.Dialect) -> sa.types.TypeEngine[Any]:
        """Choose the type that compares by bytes."""
        if dialect.name == "mysql":
            kind = sa.LargeBinary(_ANY_LENGTH) if self.size is None else sa.VARBINARY(self.size)
            return dialect.type_descriptor(kind)
        if dialect.name == "postgresql":
            return dialect.type_descriptor(sa.Text(collation="C"))
        return dialect.type_descriptor(sa.Text())

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Escape what can't be stored."""
        if value is None:
            return None
        return _escaped(value).encode() if dialect.name == "mysql" else _escaped(value)

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> str | None:  # noqa: ARG002
        """Undo :meth:`process_bind_param`."""
        text: str | None = value.decode() if isinstance(value, bytes) else value
        if text is None or _ESCAPE not in text:
            return text
        return _ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), text)


class KeyText(SafeText):
    """Text in the key of a table: a long one is :func:`shortened`, and comes back so."""

    cache_ok = True

    def __init__(self) -> None:
        super().__init__(_LONGEST_NAME)

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Shorten, then escape."""
        return super().process_bind_param(None if value is None else shortened(value), dialect)


def shortened(text: str) -> str:
    """Give a text itself, or in place of one too long for a key, a digest of it."""
    if len(text) * 5 <= _LONGEST_NAME:  # no character takes more, escaped or not
        return text
    content = _escaped(text).encode()
    if len(content) <= _LONGEST_NAME:
        return text
    return f"blake2b:{hashlib.blake2b(content, digest_size=32).hexdigest()}"


def _escaped(text: str) -> str:
    if _UNSTORABLE.search(text) is None:
        return text
    return _UNSTORABLE.sub(lambda odd: f"{_ESCAPE}{ord(odd[0]):04x}", text)


def _binary(length: int) -> sa.types.TypeEngine[bytes]:
    kind = sa.LargeBinary(length) if length == _ANY_LENGTH else sa.VARBINARY(length)
    return sa.LargeBinary().with_variant(kind, "mysql")


_KEY = 32  # bytes; a key has 16
_MYSQL: dict[str, Any] = {
    "mysql_engine": "InnoDB",
    "mysql_charset": "utf8mb4",
    "mysql_row_format": "DYNAMIC",
}


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one namespace."""

    namespace: str
    metadata: sa.MetaData
    tasks: sa.Table
    stamps: sa.Table
    owners: sa.Table
    cancelled: sa.Table
    seen: sa.Table
    meta: sa.Table


def make_tables(namespace: str) -> Tables:
    """Describe the tables of a namespace; touches no database.

    Raises:
        ConfigError: the namespace is no identifier.
    """
    check_namespace(namespace)
    metadata = sa.MetaData()
    return Tables(
        namespace,
        metadata,
        tasks=_tasks(metadata, namespace),
        stamps=sa.Table(
            f"{namespace}_stamps",
            metadata,
            sa.Column("stamp", KeyText, primary_key=True),
            sa.Column("key", _binary(_KEY), primary_key=True),
            sa.Index(f"{namespace}_ix_stamps_key", "key"),
            sqlite_with_rowid=False,
            **_MYSQL,
        ),
        owners=_owners(metadata, namespace),
        cancelled=_tombstones(
            metadata,
            f"{namespace}_cancelled",
            sa.Column("name", KeyText, primary_key=True),
            sa.Column("is_stamp", sa.SmallInteger, primary_key=True, autoincrement=False),
        ),
        seen=_tombstones(
            metadata,
            f"{namespace}_seen",
            sa.Column("key", _binary(_KEY), primary_key=True),
        ),
        meta=sa.Table(
            f"{namespace}_meta",
            metadata,
            sa.Column("name", sa.String(40), primary_key=True),
            sa.Column("value", sa.BigInteger, nullable=False),
            **_MYSQL,
        ),
    )


def _owners(metadata: sa.MetaData, namespace: str) -> sa.Table:
    return sa.Table(
        f"{namespace}_owners",
        metadata,
        sa.Column("name", SafeText(_OWNER), primary_key=True),
        sa.Column("node", SafeText, nullable=False),
        sa.Column("boot", SafeText, nullable=False),
        sa.Column("pid", sa.BigInteger, nullable=False),
        sa.Column("started", SafeText, nullable=False),
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        **_MYSQL,
    )


def _tombstones(metadata: sa.MetaData, name: str, *columns: sa.Column[Any]) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        *columns,
        sa.Column("until_ms", sa.BigInteger, nullable=False),
        sa.Index(f"{name}_ix_until", "until_ms"),
        sqlite_with_rowid=False,
        **_MYSQL,
    )


def _tasks(metadata: sa.MetaData, namespace: str) -> sa.Table:
    # Integer primary keys count by themselves in every database only under this type.
    sequence = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    tasks = sa.Table(
        f"{namespace}_tasks",
        metadata,
        sa.Column("seq", sequence, primary_key=True),
        sa.Column("key", _binary(_KEY), nullable=False),
        sa.Column("id", SafeText, nullable=False),
        sa.Column("name", SafeText, nullable=False),
        sa.Column("queue", SafeText(_QUEUE), nullable=False),
        sa.Column("due_ms", sa.BigInteger, nullable=False),
        sa.Column("envelope", _binary(_ANY_LENGTH), nullable=False),
        sa.Column("retries", sa.BigInteger, nullable=False),
        sa.Column("priority", sa.BigInteger, nullable=False),
        sa.Column("expires_ms", sa.BigInteger),
        sa.Column("arrival", sa.BigInteger, nullable=False),
        sa.Column("stamps", SafeText),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("owner", SafeText(_OWNER)),
        sa.Column("redelivered", sa.SmallInteger, nullable=False),
        # Every row is updated and deleted soon: the dead ones are swept early and often.
        postgresql_with={
            "autovacuum_vacuum_scale_factor": "0.02",
            "autovacuum_analyze_scale_factor": "0.05",
        },
        **_MYSQL,
    )
    _indexes(namespace, tasks.c)
    return tasks


def _indexes(namespace: str, column: Any) -> None:
    def index(name: str, *columns: Any, where: Any = None, **options: Any) -> sa.Index:
        options |= {"sqlite_where": where, "postgresql_where": where}
        return sa.Index(f"{namespace}_ix_{name}", *columns, **options)

    pending = column.state == sa.literal_column("0")
    index("key", column.key, unique=True)
    # An id may be longer than what an ordered index takes.
    index("id", column.id, postgresql_using="hash", mysql_length=255)
    # To the end of the order: a planner never has to sort, and so reads no more than asked for.
    in_order = (column.due_ms, column.arrival, column.seq)
    index("due", *in_order)
    index("expires", column.expires_ms, where=pending & column.expires_ms.is_not(None))
    partial = (
        index("free", column.queue, *in_order, where=pending & column.owner.is_(None)),
        index("owner", column.owner, where=column.owner.is_not(None)),
        index("dispatched", column.due_ms, where=column.state == sa.literal_column("1")),
    )
    full = (
        index("claim", column.owner, column.state, column.queue, *in_order),
        index("state", column.state, column.due_ms),
    )
    for one in partial:
        one.ddl_if(callable_=_has_partial_indexes)
    for one in full:
        one.ddl_if(dialect="mysql")


def _has_partial_indexes(*_: Any, dialect: sa.Dialect, **__: Any) -> bool:
    return dialect.name != "mysql"


_STATES = (PENDING, DISPATCHED)


def stamps_of(text: str | None) -> tuple[str, ...]:
    """Read the column ``stamps``; a damaged one must not keep its page from being claimed."""
    try:
        return tuple(json.loads(text)) if text else ()
    except ValueError:
        return ()


def task_of(row: Any) -> DelayedTask:
    """Make a task of a row of ``tasks``, all columns in their order."""
    _, key, task_id, name, queue, due_ms, envelope, *rest = row
    retries, priority, expires_ms, arrival, stamps, version, state, owner, redelivered = rest
    return DelayedTask(
        key,
        task_id,
        name,
        queue,
        due_ms,
        envelope,
        retries,
        priority,
        expires_ms,
        arrival,
        stamps_of(stamps),
        version,
        _STATES[state],
        owner,
        bool(redelivered),
    )


def _fit(number: int) -> int:
    """The nearest number that a column holds: these come from headers, so may be anything."""
    return max(-(2**63), min(number, 2**63 - 1))


def values_of(task: DelayedTask) -> dict[str, Any]:
    """Give the columns of a task that is put: pending."""
    return {
        "key": task.key,
        "id": task.id,
        "name": task.name,
        "queue": task.queue,
        "due_ms": task.due_ms,
        "envelope": task.envelope,
        "retries": _fit(task.retries),
        "priority": _fit(task.priority),
        "expires_ms": task.expires_ms,
        "arrival": task.arrival,
        "stamps": json.dumps(task.stamps) if task.stamps else None,
        "version": task.version,
        "state": 0,
        "owner": task.owner,
        "redelivered": int(task.redelivered),
    }
