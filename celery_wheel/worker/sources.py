"""Which queue a delivery came from, and what that queue allows."""

from __future__ import annotations

from typing import Any

from celery_wheel import _compat

__all__ = ("Sources",)


class Sources:
    """Notes the source queue of the delivery that is being handled.

    A delivery is handled to its end before the next begins, in one thread, so one note is
    enough and nothing needs to be written into the message.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.current = ""

    def watch(self, task_consumer: Any) -> None:
        """Note the sources of a consumer's deliveries; before it starts to consume."""
        _compat.note_sources(task_consumer, self._note)

    def _note(self, queue: str) -> None:
        self.current = queue

    def broker_only(self, queue: str) -> bool:
        """Whether messages of this queue can't outlive it: exclusive, auto-delete, Broadcast."""
        declared = self._app.amqp.queues.get(queue)
        if declared is None:
            return False
        exchange = getattr(declared, "exchange", None)
        return bool(
            declared.exclusive
            or declared.auto_delete
            or (exchange is not None and exchange.type == "fanout")
        )
