"""The group of commands, and what they have in common: the client, errors, options."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import click
from celery.utils.log import get_logger

from celery_wheel.backlog import Backlog
from celery_wheel.errors import WheelError
from celery_wheel.instants import to_ms

__all__ = ("Instant", "backlog_command", "filtering", "json_option", "selected", "wheel")

logger = get_logger(__name__)


@click.group()
def wheel() -> None:
    """Look at delayed tasks in the wheel_store, and steer them; no worker is needed."""


def backlog_command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command whose first argument is the app's :class:`Backlog`; errors become one line."""

    def decorate(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            backlog = Backlog(click.get_current_context().obj.app)
            try:
                with _warnings_shown():
                    function(backlog, *args, **kwargs)
            except WheelError as exc:
                raise click.ClickException(" ".join(str(exc).split())) from exc
            except (click.ClickException, click.exceptions.Exit, click.Abort):
                raise
            except BrokenPipeError:
                # Whoever read this has seen enough.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except Exception as exc:
                logger.debug("%s failed.", name, exc_info=True)
                raise click.ClickException(f"{name} failed unexpectedly: {exc!r}") from exc
            finally:
                backlog.close()

        return click.command(name)(run)

    return decorate


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Print what the package warns of, which Celery keeps silent outside of a worker."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Instant(click.ParamType):  # type: ignore[type-arg]
    """A date in ISO 8601."""

    name = "iso-date"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Check the date; one without an offset is in the app's timezone."""
        if isinstance(value, datetime):
            return value
        try:
            to_ms(value, ctx.obj.app.timezone)
        except ValueError as exc:
            self.fail(str(exc), param, ctx)
        return value


def filtering(function: Any) -> Any:
    """The options that choose tasks."""
    options = (
        click.option("--name", help="The task's name, in full."),
        click.option("--queue", help="The source queue."),
        click.option("--id", "ids", multiple=True, metavar="ID", help="A task id; repeatable."),
        click.option("--due-before", type=Instant(), help="Due earlier than this."),
        click.option("--due-after", type=Instant(), help="Due at this or later."),
        click.option("--owner", help="The worker that holds it, as `list` shows it."),
    )
    for option in reversed(options):
        function = option(function)
    return function


def selected(*, ids: tuple[str, ...] = (), **which: Any) -> dict[str, Any]:
    """The options of :func:`filtering` that were given, as the client takes them."""
    given = {name: value for name, value in which.items() if value is not None}
    return {"ids": ids, **given} if ids else given
