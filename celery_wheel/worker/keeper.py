"""One kind of custody: who keeps a task until it is done, and how that is said to them.

Both kinds are the same code over a :class:`~celery_wheel.stores.base.Store`:

- **store custody**: the store is durable, so a message is acknowledged as soon as its row is
  committed;
- **broker custody**: the store is a data structure of this process, and the message stays
  unacknowledged with the broker until its row is settled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from celery_wheel.clock import Clock
from celery_wheel.stores.base import Cancelled, PutResult, Ref, Store
from celery_wheel.worker.messages import Delivery

if TYPE_CHECKING:
    from celery_wheel.settings import Settings
    from celery_wheel.task import DelayedTask
    from celery_wheel.worker.residents import Item
    from celery_wheel.worker.store_thread import Executor

__all__ = ("Keeper",)

#: Ids that one call of the store cancels, so that other calls get their turn.
CANCEL_CHUNK = 1000
#: Rows that one call frees while the worker stops.
FREE_CHUNK = 1000
#: Seconds between two batches of ends: each costs the store a write, before which or after which
#: what is due has to wait for its confirmation.
SETTLE_EVERY_S = 0.01


class Keeper:
    """Puts, confirms, settles and releases through one store.

    Settles and give-backs are gathered while a call is under way and sent as one batch (group
    commit). They may come from any thread; all else is for the owner of the engine.

    Args:
        owner: the name under which this worker owns rows.
        holds_messages: broker custody.
        copies_may_come: whether the broker may deliver a message again that was acknowledged
            (the ack was lost); where it can't, no tombstones of keys are needed.
    """

    def __init__(
        self,
        executor: Executor,
        owner: str,
        clock: Clock,
        settings: Settings,
        *,
        holds_messages: bool,
    ) -> None:
        self.executor, self.owner = executor, owner
        self.holds_messages = holds_messages
        self.copies_may_come = not holds_messages
        #: Broker custody: the unacknowledged message of each key.
        self.messages: dict[bytes, Delivery] = {}
        #: Whether messages are answered in the engine's turn only (an event loop owns them).
        self.answers_on_loop = False
        #: Called in any thread when something was gathered.
        self.on_gathered: Callable[[], None] = lambda: None
        #: Called in the engine's turn when rows were given back.
        self.on_released: Callable[[], None] = lambda: None
        #: Called in any thread with what was rejected for good and how to settle it; whether it
        #: will be settled when the broker has it.
        self.dead_letter: Callable[[Item, Callable[[], None]], bool] = lambda _item, _settle: False
        #: Set while the worker stops: no turn will come, so nothing waits for one.
        self.direct = False
        self._clock, self._settings = clock, settings
        self._settles: deque[tuple[bytes, bool]] = deque()
        self._releases: deque[tuple[bytes, bool]] = deque()
        self._settling = False
        self._sent_at = float("-inf")
        self._answers: deque[tuple[Delivery, Callable[[Delivery], object]]] = deque()

    # -- intake --------------------------------------------------------------------------------

    def put(
        self,
        tasks: list[DelayedTask],
        done: Callable[[PutResult], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Commit rows."""
        now_ms = self._clock.wall_ms()
        self.executor.submit("put", lambda store: store.put(tasks, now_ms), done, failed)

    # -- the fence -----------------------------------------------------------------------------

    def confirm(
        self,
        refs: list[Ref],
        done: Callable[[set[bytes]], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Ask the store whether these may run now."""
        clock, owner = self._clock, self.owner
        self.executor.submit(
            "confirm", lambda store: store.confirm(owner, refs, clock.wall_ms()), done, failed
        )

    # -- the end of a task ---------------------------------------------------------------------

    def settle(self, item: Item) -> None:
        """The task is done (or given to the pool, as its task acknowledges). Any thread."""
        self._end(item.task.key, Delivery.ack_log_error, acked=item.acked)

    def reject(self, item: Item) -> None:
        """The task refused its message for good. Any thread."""
        end = partial(self._end, item.task.key, Delivery.reject, acked=item.acked)
        if self.holds_messages or not self.dead_letter(item, end):
            end()

    def requeue(self, item: Item, *, redelivered: bool = True) -> None:
        """Give a task back: pending and anyone's, or to the broker that holds it. Any thread."""
        if self.holds_messages:
            self._end(item.task.key, Delivery.requeue)
            return
        self._releases.append((item.task.key, redelivered))
        self._gathered()

    def free(self, items: Iterable[Item]) -> None:
        """Give rows back that wait in a worker that stops, in chunks: ends get their turn."""
        mine = [item for item in items if item.keeper is self]
        mine.sort(key=lambda item: item.task.due_ms)
        for start in range(0, len(mine), FREE_CHUNK):
            keys = [item.task.key for item in mine[start : start + FREE_CHUNK]]
            self.executor.submit("release", _releasing(self.owner, keys))

    def discard_message(self, key: bytes) -> None:
        """Broker custody: acknowledge the message of a row that is gone."""
        self._answer(self.messages.pop(key, None), Delivery.ack_log_error)

    def forget_messages(self) -> None:
        """Broker custody: the connection is gone, and with it what was held on it."""
        keys = list(self.messages)
        self.messages.clear()
        self.executor.submit("forget", lambda store: store.settle(keys))

    def _end(self, key: bytes, how: Callable[[Delivery], object], *, acked: bool = False) -> None:
        # In this order: once the broker is answered, or even before, the same message may be
        # here again, and must not find a row that still stands, nor be answered for this one.
        delivery = self.messages.pop(key, None)
        self.settle_key(key, acked=acked)
        self._answer(delivery, how)

    def _answer(self, delivery: Delivery | None, how: Callable[[Delivery], object]) -> None:
        # A channel belongs to the loop's thread; a pool's thread only leaves a note.
        if delivery is None:
            return
        if self.direct or not self.answers_on_loop:
            how(delivery)
        else:
            self._answers.append((delivery, how))
            self._gathered()

    def settle_key(self, key: bytes, *, acked: bool = False) -> None:
        """Delete a row; leave a tombstone unless no copy of its message can come. Any thread."""
        if self.holds_messages:
            self.executor.submit("settle", lambda store: store.settle([key]))
            return
        self._settles.append((key, self.copies_may_come and not acked))
        self._gathered()

    def _gathered(self) -> None:
        if self.direct:
            self.flush()
        else:
            self.on_gathered()

    def flush(self) -> None:
        """Send what was gathered; rows wait while the call before is under way."""
        while self._answers:
            delivery, how = self._answers.popleft()
            how(delivery)
        if not self.direct and (self._settling or self._clock.monotonic() < (self.flush_at or 0)):
            return
        settles, releases = _take(self._settles), _take(self._releases)
        if not settles and not releases:
            return
        self._settling = True
        self._sent_at = self._clock.monotonic()

        def settled(_: object) -> None:
            self._settling = False
            self.flush()
            if releases:
                self.on_released()

        self.executor.submit("settle", self._ending(settles, releases), settled, settled)

    @property
    def flush_at(self) -> float | None:
        """When the ends that wait may be sent, monotonic seconds; give-backs may at once."""
        if not self._settles or self._releases or self._settling:
            return None
        return self._sent_at + SETTLE_EVERY_S

    def _ending(
        self, settles: list[tuple[bytes, bool]], releases: list[tuple[bytes, bool]]
    ) -> Callable[[Store], None]:
        """The store's part of a batch of ends."""
        owner = self.owner
        seen_until_ms = self._clock.wall_ms() + self._settings.seen_ttl_ms

        def call(store: Store) -> None:
            for flag, until_ms in ((False, None), (True, seen_until_ms)):
                keys = [key for key, seen in settles if seen is flag]
                if keys:
                    store.settle(keys, until_ms)
                keys = [key for key, redelivered in releases if redelivered is flag]
                if keys:
                    store.release(owner, keys, redelivered=flag)

        return call

    @property
    def idle(self) -> bool:
        """Whether nothing waits to be sent."""
        return not (self._settles or self._releases or self._answers or self._settling)

    # -- cancelling ----------------------------------------------------------------------------

    def cancel(
        self, ids: Sequence[str], stamps: Sequence[str], done: Callable[[Cancelled], None]
    ) -> None:
        """Delete rows and leave tombstones, in chunks; ``done`` is called once per chunk."""
        until_ms = self._clock.wall_ms() + self._settings.revoke_ttl_ms
        chunks: list[tuple[Sequence[str], Sequence[str]]] = [
            (ids[start : start + CANCEL_CHUNK], ()) for start in range(0, len(ids), CANCEL_CHUNK)
        ]
        if stamps:
            chunks.append(((), stamps))
        for chunk in chunks:
            self.executor.submit("cancel", _cancelling(chunk, until_ms), done)

    def forget(self, keys: list[bytes], done: Callable[[list[DelayedTask]], None]) -> None:
        """Delete rows that expired; the answer is those that this call deleted."""
        self.executor.submit("forget", lambda store: store.forget(keys), done)


def _cancelling(
    chunk: tuple[Sequence[str], Sequence[str]], until_ms: int
) -> Callable[[Store], Cancelled]:
    ids, stamps = chunk
    return lambda store: store.cancel(ids, stamps, until_ms)


def _releasing(owner: str, keys: list[bytes]) -> Callable[[Store], int]:
    return lambda store: store.release(owner, keys)


def _take(line: deque[tuple[bytes, bool]]) -> list[tuple[bytes, bool]]:
    taken = []
    while line:
        taken.append(line.popleft())
    return taken
