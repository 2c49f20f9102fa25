"""What the worker says of itself: ``inspect wheel`` and its part of ``inspect stats``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery_wheel.stores.base import Store
    from celery_wheel.worker.engine import Engine

__all__ = ("brief", "full", "labels", "of_store")

#: Edges of the horizon histogram, seconds from now.
EDGES_S = (0, 1, 10, 60, 600, 3600, 86_400, 604_800)


def brief(engine: Engine) -> dict[str, Any]:
    """Counters and sizes that cost nothing to read."""
    return {
        "custody": "broker" if engine.store_keeper is None else "store",
        "store": engine.settings.store_shown,
        "store_answers": all(keeper.executor.healthy for keeper in engine.keepers),
        "resident": len(engine.residents),
        "due": engine.residents.due_count + engine.dispatcher.waiting_count,
        "in_flight": len(engine.dispatcher.in_flight),
        **engine.stats.report(),
    }


def of_store(store: Store, now_ms: int) -> dict[str, Any]:
    """What one store holds. Reads only."""
    counts = store.count()
    return {
        "pending": counts.pending,
        "dispatched": counts.dispatched,
        "oldest_due_ms": store.oldest_due(),
        "histogram": store.histogram([now_ms + edge * 1000 for edge in EDGES_S]),
    }


def full(engine: Engine, found: list[tuple[Any, Any]]) -> dict[str, Any]:
    """Everything, with what each keeper's store said."""
    now_ms = engine.clock.wall_ms()
    oldest = [s["oldest_due_ms"] for _, s in found if s["oldest_due_ms"] is not None]
    histogram = [sum(column) for column in zip(*(s["histogram"] for _, s in found), strict=True)]
    return {
        **brief(engine),
        "held": sum(s["pending"] for _, s in found),
        "dispatched_rows": sum(s["dispatched"] for _, s in found),
        "oldest_overdue_s": round(max(0, now_ms - min(oldest)) / 1000, 3) if oldest else 0,
        "horizon": [list(pair) for pair in zip(labels(), histogram, strict=True)],
        "levels": [
            {
                "level": level.level,
                "bucket_s": level.bucket_ticks * engine.settings.tick_ms / 1000,
                "buckets": level.buckets,
                "entries": level.entries,
            }
            for level in engine.residents.occupancy()
        ],
        "store_ms": {
            name: timing
            for keeper in engine.keepers
            for name, timing in keeper.executor.timings.report().items()
        },
    }


def labels() -> list[str]:
    """The names of the histogram's numbers."""
    names = ["overdue", *(f"under {edge} s" for edge in EDGES_S[1:])]
    return [*names, f"from {EDGES_S[-1]} s"]
