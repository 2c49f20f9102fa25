"""Commands that change something: cancel, reschedule, run-now, drain, migrate."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any

import click

from celery_wheel.backlog import RESCHEDULED, Backlog
from celery_wheel.cli.group import Instant, backlog_command, filtering, json_option, selected
from celery_wheel.cli.output import print_json, print_pairs

__all__ = ("COMMANDS",)


@backlog_command("cancel")
@click.argument("task_ids", metavar="[ID]...", nargs=-1)
@filtering
@click.option("--all", "everything", is_flag=True, help="Cancel every task there is.")
@click.option("--dry-run", is_flag=True, help="Answer, and change nothing.")
@json_option
def cancel(
    backlog: Backlog,
    task_ids: tuple[str, ...],
    *,
    everything: bool,
    dry_run: bool,
    as_json: bool,
    **which: Any,
) -> None:
    """Cancel tasks by id or by a filter, as a revoke does.

    Answers per id: cancelled, dispatched (it was handed over already) or unknown (not held; it
    is refused should it come).
    """
    ids = _clean((*task_ids, *which.pop("ids")))
    filters = selected(**which)
    if bool(ids or filters) == everything:
        raise click.UsageError("give ids, a filter such as --name, or --all")
    outcomes = backlog.cancel(ids or None, dry_run=dry_run, **filters)
    _answer(outcomes, as_json=as_json, dry_run=dry_run)


@backlog_command("reschedule")
@click.argument("task_id", metavar="ID")
@click.option("--countdown", type=float, metavar="S", help="Seconds from now; negative: now.")
@click.option("--eta", type=Instant(), metavar="ISO", help="An instant; in the past: now.")
@json_option
def reschedule(
    backlog: Backlog, task_id: str, *, countdown: float | None, eta: Any, as_json: bool
) -> None:
    """Give a task another ETA; its id stays.

    A date without an offset is taken in the app's timezone.
    """
    if (countdown is None) == (eta is None):
        raise click.UsageError("give either --countdown or --eta")
    if countdown is not None and not math.isfinite(countdown):
        raise click.UsageError(f"--countdown {countdown}: give a number of seconds")
    try:
        outcome = backlog.reschedule(task_id, countdown=countdown, eta=eta)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from exc
    if outcome == RESCHEDULED and not as_json:
        for row in backlog.list(ids=[task_id]):
            click.echo(f"due {backlog.describe(row)['due']}", err=True)
    _moved({task_id: outcome}, as_json=as_json)


@backlog_command("run-now")
@click.argument("task_ids", metavar="ID...", nargs=-1, required=True)
@json_option
def run_now(backlog: Backlog, task_ids: tuple[str, ...], *, as_json: bool) -> None:
    """Let tasks run at once, whatever their ETA."""
    _moved(backlog.run_now(_clean(task_ids)), as_json=as_json)


@backlog_command("drain")
@click.option("--force", is_flag=True, help="Go on while workers hold leases.")
@json_option
def drain(backlog: Backlog, *, force: bool, as_json: bool) -> None:
    """Give every task back to its source queue in the broker, as it came.

    Stop the workers first: workers with the wheel would take the tasks in again. A drain that is
    killed is run again; what it published last (200 tasks at most) is then there twice.
    """
    with _Bar() as bar:
        drained = backlog.drain(force=force, progress=bar.show)
    found: dict[str, Any] = {
        "drained": sum(drained.queues.values()),
        "queues": dict(drained.queues),
        "revoked": len(drained.revoked),
        "unreadable": drained.unreadable,
        "left": drained.left,
    }
    if as_json:
        print_json(found)
    else:
        queues = found.pop("queues")
        print_pairs(found.items())
        print_pairs((f"queue {name}", number) for name, number in sorted(queues.items()))
    if drained.unreadable and drained.unreadable == drained.left:
        raise click.ClickException(
            f"{drained.left} tasks stay in the store, for the reasons above: cancel them, or put "
            "right what is in the way, and drain again"
        )
    if drained.left:
        raise click.ClickException(
            f"{drained.left} tasks are in the store yet: see `celery wheel list`, stop the workers "
            "that hold them and drain again"
        )


class _Bar:
    """A progress bar on the standard error, where that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc)

    def show(self, done: int, total: int) -> None:
        """Move on; the first call draws it."""
        if self._bar is None and sys.stderr.isatty():
            self._bar = click.progressbar(
                length=total, label="drain", file=sys.stderr, show_pos=True
            )
            self._bar.__enter__()
        if self._bar is not None:
            self._bar.update(done - self._done)
        self._done = done


@backlog_command("migrate")
def migrate(backlog: Backlog) -> None:
    """Make the store's schema, or bring it up to date; workers do it at their start, too."""
    click.echo(f"{backlog.migrate()}: the schema is up to date")


def _clean(ids: Iterable[str]) -> list[str]:
    wanted = [one.strip() for one in ids]
    if not all(wanted):
        raise click.UsageError("an id is empty")
    return wanted


def _answer(outcomes: dict[str, str], *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json(outcomes)
        return
    print_pairs(outcomes.items())
    counts = Counter(outcomes.values())
    summary = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
    start = "nothing was changed; it would be: " if dry_run else ""
    click.echo(f"{start}{summary or 'no task fits'}", err=True)


def _moved(outcomes: dict[str, str], *, as_json: bool) -> None:
    _answer(outcomes, as_json=as_json, dry_run=False)
    if any(outcome != RESCHEDULED for outcome in outcomes.values()):
        click.get_current_context().exit(1)


COMMANDS = (cancel, reschedule, run_now, drain, migrate)
