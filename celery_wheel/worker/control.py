"""Remote control: this worker's own answers where held tasks are concerned.

Handlers are put into the dictionary of this worker's mailbox, not into Celery's registry.
``scheduled``, ``query_task`` and ``wheel`` read the store, so with an event loop their replies
are sent when the store has answered; the loop does not wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.utils.functional import maybe_list
from celery.utils.log import get_logger
from celery.worker import control as stock
from celery.worker import state as worker_state

from celery_wheel import _compat, remote
from celery_wheel.stores.base import Filter
from celery_wheel.task import PENDING
from celery_wheel.worker import report
from celery_wheel.worker.requests import describe

if TYPE_CHECKING:
    from celery_wheel.stores.base import Cancelled, Store
    from celery_wheel.worker.engine import Engine

__all__ = ("brief", "install")

logger = get_logger(__name__)

#: Seconds a caller without an event loop waits for the store.
PATIENCE_S = 1.0

brief = report.brief


def install(consumer: Any, engine: Engine) -> None:
    """Put our handlers into this worker's mailbox. Again on each connection does no harm."""
    node = _compat.control_node(consumer)
    if node is None:
        return
    remote.register()
    revokes, reads = Revokes(engine), Reads(engine)
    deferred = {
        "scheduled": reads.scheduled,
        "dump_schedule": reads.scheduled,
        "query_task": reads.query_task,
        "wheel": reads.wheel,
    }
    node.handlers = {
        **stock.Panel.data,
        "revoke": revokes.revoke,
        "terminate": revokes.terminate,
        "revoke_by_stamped_headers": revokes.revoke_by_stamped_headers,
        "wheel_look": partial(_look, engine),
        **{name: _waiting(engine, read) for name, read in deferred.items()},
    }
    if consumer.hub is not None:
        node.dispatch = _deferring(node, type(node).dispatch, deferred)


def _look(engine: Engine, _state: Any, **_: Any) -> Any:
    """Rows were moved from outside (``celery_wheel.Backlog``): look into the store now."""
    engine.soon(engine.pager.look_now)
    return stock.ok("looking")


Reply = Callable[[Any], None]
Read = Callable[..., None]


def _waiting(engine: Engine, read: Read) -> Callable[..., Any]:
    """A handler that waits for the store: for callers without an event loop."""

    def handler(_state: Any, **arguments: Any) -> Any:
        answered, box = threading.Event(), []

        def reply(answer: Any) -> None:
            box.append(answer)
            answered.set()

        read(reply, **arguments)
        engine.wake()
        answered.wait(PATIENCE_S)
        return box[0] if box else stock.nok("the store did not answer in time")

    return handler


def _deferring(node: Any, dispatch: Any, deferred: dict[str, Read]) -> Callable[..., Any]:
    """A mailbox's dispatch that replies later for some methods."""

    def later(
        method: str, arguments: Any = None, reply_to: Any = None, ticket: Any = None, **kw: Any
    ) -> Any:
        if method not in deferred or not reply_to:
            return dispatch(
                node, method, arguments=arguments, reply_to=reply_to, ticket=ticket, **kw
            )

        def reply(answer: Any) -> None:
            try:
                node.reply(
                    {node.hostname: answer},
                    exchange=reply_to["exchange"],
                    routing_key=reply_to["routing_key"],
                    ticket=ticket,
                )
            except Exception as exc:  # noqa: BLE001 - transports raise their own errors
                logger.warning("The reply to %s could not be sent: %r", method, exc)

        try:
            deferred[method](reply, **(arguments or {}))
        except Exception as exc:
            logger.exception("%s failed.", method)
            reply(stock.nok(repr(exc)))
        return None

    return later


class Reads:
    """Questions about what is held; each answers through ``reply``, in the engine's turn."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def scheduled(self, reply: Reply, **_: Any) -> None:
        """The next tasks by ETA, in Celery's shape, at most ``wheel_inspect_limit``."""
        limit = self._engine.settings.inspect_limit

        def rows(store: Store) -> list[Any]:
            return [r for r in store.find(Filter(), limit).rows if r.state == PENDING]

        def answer(found: list[tuple[Any, Any]]) -> None:
            found.sort(key=lambda pair: (pair[1].due_ms, pair[1].arrival))
            reply([self._describe(keeper, row) for keeper, row in found[:limit]])

        self._ask("find", rows, answer)

    def query_task(self, reply: Reply, ids: Any = None, **_: Any) -> None:
        """Where tasks are: Celery's own answer, and ``scheduled`` for those that are held."""
        wanted = tuple(maybe_list(ids) or ())
        known = stock.query_task(None, wanted)

        def rows(store: Store) -> list[Any]:
            return [r for r in store.find(Filter(ids=wanted), 1000).rows if r.state == PENDING]

        def answer(found: list[tuple[Any, Any]]) -> None:
            held = {
                row.id: ("scheduled", self._describe(keeper, row)["request"])
                for keeper, row in found
            }
            reply({**held, **known})

        self._ask("find", rows, answer)

    def wheel(self, reply: Reply, **_: Any) -> None:
        """What ``celery inspect wheel`` shows."""
        now_ms = self._engine.clock.wall_ms()

        def answer(found: list[tuple[Any, Any]]) -> None:
            reply(report.full(self._engine, found))

        self._ask("count", lambda store: [report.of_store(store, now_ms)], answer)

    def _describe(self, keeper: Any, row: Any) -> dict[str, Any]:
        delivery = keeper.messages.get(row.key)
        return describe(self._engine.requests, row, None if delivery is None else delivery.message)

    def _ask(
        self,
        name: str,
        read: Callable[[Store], list[Any]],
        answer: Callable[[list[tuple[Any, Any]]], None],
    ) -> None:
        """Ask every keeper's store; answer once all have."""
        found: list[tuple[Any, Any]] = []
        keepers = list(self._engine.keepers)
        missing = len(keepers)

        def got(keeper: Any, rows: list[Any]) -> None:
            nonlocal missing
            missing -= 1
            found.extend((keeper, row) for row in rows)
            if missing == 0:
                answer(found)

        for keeper in keepers:
            keeper.executor.submit(name, read, partial(got, keeper))


class Revokes:
    """Revokes: what is held is ours, the rest is Celery's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def revoke(
        self,
        state: Any,
        task_id: Any = None,
        terminate: Any = False,  # noqa: FBT002 - as Celery names and passes it
        signal: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Revoke by id or list of ids."""
        ids = sorted({str(one) for one in maybe_list(task_id) or ()})
        if not ids:
            return stock.ok("tasks set() flagged as revoked")
        running = [i for i in ids if i in worker_state.requests]
        reply = None
        if running:
            reply = stock.revoke(state, running, terminate=terminate, signal=signal, **kwargs)
        # A message on its way is caught by Celery's own check in the meantime.
        worker_state.revoked.update(set(ids).difference(running))

        def answered(answer: Cancelled) -> None:
            rest = [i for i, outcome in answer.outcomes.items() if outcome == "unknown"]
            for one in rest:
                self._unknown(state, one, counts, terminate=terminate, signal=signal)

        counts: dict[str, int] = dict.fromkeys(
            set(ids).difference(running), len(self._engine.keepers)
        )
        with self._engine.lock:
            self._engine.announcer.cancel(ids, [], answered)
        self._engine.wake()
        return reply or stock.ok(f"tasks {set(ids)} flagged as revoked")

    def _unknown(
        self, state: Any, task_id: str, counts: dict[str, int], *, terminate: bool, signal: Any
    ) -> None:
        """An id that no custody holds goes to Celery, once all have said so."""
        if task_id not in counts:
            return
        counts[task_id] -= 1
        if counts[task_id] == 0:
            del counts[task_id]
            self._engine.announcer.later(
                lambda: stock.revoke(state, [task_id], terminate=terminate, signal=signal)
            )

    def terminate(self, state: Any, signal: Any = None, task_id: Any = None, **_: Any) -> Any:
        """Revoke and terminate."""
        return self.revoke(state, task_id, terminate=True, signal=signal)

    def revoke_by_stamped_headers(
        self,
        state: Any,
        headers: Any = None,
        terminate: Any = False,  # noqa: FBT002 - as Celery names and passes it
        signal: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Revoke by stamped header: ``{"header": [values]}`` or ``["header=value"]``."""
        if isinstance(headers, (list, tuple)):
            pairs: dict[str, Any] = {}
            for one in headers:
                header, _, value = str(one).partition("=")
                pairs.setdefault(header, []).append(value)
            headers = pairs
        reply = stock.revoke_by_stamped_headers(
            state, headers, terminate=terminate, signal=signal, **kwargs
        )
        stamps = [
            f"{header}={value}"
            for header, values in (headers or {}).items()
            for value in maybe_list(values)
        ]
        with self._engine.lock:
            self._engine.announcer.cancel([], stamps)
        self._engine.wake()
        return reply
