"""`celery wheel list, show, cancel, reschedule, run-now, drain, migrate, check`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_wheel.cli import wheel
from celery_wheel.envelope import pack
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Owner
from celery_wheel.task import DelayedTask

ETA_MS = 2_208_988_800_000  # 2040


def row(number: int, name: str = "shop.remind") -> DelayedTask:
    headers = {"id": f"id-{number}", "task": name, "argsrepr": f"({number},)", "x": b"\xff"}
    body = b'[[%d], {}, {"chord": null}]' % number
    envelope = pack(headers, {"priority": 3}, {}, "application/json", "utf-8", body)
    key = number.to_bytes(16, "big")
    due_ms = ETA_MS + number * 1000
    return DelayedTask(key, f"id-{number}", name, "q", due_ms, envelope, arrival=number)


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'wheel.db'}"


@pytest.fixture
def store(url):
    opened = open_store(url)
    opened.open()
    opened.put([row(n) for n in range(3)], 0)
    yield opened
    opened.close()


@pytest.fixture
def run(url):
    def run(*arguments, **conf):
        app = Celery("t", broker="memory://", set_as_current=False)
        app.conf.update({"wheel_store": url, **conf})
        result = CliRunner().invoke(wheel, arguments, obj=SimpleNamespace(app=app))
        app.close()
        return result

    return run


def test_list_is_a_table_or_json(run, store):
    """One line per task, nearest ETA first; JSON has one array."""
    result = run("list", "--limit", "2")
    assert result.exit_code == 0
    head, first, second = result.stdout.splitlines()
    assert head.split()[:4] == ["id", "name", "queue", "due"]
    assert first.split()[:4] == ["id-0", "shop.remind", "q", "2040-01-01T00:00:00+00:00"]
    assert second.startswith("id-1")
    assert "2 shown" in result.stderr
    found = json.loads(run("list", "--json", "--limit", "0").stdout)
    assert [one["id"] for one in found] == ["id-0", "id-1", "id-2"]
    assert json.loads(run("list", "--json", "--name", "nothing").stdout) == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--id", "id-2", "--id", "id-0"), ["id-0", "id-2"]),
        (("--queue", "q", "--due-after", "2040-01-01T00:00:01Z"), ["id-1", "id-2"]),
        (("--due-before", "2040-01-01T00:00:01+00:00"), ["id-0"]),
        (("--owner", "w1"), ["id-0"]),
        (("--name", "shop"), []),
    ],
)
def test_list_by_filter(run, store, options, expected):
    """Each option narrows what is shown."""
    store.claim("w1", ETA_MS, 1)
    assert [one["id"] for one in json.loads(run("list", "--json", *options).stdout)] == expected


def test_show(run, store):
    """Headers are shown, bytes among them; an id that is not held is an error of one line."""
    shown = run("show", "id-1").stdout
    assert "args: (1,)" in shown
    assert "headers.task: shop.remind" in shown
    assert json.loads(run("show", "id-1", "--json").stdout)[0]["properties"] == {"priority": 3}
    missing = run("show", "nope")
    assert missing.exit_code == 1
    assert missing.stderr.startswith("Error: no task nope is held")


def test_cancel(run, store):
    """Ids or a filter; the answer is per id, a dry run changes nothing."""
    dry = run("cancel", "--name", "shop.remind", "--dry-run")
    assert dry.stdout.splitlines() == [f"id-{n}: cancelled" for n in range(3)]
    assert dry.stderr.startswith("nothing was changed; it would be: 3 cancelled")
    assert store.count().pending == 3
    result = run("cancel", "id-0", "nope")
    assert (result.exit_code, result.stdout) == (0, "id-0: cancelled\nnope: unknown\n")
    assert json.loads(run("cancel", "--id", "id-1", "--json").stdout) == {"id-1": "cancelled"}
    assert run("cancel", "--all").stdout == "id-2: cancelled\n"
    assert run("cancel", "--all").stderr == "no task fits\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("cancel",),
        ("cancel", "--all", "--queue", "q"),
        ("cancel", " "),
        ("reschedule", "id-0"),
        ("reschedule", "id-0", "--countdown", "1", "--eta", "2040-01-01"),
        ("reschedule", "id-0", "--countdown", "soon"),
        ("reschedule", "id-0", "--countdown", "nan"),
        ("reschedule", "id-0", "--countdown", "1e300"),
        ("reschedule", "id-0", "--eta", "tomorrow"),
        ("reschedule", "id-0", "--eta", ""),
        ("run-now",),
        ("list", "--limit", "-1"),
        ("list", "--due-before", "31.1.2040"),
        ("show",),
    ],
)
def test_a_wrong_command_line(run, store, arguments):
    """Usage errors end with code 2 and a line that says what is wrong; nothing changes."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("Error: ")
    assert "Traceback" not in result.output
    assert store.count().pending == 3


def test_a_wrong_date_shows_a_right_one(run, store):
    """And says which timezone a date without offset is in."""
    result = run("reschedule", "id-0", "--eta", "31.1.2040", timezone="Europe/Berlin")
    assert "2030-01-31T18:00:00+00:00" in result.stderr
    assert "Europe/Berlin" in result.stderr


def test_reschedule(run, store):
    """The new ETA is said with its offset; a date without one is in the app's timezone."""
    result = run("reschedule", "id-0", "--eta", "2050-06-01T12:00", timezone="Europe/Berlin")
    assert (result.exit_code, result.stdout) == (0, "id-0: rescheduled\n")
    assert "due 2050-06-01T12:00:00+02:00" in result.stderr
    found = json.loads(run("list", "--id", "id-0", "--json").stdout)
    assert found[0]["due"] == "2050-06-01T10:00:00+00:00"
    assert run("reschedule", "id-1", "--countdown", "-3").exit_code == 0
    assert json.loads(run("list", "--id", "id-1", "--json").stdout)[0]["due_in_s"] <= 0
    missing = run("reschedule", "nope", "--countdown", "1")
    assert (missing.exit_code, missing.stdout) == (1, "nope: unknown\n")


def test_run_now(run, store):
    """Each id is answered; one that could not be moved makes the exit code 1."""
    result = run("run-now", "id-0", "id-1")
    assert (result.exit_code, result.stdout) == (0, "id-0: rescheduled\nid-1: rescheduled\n")
    result = run("run-now", "id-2", "nope", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"id-2": "rescheduled", "nope": "unknown"}


def test_drain(run, store):
    """It says how many went where; leases are in the way unless it is forced."""
    store.heartbeat(Owner("w1/x", node="w1"), 60)
    refused = run("drain")
    assert refused.exit_code == 1
    assert refused.stderr.startswith("Error: leases are held by w1: ")
    assert len(refused.stderr.splitlines()) == 1
    assert store.count().pending == 3
    done = run("drain", "--force", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout) == {
        "drained": 3,
        "queues": {"q": 3},
        "revoked": 0,
        "unreadable": 0,
        "left": 0,
    }
    store.end_lease("w1/x")
    assert run("drain").stdout.splitlines()[0] == "drained: 0"


def test_drain_says_what_is_left(run, store):
    """Rows that a worker holds stay, and the exit code says that it is not done."""
    store.heartbeat(Owner("w1/x", node="w1"), 60)
    store.claim("w1/x", ETA_MS, 1)
    result = run("drain", "--force")
    assert result.exit_code == 1
    assert "left: 1" in result.stdout
    assert "1 tasks are in the store yet" in result.stderr


def test_drain_names_what_it_can_not_read(run, store):
    """The reason is printed with the task's id."""
    broken = row(9)
    broken.envelope = b"?"
    store.put([broken], 0)
    result = run("drain")
    assert result.exit_code == 1
    assert "unreadable: 1" in result.stdout
    first, last = result.stderr.splitlines()
    assert first.startswith("ERROR: shop.remind[id-9] stays in the store: an envelope begins")
    assert last.startswith("Error: 1 tasks stay in the store, for the reasons above")


def test_what_nobody_thought_of_is_a_line(run, store, monkeypatch):
    """Not even a mistake of ours shows a traceback."""
    monkeypatch.setattr("celery_wheel.backlog.Backlog.stats", lambda self: 1 // 0)
    result = run("stats")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: stats failed unexpectedly: ZeroDivisionError")


def test_drain_without_a_broker(run, store):
    """A broker that can't be reached is one line, and all rows stay."""
    result = run("drain", broker_url="redis://127.0.0.1:1/0")
    assert result.exit_code == 1
    assert "does not take messages: Error 111" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert store.count().pending == 3
    assert store.owners() == []


def test_migrate_makes_the_schema(run, url):
    """A new store is made; doing it again changes nothing."""
    for _ in range(2):
        result = run("migrate")
        assert (result.exit_code, result.stdout) == (0, f"{url}: the schema is up to date\n")


def test_check(run, store):
    """What is fine is said, with who holds leases."""
    store.heartbeat(Owner("w1/x", node="w1"), 60)
    result = run("check")
    assert result.exit_code == 0
    assert "3 pending" in result.stdout
    assert "alive: w1/x" in result.stdout
    found = json.loads(run("check", "--json").stdout)
    assert [one["check"] for one in found] == ["settings", "store", "schema", "clock", "leases"]
    assert all(one["ok"] for one in found)


@pytest.mark.parametrize("bad", ["sqlite:////proc/no/wheel.db", "nosuch://x", "broker://"])
def test_check_finds_what_is_wrong(run, bad):
    """A store that can't be used is a finding and exit code 1, never a traceback."""
    result = run("check", wheel_store=bad)
    assert result.exit_code == 1
    assert "BAD" in result.stdout
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [("stats",), ("list",), ("show", "x"), ("cancel", "x"), ("run-now", "x"), ("migrate",)],
)
def test_a_store_that_can_not_be_reached(run, arguments):
    """Every command fails with one line."""
    result = run(*arguments, wheel_store="sqlite:////proc/no/wheel.db")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_newer_schema_is_a_line(run, store, url):
    """A store of a newer release is refused with what to do."""
    path = url.removeprefix("sqlite:///")
    store.close()
    import sqlite3

    connection = sqlite3.connect(path)
    (table,) = connection.execute(
        "select name from sqlite_master where name like '%meta%' and type = 'table'"
    ).fetchone()
    connection.execute(f"update {table} set value = '999'")
    connection.commit()
    connection.close()
    result = run("check")
    assert result.exit_code == 1
    assert "schema version 999" in result.stdout
