"""The show: publish, watch, revoke, kill -9, start again, and count."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

from celery_wheel.clock import SYSTEM_CLOCK
from celery_wheel.demo.app import TASK
from celery_wheel.demo.ledger import Ledger, Summary
from celery_wheel.demo.plan import Planned
from celery_wheel.demo.screen import Screen
from celery_wheel.demo.stage import Closed, Stage, Worker, WorkerFailed, pause
from celery_wheel.demo.watch import Progress, Watcher
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Filter

__all__ = ("Show",)

#: Parts of the watched time after which tasks are revoked, and the worker is killed.
REVOKE_AT, KILL_AT = 0.4, 0.5
#: Seconds between a revoke and the nearest ETA it is still meant for.
REVOKE_LEAD_S = 2.0
#: Nothing may be due for so long after the kill -9: what runs just then runs twice anywhere.
CALM_MS = 150
#: Seconds the worker stays dead.
DOWN_S = 2.0
#: Seconds something may take before the demo calls it lost.
PATIENCE_S = 60.0
#: Ids in one revoke.
REVOKE_CHUNK = 200
#: Seconds in which a second run of the last tasks would show.
SETTLE_S = 1.0


class Show:
    """One show on one stage. Every wait ends with :class:`Closed` when the stage is closed."""

    def __init__(
        self, stage: Stage, screen: Screen, plan: Sequence[Planned], seconds: float
    ) -> None:
        self._stage, self._screen, self._plan, self._seconds = stage, screen, plan, seconds
        self._progress = Progress(total=len(plan))
        self._ledger = Ledger(stage.record)
        self._store = open_store(stage.store_url)
        self._start_ms = 0
        self._published: list[str] = []
        self._revoked: list[str] = []
        self._worker: Worker | None = None

    def run(self) -> Summary:
        """The whole of it.

        Raises:
            Closed: the stage was closed meanwhile.
            WorkerFailed: the worker did not start, or ended by itself.
        """
        self._store.open()
        broker = self._stage.broker
        self._say(f"broker {broker.shown}, store SQLite, all in {self._stage.folder}")
        watcher = Watcher(self._stage, self._screen, self._progress)
        watcher.start()
        try:
            self._start_worker("starting a celery worker")
            self._publish()
            self._await_commit()
            self._revoke()
            down_ms = self._kill_and_restart()
            self._await_runs()
            self._stop_worker()
        finally:
            watcher.stop()
        held = self._held()
        self._store.close()
        return Summary(self._published, self._revoked, held, self._ledger.read(), down_ms)

    # -- the acts ------------------------------------------------------------------------------

    def _start_worker(self, what: str) -> None:
        self._progress.what = what
        began = SYSTEM_CLOCK.monotonic()
        self._worker = self._stage.start_worker()
        self._worker.wait_ready()
        self._progress.worker_up = True
        took_s = SYSTEM_CLOCK.monotonic() - began
        self._say(f"worker {self._worker.pid} is ready after {took_s:.1f} s")

    def _publish(self) -> None:
        self._progress.what = "publishing"
        task = self._stage.app.tasks[TASK]
        self._start_ms = SYSTEM_CLOCK.wall_ms()
        began = SYSTEM_CLOCK.monotonic()
        for planned in self._plan:
            if self._stage.closed:
                raise Closed
            now_ms = SYSTEM_CLOCK.wall_ms()
            countdown = max(0.0, (self._due_ms(planned) - now_ms) / 1000)
            task.apply_async(task_id=planned.id, countdown=countdown)
            self._published.append(planned.id)
            self._progress.published += 1
        took_s = SYSTEM_CLOCK.monotonic() - began
        near = sum(planned.near for planned in self._plan)
        self._say(
            f"published {len(self._plan)} tasks with apply_async(countdown=…) in {took_s:.1f} s: "
            f"{near} due within {self._seconds} s, the others up to a year ahead"
        )

    def _await_commit(self) -> None:
        self._progress.what = "waiting until every task is committed to the store"
        self._wait(self._calm, "every task is committed")
        counts = self._store.count()
        self._say(f"all committed: {counts.pending} rows held, the broker has none")

    def _revoke(self) -> None:
        self._wait_until(self._seconds * REVOKE_AT)
        self._progress.what = "revoking"
        latest_ms = SYSTEM_CLOCK.wall_ms() + REVOKE_LEAD_S * 1000
        chosen = [p.id for p in self._plan if p.revoke and self._due_ms(p) > latest_ms]
        control, node = self._stage.app.control, self._stage.broker.node
        began = SYSTEM_CLOCK.monotonic()
        for start in range(0, len(chosen), REVOKE_CHUNK):
            control.revoke(chosen[start : start + REVOKE_CHUNK], destination=[node])
        self._revoked = chosen
        which = Filter(ids=tuple(chosen))
        self._wait(lambda: not self._store.find(which, 1).rows, "revoked tasks leave the store")
        took_ms = (SYSTEM_CLOCK.monotonic() - began) * 1000
        self._progress.revoked = len(chosen)
        self._say(f"revoked {len(chosen)}: their rows were gone after {took_ms:.0f} ms")

    def _kill_and_restart(self) -> tuple[int, int]:
        self._wait_until(self._seconds * KILL_AT)
        self._progress.what = "waiting for a moment in which no task runs"
        self._wait(self._calm, "a moment comes in which no task runs")
        worker = self._living_worker()
        self._progress.worker_up = False
        worker.kill()
        down_ms = SYSTEM_CLOCK.wall_ms()
        self._worker = None
        held = self._store.count().pending
        self._progress.what = "the worker is dead (kill -9)"
        self._say(f"kill -9 {worker.pid}: {held} held, all committed, none running")
        self._rest(DOWN_S)
        self._start_worker("starting the worker again")
        return down_ms, SYSTEM_CLOCK.wall_ms()

    def _await_runs(self) -> None:
        self._progress.what = "waiting for the tasks that are due soon"
        expected = self._expected_runs()
        last_s = max((expected[-1] if expected else 0) - SYSTEM_CLOCK.wall_ms(), 0) / 1000

        def ran() -> bool:
            return self._ledger.read().ran >= len(expected)

        self._wait(ran, "all near tasks run", PATIENCE_S + last_s, give_up=False)
        self._rest(SETTLE_S)

    def _stop_worker(self) -> None:
        self._progress.what = "stopping the worker (SIGTERM)"
        worker = self._living_worker()
        self._progress.worker_up = False
        began = SYSTEM_CLOCK.monotonic()
        warm = worker.stop()
        self._worker = None
        took_s = SYSTEM_CLOCK.monotonic() - began
        how = "stopped" if warm else "had to be killed"
        self._say(f"SIGTERM: the worker {how} after {took_s:.1f} s")

    def _held(self) -> list[str]:
        found: list[str] = []
        cursor = None
        while True:
            page = self._store.find(Filter(), 1000, cursor)
            found += [row.id for row in page.rows]
            cursor = page.cursor
            if cursor is None:
                return found

    # -- what is to be expected ----------------------------------------------------------------

    def _due_ms(self, planned: Planned) -> int:
        return self._start_ms + round(planned.offset_s * 1000)

    def _expected_runs(self) -> list[int]:
        """When tasks are due that will run while the demo watches, UTC ms, rising."""
        revoked = set(self._revoked)
        return [self._due_ms(p) for p in self._plan if p.near and p.id not in revoked]

    def _calm(self) -> bool:
        """Whether all is committed, what was due has run, and nothing is due just now."""
        expected = self._expected_runs()
        ran = self._ledger.read().ran
        now_ms = SYSTEM_CLOCK.wall_ms()
        soon = bisect.bisect_right(expected, now_ms + CALM_MS)
        counts = self._store.count()
        there = counts.pending + ran + len(self._revoked)
        return ran == soon and counts.dispatched == 0 and there == len(self._published)

    # -- waiting -------------------------------------------------------------------------------

    def _living_worker(self) -> Worker:
        worker = self._worker
        if worker is None or not worker.alive():
            log = "" if worker is None else worker.log()
            raise WorkerFailed(f"the worker ended by itself; the end of its log:\n{log}")
        return worker

    def _wait(
        self,
        condition: Callable[[], bool],
        what: str,
        patience_s: float = PATIENCE_S,
        *,
        give_up: bool = True,
    ) -> None:
        until = SYSTEM_CLOCK.monotonic() + patience_s
        while not condition():
            log = self._living_worker().log
            if SYSTEM_CLOCK.monotonic() > until:
                problem = f"after {patience_s:.0f} s it is still not so that {what}"
                if give_up:
                    raise WorkerFailed(f"{problem}; the end of the worker's log:\n{log()}")
                self._say(problem)
                return
            self._rest(0.02)

    def _wait_until(self, offset_s: float) -> None:
        self._progress.what = "watching"
        while SYSTEM_CLOCK.wall_ms() < self._start_ms + offset_s * 1000:
            self._rest(0.05)

    def _rest(self, seconds: float) -> None:
        until = SYSTEM_CLOCK.monotonic() + seconds
        while True:
            if self._stage.closed:
                raise Closed
            left = until - SYSTEM_CLOCK.monotonic()
            if left <= 0:
                return
            pause(min(left, 0.05))

    def _say(self, line: str) -> None:
        self._screen.say(line)
