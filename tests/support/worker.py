"""A real ``celery worker`` process, and what its tasks have left in the probe file."""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery

from tests.support.app import CONF_VARIABLE, READY_VARIABLE
from tests.support.processes import ROOT, Process, wait_for
from tests.support.tasks import PROBE_VARIABLE

__all__ = ("Probes", "Run", "Worker")


@dataclass(frozen=True)
class Run:
    """One run of a task. ``at`` is wall time in seconds; ``eta`` the task's own, or ``None``."""

    label: str
    at: float
    pid: int
    thread: str
    task_id: str
    retries: int
    eta: str | None
    hostname: str
    priority: int | None
    routing_key: str | None
    redelivered: bool | None
    headers: dict[str, Any] | None

    @property
    def late_s(self) -> float:
        """Seconds from the ETA to the run; negative where it was early."""
        assert self.eta is not None, f"{self.label} has no ETA"
        return self.at - datetime.fromisoformat(self.eta).timestamp()


class Probes:
    """What has run, read from the probe file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def runs(self, label: str | None = None) -> list[Run]:
        """Runs in the order in which they began; ``None`` for those of every label."""
        if not self.path.exists():
            return []
        # The last line may be half written.
        lines = self.path.read_text().rpartition("\n")[0].splitlines()
        found = [Run(**json.loads(line)) for line in lines]
        return [run for run in found if label in {None, run.label}]

    def wait(self, label: str | None = None, count: int = 1, timeout_s: float = 15) -> list[Run]:
        """Wait until there are ``count`` runs, and return them all."""
        what = f"{count} runs of {label or 'any task'}"
        wait_for(lambda: len(self.runs(label)) >= count, timeout_s, what=what)
        return self.runs(label)


class Worker:
    """A worker process on one node name. Its output is in a file; it dies with the test."""

    def __init__(
        self,
        app: Celery,
        folder: Path,
        *,
        conf: dict[str, Any],
        pool: str = "prefork",
        concurrency: int = 1,
        loglevel: str = "INFO",
        name: str | None = None,
        queues: Sequence[str] = (),
        args: Sequence[str] = ("--without-mingle", "--without-gossip"),
        env: dict[str, str] | None = None,
    ) -> None:
        self.app = app
        self.nodename = name or f"w-{uuid.uuid4().hex[:8]}@test"
        self._remote_control = conf.get("worker_enable_remote_control", True)
        self._ready = folder / f"ready-{uuid.uuid4().hex[:8]}"
        argv = [str(Path(sys.executable).parent / "celery"), "-A", "tests.support.app", "worker"]
        argv += ["-n", self.nodename, "-P", pool, "-c", str(concurrency), "-l", loglevel, *args]
        argv += ["-Q", ",".join(queues)] if queues else []
        self.process = Process(
            argv,
            folder / f"{self.nodename}.log",
            cwd=folder,
            env={
                CONF_VARIABLE: json.dumps(conf),
                READY_VARIABLE: str(self._ready),
                PROBE_VARIABLE: str(folder / "probes"),
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                **(env or {}),
            },
        )

    def wait_ready(self, timeout_s: float = 30) -> Worker:
        """Wait until it consumes; the log is in the error where it does not come up."""

        def ready() -> bool:
            if self.process.returncode is not None:
                raise AssertionError(f"the worker ended while starting:\n{self.log()}")
            return self._ready.exists()

        wait_for(ready, timeout_s, every_s=0.02, what="the worker is ready")
        if self._remote_control:
            # Redis may take the mailbox's subscription a moment later: a broadcast is lost then.
            ping = partial(self.inspect, "ping", timeout_s=0.5)
            wait_for(ping, timeout_s, what="the worker answers a ping")
        return self

    def log(self) -> str:
        """Everything written so far."""
        return self.process.log()

    def wait_log(self, text: str, timeout_s: float = 10) -> None:
        """Wait until ``text`` is in the log."""
        wait_for(lambda: text in self.log(), timeout_s, what=f"log has {text!r}")

    def inspect(self, method: str, *arguments: Any, timeout_s: float = 5) -> Any:
        """This worker's answer to an ``inspect`` command; ``None`` where it gave none."""
        ask = self.app.control.inspect([self.nodename], timeout=timeout_s, limit=1)
        return (getattr(ask, method)(*arguments) or {}).get(self.nodename)

    def control(self, command: str, timeout_s: float = 5, **arguments: Any) -> Any:
        """This worker's answer to any control command."""
        replies = self.app.control.broadcast(
            command, arguments, [self.nodename], reply=True, timeout=timeout_s, limit=1
        )
        return replies[0][self.nodename] if replies else None

    def scheduled(self) -> list[dict[str, Any]]:
        """The answer of ``inspect scheduled``."""
        return self.inspect("scheduled") or []

    def wheel(self) -> dict[str, Any]:
        """The answer of ``inspect wheel``."""
        answer = self.control("wheel")
        assert answer is not None, f"no answer to `inspect wheel`; the log:\n{self.log()}"
        return dict(answer)

    def wait_held(self, count: int, timeout_s: float = 15) -> None:
        """Wait until exactly ``count`` tasks are held."""
        what = f"{count} tasks are held"
        wait_for(lambda: self.wheel()["held"] == count, timeout_s, what=what)

    def prefetch(self) -> int:
        """The prefetch count as the worker has it now."""
        return int(self.inspect("stats")["prefetch_count"])

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to the main process; SIGKILL takes its children along."""
        if number == signal.SIGKILL:
            self.process.kill()
        else:
            self.process.signal(number)

    def wait(self, timeout_s: float = 20) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(timeout_s)

    def stop(self, timeout_s: float = 20) -> int:
        """A warm shutdown (SIGTERM), waited for."""
        self.kill(signal.SIGTERM)
        return self.wait(timeout_s)
