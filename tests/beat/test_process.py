"""``celery beat -S`` as a process of its own: on time, stopped, killed and started again."""

from __future__ import annotations

import base64
import json
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import Process, wait_for

Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``celery`` commands on the app of ``beat_app.py``, and ends them."""
    running: list[Process] = []

    def start(*words: str) -> Process:
        argv = [sys.executable, "-m", "celery", "-A", "tests.beat.beat_app", *words]
        env = {"BEAT_TEST_FOLDER": str(tmp_path)}
        process = Process(argv, tmp_path / f"log-{len(running)}", env=env)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()


@pytest.fixture
def beat(start: Start) -> Callable[[], Process]:
    """Starts a beat, and returns when it ticks."""

    def beat() -> Process:
        process = start("beat", "-S", "wheel", "-l", "DEBUG", "--max-interval", "1")
        wait_for(lambda: "beat: Starting..." in process.log(), 30, what="beat started")
        return process

    return beat


def _plan(folder: Path, plan: dict[str, Any]) -> None:
    (folder / "plan.json").write_text(json.dumps(plan))


def _sent(folder: Path) -> list[str]:
    """Empty the broker's folder; the labels of what was sent.

    Read by hand: kombu would take a file away that is being written, or that a kill left half.
    """
    labels = []
    for file in sorted((folder / "queue").glob("*.msg")):
        try:
            message = json.loads(file.read_bytes())
        except ValueError:
            continue
        labels.append(json.loads(base64.b64decode(message["body"]))[0][0])
        file.unlink()
    return labels


def test_beat_by_its_alias_sends_and_stops(beat: Callable[[], Process], tmp_path: Path) -> None:
    """``-S wheel`` sends by the real clock, says which file it uses, and ends on SIGTERM."""
    _plan(tmp_path, {"often": 0.2})
    process = beat()
    labels: list[str] = []
    wait_for(lambda: labels.extend(_sent(tmp_path)) or len(labels) >= 10, 20, what="ten runs")
    process.signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert f". db -> {tmp_path / 'schedule'}" in process.log()
    labels += _sent(tmp_path)
    with sqlite3.connect(tmp_path / "schedule") as conn:
        [(count,)] = conn.execute("SELECT total_run_count FROM runs WHERE name = 'often'")
    conn.close()
    assert count == len(labels)


def test_one_offs_over_kills(beat: Callable[[], Process], tmp_path: Path) -> None:
    """Killed again and again while one-offs come due, none is sent twice, and none is lost
    without a word."""
    begin = time.time() + 2
    _plan(tmp_path, {f"once-{i}": begin + i * 0.02 for i in range(200)})
    logs = []
    labels: list[str] = []
    for _ in range(4):
        process = beat()
        # Some were sent: this one is in the middle of it.
        labels += wait_for(lambda: _sent(tmp_path), 30, every_s=0.001, what="a one-off was sent")
        process.signal(signal.SIGKILL)
        process.wait()
        logs.append(process.log())
        labels += _sent(tmp_path)
        begin = time.time()
    process = beat()
    wait_for(lambda: time.time() > begin + 4, 10, what="all are due")
    process.signal(signal.SIGTERM)
    process.wait()
    logs.append(process.log())
    labels += _sent(tmp_path)
    counts = Counter(labels)
    assert max(counts.values()) == 1
    missing = {f"once-{i}" for i in range(200)} - set(counts)
    told = "\n".join(logs)
    assert all(f"one-off {name!r} was being sent when beat was killed" in told for name in missing)
    assert len(missing) <= 4


def test_a_killed_beat_goes_on_where_it_was(beat: Callable[[], Process], tmp_path: Path) -> None:
    """After SIGKILL the runs that were sent are known; an interval is not sent at once again."""
    _plan(tmp_path, {"rare": 3.0})
    process = beat()
    # The end of the tick that sent it: from here on a kill repeats nothing.
    sent = re.compile("Sending due task rare.*Waking up", re.DOTALL)
    wait_for(lambda: sent.search(process.log()), 20, what="the first run")
    process.signal(signal.SIGKILL)
    process.wait()
    runs = process.log().count("Sending due task rare")
    process = beat()
    process.signal(signal.SIGTERM)
    process.wait()
    runs += process.log().count("Sending due task rare")
    with sqlite3.connect(tmp_path / "schedule") as conn:
        [(count,)] = conn.execute("SELECT total_run_count FROM runs WHERE name = 'rare'")
    conn.close()
    assert count == runs == len(_sent(tmp_path))


def test_two_beats_do_not_share_a_file(
    beat: Callable[[], Process], start: Start, tmp_path: Path
) -> None:
    """The second one ends with an error that says what to do, and the first one goes on."""
    _plan(tmp_path, {"often": 0.2})
    first = beat()
    second = start("beat", "-S", "celery_wheel.beat:WheelScheduler")
    assert second.wait(30) != 0
    assert "is in use by another beat: stop that one" in second.log()
    _sent(tmp_path)
    wait_for(lambda: "often" in _sent(tmp_path), 10, what="the first beat sends")
    assert first.returncode is None


def test_embedded_in_a_worker(start: Start, tmp_path: Path) -> None:
    """``celery worker -B`` runs it beside the worker, which runs what it sends."""
    _plan(tmp_path, {"often": 0.3})
    worker = start("worker", "-B", "--scheduler", "wheel", "-P", "solo", "-l", "INFO")
    ran = tmp_path / "ran"
    wait_for(lambda: ran.exists() and ran.read_text().count("often") >= 3, 30, what="three runs")
    worker.signal(signal.SIGTERM)
    assert worker.wait(30) == 0
