"""What ran, how late, and what the sum is. Reads the record that the worker's tasks write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ("Ledger", "Run", "Summary", "quantile")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one task; both instants in UTC ms."""

    id: str
    eta_ms: int
    ran_ms: int

    @property
    def late_ms(self) -> int:
        """Milliseconds after the ETA; negative where it was early."""
        return self.ran_ms - self.eta_ms


class Ledger:
    """The runs so far. :meth:`read` takes in what was appended since. One thread at a time."""

    def __init__(self, record: Path) -> None:
        self._record, self._offset = record, 0
        self.runs: list[Run] = []
        self.times: Counter[str] = Counter()

    def read(self) -> Ledger:
        """Take in whole new lines."""
        if not self._record.exists():
            return self
        with self._record.open("rb") as record:
            record.seek(self._offset)
            new = record.read()
        whole = new.rpartition(b"\n")[0]
        if whole:
            self._offset += len(whole) + 1
            for line in whole.decode().splitlines():
                task_id, eta_ms, ran_ms = line.split()
                self.runs.append(Run(task_id, int(eta_ms), int(ran_ms)))
                self.times[task_id] += 1
        return self

    @property
    def ran(self) -> int:
        """How many different tasks have run."""
        return len(self.times)


def quantile(values: Iterable[int], part: float) -> int | None:
    """The value below which ``part`` of the values lie, or ``None`` for no values."""
    ordered = sorted(values)
    return ordered[int((len(ordered) - 1) * part)] if ordered else None


@dataclass(frozen=True)
class Summary:
    """Where every published task has gone.

    Args:
        published, revoked: ids; those revoked are among the published.
        held: ids in the store at the end.
        down_ms: when the worker was killed and when it was back, UTC ms.
    """

    published: Collection[str]
    revoked: Collection[str]
    held: Collection[str]
    ledger: Ledger
    down_ms: tuple[int, int]
    lost: int = field(init=False)
    doubled: int = field(init=False)
    early: int = field(init=False)
    revoked_but_there: int = field(init=False)

    def __post_init__(self) -> None:
        ran, held, revoked = set(self.ledger.times), set(self.held), set(self.revoked)
        both = ran & held
        counts = {
            "lost": len(set(self.published) - ran - held - revoked),
            "doubled": sum(times - 1 for times in self.ledger.times.values()) + len(both),
            "early": sum(run.late_ms < 0 for run in self.ledger.runs),
            "revoked_but_there": len(revoked & (ran | held)),
        }
        for name, count in counts.items():
            object.__setattr__(self, name, count)

    @property
    def good(self) -> bool:
        """Whether nothing was lost, doubled, early, or ran although it was revoked."""
        return not (self.lost or self.doubled or self.early or self.revoked_but_there)

    def lateness_ms(self, *, while_down: bool) -> list[int]:
        """Of the tasks that were due while the worker was down, or of all others."""
        start, end = self.down_ms
        return [
            run.late_ms for run in self.ledger.runs if (start <= run.eta_ms < end) is while_down
        ]

    def lines(self) -> list[str]:
        """The summary as text."""
        numbers = [
            ("published", len(self.published)),
            ("ran", self.ledger.ran),
            ("revoked", len(self.revoked)),
            ("still held", len(self.held)),
            ("lost", self.lost),
            ("doubled", self.doubled),
            ("ran early", self.early),
            ("ran or kept although revoked", self.revoked_but_there),
        ]
        found = [f"{name:<30}{number:>8}" for name, number in numbers]
        found.append(_late("late, p50 / p99 / max", self.lateness_ms(while_down=False)))
        found.append(_late("due while it was down, ditto", self.lateness_ms(while_down=True)))
        return found


def _late(name: str, values: list[int]) -> str:
    if not values:
        return f"{name:<30}{'-':>8}"
    figures = [quantile(values, part) for part in (0.5, 0.99, 1)]
    return f"{name:<30}{figures[0]:>8} / {figures[1]} / {figures[2]} ms, of {len(values)}"
