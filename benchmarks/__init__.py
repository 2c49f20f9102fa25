"""Benchmarks: `python -m benchmarks`. None of them runs in CI."""

from __future__ import annotations
