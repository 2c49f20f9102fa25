"""The demo itself, run as its user runs it: to the end, interrupted, and on a wrong broker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT, wait_for

SMALL = ("--tasks", "200", "--seconds", "6")

#: Sends Ctrl-C in the middle of the demo's imports.
IN_IMPORTS = """
import os, signal, sys
from importlib.abc import MetaPathFinder
import celery_wheel.demo.__main__ as demo

class Interrupt(MetaPathFinder):
    def find_spec(self, name, *rest):
        if name == "celery_wheel.demo.command":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
demo._main()
"""


@pytest.fixture
def demo(tmp_path):
    """Start ``python -m celery_wheel.demo`` with its temporary files in the test's folder."""
    started = []

    def start(*arguments, command=("-m", "celery_wheel.demo"), **env):
        clean = {key: value for key, value in os.environ.items() if key != "BROKER"}
        process = subprocess.Popen(
            [sys.executable, *command, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**clean, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1", **env},
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("celery-wheel-demo-*")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_without_any_server(demo, tmp_path):
    """On a folder and SQLite: a kill -9 in the middle, nothing lost or doubled, exit code 0."""
    out, err = demo(*SMALL).communicate(timeout=110)
    assert err == ""
    numbers = dict(re.findall(r"^([a-z][a-z ,]*?) {2,}(\d+)", out, re.MULTILINE))
    assert numbers["published"] == "200"
    assert numbers["lost"] == numbers["doubled"] == numbers["ran early"] == "0"
    assert "kill -9" in out
    assert "none lost, none run twice, none early" in out
    ends = ("ran", "revoked", "still held")
    assert sum(int(numbers[name]) for name in ends) == 200
    assert not leftovers(tmp_path)


def test_a_run_on_redis_leaves_no_key_behind(demo, redis_server):
    """``BROKER=redis://…`` does the same on a real broker and removes what it made there."""
    redis_server.client.flushall()
    process = demo(*SMALL, BROKER=f"{redis_server.url}/5")
    out, err = process.communicate(timeout=110)
    assert (process.returncode, err) == (0, ""), out
    assert redis_server.client.info("keyspace") == {}


def test_ctrl_c_twice_ends_everything(demo, tmp_path):
    """One line, no traceback, exit code 130, no process and no file left."""
    process = demo(*SMALL)
    pid = 0
    for line in process.stdout:
        ready = re.search(r"worker (\d+) is ready", line)
        if ready:
            pid = int(ready[1])
            break
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted: the worker is killed, the temporary files are removed\n"
    assert not alive(pid)
    assert not leftovers(tmp_path)


def test_ctrl_c_during_the_imports(demo):
    """Before anything was started it is one word."""
    process = demo(command=("-c", IN_IMPORTS))
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "", "interrupted")


def test_the_worker_ends_with_a_demo_that_was_killed(demo):
    """A kill -9 of the demo itself leaves no worker behind."""
    process = demo(*SMALL)
    ready = next(
        match for line in process.stdout if (match := re.search(r"worker (\d+) is ready", line))
    )
    process.kill()
    wait_for(lambda: not alive(int(ready[1])), what="the worker is gone")


@pytest.mark.parametrize(
    ("url", "words"),
    [("nonsense", "must be a URL"), ("redis://:secret@127.0.0.1:1/0", "does not answer")],
)
def test_a_wrong_broker_is_one_line(demo, tmp_path, url, words):
    """A bad URL and a dead broker: one line without the password, exit code 2, no files."""
    process = demo(BROKER=url)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
    assert "secret" not in err
    assert not leftovers(tmp_path)
