"""Who this worker is to a store, and which earlier one is provably dead.

An owner names its host's boot, its pid namespace, its pid and that process's start time. Only
where the first two are our own can the process table answer; a pid in another container, or
one that was reused, proves nothing.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from celery_wheel.stores.base import Owner

__all__ = ("new_owner", "provably_dead")


def new_owner(node: str) -> Owner:
    """An owner for this process, never the same twice."""
    pid = os.getpid()
    return Owner(
        name=f"{node}/{uuid.uuid4().hex[:12]}",
        node=node,
        boot=_boot(),
        pid=pid,
        started=_started(pid) or "",
    )


def provably_dead(owner: Owner) -> bool:
    """Whether the process of an owner is gone for certain."""
    if not owner.boot or not owner.pid or not owner.started or owner.boot != _boot():
        return False
    return _started(owner.pid) != owner.started


def _boot() -> str:
    """Host boot and pid namespace; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """When a process began, in clock ticks after boot; ``None`` for no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The second field is the command in parentheses, which may hold anything; a zombie
    # is a process that is over.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]
