"""Workers that are killed again and again while delayed tasks come in; and the books afterwards.

``make soak`` (:mod:`tests.crash.soak`) runs it for longer than a test does.
"""

from __future__ import annotations

import json
import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from celery import Celery
from kombu.exceptions import OperationalError

from tests.support.broker import Broker
from tests.support.processes import wait_for
from tests.support.worker import Worker

__all__ = ("SOLO", "Books", "Storm", "chaos_conf")

#: What a dead worker held comes back after some seconds, not after an hour; longer than a living
#: one keeps what is due already behind another task, or the copy is run, too, as in stock Celery.
IMPATIENT = {
    "visibility_timeout": 5,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    # A worker that is killed while it gives back keeps others from it for so long.
    "unacked_mutex_expire": 2,
}
#: The longest delay and the time that Redis takes to give back, and some.
CALM_S = 10.0
#: Seconds between a task's beginning or end and its worker's death within which the worker may
#: not have told the store yet, on a machine that has other things to do.
UNTOLD_S = 2.0
#: A storm over workers that cost little: more of them, and shorter lives.
SOLO: dict[str, Any] = {"life_s": (0, 0.5), "every_s": 0.5, "takes_s": (0, 0, 0, 0.05, 0.2)}
#: More than this after its ETA a task is late; workers are missing half of the time.
LATE_S = 2.0


def chaos_conf(broker: Broker) -> dict[str, Any]:
    """What the workers of a storm need beyond their broker and their custody."""
    conf: dict[str, Any] = {"imports": ["tests.crash.journal"], "task_ignore_result": True}
    if broker.kind == "redis":
        conf["broker_transport_options"] = IMPATIENT
    return conf


@dataclass(frozen=True)
class Books:
    """What came of it.

    ``late_s`` are those over :data:`LATE_S` of each task's first run. ``lost`` were acknowledged
    for the store and never ran. ``unread`` never ran and were never acknowledged: Redis gives a
    message away before kombu writes down who has it, so a kill in that moment loses it, with
    this package or without. ``unexplained`` are second runs that nothing excuses: the
    one before did not begin in a worker that was killed before it could say so, or the second
    does not know that it is one.
    """

    published: int
    runs: int
    lost: list[str]
    unread: list[str]
    early_s: list[float]
    late_s: list[float]
    doubled: int
    unexplained: list[str]
    kills: Counter[str]

    def __str__(self) -> str:
        return (
            f"published {self.published}, runs {self.runs}, lost {len(self.lost)}, "
            f"never read {len(self.unread)}, early {len(self.early_s)}, "
            f"late {len(self.late_s)} (at most {max(self.late_s, default=0):.1f} s), "
            f"doubled {self.doubled}, of these unexplained {len(self.unexplained)}; "
            f"workers ended: {dict(self.kills)}"
        )


@dataclass
class Storm:
    """Some workers over one store, a stream of tasks, and a hand for each worker that kills.

    Args:
        start: starts a worker of a node name and does not wait for it.
        folder: where the workers' logs and the journal are.
        left: how many rows there are in the store.
        late: tasks acknowledge late, and a kill takes the children along. Otherwise they
            acknowledge early, and the children of a killed worker finish what they have: so a
            task that began is a task that ran, and none may be lost.
    """

    app: Celery
    start: Callable[[str], Worker]
    folder: Path
    left: Callable[[], int]
    late: bool
    seed: int
    workers: int = 2
    #: Seconds from a worker's readiness (or start) to its end, seconds between two tasks at
    #: most, and how long tasks take.
    life_s: tuple[float, float] = (0.5, 1.5)
    every_s: float = 0.1
    takes_s: Sequence[float] = (0, 0, 0.05, 0.3)
    published: set[str] = field(default_factory=set)
    #: When servers were away: from and until.
    outages: list[tuple[float, float]] = field(default_factory=list)
    killed_at: dict[int, float] = field(default_factory=dict)
    stopped: list[int] = field(default_factory=list)

    def run(self, seconds: float, kills: float = float("inf")) -> Books:
        """Storm for this long or until so many were killed, let it calm down, do the books."""
        until = time.monotonic() + seconds

        def over() -> bool:
            return time.monotonic() >= until or len(self.killed_at) >= kills

        names = [f"node{number}@test" for number in range(self.workers)]
        with ThreadPoolExecutor(self.workers) as hands:
            tormented = [hands.submit(self._torment, n, name, over) for n, name in enumerate(names)]
            self._publish(over)
        for each in tormented:
            each.result()
        for survivor in [self.start(name) for name in names]:
            survivor.wait_ready(60)
        self._calm_down()
        wait_for(lambda: self.left() == 0, 30, what="the store is empty")
        time.sleep(1)  # for a run that nobody should have started
        books = self._books()
        # A second try of the test would leave nothing else of the first.
        (self.folder / "books").write_text(f"{books}\n{books!r}\n")
        return books

    def _publish(self, over: Callable[[], bool]) -> None:
        dice = random.Random(self.seed)
        name = "late_journal" if self.late else "journal"
        while not over():
            task_id = str(uuid.UUID(int=dice.getrandbits(128)))
            seconds = dice.choice(self.takes_s)
            countdown = dice.uniform(0.5, 6)
            # Where a broker is away nobody knows whether it has the message: it does not count.
            with suppress(OperationalError):
                self.app.send_task(name, (seconds,), task_id=task_id, countdown=countdown)
                self.published.add(task_id)
            time.sleep(dice.uniform(0, self.every_s))

    def _torment(self, number: int, name: str, over: Callable[[], bool]) -> None:
        dice = random.Random(self.seed * 10 + number)
        while not over():
            victim = self.start(name)
            if dice.random() < 0.8:  # others are killed while they start
                victim.wait_ready(60)
            time.sleep(dice.uniform(*self.life_s))
            if dice.random() < 0.1:
                victim.kill(signal.SIGTERM)
                self.stopped.append(victim.process.pid)
                victim.wait(60)
                continue
            self.killed_at[victim.process.pid] = time.time()
            if self.late:
                victim.kill()
            else:
                victim.process.signal(signal.SIGKILL)

    def _lines(self) -> list[dict[str, Any]]:
        journal = self.folder / "journal"
        if not journal.exists():
            return []
        return [json.loads(line) for line in journal.read_text().splitlines()]

    def _calm_down(self) -> None:
        """Wait until every task has run, or nothing has begun for longer than any delay is."""
        ran, changed_at = 0, time.monotonic()
        while ran < len(self.published) and time.monotonic() - changed_at < CALM_S:
            time.sleep(0.25)
            now = len({line["id"] for line in self._lines() if line["event"] == "start"})
            if now != ran:
                ran, changed_at = now, time.monotonic()

    def _books(self) -> Books:
        lines = self._lines()
        ends = {(e["id"], e["child"]): e["at"] for e in lines if e["event"] == "end"}
        runs: dict[str, list[dict[str, Any]]] = {}
        for line in lines:
            if line["event"] == "start":
                runs.setdefault(line["id"], []).append(line)
        acked = {line["id"] for line in lines if line["event"] == "ack"}
        missing = self.published - runs.keys()
        doubled = {task_id: found for task_id, found in runs.items() if len(found) > 1}
        return Books(
            published=len(self.published),
            runs=sum(map(len, runs.values())),
            lost=sorted(missing & acked),
            unread=sorted(missing - acked),
            early_s=[-_late_s(run) for found in runs.values() for run in found if _late_s(run) < 0],
            late_s=[late_s for found in runs.values() if (late_s := _late_s(found[0])) > LATE_S],
            doubled=len(doubled),
            unexplained=[
                f"{task_id}: {found}, killed at {[self.killed_at.get(r['main']) for r in found]}"
                for task_id, found in doubled.items()
                if not all(self._excused(run, later, ends) for run, later in pairwise(found))
            ],
            # Several threads count: by what is one step for them.
            kills=Counter(SIGKILL=len(self.killed_at), SIGTERM=len(self.stopped)),
        )

    def _excused(
        self, run: dict[str, Any], later: dict[str, Any], ends: dict[tuple[str, int], float]
    ) -> bool:
        """Whether a run's worker was killed before it could say that the run began or ended (then
        the later one knows that), or had no server to say it to that kept it."""
        settles_at = run["at"]
        if self.late:
            settles_at = ends.get((run["id"], run["child"]), float("inf"))
        if any(
            run["at"] <= again_at + UNTOLD_S and away_at <= settles_at + UNTOLD_S
            for away_at, again_at in self.outages
        ):
            return True
        killed_at = self.killed_at.get(run["main"])
        if killed_at is None or not later["redelivered"]:
            return False
        return run["at"] <= killed_at + UNTOLD_S and killed_at <= settles_at + UNTOLD_S


def _late_s(run: dict[str, Any]) -> float:
    return float(run["at"] - datetime.fromisoformat(run["eta"]).timestamp())
