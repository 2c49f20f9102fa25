"""Which earlier worker is provably dead: real processes, alive, gone, zombies and reused pids."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from celery_wheel.worker import incarnation
from celery_wheel.worker.incarnation import new_owner, provably_dead

pytestmark = pytest.mark.skipif(not incarnation._boot(), reason="needs /proc")


@pytest.fixture
def child():
    """A process that waits, and the owner it would be."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    started = incarnation._started(process.pid)
    owner = replace(new_owner("node@here"), pid=process.pid, started=started)
    yield process, owner
    process.kill()
    process.communicate()


def test_owners_of_one_process_differ():
    """Two incarnations never share a name, and both name the same living process."""
    one, two = new_owner("node@here"), new_owner("node@here")
    assert one.name != two.name
    assert (one.node, one.pid, one.started) == ("node@here", os.getpid(), two.started)
    assert not provably_dead(one)


def test_a_living_process_is_not_dead(child):
    """It may be a namesake that is well."""
    _, owner = child
    assert not provably_dead(owner)


def test_a_process_that_is_gone_is_dead(child):
    """Killed and waited for."""
    process, owner = child
    process.kill()
    process.wait()
    assert provably_dead(owner)


def test_a_zombie_is_dead(child):
    """Killed and not waited for: its pid is still taken."""
    process, owner = child
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert provably_dead(owner)


def test_a_reused_pid_is_another_process(child):
    """The pid lives, but began at another time: the owner is gone."""
    _, owner = child
    assert provably_dead(replace(owner, started=str(int(owner.started) - 1)))


@pytest.mark.parametrize("field", ["boot", "pid", "started"])
def test_without_proof_nobody_is_dead(child, field):
    """Another boot or pid namespace, or an owner that did not say, proves nothing."""
    process, owner = child
    process.kill()
    process.wait()
    unknown = {"boot": "another/pid:[1]", "pid": 0, "started": ""}
    assert not provably_dead(replace(owner, **{field: unknown[field]}))
    assert not provably_dead(replace(owner, boot=""))


def test_a_command_with_parentheses_and_spaces(tmp_path):
    """The start time is read after the last parenthesis: a command may hold anything."""
    program = tmp_path / "a ) S 1 (b"
    program.symlink_to(sys.executable)
    process = subprocess.Popen([program, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert int(incarnation._started(process.pid)) > 0
    finally:
        process.kill()
        process.communicate()
