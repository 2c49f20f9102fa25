"""One delayed task: what is kept of a message from the broker until it is due.

Knows nothing of stores, wheels or workers. The envelope holds the whole message in a
self-describing encoding (never pickle) so that what comes out is what went in.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

__all__ = ("DISPATCHED", "PENDING", "DelayedTask", "task_key")

#: The two states of a row.
PENDING = "pending"
DISPATCHED = "dispatched"


def task_key(queue: str, task_id: str, retries: int, nesting: int, eta: str | None) -> bytes:
    """The identity of a *message*: 16 bytes, equal only for copies of one message.

    A retry, a replacement and a re-publication with another ETA under the same task id are
    other messages and get other keys.

    Args:
        queue: name of the source queue.
        task_id: the task's id.
        retries: the ``retries`` header.
        nesting: the ``replaced_task_nesting`` header.
        eta: the text of the ``eta`` header, untouched.
    """
    text = "\x1f".join((queue, task_id, str(retries), str(nesting), eta or ""))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


@dataclass(slots=True)
class DelayedTask:
    """A row of a store, and the item in the wheel.

    ``version`` counts reschedulings and is part of the fence; ``arrival`` is the order of
    receipt (UTC microseconds, made unique and rising within one worker). ``stamps`` holds one
    ``header=value`` text per stamp, for revokes by stamped header. All instants are UTC.
    """

    key: bytes
    id: str
    name: str
    queue: str
    due_ms: int
    envelope: bytes
    retries: int = 0
    priority: int = 0
    expires_ms: int | None = None
    arrival: int = 0
    stamps: tuple[str, ...] = ()
    version: int = 0
    state: str = PENDING
    owner: str | None = None
    redelivered: bool = False

    def describe(self) -> dict[str, Any]:
        """The row without its envelope, for people."""
        return {
            "id": self.id,
            "name": self.name,
            "queue": self.queue,
            "due_ms": self.due_ms,
            "retries": self.retries,
            "priority": self.priority,
            "expires_ms": self.expires_ms,
            "state": self.state,
            "owner": self.owner,
            "version": self.version,
        }
