"""The client: looking and steering without a worker."""

from __future__ import annotations

import os
import threading
from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.backends import cache
from celery.signals import task_revoked

import celery_wheel
from celery_wheel import Backlog
from celery_wheel.clock import FakeClock
from celery_wheel.envelope import pack
from celery_wheel.errors import ConfigError, StoreUnavailable
from celery_wheel.instants import LATEST_MS, iso, to_ms
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter
from celery_wheel.task import DelayedTask, task_key

NOW = 2_000_000_000_000
FAR = 2**53


def row(number: int, name: str = "t", queue: str = "q", **more) -> DelayedTask:
    task_id = f"id-{number}"
    headers = {"id": task_id, "task": name, "argsrepr": f"({number},)", "lang": "py"}
    body = b'[[%d], {}, {"chord": null}]' % number
    return DelayedTask(
        task_key(queue, task_id, more.get("retries", 0), 0, str(number)),
        task_id,
        name,
        queue,
        more.pop("due_ms", NOW + number * 1000),
        pack(headers, {}, {}, "application/json", "utf-8", body),
        arrival=number,
        **more,
    )


@pytest.fixture
def app(tmp_path):
    cache._DUMMY_CLIENT_CACHE.clear()  # one for all apps of a process
    made = Celery("t", broker="memory://", backend="cache+memory://", set_as_current=False)
    made.conf.wheel_store = f"sqlite:///{tmp_path / 'wheel.db'}"
    yield made
    made.close()


@pytest.fixture
def store(app):
    opened = open_store(app.conf.wheel_store)
    opened.open()
    yield opened
    opened.close()


@pytest.fixture
def clock():
    return FakeClock(NOW)


@pytest.fixture
def backlog(app, clock):
    with Backlog(app, clock=clock) as made:
        yield made


def dispatched(store, one: DelayedTask) -> None:
    store.put([one], 0)
    store.claim("w1", FAR, 1)
    store.confirm("w1", [(one.key, 0)], FAR)


def test_it_is_a_public_name():
    """`celery_wheel.Backlog` is the client, loaded when it is asked for."""
    assert celery_wheel.Backlog is Backlog
    assert "Backlog" in celery_wheel.__all__


def test_making_one_does_no_io(tmp_path):
    """Connecting is left to the first call."""
    app = Celery("t", set_as_current=False)
    app.conf.wheel_store = f"sqlite:///{tmp_path / 'no' / 'such' / 'wheel.db'}"
    with Backlog(app) as made, pytest.raises((ConfigError, StoreUnavailable)):
        made.stats()


def test_broker_custody_has_no_backlog():
    """Without a store the error names what to use instead."""
    with pytest.raises(ConfigError, match=r"celery inspect wheel.*celery control revoke"):
        Backlog(Celery("t", set_as_current=False)).stats()


def test_stats(backlog, store):
    """Counts are exact, and what is due when adds up."""
    dispatched(store, row(0))
    store.put([row(-3), row(-1), row(5), row(500)], 0)
    found = backlog.stats()
    assert (found["pending"], found["dispatched"], found["owned"]) == (4, 1, 1)
    assert found["oldest_overdue_s"] == 3.0
    due = {label: number for label, number in found["horizon"].items() if number}
    assert due == {"overdue": 2, "under 10 s": 1, "under 600 s": 1}


def test_list_by_filter(backlog, store):
    """Every filter narrows; pages follow each other up to the limit."""
    store.put([row(n, name=f"t{n % 2}", queue=f"q{n % 3}") for n in range(1200)], 0)
    assert [one.id for one in backlog.list(limit=3)] == ["id-0", "id-1", "id-2"]
    assert len(backlog.list(limit=None)) == 1200
    assert len(backlog.list(limit=700)) == 700
    assert len(backlog.list()) == 100
    assert backlog.list(limit=0) == []
    assert len(backlog.list(limit=None, name="t1", queue="q2")) == 200
    assert [one.id for one in backlog.list(ids=["id-7", "nope"])] == ["id-7"]
    store.claim("w1", FAR, 5)
    assert len(backlog.list(owner="w1")) == 5
    at = datetime.fromtimestamp(NOW / 1000 + 10, timezone.utc)
    assert len(backlog.list(due_before=at)) == 10
    between = backlog.list(due_after=at, due_before=(at + timedelta(seconds=2)).isoformat())
    assert [one.id for one in between] == ["id-10", "id-11"]


def test_a_date_without_offset_is_in_the_apps_timezone(app, backlog, store):
    """Naive dates are local to the app, and dates are shown in its timezone."""
    app.conf.timezone = "Asia/Tokyo"
    store.put([row(0, due_ms=to_ms("2040-01-01T09:00:00+09:00", timezone.utc))], 0)
    assert len(backlog.list(due_after="2040-01-01T09:00", due_before="2040-01-01T09:01")) == 1
    assert backlog.show("id-0")[0]["due"] == "2040-01-01T09:00:00+09:00"
    backlog.reschedule("id-0", eta="2040-01-01T10:00:00")
    assert backlog.list()[0].due_ms == to_ms("2040-01-01T01:00:00Z", timezone.utc)


@pytest.mark.parametrize("text", ["", "tomorrow", "2040-13-01", "12", "Z", "2040-01-01T25:00"])
def test_a_wrong_date_says_what_to_write(text):
    """The message shows a date that is right."""
    with pytest.raises(ValueError, match="ISO 8601: write 2030-01-31T18"):
        to_ms(text, ZoneInfo("Europe/Berlin"))


def test_instants_round_up_and_are_bounded():
    """Half a millisecond is a whole one; the ends of the calendar are no error."""
    assert to_ms("1970-01-01T00:00:00.000500Z", timezone.utc) == 1
    assert to_ms("1969-12-31T23:59:59.998500Z", timezone.utc) == -1
    assert iso(FAR).startswith("9999-12-31")
    assert iso(-FAR).startswith("0001")
    assert to_ms(iso(LATEST_MS), timezone.utc) == LATEST_MS


def test_show_holds_the_whole_message(backlog, store):
    """Headers are shown, the body is measured; damaged rows and unknown ids are no error."""
    broken = row(2)
    broken.envelope = b"?"
    store.put([row(1, stamps=("s=1",)), broken], 0)
    (shown,) = backlog.show("id-1")
    assert shown["args"] == "(1,)"
    assert shown["headers"]["task"] == "t"
    assert shown["due_in_s"] == 1.0
    assert shown["stamps"] == ["s=1"]
    assert "unreadable" in backlog.show("id-2")[0]
    assert backlog.show("nope") == []


def test_cancel_by_id_is_a_revoke(app, backlog, store):
    """Answers per id; the row is gone, REVOKED is stored, the id is refused from then on."""
    dispatched(store, row(1))
    store.put([row(2), row(3)], 0)
    signals = []
    task_revoked.connect(lambda request, **_: signals.append(request.id), weak=False)
    answer = backlog.cancel(["id-1", "id-2", "id-9", "id-2"])
    assert answer == {"id-1": "dispatched", "id-2": "cancelled", "id-9": "unknown"}
    assert app.AsyncResult("id-2").state == "REVOKED"
    assert app.AsyncResult("id-1").state == "PENDING"
    assert signals == ["id-2"]
    late = row(9)
    assert store.put([late], NOW).cancelled == {late.key}
    assert backlog.cancel("id-2") == {"id-2": "unknown"}
    task_revoked.receivers.clear()


def test_cancel_by_filter_goes_in_chunks(backlog, store):
    """Thousands of tasks by name, and no other."""
    store.put([row(n, name=f"t{n % 2}") for n in range(2400)], 0)
    answer = backlog.cancel(name="t1")
    assert len(answer) == 1200
    assert set(answer.values()) == {"cancelled"}
    assert {one.name for one in backlog.list(limit=None)} == {"t0"}
    assert backlog.cancel(name="t1") == {}


def test_an_id_in_several_chunks_is_cancelled(backlog, store):
    """One id with many rows (retries, queues) has one answer."""
    rows = [row(1, retries=n, due_ms=NOW + n) for n in range(1, 3)]
    between = [row(n, due_ms=NOW + 1) for n in range(2, 700)]
    store.put([*rows, *between], 0)
    answer = backlog.cancel(name="t")
    assert answer["id-1"] == "cancelled"
    assert set(answer.values()) == {"cancelled"}
    assert store.count().pending == 0


def test_a_dry_run_changes_nothing(backlog, store):
    """It answers what a cancel would."""
    dispatched(store, row(1))
    store.put([row(2)], 0)
    expected = {"id-1": "dispatched", "id-2": "cancelled", "id-9": "unknown"}
    assert backlog.cancel(["id-1", "id-2", "id-9"], dry_run=True) == expected
    assert backlog.cancel(name="t", dry_run=True) == {"id-1": "dispatched", "id-2": "cancelled"}
    assert store.count().pending == 1
    assert store.put([row(9)], NOW).new


def test_ids_and_a_filter(backlog, store):
    """Given both, only what both name is cancelled and answered."""
    store.put([row(1, name="a"), row(2, name="b"), row(3, name="a")], 0)
    assert backlog.cancel(["id-1", "id-2", "nope"], name="a") == {"id-1": "cancelled"}
    assert [one.id for one in backlog.list()] == ["id-2", "id-3"]


def test_a_result_backend_that_is_away_costs_one_error(app, backlog, store, caplog):
    """Tasks are cancelled all the same, and those not announced are named."""
    app.conf.result_backend = "file:///proc/no/such/place"
    store.put([row(1), row(2)], 0)
    assert set(backlog.cancel(name="t").values()) == {"cancelled"}
    assert store.count().pending == 0
    assert "id-1" in caplog.text
    assert "id-2" in caplog.text


def test_reschedule_keeps_the_id_and_refuses_the_old_copy(backlog, store, clock):
    """What a worker has in its wheel can't run any more; the row is anyone's at the new time."""
    one = row(5)
    store.put([one], 0)
    store.claim("w1", FAR, 1)
    assert backlog.reschedule("id-5", countdown=60) == "rescheduled"
    (moved,) = backlog.list()
    assert (moved.id, moved.due_ms, moved.owner) == ("id-5", NOW + 60_000, None)
    assert store.confirm("w1", [(one.key, 0)], FAR) == set()
    assert backlog.reschedule("id-5", countdown=-5) == "rescheduled"
    assert backlog.list()[0].due_ms == NOW
    clock.advance(1)
    assert backlog.run_now("id-5") == {"id-5": "rescheduled"}
    assert backlog.list()[0].due_ms == NOW + 1000


def test_what_can_not_be_moved_is_told(backlog, store):
    """A task that was handed over, and one that is not held."""
    dispatched(store, row(1))
    assert backlog.reschedule("id-1", countdown=1) == "dispatched"
    assert backlog.run_now(["id-1", "nope"]) == {"id-1": "dispatched", "nope": "unknown"}


@pytest.mark.parametrize("arguments", [{}, {"countdown": 1, "eta": "2040-01-01"}])
def test_reschedule_needs_one_time(backlog, arguments):
    """Either a countdown or an ETA."""
    with pytest.raises(ValueError, match="either countdown or eta"):
        backlog.reschedule("id", **arguments)


@pytest.mark.parametrize("countdown", [float("nan"), float("inf"), 1e300])
def test_a_countdown_has_bounds(backlog, countdown):
    """Numbers that are no time are refused."""
    with pytest.raises(ValueError, match="year 9999"):
        backlog.reschedule("id", countdown=countdown)


def test_owners_and_looking(backlog, store):
    """With nobody there, nobody is told to look."""
    assert backlog.owners() == []
    assert backlog.look() is False


def test_threads_take_turns(backlog, store):
    """One client serves many threads."""
    store.put([row(n) for n in range(200)], 0)
    failed = []

    def work(start: int) -> None:
        try:
            ids = [f"id-{n}" for n in range(start, start + 50)]
            assert set(backlog.cancel(ids).values()) == {"cancelled"}
        except BaseException as exc:
            failed.append(exc)

    threads = [threading.Thread(target=work, args=(n * 50,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert store.find(Filter(), 1).rows == []


def test_a_child_connects_anew(app, backlog):
    """After a fork the child has a connection of its own, and the parent's works on."""
    first = open_store(app.conf.wheel_store)
    first.open()
    first.put([row(1)], 0)
    first.close()
    assert backlog.stats()["pending"] == 1
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if backlog.cancel("id-1") == {"id-1": "cancelled"} else 3)
        finally:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert backlog.stats()["pending"] == 0
