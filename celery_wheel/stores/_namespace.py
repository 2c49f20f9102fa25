"""The namespace: what the names of tables and keys begin with."""

from __future__ import annotations

import re

from celery_wheel.errors import ConfigError

__all__ = ("check_namespace",)

_NAMESPACE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,39}")


def check_namespace(namespace: str) -> None:
    """Refuse what is no identifier.

    Raises:
        ConfigError: with what would do.
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"wheel_namespace {namespace!r} can't begin names of tables and keys: use up to 40 "
            "letters, digits and underscores, not beginning with a digit"
        )
