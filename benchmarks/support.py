"""Measuring: the disk's fsync, a process's CPU and memory, and values with their spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

__all__ = (
    "Values",
    "conditions",
    "cpu_s",
    "fsync_ms",
    "peak_kb",
    "quantile",
    "rss_kb",
    "wait_for",
    "wait_idle",
)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of them lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Values:
    """One measured thing over the rounds."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def text(self) -> str:
        """The median, and the range where there is one."""
        if not self.values:
            return "-"
        low, high = number(min(self.values)), number(max(self.values))
        middle = number(self.median)
        return middle if low == high else f"{middle} ({low} … {high})"


def number(value: float) -> str:
    """Three digits that count."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) < 10 else 1}f}" if abs(value) >= 0.1 else f"{value:.3g}"


def fsync_ms(folder: Path, count: int = 200) -> tuple[float, float]:
    """How long an append of 4 KiB and its fsync take: p50 and p99 in ms."""
    took = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(count):
            began = time.perf_counter()
            os.write(file.fileno(), b"x" * 4096)
            os.fsync(file.fileno())
            took.append((time.perf_counter() - began) * 1000)
    return quantile(took, 0.5), quantile(took, 0.99)


def cpu_s(pid: int) -> float:
    """CPU time of one process with all its threads, user and system, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_kb(pid: int) -> int:
    """Resident memory of one process, without its children."""
    return _status(pid, "VmRSS:")


def peak_kb(pid: int) -> int:
    """The most resident memory it ever had."""
    return _status(pid, "VmHWM:")


def _status(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise LookupError(name)


def wait_for(
    condition: Callable[[], object], timeout_s: float, *, every_s: float = 0.02, what: str = ""
) -> bool:
    """Poll until it is so; ``False`` after the time is up, told in one line if named."""
    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            if what:
                print(f"    gave up after {timeout_s:.0f} s: {what}", flush=True)
            return False
        time.sleep(every_s)
    return True


def wait_idle(pid: int, timeout_s: float = 60, *, share: float = 0.03) -> None:
    """Wait until a process uses next to no CPU for half a second."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        before = cpu_s(pid)
        time.sleep(0.5)
        if cpu_s(pid) - before < share * 0.5:
            return


def conditions() -> dict[str, str]:
    """What the numbers depend on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("celery", "kombu", "sqlalchemy")},
        "load average before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def save(path: Path, what: object) -> None:
    """Keep raw values as JSON."""
    path.write_text(json.dumps(what, indent=1, default=vars) + "\n")
