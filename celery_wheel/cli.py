"""``celery wheel …``: Celery's own command line, extended through ``celery.commands``.

Loading this module also makes ``celery inspect wheel`` known.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import click

from celery_wheel import remote
from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.errors import WheelError
from celery_wheel.settings import Settings
from celery_wheel.stores import open_store

__all__ = ("wheel",)

remote.register()


@click.group()
def wheel() -> None:
    """Look at delayed tasks that are kept in a wheel_store."""


@wheel.command()
@click.pass_context
def settings(ctx: click.Context) -> None:
    """Show the wheel_* settings of the app as they are in force."""
    in_force = _settings(ctx)
    for item in fields(in_force):
        value = in_force.store_shown if item.name == "store_url" else getattr(in_force, item.name)
        unit = item.name.rpartition("_")[2]
        unit = f" {unit}" if unit in ("s", "ms") else ""
        click.echo(f"{item.metadata['spec'].name} = {value}{unit}")


@wheel.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def stats(ctx: click.Context, *, as_json: bool) -> None:
    """Count what the store holds; works with no worker running."""
    in_force = _settings(ctx)
    if in_force.store_url in (None, "broker://"):
        raise click.UsageError(
            "no wheel_store is set, so the broker keeps delayed tasks: ask the workers with "
            "`celery inspect wheel`"
        )
    try:
        found = _read(in_force)
    except WheelError as exc:
        raise click.ClickException(str(exc)) from exc
    if as_json:
        click.echo(json.dumps(found))
    else:
        for name, value in found.items():
            click.echo(f"{name}: {value}")


def _settings(ctx: click.Context) -> Settings:
    try:
        return Settings.from_app(ctx.obj.app)
    except WheelError as exc:
        raise click.ClickException(str(exc)) from exc


def _read(in_force: Settings) -> dict[str, Any]:
    store = open_store(in_force.store_url or "", in_force.namespace)
    store.open()
    try:
        counts, oldest = store.count(), store.oldest_due()
    finally:
        store.close()
    overdue_ms = 0 if oldest is None else max(0, SYSTEM_CLOCK.wall_ms() - oldest)
    return {
        "store": in_force.store_shown,
        "pending": counts.pending,
        "dispatched": counts.dispatched,
        "oldest_overdue_s": round(overdue_ms / 1000, 3),
    }
