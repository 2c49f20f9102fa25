"""Announcing revoked tasks from a process that is no worker.

The result backend is told as a worker would tell it, chords included, and the signal
``task_revoked`` is sent in this process. The event ``task-revoked`` is not: no worker says it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery.utils.log import get_logger
from celery.worker.request import Request

from celery_wheel import _compat
from celery_wheel.envelope import unpack
from celery_wheel.task import DelayedTask
from celery_wheel.worker.requests import message_of

__all__ = ("Notices",)

logger = get_logger(__name__)


class Notices:
    """Announces; after the backend failed once, no more: each try may take long."""

    def __init__(self, app: Any) -> None:
        self._app, self._silent = app, False

    def revoked(self, rows: Iterable[DelayedTask]) -> None:
        """Announce rows that this process deleted. Never raises."""
        for row in rows:
            if self._silent:
                logger.warning("%s[%s] is cancelled, not announced.", row.name, row.id)
            else:
                self._revoked(row)

    def _revoked(self, row: DelayedTask) -> None:
        try:
            request = self._request(row)
        except Exception as exc:  # noqa: BLE001 - bodies fail to decode in every way there is
            logger.warning("%s[%s] can't be announced in full: %r", row.name, row.id, exc)
            request = None
        try:
            if request is None:
                self._app.backend.mark_as_revoked(row.id, "revoked")
            else:
                _compat.announce_revoked(request)
        except Exception as exc:  # noqa: BLE001 - backends raise their own errors
            self._silent = True
            logger.error(
                "%s[%s] is cancelled, but the result backend could not be told: %r",
                row.name,
                row.id,
                exc,
            )

    def _request(self, row: DelayedTask) -> Any:
        app = self._app
        envelope = unpack(row.envelope)
        message = message_of(row, envelope, _compat.accepted_content(app))
        # Clients need not have the task: what is announced is in the message.
        task = app.tasks[row.name] if row.name in app.tasks else app.Task()
        request = Request(
            message,
            on_ack=lambda *_: None,
            on_reject=lambda *_: None,
            app=app,
            task=task,
            body=message.body,
            headers=envelope.headers,
            decoded=False,
            utc=app.uses_utc_timezone(),
        )
        request.args  # noqa: B018 - decodes the body: what can't be fails here
        return request
