"""Prometheus metrics."""

from __future__ import annotations

import socket
import urllib.request

import pytest

from celery_wheel.errors import ConfigError
from celery_wheel.metrics import COUNTERS, serve

REPORT = {
    **dict.fromkeys(COUNTERS, 3),
    "resident": 2,
    "due": 1,
    "in_flight": 0,
    "store_answers": True,
    "lateness_ms": {"p50": 5.0, "p99": 20.0, "max": 30.0},
}


def test_a_scrape_shows_the_report():
    """Counters, gauges and lateness of the report are served as text."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve(lambda: REPORT, port)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    assert "celery_wheel_dispatched_total 3.0" in text
    assert "celery_wheel_resident 2.0" in text
    assert 'celery_wheel_lateness_seconds{quantile="p99"} 0.02' in text


def test_a_port_that_is_taken_is_a_clear_error():
    """The message names the setting and what to do."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="wheel_metrics_port"):
            serve(lambda: REPORT, taken.getsockname()[1])
