"""A worker that gives up a PostgreSQL server that hangs after two seconds, not after thirty.

Imported by a worker process (``conf={"imports": …}``); for the other stores the URL says it.
"""

from __future__ import annotations

from celery_wheel.stores import postgresql

__all__ = ()

postgresql.ANSWER_TIMEOUT_S = 2.0
