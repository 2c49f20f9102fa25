"""Workers for a third of the CPU: forked from a process in which all is imported already.

For tests that start them by the hundred. They have the solo pool, so a worker is one process, and
no remote control. ``python -m tests.crash.nursery`` is the process they come from; it reads a
line of JSON for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from celery import Celery

from tests.support.app import CONF_VARIABLE, READY_VARIABLE
from tests.support.processes import ROOT, leash_folder
from tests.support.tasks import PROBE_VARIABLE
from tests.support.worker import Worker

__all__ = ("Nursery",)

QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class _Forked:
    """As much of :class:`~tests.support.processes.Process` as a worker needs; no exit code.

    Thread-safety: one thread at a time, but for ``gone``.
    """

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log_path = pid, log
        self._listed = leash_folder() / "groups" / str(pid)
        self._listed.touch()
        self._handle: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._handle = os.pidfd_open(pid)

    @property
    def gone(self) -> bool:
        """Whether somebody has seen it end."""
        return self._handle is None

    @property
    def returncode(self) -> int | None:
        return 0 if self._ended(0) else None

    def _ended(self, timeout_s: float) -> bool:
        if self._handle is None:
            return True
        if not select.select([self._handle], [], [], timeout_s)[0]:
            return False
        os.close(self._handle)
        self._handle = None
        self._listed.unlink(missing_ok=True)
        return True

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def signal(self, number: int = signal.SIGTERM) -> None:
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def wait(self, timeout_s: float = 15) -> int:
        if not self._ended(timeout_s):
            raise TimeoutError(f"a worker did not end within {timeout_s} s:\n{self.log()}")
        return 0

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()


class _Seedling(Worker):
    """A worker that was forked."""

    def __init__(self, app: Celery, name: str, ready: Path, process: Any) -> None:
        self.app, self.nodename, self.process = app, name, process
        self._remote_control, self._ready = False, ready


class Nursery:
    """Starts workers of one configuration. Thread-safety: :meth:`start` from any thread."""

    def __init__(
        self, app: Celery, folder: Path, *, conf: dict[str, Any], env: dict[str, str]
    ) -> None:
        self._app, self._folder = app, folder
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        conf = {**conf, "worker_enable_remote_control": False}
        told = {
            CONF_VARIABLE: json.dumps(conf),
            PROBE_VARIABLE: str(folder / "probes"),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **env,
        }
        with (folder / "nursery.log").open("ab") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.crash.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **told},
                cwd=folder,
                text=True,
            )

    def start(self, name: str) -> Worker:
        """Start a worker of this node name; wait for it with ``wait_ready``."""
        ready, log = self._folder / f"ready-{uuid.uuid4().hex[:8]}", self._folder / f"{name}.log"
        order = {"name": name, "ready": str(ready), "log": str(log)}
        with self._lock:
            worker = _Seedling(self._app, name, ready, _Forked(self._fork(order), log))
            self._workers = [one for one in self._workers if not one.process.gone]
            self._workers.append(worker)
            return worker

    def _fork(self, order: dict[str, str]) -> int:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(order) + "\n")
        self._popen.stdin.flush()
        answer = self._popen.stdout.readline()
        assert answer, (self._folder / "nursery.log").read_text()
        return int(answer)

    def close(self) -> None:
        """Kill what lives of the workers, and end the process they came from."""
        for worker in self._workers:
            worker.process.kill()
        self._popen.communicate(timeout=10)


def _serve() -> None:
    """Fork a worker per line; in the children, return from here as one."""
    import celery.apps.worker
    import celery.bin.worker
    import celery.concurrency.solo  # noqa: F401

    import celery_wheel.worker.step  # noqa: F401
    from celery_wheel.stores import open_store
    from tests.support.app import app

    app.finalize()
    app.connection_for_read().get_transport_cls()
    open_store(app.conf["wheel_store"])
    app.loader.import_default_modules()
    # Whoever ends is gone from the process table.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(order)
            app.worker_main(["worker", "-P", "solo", "-l", "INFO", "-n", order["name"], *QUIET])
            return
        print(pid, flush=True)


def _become(order: dict[str, str]) -> None:
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ[READY_VARIABLE] = order["ready"]
    log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    _serve()
