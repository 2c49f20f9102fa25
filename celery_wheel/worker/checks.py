"""Looks at the set-up once, when the worker starts, for what is going to hurt later.

``wheel_checks`` says what a finding does: a warning in the log, the end of the worker, nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.utils.quorum_queues import detect_quorum_queues

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_wheel.worker.engine import Engine

__all__ = ("findings", "network_file_system", "run")

logger = get_logger(__name__)

#: File systems on which SQLite's locks or fsync are not to be trusted.
NETWORK_TYPES = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "9p",
        "ceph",
        "fuse.sshfs",
        "fuse.s3fs",
        "glusterfs",
        "lustre",
    )
)
#: Redis' visibility timeout where none is set (kombu's default, seconds).
REDIS_VISIBILITY_S = 3600


def run(consumer: Any, engine: Engine) -> None:
    """Report what was found.

    Raises:
        SystemExit: something was found and ``wheel_checks`` is ``"error"``.
    """
    if engine.settings.checks == "ignore":
        return
    found = list(findings(consumer, engine.settings))
    for line in found:
        logger.warning("celery-wheel: %s", line)
    if found and engine.settings.checks == "error":
        logger.critical("celery-wheel stops: wheel_checks is 'error' and a check failed")
        raise SystemExit(1)


def findings(consumer: Any, settings: Any) -> Iterator[str]:
    """What is wrong with this worker's set-up, a sentence each."""
    url = settings.store_url or "broker://"
    driver = consumer.connection.transport.driver_type
    if url == "broker://":
        yield from _broker_custody(consumer, driver)
    elif url.startswith("sqlite"):
        path = Path(url.partition(":///")[2] or ".").absolute()
        kind = network_file_system(path)
        if kind:
            yield (
                f"the SQLite store {path} is on a network file system ({kind}): its locks can "
                "fail there; put it on a local disk"
            )


def _broker_custody(consumer: Any, driver: str) -> Iterator[str]:
    options = consumer.app.conf.broker_transport_options or {}
    if driver == "redis":
        visibility_s = float(options.get("visibility_timeout", REDIS_VISIBILITY_S))
        if visibility_s < 10:
            yield (
                f"visibility_timeout is {visibility_s:g} s: held messages are renewed every "
                "quarter of it, and a worker that is busy for longer loses them to others; "
                "set at least 60 s, or name a wheel_store"
            )
    elif driver == "amqp":
        found, queue = detect_quorum_queues(consumer.app, driver)
        if found:
            yield (
                f"no wheel_store is set and {queue} is a quorum queue, whose window of "
                "unacknowledged messages can't be raised: once it is full of delayed tasks "
                "nothing else runs; set wheel_store, for example sqlite:///wheel.db"
            )
    elif driver in ("filesystem", "memory"):
        yield (
            f"no wheel_store is set and the {driver} transport removes a message before it is "
            "delivered: delayed tasks are lost when this worker stops; set wheel_store"
        )


def network_file_system(path: Path, mounts: str = "/proc/self/mounts") -> str | None:
    """The type of the network file system a path is on, or ``None``."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return None
    best, kind = "", ""
    target = os.path.realpath(path)
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind if kind in NETWORK_TYPES else None
