"""The contract of a store, sentence by sentence: the life of a row."""

from __future__ import annotations

import dataclasses

import pytest

from celery_wheel.stores.base import Counts, PutResult
from celery_wheel.task import DISPATCHED, PENDING
from tests.stores.rows import LATER, NOW, claimed, dispatched, everything, ids, owner, task


def test_put_keeps_every_field(store):
    """A row comes back with every field as it went in, pending and under the owner it carries."""
    put = task(
        "a",
        retries=3,
        priority=7,
        expires_ms=LATER,
        stamps=("batch=1", "user=ü"),
        version=2,
        owner="w1",
        redelivered=True,
        envelope=bytes(range(256)),
    )
    store.put([put], NOW)
    assert everything(store) == [put]


def test_put_is_a_copy(store):
    """What the caller does to its object afterwards does not change the row."""
    mine = task("a")
    store.put([mine], NOW)
    mine.due_ms, mine.state = 0, DISPATCHED
    (row,) = store.claim("w1", LATER, 1)
    row.version = 9
    (again,) = everything(store)
    assert (again.due_ms, again.state, again.version) == (NOW, PENDING, 0)


def test_put_is_pending_whatever_the_object_says(store):
    """A task is put as pending even from an object that was dispatched."""
    store.put([task("a", state=DISPATCHED)], NOW)
    assert store.count() == Counts(pending=1)


@pytest.mark.parametrize(
    "text", ["", "\x00", "a\x1a0041", "\ud800", "'; DROP TABLE x; --", "☃" * 500]
)
def test_put_takes_any_text(store, text):
    """An id, name or queue of any content is kept, found and cancelled like another."""
    put = task(text, name=text, queue=text, stamps=(text,))
    store.put([put], NOW)
    assert everything(store) == [put]
    assert store.cancel([text], [text], LATER).outcomes == {text: "cancelled"}
    assert store.put([put], NOW).cancelled == {put.key}


def test_put_takes_any_number_of_retries(store):
    """Numbers of a header that no column holds do not fail the batch they are in."""
    store.put([task("a", retries=2**80, priority=-(2**80)), task("b")], NOW)
    first = store.claim("w1", LATER, 2)[0]
    assert first.retries >= 2**62
    assert first.priority <= -(2**62)


def test_put_again_after_a_lost_answer(store):
    """A second put of what was kept answers known and changes nothing."""
    tasks = [task("a"), task("b")]
    first, second = store.put(tasks, NOW), store.put(tasks, NOW)
    assert first.new == second.known == {t.key for t in tasks}
    assert not second.new
    assert store.count().pending == 2


def test_put_of_a_known_key_leaves_the_row(store):
    """A copy with a known key does not touch the row, even one that is dispatched."""
    (row,) = dispatched(store, task("a"))
    copy = dataclasses.replace(row, envelope=b"other", due_ms=NOW + 1)
    assert store.put([copy], NOW).known == {row.key}
    assert everything(store)[0].envelope == row.envelope


def test_put_twice_in_one_call(store):
    """Of two tasks of one key in one call the first is kept, and the key is new once."""
    first = task("a", envelope=b"first")
    second = dataclasses.replace(first, envelope=b"second")
    result = store.put([first, second], NOW)
    assert (result.new, result.known, result.cancelled) == ({first.key}, set(), set())
    assert [row.envelope for row in everything(store)] == [b"first"]


def test_put_of_nothing(store):
    """An empty batch is no error."""
    assert store.put([], NOW) == PutResult()


def test_put_of_a_large_batch(store):
    """A batch larger than any limit of a database is kept as a whole."""
    tasks = [task(f"t{n}", stamps=(f"s={n}",)) for n in range(1200)]
    assert len(store.put(tasks, NOW).new) == 1200
    assert len(store.put(tasks, NOW).known) == 1200
    assert store.count().pending == 1200


def test_put_is_refused_by_a_tombstone_of_its_id(store):
    """A task that comes after the cancel of its id is answered cancelled and not kept."""
    store.cancel(["a"], [], LATER)
    late, retry, other = task("a"), task("a", retries=1), task("b")
    result = store.put([late, retry, other], NOW)
    assert result.cancelled == {late.key, retry.key}
    assert result.new == {other.key}
    assert ids(everything(store)) == ["b"]
    assert store.put([late], NOW).cancelled == {late.key}


def test_put_is_refused_by_a_tombstone_of_a_stamp(store):
    """A task that carries a cancelled stamp is answered cancelled; the name alone is no stamp."""
    store.cancel([], ["batch=1"], LATER)
    late, other = task("a", stamps=("user=2", "batch=1")), task("batch=1", stamps=("batch=2",))
    result = store.put([late, other], NOW)
    assert (result.cancelled, result.new) == ({late.key}, {other.key})


def test_tombstones_of_cancel_end(store):
    """A tombstone holds until its instant, exclusive, by the caller's clock."""
    store.cancel(["a"], ["s=1"], NOW + 10)
    by_id, by_stamp = task("a"), task("b", stamps=("s=1",))
    assert store.put([by_id, by_stamp], NOW + 9).cancelled == {by_id.key, by_stamp.key}
    assert store.put([by_id, by_stamp], NOW + 10).new == {by_id.key, by_stamp.key}


def test_a_shorter_cancel_does_not_shorten_the_tombstone(store):
    """Of two cancels the longer memory counts, in whichever order they came."""
    for first, second in ((NOW + 5, LATER), (LATER, NOW + 5)):
        store.cancel([f"a{first}"], [], first)
        store.cancel([f"a{first}"], [], second)
        late = task(f"a{first}")
        assert store.put([late], NOW + 100).cancelled == {late.key}


def test_claim_takes_in_due_order_then_arrival(store):
    """Rows come in due order, then arrival, whatever the order of their put."""
    store.put(
        [
            task("c", NOW + 2, arrival=1),
            task("b2", NOW + 1, arrival=9),
            task("b1", NOW + 1, arrival=5),
            task("a", NOW, arrival=7),
        ],
        NOW,
    )
    assert ids(store.claim("w1", LATER, 10)) == ["a", "b1", "b2", "c"]


def test_claim_respects_until_and_limit(store):
    """Only rows due by ``until`` (inclusive) are taken, and no more than the limit."""
    store.put([task(f"t{n}", NOW + n) for n in range(5)], NOW)
    assert ids(store.claim("w1", NOW + 3, 2)) == ["t0", "t1"]
    assert ids(store.claim("w1", NOW + 3, 10)) == ["t2", "t3"]
    assert store.claim("w1", NOW + 3, 10) == []
    assert store.claim("w1", LATER, 0) == []


def test_claim_gives_no_row_twice(store, other):
    """Two claimers share the rows without overlap; what is claimed names its owner."""
    store.put([task(f"t{n}", NOW + n) for n in range(6)], NOW)
    mine, theirs = store.claim("w1", LATER, 3), other.claim("w2", LATER, 6)
    assert (ids(mine), ids(theirs)) == (["t0", "t1", "t2"], ["t3", "t4", "t5"])
    assert {row.owner for row in mine} == {"w1"}
    assert [row.owner for row in everything(store)] == ["w1"] * 3 + ["w2"] * 3


def test_claim_follows_the_queues(store):
    """Only rows of the named queues are taken; in due order over all of them; none for none."""
    names = ("a", "b", "c", "a", "b", "", "c")
    store.put([task(f"{name}{n}", NOW + n, queue=name) for n, name in enumerate(names)], NOW)
    assert store.claim("w1", LATER, 10, queues=[]) == []
    assert store.claim("w1", LATER, 10, queues=["no such queue"]) == []
    assert ids(store.claim("w1", LATER, 3, queues=["c", "a", "a"])) == ["a0", "c2", "a3"]
    assert ids(store.claim("w1", NOW + 1, 9, queues=["a", "b", "c"])) == ["b1"]
    assert ids(store.claim("w2", LATER, 9, queues=["", "b"])) == ["b4", "5"]
    assert ids(store.claim("w2", LATER, 9)) == ["c6"]


def test_claim_of_every_queue_keeps_the_order(store):
    """Without queues rows of all of them come in due order, then arrival, up to the limit."""
    store.put([task(f"t{n}", NOW + n // 2, queue=f"q{n % 3}") for n in range(9)], NOW)
    assert ids(store.claim("w1", NOW + 3, 5)) == ["t0", "t1", "t2", "t3", "t4"]
    assert ids(store.claim("w1", NOW + 3, 9)) == ["t5", "t6", "t7"]


def test_claim_skips_unknown_tasks(store):
    """Rows of tasks that the claimer does not know are left, and do not count to the limit."""
    rows = [task(f"t{n}", NOW + n, name=f"n{n % 3}", queue=f"q{n % 2}") for n in range(9)]
    store.put(rows, NOW)
    assert ids(store.claim("w1", LATER, 2, unknown=["n0", "never put"])) == ["t1", "t2"]
    assert ids(store.claim("w1", LATER, 9, queues=["q0"], unknown=["n0"])) == ["t4", "t8"]
    assert store.claim("w1", LATER, 9, unknown=["n0", "n1", "n2"]) == []
    assert ids(store.claim("w2", LATER, 9)) == ["t0", "t3", "t5", "t6", "t7"]


def test_freed_rows_are_claimable_by_their_queue(store):
    """Released and moved rows come back under the queue they have, and no other."""
    (row,) = claimed(store, task("a", queue="q1"))
    store.release("w1", [row.key])
    assert store.claim("w2", LATER, 9, queues=["q2"]) == []
    assert ids(store.claim("w2", LATER, 9, queues=["q1"])) == ["a"]
    store.reschedule("a", NOW + 5)
    assert ids(store.claim("w1", NOW + 5, 9, queues=["q2", "q1"])) == ["a"]


def test_claim_leaves_owned_and_dispatched_rows(store):
    """Rows put under an owner, and rows handed over, are not claimable."""
    dispatched(store, task("a"))
    store.put([task("b", owner="w1")], NOW)
    assert store.claim("w2", LATER, 10) == []


def test_confirm_dispatches(store):
    """A row that is pending, mine, of this version and due is dispatched."""
    (row,) = claimed(store, task("a"))
    assert store.confirm("w1", [(row.key, 0)], NOW) == {row.key}
    (row,) = everything(store)
    assert (row.state, row.owner) == (DISPATCHED, "w1")


def test_confirm_again_after_a_lost_answer(store):
    """A second confirm returns the same keys."""
    rows = claimed(store, task("a"), task("b"))
    refs = [(row.key, row.version) for row in rows]
    assert store.confirm("w1", refs, NOW) == store.confirm("w1", refs, NOW)
    assert store.count() == Counts(dispatched=2, owned=2)


@pytest.mark.parametrize(
    ("by", "version", "now_ms"),
    [("w2", 0, NOW), ("w1", 1, NOW), ("w1", 0, NOW - 1)],
    ids=["another owner", "another version", "not yet due"],
)
def test_confirm_refuses(store, by, version, now_ms):
    """A row of another owner or version, or not yet due, is refused and stays as it is."""
    (row,) = claimed(store, task("a"))
    assert store.confirm(by, [(row.key, version)], now_ms) == set()
    assert everything(store) == [row]


def test_confirm_refuses_what_is_not_mine(store):
    """Unowned rows, rows dispatched by others, and keys without a row are refused."""
    free = task("a")
    store.put([free], NOW)
    (theirs,) = dispatched(store, task("b", NOW - 1), by="w2")[:1]
    refs = [(free.key, 0), (theirs.key, 0), (b"no such key 1234", 0)]
    assert store.confirm("w1", refs, LATER) == set()


def test_confirm_is_partial(store):
    """What fits is confirmed, and the rest of the batch is not."""
    soon, late = claimed(store, task("a", NOW), task("b", NOW + 5))
    assert store.confirm("w1", [(soon.key, 0), (late.key, 0)], NOW) == {soon.key}
    assert store.confirm("w1", [], NOW) == set()


def test_confirm_refuses_after_a_cancel(store):
    """A row that was handed over, cancelled, and given back is not handed over again."""
    by_id, by_stamp = dispatched(store, task("a"), task("b", stamps=("s=1",)))
    assert store.cancel(["a"], ["s=1"], LATER).outcomes == {"a": "dispatched", "b": "dispatched"}
    store.release("w1")
    rows = store.claim("w1", LATER, 10)
    assert store.confirm("w1", [(row.key, row.version) for row in rows], NOW) == set()
    assert {row.id for row in store.forget([by_id.key, by_stamp.key])} == {"a", "b"}


def test_confirm_goes_on_once_a_tombstone_ended(store):
    """A tombstone that has run out by the caller's clock refuses nothing."""
    (row,) = dispatched(store, task("a"))
    store.cancel(["a"], [], NOW + 10)
    store.release("w1")
    store.claim("w1", LATER, 1)
    assert store.confirm("w1", [(row.key, 0)], NOW + 9) == set()
    assert store.confirm("w1", [(row.key, 0)], NOW + 10) == {row.key}


def test_settle_deletes(store):
    """Settled rows are gone, in either state; the number tells how many there were."""
    handed, held = dispatched(store, task("a")) + claimed(store, task("b"))
    assert store.settle([handed.key, held.key, b"no such key 1234"]) == 2
    assert store.settle([handed.key, held.key]) == 0
    assert everything(store) == []


def test_settle_without_memory_lets_a_copy_in(store):
    """Without a tombstone the same key may be put again."""
    (row,) = dispatched(store, task("a", stamps=("s=1",)))
    store.settle([row.key])
    assert store.put([row], NOW).new == {row.key}


def test_settle_with_memory_refuses_a_copy(store):
    """With a tombstone a copy is known until then, whether or not a row was there."""
    (row,) = dispatched(store, task("a"))
    never = task("b")
    assert store.settle([row.key, never.key], seen_until_ms=NOW + 10) == 1
    assert store.put([row, never], NOW + 9).known == {row.key, never.key}
    assert store.put([row, never], NOW + 10).new == {row.key, never.key}


def test_settle_again_keeps_the_longer_memory(store):
    """Repeating a settle neither shortens the tombstone nor forgets it."""
    row = task("a")
    store.settle([row.key], seen_until_ms=LATER)
    store.settle([row.key], seen_until_ms=NOW + 1)
    store.settle([row.key])
    assert store.put([row], NOW + 100).known == {row.key}


def test_a_settled_copy_is_known_even_when_cancelled(store):
    """A copy of what already ran is a copy, whatever was cancelled since."""
    row = task("a")
    store.settle([row.key], seen_until_ms=LATER)
    store.cancel(["a"], [], LATER)
    result = store.put([row], NOW)
    assert (result.known, result.cancelled) == ({row.key}, set())


def test_release_named_rows(store):
    """Named rows go back: pending, unowned, same due and version, not redelivered."""
    first, second = claimed(store, task("a"), task("b"))
    assert store.release("w1", [first.key, b"no such key 1234"]) == 1
    assert store.release("w1", [first.key]) == 0
    back, kept = everything(store)
    assert (back.owner, back.state, back.redelivered, back.due_ms) == (None, PENDING, False, NOW)
    assert kept == second
    assert ids(store.claim("w2", LATER, 10)) == ["a"]


def test_release_of_what_was_dispatched_is_redelivered(store):
    """A row that was handed over comes back marked redelivered in any case."""
    (row,) = dispatched(store, task("a"))
    assert store.release("w1", [row.key]) == 1
    (back,) = store.claim("w2", LATER, 1)
    assert (back.redelivered, back.state, back.version) == (True, PENDING, 0)


def test_release_can_mark_named_rows(store):
    """``redelivered`` sets the flag on named rows, and a later release does not take it away."""
    (row,) = claimed(store, task("a"))
    store.release("w1", [row.key], redelivered=True)
    (row,) = store.claim("w1", LATER, 1)
    assert row.redelivered
    store.release("w1", [row.key])
    assert everything(store)[0].redelivered


def test_release_everything(store):
    """Without keys all of this owner's rows go back, in either state, and nobody else's."""
    dispatched(store, task("a", NOW - 2))
    claimed(store, task("b", NOW - 1))
    claimed(store, task("c"), by="w2")
    assert store.release("w1") == 2
    assert store.release("w1") == 0
    assert [(row.id, row.owner, row.redelivered) for row in everything(store)] == [
        ("a", None, True),
        ("b", None, False),
        ("c", "w2", False),
    ]


def test_release_of_others_rows_is_refused(store):
    """Naming a row of another owner releases nothing."""
    (row,) = claimed(store, task("a"), by="w2")
    assert store.release("w1", [row.key], redelivered=True) == 0
    assert everything(store) == [row]


def test_release_of_many(store):
    """Thousands of named rows go back in one call."""
    rows = claimed(store, *(task(f"t{n}") for n in range(1100)))
    assert store.release("w1", [row.key for row in rows]) == 1100
    assert store.count().owned == 0


def test_rows_outlive_a_close(store, other):
    """Closing, twice even, loses no row; opening again finds them."""
    store.put([task("a")], NOW)
    store.close()
    store.close()
    store.open()
    assert ids(everything(store)) == ids(everything(other)) == ["a"]


def test_a_damaged_envelope_is_handed_out_as_it_is(store):
    """The store does not read envelopes: the worker decides about what it can't read."""
    store.put([task("a", envelope=b"\x00not an envelope")], NOW)
    (row,) = store.claim("w1", LATER, 1)
    assert row.envelope == b"\x00not an envelope"


def test_every_change_is_seen_by_a_sibling(store, other):
    """What one object did is there for the other at once."""
    (row,) = dispatched(store, task("a"))
    assert other.put([row], NOW).known == {row.key}
    assert other.settle([row.key]) == 1
    assert store.put([row], NOW).new == {row.key}
    assert other.heartbeat(owner("w1"), 60)
    assert store.owners() == [owner("w1")]
