"""The contract of a store, sentence by sentence: leases and what happens without one."""

from __future__ import annotations

from celery_wheel.task import PENDING
from tests.stores.rows import LATER, NOW, claimed, dispatched, everything, ids, owner, task

#: Seconds of a lease that has run out when it begins: no test waits for a clock.
RUN_OUT = -1.0


def test_the_first_heartbeat_is_true(store):
    """The first call of an incarnation starts its lease and returns true."""
    assert store.heartbeat(owner("w1"), 60) is True
    assert store.owners() == [owner("w1")]


def test_heartbeats_renew(store):
    """Every further call renews and returns true, even late, if nobody reaped meanwhile."""
    store.heartbeat(owner("w1"), RUN_OUT)
    assert store.heartbeat(owner("w1"), 60) is True
    claimed(store, task("a"))
    assert store.reap() == 0


def test_a_lost_lease_is_told_once(store, other):
    """After a reap the next heartbeat returns false and starts a new lease."""
    store.heartbeat(owner("w1"), RUN_OUT)
    claimed(store, task("a"))
    assert other.reap() == 1
    assert store.heartbeat(owner("w1"), 60) is False
    assert store.heartbeat(owner("w1"), 60) is True
    assert store.owners() == [owner("w1")]


def test_a_new_incarnation_under_an_old_name_is_true(store, other):
    """Belief is the caller's: another object's first call returns true whatever is on record."""
    store.heartbeat(owner("w1"), 60)
    assert other.heartbeat(owner("w1"), 60) is True


def test_end_lease(store):
    """An ended lease is off the record; ending it again is no error."""
    store.heartbeat(owner("w1"), 60)
    store.heartbeat(owner("w2"), 60)
    store.end_lease("w1")
    store.end_lease("w1")
    assert store.owners() == [owner("w2")]
    assert store.heartbeat(owner("w1"), 60) is True


def test_owners_lists_the_dead_too(store):
    """Owners whose lease has run out are listed until somebody reaps."""
    store.heartbeat(owner("w1"), RUN_OUT)
    store.heartbeat(owner("w2"), 60)
    assert sorted(found.name for found in store.owners()) == ["w1", "w2"]
    store.reap()
    assert store.owners() == [owner("w2")]


def test_reap_frees_rows_of_expired_owners(store, other):
    """Rows of a lease that has run out are pending and unowned again, for anyone."""
    store.heartbeat(owner("w1"), RUN_OUT)
    store.heartbeat(owner("w2"), 60)
    claimed(store, task("a"))
    claimed(store, task("b"), by="w2")
    assert other.reap() == 1
    assert other.reap() == 0
    assert ids(other.claim("w3", LATER, 10)) == ["a"]


def test_reap_marks_what_was_dispatched(store):
    """Rows that a dead owner had handed over come back redelivered, the others do not."""
    store.heartbeat(owner("w1"), RUN_OUT)
    dispatched(store, task("a", NOW - 1))
    claimed(store, task("b"))
    assert store.reap() == 2
    assert [(row.id, row.state, row.owner, row.redelivered) for row in everything(store)] == [
        ("a", PENDING, None, True),
        ("b", PENDING, None, False),
    ]


def test_reap_frees_rows_of_unknown_owners(store):
    """Rows of an owner that never had a lease, or ended it, are freed."""
    store.put([task("a", owner="nobody")], NOW)
    store.heartbeat(owner("w1"), 60)
    claimed(store, task("b"))
    store.end_lease("w1")
    assert store.reap() == 2


def test_reap_of_named_owners(store):
    """A living lease that is named dead ends now; other leases go on."""
    for name in ("w1", "w2"):
        store.heartbeat(owner(name), 60)
        claimed(store, task(f"of {name}"), by=name)
    assert store.reap(["w1", "never heard of"]) == 1
    assert store.owners() == [owner("w2")]
    assert [(row.id, row.owner) for row in everything(store)] == [("of w1", None), ("of w2", "w2")]
    assert store.heartbeat(owner("w1"), 60) is False


def test_the_fence_holds_after_a_reap(store):
    """A worker that lost its lease can no longer confirm what was taken from it."""
    store.heartbeat(owner("w1"), RUN_OUT)
    (row,) = claimed(store, task("a"))
    store.reap()
    assert store.confirm("w1", [(row.key, 0)], NOW) == set()
    store.claim("w2", LATER, 1)
    assert store.confirm("w1", [(row.key, 0)], NOW) == set()
    assert store.confirm("w2", [(row.key, 0)], NOW) == {row.key}


def test_reap_deletes_tombstones_that_ran_out(store):
    """Tombstones of the past are deleted, of the future kept: of ids, stamps and keys."""
    old, new = task("old"), task("new")
    store.cancel(["old id"], ["old=1"], 1000)
    store.cancel(["new id"], ["new=1"], LATER)
    store.settle([old.key], seen_until_ms=1000)
    store.settle([new.key], seen_until_ms=LATER)
    store.reap()
    # At instant 0 even the old ones would still hold, were they there.
    olds = [old, task("old id"), task("x", stamps=("old=1",))]
    assert store.put(olds, 0).new == {row.key for row in olds}
    by_id, by_stamp = task("new id"), task("y", stamps=("new=1",))
    result = store.put([new, by_id, by_stamp], 0)
    assert (result.known, result.cancelled) == ({new.key}, {by_id.key, by_stamp.key})
