"""Celery's consumer with the wheel in it. ``worker_consumer = "celery_wheel:Consumer"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from celery.worker import state
from celery.worker.consumer import Consumer as CeleryConsumer
from celery.worker.state import task_reserved

from celery_wheel import _compat
from celery_wheel.errors import ConfigError
from celery_wheel.settings import Settings

if TYPE_CHECKING:
    from celery_wheel.worker.engine import Engine

__all__ = ("Consumer", "WheelMixin")

logger = get_logger(__name__)

STEP = "celery_wheel.worker.step:WheelStep"


class WheelMixin:
    """Adds the wheel to a consumer class: ``class Mine(WheelMixin, MyConsumer)``."""

    wheel: Engine | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        base: Any = cls.Blueprint  # type: ignore[attr-defined]
        if STEP not in base.default_steps:
            steps = [*base.default_steps, STEP]
            cls.Blueprint = type(  # type: ignore[attr-defined]
                "Blueprint", (base,), {"default_steps": steps}
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        app = kwargs["app"]
        _compat.warn_unknown_version()
        try:
            self.wheel_settings = Settings.from_app(app)
        except ConfigError as exc:
            logger.critical("celery-wheel can't start: %s", exc)
            raise SystemExit(1) from exc
        super().__init__(*args, **kwargs)

    def wheel_stops(self: Any) -> bool:
        """Whether the worker is stopping, rather than its connection being lost.

        Once it was asked to, there may be no pool any more: a cold shutdown ends it first.
        """
        asked = (state.should_stop, state.should_terminate)
        return self.controller.blueprint.state != _compat.RUN or any(
            one is not None and one is not False for one in asked
        )

    # -- strategies ----------------------------------------------------------------------------

    def update_strategies(self: Any) -> None:
        """Also runs when tasks were reloaded."""
        super().update_strategies()  # type: ignore[misc]
        if self.wheel is not None:
            self.wrap_strategies()

    def wrap_strategies(self: Any) -> None:
        """Put the intake before each task's strategy."""
        engine = self.wheel
        engine.requests = type(engine.requests)(self, engine.dispatcher.finished)
        for name, task in self.app.tasks.items():
            stock = self.strategies[name]
            if not hasattr(stock, "wheel_intake"):
                handler = engine.intake.strategy(task, stock)
                if handler is not stock:
                    handler.wheel_intake = True
                self.strategies[name] = handler
        with engine.lock:
            engine.dispatcher.parking.unpark()
        engine.wake()

    # -- the connection ------------------------------------------------------------------------

    def on_connection_error_after_connected(self: Any, exc: Exception) -> None:
        """Held tasks that run are the store's, not the connection's: they go on."""
        held = [] if self.wheel is None else self.wheel.running()
        with _compat.without_requests(held):
            super().on_connection_error_after_connected(exc)  # type: ignore[misc]

    def on_close(self: Any) -> None:
        """Celery throws away what the connection was to ack; ours can still be settled."""
        engine = self.wheel
        if engine is None:
            super().on_close()  # type: ignore[misc]
            return
        with engine.lock:
            written = engine.dispatcher.survive()
        active = set(state.active_requests)
        with _compat.keep_written_jobs(active.union(written)):
            super().on_close()  # type: ignore[misc]
        for request in written:
            if request not in active:
                task_reserved(request)
        semaphore = _compat.slot_semaphore(self.controller)
        if semaphore is not None:
            _compat.correct_semaphore(semaphore, len(active.union(written)))


class Consumer(WheelMixin, CeleryConsumer):
    """Celery's own consumer with the wheel."""
