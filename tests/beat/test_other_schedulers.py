"""The mixin before the schedulers of django-celery-beat and RedBeat, where they are installed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.beat.support import sent


@pytest.fixture
def app(tmp_path: Path) -> Celery:
    """An app by the machine's clock: these schedulers read that."""
    app = Celery("others", broker="memory://", set_as_current=False)
    app.conf.update(task_default_queue=f"q-{tmp_path.name}", result_expires=None)
    return app


@pytest.fixture(scope="module")
def django() -> Any:
    """Django with django-celery-beat's tables in memory."""
    pytest.importorskip("django_celery_beat", reason="django-celery-beat is not installed")
    import django
    from django.conf import settings
    from django.core.management import call_command

    settings.configure(
        INSTALLED_APPS=["django_celery_beat"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
    )
    django.setup()
    call_command("migrate", verbosity=0)
    return django


@pytest.fixture
def tables(django: Any) -> Iterator[Any]:
    """The models, with empty tables."""
    from django_celery_beat import models

    models.PeriodicTask.objects.all().delete()
    models.PeriodicTasks.objects.all().delete()
    return models


def _row(tables: Any, name: str, every_s: int, **more: Any) -> Any:
    interval, _ = tables.IntervalSchedule.objects.get_or_create(every=every_s, period="seconds")
    more.setdefault("args", f'["{name}"]')
    return tables.PeriodicTask.objects.create(name=name, task="job", interval=interval, **more)


def _scheduler(app: Celery) -> Any:
    from celery_wheel.beats.django import WheelDatabaseScheduler

    made = WheelDatabaseScheduler(app=app)
    made._finalize.cancel()  # it would sync a database that is gone at exit
    return made


def _ago(seconds: float) -> Any:
    from django.utils.timezone import now

    return now() - timedelta(seconds=seconds)


def test_rows_are_sent_and_written(app: Celery, tables: Any) -> None:
    """Rows that are due go out in one tick, and their runs reach the database at a sync."""
    for number in range(20):
        _row(tables, f"due-{number}", 60, last_run_at=_ago(120))
    _row(tables, "later", 60, last_run_at=_ago(1))
    made = _scheduler(app)
    assert made.tick() <= 5
    assert sorted(sent(app)) == sorted(f"due-{number}" for number in range(20))
    made.tick()
    assert sent(app) == []
    made.sync()
    counts = tables.PeriodicTask.objects.values_list("name", "total_run_count")
    assert dict(counts) == {**{f"due-{n}": 1 for n in range(20)}, "later": 0}
    made.close()


def test_an_edited_row_moves_one_entry(app: Celery, tables: Any) -> None:
    """Of many rows, the one that was edited is asked again; removed and added ones count, too."""
    for number in range(30):
        _row(tables, f"row-{number}", 600, last_run_at=_ago(10))
    gone = _row(tables, "gone", 600, last_run_at=_ago(10))
    made = _scheduler(app)
    made.tick()
    asked: list[str] = []
    is_due = made.is_due
    made.is_due = lambda entry: asked.append(entry.name) or is_due(entry)
    row = tables.PeriodicTask.objects.get(name="row-7")
    row.interval, _ = tables.IntervalSchedule.objects.get_or_create(every=5, period="seconds")
    row.save()
    gone.delete()
    _row(tables, "new", 5, last_run_at=_ago(10))
    made.tick()
    assert sorted(sent(app)) == ["new", "row-7"]
    assert set(asked) == {"new", "row-7"}
    made.sync()
    assert tables.PeriodicTask.objects.get(name="row-7").total_run_count == 1
    made.close()


def test_what_an_entry_ran_survives_a_reload(app: Celery, tables: Any) -> None:
    """Entries that change hands in their slots write their later runs to the new rows."""
    _row(tables, "a", 1, last_run_at=_ago(5))
    other = _row(tables, "b", 600, last_run_at=_ago(5))
    made = _scheduler(app)
    made.tick()
    other.description = "edited"
    other.save()
    made.tick()
    entry = made._wheel.get("a")
    assert entry is made.schedule["a"]
    made.touch("a")
    entry.last_run_at = _ago(2)
    made.tick()
    made.sync()
    assert sent(app) == ["a", "a"]
    assert tables.PeriodicTask.objects.get(name="a").total_run_count == 2
    made.close()


def test_a_row_that_is_one_off_is_in_the_database_before_it_is_sent(
    app: Celery, tables: Any
) -> None:
    """A kill after the send can't send it twice: the count is written first."""
    _row(tables, "once", 1, one_off=True, last_run_at=_ago(5))
    made = _scheduler(app)
    seen: list[int] = []
    apply_entry = made.apply_entry

    def looking(entry: Any, producer: Any = None) -> None:
        seen.append(tables.PeriodicTask.objects.get(name="once").total_run_count)
        apply_entry(entry, producer=producer)

    made.apply_entry = looking
    made.tick()
    assert seen == [1]
    assert sent(app) == ["once"]
    again = _scheduler(app)
    again.tick()
    assert sent(app) == []
    made.close()
    again.close()


@pytest.fixture
def redbeat_app(app: Celery, request: pytest.FixtureRequest) -> Any:
    """An app whose RedBeat uses this test process's Redis."""
    pytest.importorskip("redbeat", reason="celery-redbeat is not installed")
    server = request.getfixturevalue("redis_server")
    server.client.flushall()
    app.conf.update(
        redbeat_redis_url=f"{server.url}/0", redbeat_redis_options={}, redbeat_lock_key=None
    )
    return app


def test_redbeats_entries_are_sent(redbeat_app: Any) -> None:
    """What RedBeat keeps in Redis is sent when due, in one tick, and its runs are written there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from redbeat import RedBeatSchedulerEntry

        from celery_wheel.beats.redbeat import WheelRedBeatScheduler
    made = WheelRedBeatScheduler(app=redbeat_app)
    made.lock_key = None
    for name, every_s in (("a", 1.0), ("b", 1.0), ("later", 600.0)):
        entry = RedBeatSchedulerEntry(
            name, "job", every_s, args=(name,), app=redbeat_app, last_run_at=redbeat_app.now()
        )
        entry.last_run_at = redbeat_app.now() - timedelta(seconds=5)
        entry.save()
    made.tick()
    assert sorted(sent(redbeat_app)) == ["a", "b"]
    assert made.tick() <= 1
    assert sent(redbeat_app) == []
    stored = RedBeatSchedulerEntry.from_key("redbeat:a", app=redbeat_app)
    assert stored.total_run_count == 1
    made.close()
    assert "redbeat" in sys.modules
