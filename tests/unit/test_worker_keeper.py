"""The keeper: ends are gathered while a call is under way, and tombstones are left if needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from celery_wheel.clock import FakeClock
from celery_wheel.settings import Settings
from celery_wheel.worker.keeper import CANCEL_CHUNK, SETTLE_EVERY_S, Keeper


class Recorder:
    """A store that writes down what it is asked."""

    def __init__(self):
        self.calls = []

    def settle(self, keys, seen_until_ms=None):
        self.calls.append(("settle", list(keys), seen_until_ms))

    def release(self, owner, keys, *, redelivered=False):
        self.calls.append(("release", owner, list(keys), redelivered))

    def cancel(self, ids, stamps, until_ms):
        self.calls.append(("cancel", len(ids), list(stamps), until_ms))


class Slow:
    """An executor whose calls run when told."""

    def __init__(self):
        self.store = Recorder()
        self.under_way = []

    def submit(self, name, call, done=None, failed=None):
        self.under_way.append((name, call, done, failed))

    def finish(self):
        """Run the oldest call and its callback."""
        _, call, done, _ = self.under_way.pop(0)
        answer = call(self.store)
        if done is not None:
            done(answer)


@pytest.fixture
def clock():
    """A clock that moves when told."""
    return FakeClock()


@pytest.fixture
def keeper(clock):
    """Store custody over a slow executor."""
    made = Keeper(Slow(), "me", clock, Settings(), holds_messages=False)
    made.gathered = []
    made.on_gathered = lambda: made.gathered.append(1)
    return made


def item(name, *, acked=False):
    return SimpleNamespace(task=SimpleNamespace(key=name), acked=acked)


def test_ends_are_sent_as_one_batch_per_call(keeper, clock):
    """While a call is under way, ends wait for it, and then go together."""
    keeper.settle(item(b"1"))
    keeper.flush()
    for name in (b"2", b"3", b"4"):
        keeper.settle(item(name))
        keeper.flush()
    assert len(keeper.executor.under_way) == 1
    clock.advance(SETTLE_EVERY_S)
    keeper.executor.finish()
    keeper.executor.finish()
    until_ms = clock.wall_ms() + keeper._settings.seen_ttl_ms
    batches = [keys for _, keys, _ in keeper.executor.store.calls]
    assert batches == [[b"1"], [b"2", b"3", b"4"]]
    assert keeper.executor.store.calls[-1][2] == until_ms
    assert keeper.idle
    assert len(keeper.gathered) == 4


def test_a_batch_of_ends_waits_a_moment_and_a_give_back_does_not(keeper, clock):
    """Ends cost a write each: not more than some per second. What others may run goes at once."""
    keeper.settle(item(b"1"))
    keeper.flush()
    keeper.executor.finish()
    keeper.settle(item(b"2"))
    keeper.flush()
    assert keeper.executor.under_way == []
    assert keeper.flush_at == pytest.approx(clock.monotonic() + SETTLE_EVERY_S)
    keeper.requeue(item(b"3"))
    keeper.flush()
    assert len(keeper.executor.under_way) == 1
    keeper.executor.finish()
    sent = {call[0] for call in keeper.executor.store.calls[1:]}
    assert sent == {"release", "settle"}


def test_tombstones_are_left_where_a_copy_may_come(keeper):
    """Not where the broker is known to have taken the ack."""
    keeper.settle(item(b"known", acked=True))
    keeper.settle(item(b"unknown"))
    keeper.flush()
    keeper.executor.finish()
    seen = {keys[0]: until_ms for _, keys, until_ms in keeper.executor.store.calls}
    assert seen[b"known"] is None
    assert seen[b"unknown"] > 0


def test_give_backs_carry_their_flag_and_are_told_of(keeper):
    """What was delivered before says so; the engine looks at the store again after it."""
    released = []
    keeper.on_released = lambda: released.append(1)
    keeper.requeue(item(b"ran"))
    keeper.requeue(item(b"waited"), redelivered=False)
    keeper.flush()
    assert released == []
    keeper.executor.finish()
    assert sorted(keeper.executor.store.calls, key=str) == [
        ("release", "me", [b"ran"], True),
        ("release", "me", [b"waited"], False),
    ]
    assert released == [1]


def test_while_the_worker_stops_nothing_waits(keeper):
    """There will be no turn: each end is sent by whoever brings it."""
    keeper.settle(item(b"1"))
    keeper.flush()
    keeper.direct = True
    keeper.settle(item(b"2"))
    keeper.requeue(item(b"3"))
    assert len(keeper.executor.under_way) == 3
    for _ in range(3):
        keeper.executor.finish()
    assert keeper.idle


def test_many_ids_are_cancelled_in_chunks(keeper, clock):
    """Other calls get their turn between them; stamps have a call of their own."""
    keeper.cancel([str(number) for number in range(2 * CANCEL_CHUNK + 1)], ["a=b"], lambda _: None)
    while keeper.executor.under_way:
        keeper.executor.finish()
    until_ms = clock.wall_ms() + keeper._settings.revoke_ttl_ms
    assert keeper.executor.store.calls == [
        ("cancel", CANCEL_CHUNK, [], until_ms),
        ("cancel", CANCEL_CHUNK, [], until_ms),
        ("cancel", 1, [], until_ms),
        ("cancel", 0, ["a=b"], until_ms),
    ]
