"""``python -m benchmarks`` lists the benchmarks, ``python -m benchmarks NAME …`` runs one.

Each is a module of this package with ``main(argv)``; what follows the name is the module's own.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

BENCHMARKS = {
    "wheel": "the data structure alone: insert, cancel, expire, memory",
    "worker": "stock Celery and the wheel in turn on the same load (minutes; needs the brokers)",
    "beat": "beat's heap and the wheel",
    "scale": "what a call of each store costs with few and with a million rows pending",
}


def main(argv: list[str]) -> int:
    """List, or run one."""
    if not argv or argv[0] in {"-h", "--help"}:
        print("usage: python -m benchmarks NAME [--help | …]\n")
        for name, text in BENCHMARKS.items():
            missing = "" if importlib.util.find_spec(f"benchmarks.{name}") else "  (not here yet)"
            print(f"  {name:<8} {text}{missing}")
        return 0
    if argv[0] not in BENCHMARKS:
        print(f"no benchmark {argv[0]!r}: there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    run = importlib.import_module(f"benchmarks.{argv[0]}").main
    return int((run(argv[1:]) if inspect.signature(run).parameters else run()) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
