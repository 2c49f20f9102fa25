"""The remote control command that Celery's command line has to know of."""

from __future__ import annotations

from typing import Any

from celery.worker import control

__all__ = ("register",)


def register() -> None:
    """Make ``celery inspect wheel`` known in this process. Calling it again does no harm."""
    if "wheel" not in control.Panel.meta:
        control.inspect_command(name="wheel", default_timeout=5.0)(_wheel)


def _wheel(_state: Any, **_: Any) -> Any:
    """Show what the timing wheel holds, and how late tasks are."""
    # A worker with the wheel answers from its own mailbox; this is what others say.
    return {"error": "this worker does not run celery_wheel:Consumer"}
