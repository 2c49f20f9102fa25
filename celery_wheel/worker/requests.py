"""From a row back to the request that the pool runs.

To Celery the held message looks like one from the broker: it has headers, properties,
delivery info and a body, and it is acknowledged or rejected once.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery.utils.imports import symbol_by_name
from celery.worker.request import create_request_cls
from kombu.message import Message

from celery_wheel import _compat
from celery_wheel.envelope import Envelope, unpack

if TYPE_CHECKING:
    from celery_wheel.task import DelayedTask

__all__ = ("RequestFactory", "describe", "message_of")


class RequestFactory:
    """Builds requests for one connection of one consumer.

    Args:
        consumer: Celery's consumer.
        finished: called with the request, in whichever thread the pool reports in, when the
            pool is done with it, after Celery has handled the outcome.
    """

    def __init__(self, consumer: Any, finished: Callable[[Any], None]) -> None:
        self._consumer, self._finished = consumer, finished
        self._accept = _compat.accepted_content(consumer.app)
        self._classes: dict[str, type] = {}

    def knows(self, name: str) -> bool:
        """Whether the task is registered here."""
        return name in self._consumer.app.tasks

    def build(
        self,
        task: DelayedTask,
        message: Any = None,
        *,
        on_ack: Callable[..., None] = lambda *_: None,
        on_reject: Callable[..., None] = lambda *_: None,
    ) -> Any:
        """The request of a row, or of the message itself in broker custody.

        Raises:
            CorruptRow: its envelope can't be read.
            KeyError: its task is not registered.
            Exception: whatever kombu raises for a body that is not accepted or not decodable.
        """
        app = self._consumer.app
        celery_task = app.tasks[task.name]
        if message is None:
            message, headers = self._unpacked(task)
        else:
            headers = message.headers
        return self._class(celery_task)(
            message,
            on_ack=on_ack,
            on_reject=on_reject,
            app=app,
            hostname=self._consumer.hostname,
            eventer=self._consumer.event_dispatcher,
            task=celery_task,
            connection_errors=self._consumer.connection_errors,
            body=message.body,
            headers=headers,
            decoded=False,
            utc=app.uses_utc_timezone(),
        )

    def _unpacked(self, task: DelayedTask) -> tuple[Message, dict[str, Any]]:
        """The row as a message without a channel, and all its headers."""
        envelope = unpack(task.envelope)
        return message_of(task, envelope, self._accept), envelope.headers

    def _class(self, celery_task: Any) -> type:
        cls = self._classes.get(celery_task.name)
        if cls is None:
            consumer = self._consumer
            base = create_request_cls(
                symbol_by_name(celery_task.Request),
                celery_task,
                consumer.pool,
                consumer.hostname,
                consumer.event_dispatcher,
                app=consumer.app,
            )
            cls = self._classes[celery_task.name] = _reporting(base, self._finished)
        return cls


def message_of(task: DelayedTask, envelope: Envelope, accept: Any) -> Message:
    """A row as a message without a channel; ``accept`` is what may be decoded."""
    delivery_info = dict(envelope.delivery_info)
    delivery_info["redelivered"] = task.redelivered or bool(delivery_info.get("redelivered"))
    # The body was decompressed on arrival; with the header kombu would do it once more.
    headers = {k: v for k, v in envelope.headers.items() if k != "compression"}
    return Message(  # type: ignore[no-untyped-call]
        body=envelope.body,
        content_type=envelope.content_type,
        content_encoding=envelope.content_encoding,
        delivery_info=delivery_info,
        properties=envelope.properties,
        headers=headers,
        accept=accept,
    )


def _reporting(base: Any, finished: Callable[[Any], None]) -> type:
    """A request class that tells when the pool is done with it."""

    class HeldRequest(base):
        def on_success(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().on_success(*args, **kwargs)
            finally:
                finished(self)

        def on_failure(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().on_failure(*args, **kwargs)
            finally:
                finished(self)

        def on_timeout(self, soft: Any, timeout: Any) -> Any:
            try:
                return super().on_timeout(soft, timeout)
            finally:
                if not soft:
                    finished(self)

    return HeldRequest


def describe(factory: RequestFactory, task: DelayedTask, message: Any = None) -> dict[str, Any]:
    """A row as ``inspect scheduled`` shows a request.

    What can't be decoded here (an unknown task, a content type that is not accepted) is shown
    by its headers.
    """
    eta = datetime.fromtimestamp(task.due_ms / 1000, timezone.utc).isoformat()
    try:
        request = factory.build(task, message)
        info = request.info()
        eta = request.eta.isoformat() if request.eta else eta
    except Exception:  # noqa: BLE001 - bodies fail to decode in every way there is
        info = {"id": task.id, "name": task.name, "type": task.name, "acknowledged": False}
    return {"eta": eta, "priority": 6, "request": info}
