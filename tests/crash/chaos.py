"""Workers that are killed again and again while delayed tasks come in; and the books afterwards.

``python -m tests.crash.chaos --minutes 10 [--broker rabbitmq] [--late] [--seed 7]`` runs it for
longer than a test does.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Thread
from typing import Any

from celery import Celery

from tests.support.worker import Worker

__all__ = ("Books", "Storm", "chaos_conf")

#: What a dead worker held comes back after two seconds, not after an hour.
IMPATIENT = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
#: The longest delay and the time that Redis takes to give back, and some.
CALM_S = 10.0
#: Seconds between a task's beginning or end and its worker's death within which the worker may
#: not have told the store yet, on a machine that has other things to do.
UNTOLD_S = 2.0


def chaos_conf(broker: Any, folder: Path) -> dict[str, Any]:
    """What the workers of a storm need beyond their broker."""
    conf: dict[str, Any] = {
        "imports": ["tests.crash.journal"],
        "worker_consumer": "celery_wheel:Consumer",
        "wheel_store": f"sqlite:///{folder / 'wheel.db'}",
        "task_ignore_result": True,
    }
    if broker.kind == "redis":
        conf["broker_transport_options"] = IMPATIENT
    return conf


@dataclass(frozen=True)
class Books:
    """What came of it.

    ``lost`` were received by a worker and never ran. ``unread`` no worker received: Redis gives
    a message away before kombu writes down who has it, so a kill in that moment loses it, with
    this package or without. ``unexplained`` are second runs that nothing excuses.
    """

    published: int
    runs: int
    lost: list[str]
    unread: list[str]
    early_s: list[float]
    doubled: int
    unexplained: list[str]
    kills: Counter[str]

    def __str__(self) -> str:
        return (
            f"published {self.published}, runs {self.runs}, lost {len(self.lost)}, "
            f"never read {len(self.unread)}, early {len(self.early_s)}, doubled {self.doubled}, "
            f"of these unexplained {len(self.unexplained)}; workers ended: {dict(self.kills)}"
        )


@dataclass
class Storm:
    """Two workers over one store, a stream of tasks, and a hand that kills.

    Args:
        start: starts a worker of a node name and does not wait for it.
        folder: where the workers' logs and the journal are.
        late: tasks acknowledge late, and a kill takes the children along. Otherwise they
            acknowledge early, and the children of a killed worker finish what they have: so a
            task that began is a task that ran, and none may be lost.
    """

    app: Celery
    start: Callable[[str], Worker]
    folder: Path
    late: bool
    seed: int
    published: set[str] = field(default_factory=set)
    killed_at: dict[int, float] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)

    def run(self, seconds: float) -> Books:
        """Storm for this long, let it calm down, and do the books."""
        until = time.monotonic() + seconds
        hands = [
            Thread(target=self._torment, args=(f"node{number}@test", number, until), daemon=True)
            for number in (1, 2)
        ]
        for hand in hands:
            hand.start()
        self._publish(until)
        for hand in hands:
            hand.join()
        survivors = [self.start(f"node{number}@test").wait_ready(60) for number in (1, 2)]
        self._calm_down()
        for survivor in survivors:
            survivor.wait_held(0, 30)
        time.sleep(1)  # for a run that nobody should have started
        return self._books()

    def _publish(self, until: float) -> None:
        dice = random.Random(self.seed)
        name = "late_journal" if self.late else "journal"
        while time.monotonic() < until:
            task_id = str(uuid.UUID(int=dice.getrandbits(128)))
            seconds = dice.choice((0, 0, 0.05, 0.3))
            countdown = dice.uniform(0.5, 6)
            self.app.send_task(name, (seconds,), task_id=task_id, countdown=countdown)
            self.published.add(task_id)
            time.sleep(dice.uniform(0, 0.1))

    def _torment(self, name: str, number: int, until: float) -> None:
        dice = random.Random(self.seed * 10 + number)
        while time.monotonic() < until:
            victim = self.start(name)
            if dice.random() < 0.8:  # others are killed while they start
                victim.wait_ready(60)
            time.sleep(dice.uniform(0.5, 1.5))
            if dice.random() < 0.2:
                victim.kill(signal.SIGTERM)
                self.kills["SIGTERM"] += 1
                victim.wait(60)
                continue
            self.killed_at[victim.process.pid] = time.time()
            self.kills["SIGKILL"] += 1
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
        early = []
        for line in lines:
            if line["event"] == "start":
                runs.setdefault(line["id"], []).append(line)
                ahead_s = datetime.fromisoformat(line["eta"]).timestamp() - line["at"]
                if ahead_s > 0:
                    early.append(ahead_s)
        logs = "".join(path.read_text(errors="replace") for path in self.folder.glob("*.log"))
        missing = sorted(self.published - runs.keys())
        doubled = {task_id: found for task_id, found in runs.items() if len(found) > 1}
        return Books(
            published=len(self.published),
            runs=sum(map(len, runs.values())),
            lost=[task_id for task_id in missing if f"{task_id}] received" in logs],
            unread=[task_id for task_id in missing if f"{task_id}] received" not in logs],
            early_s=early,
            doubled=len(doubled),
            unexplained=[
                f"{task_id}: {found}"
                for task_id, found in doubled.items()
                if not all(self._under_way(run, ends) for run in found[:-1])
            ],
            kills=self.kills,
        )

    def _under_way(self, run: dict[str, Any], ends: dict[tuple[str, int], float]) -> bool:
        """Whether a run's worker was killed before it could say that the run began or ended."""
        killed_at = self.killed_at.get(run["main"])
        if killed_at is None:
            return False
        settles_at = run["at"]
        if self.late:
            settles_at = ends.get((run["id"], run["child"]), float("inf"))
        return run["at"] <= killed_at + UNTOLD_S and killed_at <= settles_at + UNTOLD_S


def main(arguments: list[str]) -> int:
    """Run a storm of minutes on servers of its own."""
    from tests.crash.journal import JOURNAL_VARIABLE
    from tests.support.app import make_app
    from tests.support.broker import Broker
    from tests.support.processes import hold_leash
    from tests.support.servers import RabbitServer, RedisServer

    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--late", action="store_true", help="tasks acknowledge late")
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args(arguments)
    leash = hold_leash()
    try:
        server = RedisServer() if told.broker == "redis" else RabbitServer()
        url = f"{server.url}/0" if told.broker == "redis" else f"{server.url}/gw0"
        broker = Broker(told.broker, url, "storm")
        folder = Path(tempfile.mkdtemp(prefix="storm-"))
        conf = {**broker.conf(), **chaos_conf(broker, folder)}
        app = make_app(conf)

        def start(name: str) -> Worker:
            env = {JOURNAL_VARIABLE: str(folder / "journal")}
            return Worker(app, folder, conf=conf, name=name, concurrency=2, env=env)

        storm = Storm(app, start, folder, late=told.late, seed=told.seed)
        books = storm.run(told.minutes * 60)
        print(books)
        print(f"the journal and the workers' logs: {folder}")
        return int(
            bool(
                books.lost
                or (books.unread and told.broker != "redis")
                or books.early_s
                or books.unexplained
            )
        )
    finally:
        leash.communicate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
