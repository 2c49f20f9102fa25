"""Processes that tests start, and the leash that kills what a dead test run leaves behind.

The test run that was started by hand (the controller, where xdist is used) holds a *leash*: a
tiny process that reads a pipe from it. When the run ends in whatever way, Ctrl-C and SIGKILL
included, the pipe closes and the leash kills every process group on its list, which is a folder
with one file for each.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

__all__ = ("Process", "find_program", "hold_leash", "leash_folder", "wait_for")

T = TypeVar("T")
ROOT = Path(__file__).parents[2]

_VARIABLE = "CELERY_WHEEL_TEST_LEASH"
_WATCH = """
import os, shutil, signal, sys
sys.stdin.read()
for name in os.listdir(sys.argv[1] + "/groups"):
    try:
        os.killpg(int(name), signal.SIGKILL)
    except OSError:
        pass
shutil.rmtree(sys.argv[1], ignore_errors=True)
"""


def hold_leash() -> subprocess.Popen[bytes]:
    """Start the leash of this test run; call it once, in the controller."""
    folder = tempfile.mkdtemp(prefix="celery-wheel-tests-")
    Path(folder, "groups").mkdir()
    os.environ[_VARIABLE] = folder
    return subprocess.Popen(
        [sys.executable, "-S", "-c", _WATCH, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the terminal's group, not the leash
    )


def leash_folder() -> Path:
    """A folder all processes of this test run share; it is removed at the end."""
    return Path(os.environ[_VARIABLE])


def wait_for(
    condition: Callable[[], T], timeout_s: float = 10, *, every_s: float = 0.05, what: str = ""
) -> T:
    """Poll until ``condition()`` is true and return its value; fail the test otherwise."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            told = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"after {timeout_s} s still not so: {told} (last: {value!r})")
        time.sleep(every_s)


class Process:
    """A child in its own process group, on the leash, with its output in a file."""

    def __init__(
        self,
        argv: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.argv = list(argv)
        self.log_path = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
                cwd=cwd,
                start_new_session=True,
            )
        self._listed = leash_folder() / "groups" / str(self.pid)
        self._listed.touch()

    @property
    def pid(self) -> int:
        """The main process; also the id of the group."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """``None`` while the main process lives."""
        return self._popen.poll()

    def log(self) -> str:
        """Everything written so far."""
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to the main process alone."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = 15) -> int:
        """Wait for the main process to end; what is left of its group is killed then."""
        code = self._popen.wait(timeout_s)
        self._kill_group()
        return code

    def kill(self) -> None:
        """End the whole group at once. May be called twice."""
        self._kill_group()
        self._popen.wait()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._listed.unlink(missing_ok=True)


def find_program(name: str, *folders: str) -> str:
    """The path of a program, looked for in ``folders`` first; a missing one is an error."""
    found = shutil.which(name, path=os.pathsep.join([*folders, os.environ.get("PATH", "")]))
    if found is None:
        raise FileNotFoundError(f"{name} is not installed: run `make servers`")
    return found
