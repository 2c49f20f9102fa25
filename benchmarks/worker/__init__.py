"""Stock Celery and the wheel in turn on the same load: ``python -m benchmarks worker``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.support import Values, conditions, fsync_ms, number, save
from benchmarks.worker.burst import PREFORK, SOLO
from benchmarks.worker.inspection import INSPECT
from benchmarks.worker.intake import CPU, RABBITMQ
from benchmarks.worker.lateness import LATENESS
from benchmarks.worker.memory import BACKLOG, NEAR
from benchmarks.worker.part import Lab, Metric, Part
from benchmarks.worker.revoke import DELAY, MANY
from benchmarks.worker.site import OURS, SIDES, STOCK
from benchmarks.worker.stop import STOP

__all__ = ("PARTS", "main")

PARTS: tuple[Part, ...] = (
    RABBITMQ, CPU, NEAR, BACKLOG, LATENESS, SOLO, PREFORK, MANY, DELAY, STOP, INSPECT,
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the parts that are named, or all; print a table for each."""
    options = _parse(argv)
    if options.list:
        for part in PARTS:
            print(f"  {part.name:<16} {part.about}")
        return 0
    chosen = [part for part in PARTS if not options.names or part.name in options.names]
    for key, value in conditions().items():
        print(f"{key}: {value}")
    raw: dict[str, object] = {"conditions": conditions(), "quick": options.quick}
    with tempfile.TemporaryDirectory(prefix="wheel-bench-", dir=options.folder) as folder:
        lab = Lab(options.redis, options.amqp, Path(folder), options.quick)
        for part in chosen:
            p50, p99 = fsync_ms(lab.folder)
            print(f"\n### {part.name}: {part.about}", flush=True)
            values = _measure(lab, part, options.rounds or part.rounds, options.sides)
            print(_table(part, values))
            print(f"fsync of the disk: p50 {number(p50)} ms, p99 {number(p99)} ms", flush=True)
            raw[part.name] = {"values": values, "fsync_ms": [p50, p99]}
    if options.save:
        save(Path(options.save), raw)
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks worker", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="PART", help="all where none is named")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--quick", action="store_true", help="small loads, for a first look")
    parser.add_argument("--rounds", type=int, help="rounds of stock, ours (default: 1 to 3)")
    parser.add_argument("--only", dest="sides", choices=SIDES, help="one side alone")
    parser.add_argument(
        "--redis", default="redis://127.0.0.1:6379/10", help="emptied! (%(default)s)"
    )
    parser.add_argument("--amqp", default="amqp://guest:guest@127.0.0.1:5672//")
    parser.add_argument("--folder", help="where the wheel's file is put (a folder on a disk)")
    parser.add_argument("--save", metavar="FILE", help="write the raw values as JSON")
    options = parser.parse_args(argv)
    unknown = set(options.names) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: --list shows them")
    options.sides = (options.sides,) if options.sides else SIDES
    return options


def _measure(
    lab: Lab, part: Part, rounds: int, sides: tuple[str, ...]
) -> dict[str, dict[str, Values]]:
    values = {side: {m.key: Values() for m in part.metrics} for side in SIDES}
    for turn in range(rounds):
        for side in sides:
            began = time.monotonic()
            try:
                found = part.measure(lab, side)
            except Exception as exc:  # noqa: BLE001 - the other rounds and parts go on
                print(f"    {side}: {exc!r}", file=sys.stderr, flush=True)
                continue
            shown = ", ".join(f"{key} {number(value)}" for key, value in found.items())
            took = time.monotonic() - began
            if found:
                print(f"    {turn + 1} {side}: {shown} ({took:.0f} s)", flush=True)
            for key, value in found.items():
                if key in values[side]:
                    values[side][key].values.append(value)
    return values


def _table(part: Part, values: dict[str, dict[str, Values]]) -> str:
    lines = ["", "| | stock | ours | ours ÷ stock | target | met |", "|---|---|---|---|---|---|"]
    for metric in part.metrics:
        stock, ours = values[STOCK][metric.key], values[OURS][metric.key]
        ratio = (
            ours.median / stock.median if stock.values and ours.values and stock.median else None
        )
        held = ratio if metric.as_ratio else (ours.median if ours.values else None)
        met = None if held is None else metric.meets(held)
        cells = [
            metric.text, stock.text(), ours.text(),
            "-" if ratio is None else number(ratio),
            _target(metric), {None: "", True: "yes", False: "**no**"}[met],
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _target(metric: Metric) -> str:
    limit = metric.at_most if metric.at_most is not None else metric.at_least
    if limit is None:
        return ""
    sign = "≤" if metric.at_most is not None else "≥"
    return f"{sign} {number(limit)}" + (" x stock" if metric.as_ratio else "")
