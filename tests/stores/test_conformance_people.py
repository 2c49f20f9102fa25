"""The contract of a store, sentence by sentence: what people and control commands ask for."""

from __future__ import annotations

import pytest

from celery_wheel.stores.base import Cancelled, Counts, Filter
from celery_wheel.task import PENDING
from tests.stores.rows import LATER, NOW, claimed, dispatched, everything, ids, task


def test_cancel_returns_what_it_deleted(store):
    """Pending rows of the ids, owned or not, are deleted and returned with their envelopes."""
    free, held, kept = task("a"), task("b", owner="w1"), task("c")
    store.put([free, held, kept], NOW)
    answer = store.cancel(["a", "b"], [], LATER)
    assert sorted(answer.rows, key=lambda row: row.id) == [free, held]
    assert answer.outcomes == {"a": "cancelled", "b": "cancelled"}
    assert ids(everything(store)) == ["c"]


def test_cancel_outcomes(store):
    """Each id is answered cancelled, dispatched or unknown; dispatched rows are left alone."""
    dispatched(store, task("run", NOW - 1))
    store.put([task("wait")], NOW)
    answer = store.cancel(["run", "wait", "never"], [], LATER)
    assert answer.outcomes == {"run": "dispatched", "wait": "cancelled", "never": "unknown"}
    assert ids(answer.rows) == ["wait"]
    assert store.count() == Counts(dispatched=1, owned=1)


def test_cancel_of_a_running_task_takes_its_waiting_retry(store):
    """An id with one row running and one waiting is cancelled: the waiting one is gone."""
    dispatched(store, task("a"))
    store.put([task("a", retries=1)], NOW)
    answer = store.cancel(["a"], [], LATER)
    assert [row.retries for row in answer.rows] == [1]
    assert answer.outcomes == {"a": "cancelled"}
    assert store.count().dispatched == 1


def test_cancel_again_returns_no_row(store):
    """Only one call gets a row: a second one finds nothing, and the tombstone stands."""
    late = task("a")
    store.put([late], NOW)
    store.cancel(["a"], [], LATER)
    assert store.cancel(["a"], [], LATER) == Cancelled([], {"a": "unknown"})
    assert store.put([late], NOW).cancelled == {late.key}


def test_what_was_cancelled_is_remembered(store):
    """Ids are told by how long they are remembered; stamps are not among them."""
    store.cancel(["a"], ["s=1"], LATER)
    store.cancel(["b"], [], LATER + 5)
    assert store.remembered(10) == ["b", "a"]
    assert store.remembered(1) == ["b"]


def test_cancel_by_stamp(store):
    """Rows that carry one of the stamps are deleted; their ids are among the outcomes."""
    dispatched(store, task("run", stamps=("s=1",)))
    store.put([task("a", stamps=("s=1", "t=1")), task("b", stamps=("s=2",)), task("c")], NOW)
    answer = store.cancel([], ["s=1", "t=1"], LATER)
    assert ids(answer.rows) == ["a"]
    assert answer.rows[0].stamps == ("s=1", "t=1")
    assert answer.outcomes == {"run": "dispatched", "a": "cancelled"}
    assert ids(everything(store)) == ["run", "b", "c"]


def test_cancel_by_id_and_stamp_deletes_a_row_once(store):
    """A row that both name is returned once."""
    store.put([task("a", stamps=("s=1", "s=2"))], NOW)
    answer = store.cancel(["a", "a"], ["s=1", "s=2"], LATER)
    assert ids(answer.rows) == ["a"]
    assert answer.outcomes == {"a": "cancelled"}


def test_cancel_of_nothing(store):
    """Without ids and stamps nothing is cancelled."""
    store.put([task("a")], NOW)
    assert store.cancel([], [], LATER) == Cancelled()
    assert store.count().pending == 1


def test_cancel_of_thousands(store):
    """Thousands of ids go in one call, and each is answered and remembered."""
    tasks = [task(f"t{n}") for n in range(1300)]
    store.put(tasks, NOW)
    wanted = [f"t{n}" for n in range(2600)]
    answer = store.cancel(wanted, [], LATER)
    assert len(answer.rows) == 1300
    assert answer.outcomes == {
        name: "cancelled" if n < 1300 else "unknown" for n, name in enumerate(wanted)
    }
    assert len(store.put(tasks, NOW).cancelled) == 1300


def test_cancelled_rows_leave_the_fence(store):
    """A worker that holds a cancelled row in its wheel is refused."""
    (row,) = claimed(store, task("a"))
    store.cancel(["a"], [], LATER)
    assert store.confirm("w1", [(row.key, row.version)], NOW) == set()


def test_forget(store):
    """Pending rows are deleted by key whoever owns them; only one caller gets each."""
    free, held = task("a", expires_ms=NOW, stamps=("s=1",)), task("b", owner="w2")
    store.put([free, held], NOW)
    keys = [free.key, held.key, b"no such key 1234"]
    assert sorted(store.forget(keys), key=lambda row: row.id) == [free, held]
    assert store.forget(keys) == []
    assert store.put([free], NOW).new == {free.key}


def test_forget_leaves_what_was_dispatched(store):
    """A row that was handed over is not forgotten."""
    (row,) = dispatched(store, task("a"))
    assert store.forget([row.key]) == []
    assert store.count().dispatched == 1


def test_reschedule(store):
    """Pending rows of the id move: new due, version + 1, unowned; the old version is refused."""
    (row,) = claimed(store, task("a"))
    assert store.reschedule("a", NOW + 500) == 1
    (moved,) = everything(store)
    assert (moved.due_ms, moved.version, moved.owner) == (NOW + 500, 1, None)
    assert (moved.key, moved.state, moved.envelope) == (row.key, PENDING, row.envelope)
    assert store.confirm("w1", [(row.key, 0)], LATER) == set()
    assert store.claim("w2", NOW + 499, 1) == []
    (again,) = store.claim("w2", NOW + 500, 1)
    assert store.confirm("w2", [(again.key, again.version)], NOW + 500) == {row.key}


def test_reschedule_again_changes_nothing(store):
    """Moving a row to where it is leaves version and owner: a repeated call is harmless."""
    store.put([task("a")], NOW)
    store.reschedule("a", NOW + 5)
    store.claim("w1", LATER, 1)
    assert store.reschedule("a", NOW + 5) == 1
    (row,) = everything(store)
    assert (row.version, row.owner) == (1, "w1")


def test_reschedule_of_what_is_not_pending(store):
    """A dispatched row and an unknown id are not moved."""
    (row,) = dispatched(store, task("a"))
    assert store.reschedule("a", LATER) == 0
    assert store.reschedule("b", LATER) == 0
    assert everything(store)[0].due_ms == row.due_ms


def test_find_gives_pages_in_due_order(store):
    """Pages follow each other in due order, then arrival, without gap or repetition."""
    tasks = [task(f"t{n}", NOW + n // 3, arrival=n) for n in range(10)]
    store.put(tasks[::-1], NOW)
    seen, cursor = [], None
    for _ in range(4):
        page = store.find(Filter(), 3, cursor)
        seen += ids(page.rows)
        cursor = page.cursor
    assert seen == ids(tasks)
    assert cursor is None


def test_find_ends(store):
    """The cursor is none when nothing follows, also where the limit fits exactly."""
    store.put([task("a"), task("b")], NOW)
    assert store.find(Filter(), 2).cursor is None
    assert store.find(Filter(), 1).cursor is not None
    assert store.find(Filter(), 0).rows == []


def test_find_goes_on_where_rows_vanished(store):
    """A cursor stays good when the row it was made of is gone."""
    store.put([task(f"t{n}", NOW + n) for n in range(4)], NOW)
    page = store.find(Filter(), 2)
    store.settle([row.key for row in page.rows])
    assert ids(store.find(Filter(), 9, page.cursor).rows) == ["t2", "t3"]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (Filter(), "abcd"),
        (Filter(ids=("a", "d", "x")), "ad"),
        (Filter(ids=()), ""),
        (Filter(stamps=("s=1", "s=2")), "ab"),
        (Filter(stamps=()), ""),
        (Filter(name="n1"), "ac"),
        (Filter(queue="q2"), "cd"),
        (Filter(owner="w1"), "bd"),
        (Filter(due_from_ms=NOW + 1), "bcd"),
        (Filter(due_before_ms=NOW + 2), "ab"),
        (Filter(due_from_ms=NOW + 1, due_before_ms=NOW + 3), "bc"),
        (Filter(ids=("a", "b", "c"), name="n1", due_from_ms=NOW + 1), "c"),
        (Filter(stamps=("s=1",), queue="q1", owner="w1"), "b"),
        (Filter(name="other"), ""),
    ],
)
def test_find_by_filter(store, which, expected):
    """Every field that is set must fit; dispatched rows are found like pending ones."""
    store.put([task("d", NOW + 3, name="n2", queue="q2")], NOW)
    (row,) = store.claim("w1", LATER, 1)
    store.confirm("w1", [(row.key, 0)], LATER)
    store.put(
        [
            task("a", NOW, name="n1", queue="q1", stamps=("s=1", "s=2")),
            task("b", NOW + 1, name="n2", queue="q1", stamps=("s=1",), owner="w1"),
            task("c", NOW + 2, name="n1", queue="q2"),
        ],
        NOW,
    )
    assert ids(store.find(which, 10).rows) == list(expected)


def test_find_thousands_of_ids_in_pages(store):
    """A filter of thousands of ids is answered in order, page by page."""
    store.put([task(f"t{n}", NOW + n) for n in range(1200)], NOW)
    which = Filter(ids=tuple(f"t{n}" for n in reversed(range(1200))))
    first = store.find(which, 700)
    second = store.find(which, 700, first.cursor)
    assert ids(first.rows + second.rows) == [f"t{n}" for n in range(1200)]
    assert second.cursor is None


def test_a_foreign_cursor_is_an_error(store):
    """A text that is no cursor is refused with what to do."""
    with pytest.raises(ValueError, match="pass the cursor of the previous page"):
        store.find(Filter(), 1, "page 2")


def test_count(store):
    """Counts are exact: pending, dispatched, and those of either state that have an owner."""
    assert store.count() == Counts(0, 0, 0)
    dispatched(store, task("a"))
    claimed(store, task("b"), task("c"))
    store.put([task("d")], NOW)
    assert store.count() == Counts(pending=3, dispatched=1, owned=3)


def test_histogram(store):
    """Pending rows are counted below, between and from the edges on; an edge is inclusive."""
    dispatched(store, task("run", NOW - 5))
    store.put([task(f"t{n}", NOW + n) for n in (-1, 0, 1, 9, 10, 11)], NOW)
    assert store.histogram([NOW, NOW + 10]) == [1, 3, 2]
    assert store.histogram([NOW, NOW, NOW + 100]) == [1, 0, 5, 0]
    assert store.histogram([]) == [6]


def test_oldest_due(store):
    """The smallest due of a pending row, owned or not; none when nothing is pending."""
    assert store.oldest_due() is None
    dispatched(store, task("run", NOW - 5))
    assert store.oldest_due() is None
    store.put([task("a", NOW + 1, owner="w1"), task("b", NOW + 2)], NOW)
    assert store.oldest_due() == NOW + 1


def test_next_expiring(store):
    """Pending rows that expire before an instant (exclusive), soonest first, up to the limit."""
    dispatched(store, task("run", expires_ms=NOW))
    store.put(
        [
            task("c", expires_ms=NOW + 3),
            task("a", expires_ms=NOW + 1, owner="w1"),
            task("b", expires_ms=NOW + 2),
            task("never"),
        ],
        NOW,
    )
    assert ids(store.next_expiring(NOW + 3, 10)) == ["a", "b"]
    assert ids(store.next_expiring(LATER, 2)) == ["a", "b"]
    assert store.next_expiring(NOW + 1, 10) == []
    assert store.next_expiring(LATER, 0) == []
