"""Catch the events that workers send."""

from __future__ import annotations

import threading
from typing import Any

from celery import Celery

__all__ = ("EventCatcher",)


class EventCatcher:
    """A thread that notes every event from :meth:`start` until the block ends."""

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._ready = threading.Event()
        self._stopped = False
        self.caught: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def __enter__(self) -> EventCatcher:
        self._thread.start()
        assert self._ready.wait(10), "the event receiver did not come up"
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._thread.join(10)

    def of(self, kind: str, task_id: str | None = None) -> list[dict[str, Any]]:
        """Events of one type, such as ``task-revoked``, about one task."""
        return [
            event
            for event in list(self.caught)
            if event["type"] == kind and task_id in {None, event.get("uuid")}
        ]

    def _run(self) -> None:
        with self._app.connection_for_read() as connection:
            receiver = self._app.events.Receiver(connection, handlers={"*": self.caught.append})
            with receiver.consumer_context(wakeup=False) as (own_connection, _, _):
                self._ready.set()
                while not self._stopped:
                    try:
                        own_connection.drain_events(timeout=0.1)
                    except TimeoutError:
                        continue
