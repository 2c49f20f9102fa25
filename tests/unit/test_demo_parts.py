"""The demo's pure parts: the plan, the ledger and the sum, the broker's URL, the folder."""

from __future__ import annotations

import random

import pytest
from kombu import Connection

from celery_wheel.demo.brokers import FILESYSTEM, BrokerError, make_broker
from celery_wheel.demo.folder import Transport
from celery_wheel.demo.ledger import Ledger, Summary, quantile
from celery_wheel.demo.plan import BUSY_PART, LEAD_S, PERIOD_S, make_plan


@pytest.mark.parametrize(("tasks", "seconds"), [(20, 4), (200, 6), (5000, 20)])
def test_a_plan_has_what_was_asked_for(tasks, seconds):
    """As many tasks as asked for, in due order, all ids different, near and far ones."""
    plan = make_plan(tasks, seconds, random.Random(1))
    assert len(plan) == len({planned.id for planned in plan}) == tasks
    offsets = [planned.offset_s for planned in plan]
    assert offsets == sorted(offsets)
    near = [planned.offset_s for planned in plan if planned.near]
    far = [planned.offset_s for planned in plan if not planned.near]
    assert min(near) >= LEAD_S
    assert max(near) <= seconds
    assert min(far) > 60
    assert far


def test_a_plan_leaves_moments_in_which_nothing_is_due():
    """The end of each period is free of near tasks: there the worker can be killed."""
    near = [p.offset_s for p in make_plan(5000, 20, random.Random(2)) if p.near]
    assert max(at % PERIOD_S for at in near) <= PERIOD_S * BUSY_PART


def test_only_what_is_due_late_is_revoked():
    """Some near and some far tasks are to be revoked, no near one of the first half."""
    chosen = [planned for planned in make_plan(1000, 20, random.Random(3)) if planned.revoke]
    assert {planned.near for planned in chosen} == {True, False}
    assert min(planned.offset_s for planned in chosen) > 10


def test_the_ledger_reads_whole_lines_as_they_come(tmp_path):
    """A line that is half written is read when it is whole, and none is read twice."""
    record = tmp_path / "ran"
    ledger = Ledger(record)
    assert ledger.read().ran == 0
    record.write_bytes(b"a 1000 1005\nb 20")
    assert [run.late_ms for run in ledger.read().runs] == [5]
    with record.open("ab") as more:
        more.write(b"00 2001\na 1000 1100\n")
    assert [run.late_ms for run in ledger.read().runs] == [5, 1, 100]
    assert ledger.read().times == {"a": 2, "b": 1}
    assert ledger.ran == 2


def summary(tmp_path, lines, *, published, revoked=(), held=()):
    (tmp_path / "ran").write_text("".join(f"{line}\n" for line in lines))
    return Summary(published, revoked, held, Ledger(tmp_path / "ran").read(), (5000, 7000))


def test_a_sum_without_faults_is_good(tmp_path):
    """Each task ran once, is held, or was revoked: good; lateness is told apart by the kill."""
    found = summary(
        tmp_path,
        ["a 1000 1009", "b 6000 8000"],
        published=["a", "b", "c", "d"],
        revoked=["c"],
        held=["d"],
    )
    assert found.good
    assert found.lateness_ms(while_down=False) == [9]
    assert found.lateness_ms(while_down=True) == [2000]
    assert any("9 / 9 / 9 ms, of 1" in line for line in found.lines())


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (["a 1000 1000"], "lost"),
        (["a 1000 1000", "b 1 1", "a 1000 1010"], "doubled"),
        (["a 1000 1000", "b 1 1", "held 1 1"], "doubled"),
        (["a 1000 999", "b 1 1"], "early"),
        (["a 1000 1000", "b 1 1", "revoked 1 1"], "revoked_but_there"),
    ],
)
def test_each_fault_is_counted_and_makes_the_sum_bad(tmp_path, lines, fault):
    """A lost, doubled, early or wrongly run task is one of its kind, and the sum is not good."""
    found = summary(
        tmp_path,
        lines,
        published=["a", "b", "revoked", "held"],
        revoked=["revoked"],
        held=["held"],
    )
    assert not found.good
    counts = {name: getattr(found, name) for name in ("lost", "doubled", "early")}
    counts["revoked_but_there"] = found.revoked_but_there
    assert counts == {**dict.fromkeys(counts, 0), fault: 1}


def test_quantiles_of_few_values():
    """No values have no quantile; one value is all of them."""
    assert quantile([], 0.5) is None
    assert [quantile([7], part) for part in (0.5, 0.99, 1)] == [7, 7, 7]
    assert quantile(range(101), 0.99) == 99


@pytest.mark.parametrize("url", ["redis", "localhost:6379", "sqs://x", "redis://[bad", "", "://"])
def test_a_broker_that_the_demo_does_not_know(tmp_path, url):
    """What is no URL of a broker it knows is refused with the ones it knows."""
    with pytest.raises(BrokerError, match="redis://localhost"):
        make_broker(url, tmp_path)


def test_passwords_are_not_shown(tmp_path):
    """Neither a broker's name on the screen nor an error holds the password."""
    broker = make_broker("redis://:secret@localhost/0", tmp_path)
    assert "secret" not in broker.shown
    with pytest.raises(BrokerError) as caught:
        make_broker("sqs://key:secret@", tmp_path)
    assert "secret" not in str(caught.value)


def test_every_run_has_names_of_its_own(tmp_path):
    """Two runs on one broker share no queue, exchange or key."""
    one, other = (make_broker("redis://localhost/0", tmp_path) for _ in range(2))
    assert one.tag != other.tag
    assert one.options["global_keyprefix"].startswith(one.tag)
    assert one.conf()["control_exchange"] == one.conf()["task_default_queue"] == one.tag


def test_a_message_in_the_folder_appears_whole(tmp_path):
    """A message goes through the folder in order, and nothing is left of it."""
    options = make_broker(FILESYSTEM, tmp_path).options
    with Connection(transport=Transport, transport_options=options) as connection:
        queue = connection.SimpleQueue("q")
        for number in range(3):
            queue.put({"number": number})
        assert all(path.suffix == ".msg" for path in (tmp_path / "messages").iterdir())
        messages = [queue.get(timeout=1) for _ in range(3)]
        assert [message.payload["number"] for message in messages] == [0, 1, 2]
        for message in messages:
            message.ack()
        queue.close()
    assert not list((tmp_path / "messages").iterdir())
