"""Prometheus metrics of a worker: what ``inspect wheel`` counts, for scraping.

Needs the extra ``metrics``. Set ``wheel_metrics_port`` and each worker serves ``/metrics``
there; or register a :class:`WheelCollector` with a registry of your own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from celery_wheel.errors import ConfigError

__all__ = ("WheelCollector", "serve")

#: What only grows; all else in the report goes up and down.
COUNTERS = ("received", "duplicates", "dispatched", "revoked", "expired", "requeued", "parked")
GAUGES = ("resident", "due", "in_flight")


class WheelCollector:
    """Turns a worker's report into metrics when it is scraped.

    Args:
        report: returns the mapping that ``inspect stats`` shows under ``wheel``.

    Thread-safety: scraped from the server's thread; the report is made of plain reads.
    """

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        self._report = report

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; called by the registry."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        report = self._report()
        for name in COUNTERS:
            yield CounterMetricFamily(
                f"celery_wheel_{name}", f"Delayed tasks {name} by this worker.", report[name]
            )
        for name in GAUGES:
            yield GaugeMetricFamily(
                f"celery_wheel_{name}", f"Delayed tasks {name} now.", report[name]
            )
        yield GaugeMetricFamily(
            "celery_wheel_store_answers", "1 while the store answers.", report["store_answers"]
        )
        lateness = GaugeMetricFamily(
            "celery_wheel_lateness_seconds",
            "Time from the ETA to the pool, over the latest thousand tasks.",
            labels=["quantile"],
        )
        for quantile, value_ms in report["lateness_ms"].items():
            lateness.add_metric([quantile], value_ms / 1000)
        yield lateness


def serve(report: Callable[[], dict[str, Any]], port: int) -> None:
    """Serve a worker's metrics in a thread of its own.

    Raises:
        ConfigError: prometheus-client is not installed, or the port can't be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as exc:
        raise ConfigError(
            "wheel_metrics_port is set but prometheus-client is not installed: "
            "pip install celery-wheel[metrics]"
        ) from exc
    registry = CollectorRegistry()
    registry.register(WheelCollector(report))
    try:
        start_http_server(port, registry=registry)
    except OSError as exc:
        raise ConfigError(
            f"wheel_metrics_port {port} can't be listened on ({exc.strerror}): "
            "give each worker of a host a port of its own"
        ) from exc
