"""`celery wheel …` and what `celery inspect` knows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker.control import Panel
from click.testing import CliRunner

from celery_wheel.cli import wheel
from celery_wheel.stores import open_store
from celery_wheel.task import DelayedTask


@pytest.fixture
def run(tmp_path):
    def run(*arguments, **conf):
        app = Celery("t", broker="memory://", set_as_current=False)
        app.conf.update(conf)
        return CliRunner().invoke(wheel, arguments, obj=SimpleNamespace(app=app))

    return run


def test_inspect_knows_the_wheel():
    """Loading the command makes `celery inspect wheel` known."""
    assert Panel.meta["wheel"].type == "inspect"


def test_stats_reads_the_store_without_a_worker(run, tmp_path):
    """Counts come from the store itself."""
    url = f"sqlite:///{tmp_path / 'wheel.db'}"
    store = open_store(url, "celery_wheel")
    store.open()
    store.put([DelayedTask(b"k" * 16, "id", "name", "queue", 10**14, b"")], 0)
    store.close()
    result = run("stats", "--json", wheel_store=url)
    assert result.exit_code == 0
    assert '"pending": 1' in result.output
    assert "pending: 1" in run("stats", wheel_store=url).output


def test_stats_says_where_to_look_in_broker_custody(run):
    """Without a store the broker keeps the tasks; the message names the command to use."""
    result = run("stats")
    assert result.exit_code != 0
    assert "celery inspect wheel" in result.output


def test_a_wrong_setting_is_one_line(run):
    """A user's mistake gives a message, not a traceback."""
    result = run("stats", wheel_tick="soon")
    assert result.exit_code == 1
    assert "wheel_tick" in result.output
    assert "Traceback" not in result.output


def test_settings_hide_passwords(run):
    """The settings in force are shown with units and without passwords."""
    result = run("settings", wheel_store="postgresql://u:secret@h/d")
    assert "secret" not in result.output
    assert "wheel_tick = 10 ms" in result.output
