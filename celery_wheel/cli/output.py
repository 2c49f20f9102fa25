"""Tables and JSON: with rich on a terminal where it is installed, plain text otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import click

__all__ = ("print_json", "print_pairs", "print_table")


def print_json(value: Any) -> None:
    """One JSON value; what JSON does not know is shown as text."""
    click.echo(json.dumps(value, default=_text, ensure_ascii=False, indent=2))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def print_pairs(pairs: Iterable[tuple[str, Any]]) -> None:
    """One ``name: value`` a line."""
    for name, value in pairs:
        click.echo(f"{name}: {value}")


def print_table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table; without a terminal its cells are separated by two blanks or more."""
    lines = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty() and _rich_table(heads, lines):
        return
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    for line in (heads, *lines):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        click.echo("  ".join(cells).rstrip())


def _rich_table(heads: Sequence[str], lines: list[list[str]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        # What is cut short can't be used.
        table.add_column(head, overflow="fold", no_wrap=head in ("id", "due"))
    for line in lines:
        table.add_row(*map(Text, line))
    Console().print(table)
    return True
