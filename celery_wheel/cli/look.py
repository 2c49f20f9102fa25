"""Commands that only read: settings, stats, list, show, check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import click

from celery_wheel.backlog import Backlog
from celery_wheel.cli.group import backlog_command, filtering, json_option, selected
from celery_wheel.cli.output import print_json, print_pairs, print_table
from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.errors import WheelError
from celery_wheel.worker.incarnation import provably_dead

__all__ = ("COMMANDS",)

#: A clock that is off by more than this makes tasks late or early by as much (milliseconds).
SKEW_MS = 1000


@backlog_command("settings")
def settings(backlog: Backlog) -> None:
    """Show the wheel_* settings of the app as they are in force."""
    in_force = backlog.settings
    for item in fields(in_force):
        value = in_force.store_shown if item.name == "store_url" else getattr(in_force, item.name)
        unit = item.name.rpartition("_")[2]
        unit = f" {unit}" if unit in ("s", "ms") else ""
        click.echo(f"{item.metadata['spec'].name} = {value}{unit}")


@backlog_command("stats")
@json_option
def stats(backlog: Backlog, *, as_json: bool) -> None:
    """Count what the store holds, and when it is due."""
    found = backlog.stats()
    if as_json:
        print_json(found)
        return
    horizon = found.pop("horizon")
    print_pairs(found.items())
    when = ", ".join(f"{label} {number}" for label, number in horizon.items() if number)
    click.echo(f"due: {when or '-'}")


@backlog_command("list")
@filtering
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=100,
    show_default=True,
    help="How many at most; 0: all.",
)
@json_option
def list_(backlog: Backlog, *, limit: int, as_json: bool, **which: Any) -> None:
    """List tasks, nearest ETA first."""
    rows = [backlog.describe(row) for row in backlog.list(limit=limit or None, **selected(**which))]
    if as_json:
        print_json(rows)
        return
    heads = ("id", "name", "queue", "due", "state", "owner")  # --json has all
    print_table(heads, ([row[head] for head in heads] for row in rows))
    if limit and len(rows) == limit:
        click.echo(f"({limit} shown; there may be more: --limit 0 for all)", err=True)


@backlog_command("show")
@click.argument("task_id", metavar="ID")
@json_option
def show(backlog: Backlog, task_id: str, *, as_json: bool) -> None:
    """Show all that is kept of one task, its headers included."""
    rows = backlog.show(task_id)
    if not rows:
        raise click.ClickException(
            f"no task {task_id} is held: it ran, was cancelled, or has not reached a worker yet"
        )
    if as_json:
        print_json(rows)
        return
    for number, row in enumerate(rows):
        if number:
            click.echo()
        for name, value in row.items():
            if isinstance(value, dict):
                print_pairs((f"{name}.{key}", one) for key, one in value.items())
            else:
                click.echo(f"{name}: {value}")


@backlog_command("check")
@json_option
def check(backlog: Backlog, *, as_json: bool) -> None:
    """Look at the store's connection, schema, clock and leases; exit code 1 if one is bad."""
    findings = list(_findings(backlog))
    if as_json:
        print_json([dict(zip(("check", "ok", "says"), one, strict=True)) for one in findings])
    else:
        print_table(
            ("check", "state", "says"),
            ((name, "ok" if fine else "BAD", says) for name, fine, says in findings),
        )
    if not all(fine for _, fine, _ in findings):
        click.get_current_context().exit(1)


def _findings(backlog: Backlog) -> Iterator[tuple[str, bool, str]]:
    yield from _checked("settings", lambda: (True, f"wheel_store = {backlog.settings.store_shown}"))
    connected = _checked("store", lambda: _connection(backlog))
    fine = False
    for finding in connected:
        fine = finding[1]
        yield finding
    if not fine:
        return
    yield "schema", True, "as this release makes it"
    yield from _checked("clock", lambda: _clock(backlog))
    yield from _checked("leases", lambda: _leases(backlog))


def _checked(name: str, check: Callable[[], tuple[bool, str]]) -> Iterator[tuple[str, bool, str]]:
    try:
        fine, says = check()
    except WheelError as exc:
        fine, says = False, " ".join(str(exc).split())
    yield name, fine, says


def _connection(backlog: Backlog) -> tuple[bool, str]:
    backlog.migrate()  # connects
    asked = SYSTEM_CLOCK.monotonic()
    found = backlog.stats()
    took_ms = (SYSTEM_CLOCK.monotonic() - asked) * 1000
    return True, (
        f"answers in {took_ms:.0f} ms: {found['pending']} pending, {found['dispatched']} "
        f"dispatched, the oldest {found['oldest_overdue_s']:g} s overdue"
    )


def _clock(backlog: Backlog) -> tuple[bool, str]:
    skew_ms = backlog.clock_skew_ms()
    if skew_ms is None:
        return True, "this store has no clock of its own to compare with"
    says = f"this machine is {skew_ms} ms ahead of the store"
    return abs(skew_ms) <= SKEW_MS, says


def _leases(backlog: Backlog) -> tuple[bool, str]:
    owners = backlog.owners()
    if not owners:
        return True, "no worker holds one: nothing runs until a worker starts"
    dead = sorted({owner.name for owner in owners if provably_dead(owner)})
    alive = sorted({owner.name for owner in owners}.difference(dead))
    parts = [f"alive: {', '.join(alive)}"] if alive else []
    parts += [f"dead, free when the lease ends: {', '.join(dead)}"] if dead else []
    return True, "; ".join(parts)


COMMANDS = (settings, stats, list_, show, check)
