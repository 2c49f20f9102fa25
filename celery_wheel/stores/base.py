"""The contract of a store, in prose. One conformance suite runs it over every store.

A store keeps **rows** (:class:`~celery_wheel.task.DelayedTask`), **leases** (one per owner),
and two kinds of **tombstone**: of *ids and stamps* that were cancelled, and of *keys* that
were settled while the broker might still deliver a copy.

The life of a row::

    put ─▶ pending, unowned ─claim─▶ pending, owned ─confirm─▶ dispatched ─settle─▶ gone
                 ▲                        │                        │
                 └────────release─────────┴────────release─────────┘

Rules that hold for every store:

- Calls take batches. Each call is atomic unless its docstring says otherwise, and each may be
  repeated after an error: the second call changes nothing that the first one did.
- A call that can't reach its server raises :class:`~celery_wheel.errors.StoreUnavailable`.
- Instants are UTC milliseconds. ``due``, ``expires`` and tombstones are compared with the
  ``now_ms`` of the caller; leases are compared with the *store's own* clock (for an embedded
  store the machine's), and so is what :meth:`Store.reap` clears away.
- A row whose owner has no living lease may be taken by anyone, after :meth:`Store.reap`.
- One object is used by one thread at a time. Another thread that needs the store opens
  another one of the same URL (:meth:`Store.sibling`).
- After a fork the child must not use, nor close, what the parent opened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from celery_wheel.task import DelayedTask

__all__ = (
    "Cancelled",
    "Counts",
    "Filter",
    "Owner",
    "Page",
    "PutResult",
    "Ref",
    "Store",
)

#: A row as the fence knows it: its key and the version the caller has seen.
Ref = tuple[bytes, int]


@dataclass(frozen=True, slots=True)
class Owner:
    """One incarnation of one worker.

    ``name`` is unique to the incarnation (node name and a random part). ``node`` is the
    worker's node name, ``boot`` the boot id of its host, ``pid`` and ``started`` its process:
    with them a later incarnation on the same host can tell that this one is provably dead.
    """

    name: str
    node: str = ""
    boot: str = ""
    pid: int = 0
    started: str = ""


@dataclass(frozen=True, slots=True)
class PutResult:
    """What became of the tasks of one :meth:`Store.put`; each key is in exactly one set.

    Attributes:
        new: committed now.
        known: a row with this key is there already, or a tombstone of the key: a copy. Goes
            before cancelled: what was handed over and is then cancelled has copies, too.
        cancelled: a tombstone of its id or of one of its stamps is there; not kept.
    """

    new: frozenset[bytes] = frozenset()
    known: frozenset[bytes] = frozenset()
    cancelled: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Filter:
    """Which rows, in either state; every field that is set must fit, ``ids`` and ``stamps`` by
    one of theirs. ``due_*`` in UTC ms, before is exclusive."""

    ids: tuple[str, ...] | None = None
    stamps: tuple[str, ...] | None = None
    name: str | None = None
    queue: str | None = None
    owner: str | None = None
    due_from_ms: int | None = None
    due_before_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """Rows in due order; ``cursor`` goes into the next call, ``None`` at the end."""

    rows: list[DelayedTask] = field(default_factory=list)
    cursor: str | None = None


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The answer of :meth:`Store.cancel`.

    Attributes:
        rows: the rows that this call deleted, with their envelopes: only the caller that got
            a row announces it.
        outcomes: per id that was asked for or found: ``cancelled`` (a pending row is gone, even
            if another of that id runs), ``dispatched`` (it was handed over already) or
            ``unknown`` (no row has it; the tombstone stands for what may still come).
    """

    rows: list[DelayedTask] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many rows there are; ``owned`` are those of either state that have an owner."""

    pending: int = 0
    dispatched: int = 0
    owned: int = 0


class Store(ABC):
    """Where delayed tasks are kept. See the module's text for what every store promises."""

    #: ``True`` where what was put outlives this process.
    durable: bool = True

    @abstractmethod
    def open(self) -> None:
        """Connect, and make the schema where there is none.

        Safe when many workers start at once.

        Raises:
            SchemaVersionError: a newer release made this store.
            StoreUnavailable: it can't be reached.
            ConfigError: the URL names a place that can't be used (unreadable path, …).
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. Rows stay. May be called twice."""

    @abstractmethod
    def sibling(self) -> Store:
        """Another, unopened store object of the same place, for another thread."""

    @abstractmethod
    def put(self, tasks: Sequence[DelayedTask], now_ms: int) -> PutResult:
        """Keep tasks as pending, each under the ``owner`` it carries (``None``: unowned).

        Idempotent by key. **Durable on return**: only now may the broker's copy be acked.
        The check for tombstones and the insert are one atomic step, so that no cancel falls
        between. Two tasks of one key in one call: the first is new, the result holds the key
        once.

        On crash: before the return, all or nothing is there; the broker still has every
        message, and a second put of those that were kept answers ``known``.
        """

    @abstractmethod
    def claim(
        self,
        owner: str,
        until_ms: int,
        limit: int,
        *,
        queues: Sequence[str] | None = None,
        unknown: Sequence[str] = (),
    ) -> list[DelayedTask]:
        """Take up to ``limit`` unowned pending rows with ``due_ms <= until_ms``.

        Only rows whose source queue is one of ``queues`` (``None``: every queue), and of no
        task whose name is in ``unknown``: what the claimer does not consume, or can't run, is
        left for others. In due order, then arrival. Two claimers never get the same row.
        Costs by what it returns and the number of queues; rows of other queues or due later
        are never read. Rows of unknown tasks are stepped over one by one.

        On crash: the rows stay owned until the lease ends, then :meth:`reap` frees them. After
        an error the caller may own rows that it was not told of: :meth:`find` them by owner.
        """

    @abstractmethod
    def confirm(self, owner: str, refs: Sequence[Ref], now_ms: int) -> set[bytes]:
        """The fence: ``pending → dispatched`` where all of this still holds.

        The row is pending, owned by ``owner``, of this version, ``due_ms <= now_ms``, and
        neither its id nor a stamp of it has a tombstone. Returns the keys that were confirmed;
        the rest must be dropped by the caller. Repeating the call after a lost answer returns
        the same keys (a row dispatched under this owner and version counts as confirmed).

        On crash: dispatched rows of a dead owner become pending again by :meth:`reap`, with
        ``redelivered`` set.
        """

    @abstractmethod
    def settle(self, keys: Sequence[bytes], seen_until_ms: int | None = None) -> int:
        """Delete rows that are done; returns how many there were.

        With ``seen_until_ms`` a tombstone of each key is left until then, whether or not a row
        was there: the broker may deliver a copy yet.
        """

    @abstractmethod
    def release(
        self, owner: str, keys: Sequence[bytes] | None = None, *, redelivered: bool = False
    ) -> int:
        """Give rows back: pending, unowned. ``None``: all of this owner's, in either state.

        ``redelivered`` sets the flag on the named rows; a row that was dispatched gets it in
        any case. Due times stay. Returns how many.
        """

    @abstractmethod
    def heartbeat(self, owner: Owner, ttl_s: float) -> bool:
        """Start or renew the owner's lease for ``ttl_s`` seconds of the store's clock.

        Returns ``False`` where a lease of this owner existed in the caller's belief but was
        reaped meanwhile; it is started anew, and rows that were taken are taken.
        The first call of an incarnation returns ``True``.
        """

    @abstractmethod
    def end_lease(self, owner: str) -> None:
        """Forget the lease. Call :meth:`release` first; what is still owned is freed by reap."""

    @abstractmethod
    def owners(self) -> list[Owner]:
        """Every owner that has a lease on record, alive or not."""

    @abstractmethod
    def reap(self, dead: Iterable[str] = ()) -> int:
        """Free the rows of every owner whose lease has run out or is not on record.

        ``dead`` names owners that are provably dead: their leases end now. Freed rows are
        pending and unowned; those that were dispatched are marked redelivered. Also deletes
        tombstones that have run out, a bounded number per call. Returns how many rows were freed.
        """

    @abstractmethod
    def cancel(
        self,
        ids: Sequence[str],
        stamps: Sequence[str],
        remember_until_ms: int,
    ) -> Cancelled:
        """Delete the pending rows of these ids and of these ``header=value`` stamps.

        Leaves a tombstone of every id and stamp until ``remember_until_ms``, found or not, in
        the same atomic step. Dispatched rows are left alone and answered ``dispatched``.
        Durable on return.
        """

    @abstractmethod
    def remembered(self, limit: int) -> list[str]:
        """Ids with a tombstone of :meth:`cancel`, those that last longest first. Reads only.

        For what never comes into a store: a message whose ETA passed before a worker got it.
        """

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> list[DelayedTask]:
        """Delete pending rows by key, whoever owns them, and return those deleted.

        For tasks that expired: only the caller that got the row announces it.
        """

    @abstractmethod
    def reschedule(self, task_id: str, due_ms: int) -> int:
        """Move the pending rows of an id: new due, version + 1, unowned. Returns how many.

        Rows that have this due already are counted and left as they are.
        """

    @abstractmethod
    def find(self, which: Filter, limit: int, cursor: str | None = None) -> Page:
        """Rows in due order, then arrival. Reads only; one page costs by what it returns
        where only due bounds are given."""

    @abstractmethod
    def count(self) -> Counts:
        """Exact at some instant during the call."""

    @abstractmethod
    def histogram(self, edges_ms: Sequence[int]) -> list[int]:
        """Pending rows with ``due_ms`` below the first edge, between each two, and from the
        last on: ``len(edges_ms) + 1`` numbers."""

    @abstractmethod
    def oldest_due(self) -> int | None:
        """The smallest ``due_ms`` of a pending row, or ``None``."""

    @abstractmethod
    def next_expiring(self, before_ms: int, limit: int) -> list[DelayedTask]:
        """Pending rows whose ``expires_ms`` is below ``before_ms``, soonest first."""
