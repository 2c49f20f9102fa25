"""Everything of the demo that has to be gone when it ends: processes, folder, queues.

Thread-safety: :meth:`Stage.close` may come from another thread at any moment; what was started
before it is ended by it, and nothing can be started after it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.demo.app import CONF_VARIABLE, READY_VARIABLE, RECORD_VARIABLE, make_app
from celery_wheel.demo.brokers import Broker, make_broker

__all__ = ("Closed", "Stage", "Worker", "WorkerFailed")

#: Seconds a worker may take to come up, and to end when asked to.
START_PATIENCE_S, STOP_PATIENCE_S = 60.0, 20.0
#: Seconds that deleting queues of a real broker may take at the end.
CLEAN_PATIENCE_S = 5.0
#: Buckets of each wheel: few, so that there is more than one level to look at.
WHEEL_SIZE = 64


class Closed(Exception):
    """The demo is being ended."""


class WorkerFailed(Exception):
    """The worker did not come up, or ended; the message holds the end of its log."""


class Worker:
    """A ``celery worker`` process in a session of its own, so that Ctrl-C is not for it."""

    def __init__(self, process: subprocess.Popen[bytes], ready: Path, log: Path) -> None:
        self._process, self._ready, self._log = process, ready, log

    @property
    def pid(self) -> int:
        """The main process, and the group."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it consumes.

        Raises:
            WorkerFailed: it ended, or takes too long.
        """
        give_up_at = SYSTEM_CLOCK.monotonic() + START_PATIENCE_S
        while not self._ready.exists():
            if self._process.poll() is not None or SYSTEM_CLOCK.monotonic() > give_up_at:
                raise WorkerFailed(f"the worker did not start; the end of its log:\n{self.log()}")
            pause(0.02)

    def alive(self) -> bool:
        """Whether the main process runs."""
        return self._process.poll() is None

    def log(self) -> str:
        """The last lines it wrote."""
        with suppress(OSError):
            return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return ""

    def stop(self) -> bool:
        """A warm shutdown; whether it ended by itself in time."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return False
        self.kill()
        return True

    def kill(self) -> None:
        """``kill -9`` for the main process and its children, at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


class Stage:
    """The temporary folder, the broker, the app, and the workers."""

    def __init__(self, broker_url: str) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._workers: list[Worker] = []
        self.folder = Path(tempfile.mkdtemp(prefix="celery-wheel-demo-"))
        try:
            self.broker: Broker = make_broker(broker_url, self.folder)
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        self.record = self.folder / "ran"
        self.store_url = f"sqlite:///{self.folder / 'wheel.db'}"
        self.conf: dict[str, Any] = {
            **self.broker.conf(),
            "worker_consumer": "celery_wheel:Consumer",
            "wheel_store": self.store_url,
            "wheel_size": WHEEL_SIZE,
            "task_ignore_result": True,
        }
        self.app = make_app(self.conf)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._closed

    def start_worker(self) -> Worker:
        """Start a worker process.

        Raises:
            Closed: the demo is being ended.
        """
        with self._lock:
            if self._closed:
                raise Closed
            number = len(self._workers)
            ready, log = self.folder / f"ready-{number}", self.folder / "worker.log"
            env = {
                CONF_VARIABLE: json.dumps(self.conf),
                RECORD_VARIABLE: str(self.record),
                READY_VARIABLE: str(ready),
            }
            with log.open("ab") as output:
                process = subprocess.Popen(  # noqa: S603 - this Python, fixed arguments
                    self._command(),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **env},
                    start_new_session=True,
                )
            worker = Worker(process, ready, log)
            self._workers.append(worker)
            return worker

    def _command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "celery", "-A", "celery_wheel.demo.app", "worker"),
            *("-n", self.broker.node, "-c", "2", "-l", "WARNING"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ]

    def close(self) -> None:
        """End and remove everything. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        for worker in self._workers:
            worker.kill()
        cleaner = threading.Thread(target=self.broker.clean, daemon=True)
        cleaner.start()
        cleaner.join(CLEAN_PATIENCE_S)
        for _ in range(5):
            # An interrupted demo may be writing a last message into it.
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                break
            pause(0.05)


def pause(seconds: float) -> None:
    """Sleep."""
    threading.Event().wait(seconds)
