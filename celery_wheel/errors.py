"""Every error this package raises on purpose.

::

    WheelError
    ├── ConfigError (ValueError)        a setting is wrong; the message says how to put it right
    ├── StoreError
    │   ├── StoreUnavailable            try again later; nothing was changed or it is safe to repeat
    │   │   └── StoreFull               it takes nothing in; what takes tasks out goes on
    │   ├── SchemaVersionError          the store was made by a newer release
    │   └── CorruptRow (ValueError)     a row's envelope can't be read
    ├── WheelStopped (RuntimeError)     used after ``stop()`` or ``shutdown()``
    └── TooManyPending (RuntimeError)   ``max_pending`` was reached

Driver errors are kept in ``__cause__``.
"""

from __future__ import annotations

__all__ = (
    "ConfigError",
    "CorruptRow",
    "SchemaVersionError",
    "StoreError",
    "StoreFull",
    "StoreUnavailable",
    "TooManyPending",
    "WheelError",
    "WheelStopped",
)


class WheelError(Exception):
    """The base of every error of this package."""


class ConfigError(WheelError, ValueError):
    """A setting is wrong. The message names it and says what to do."""


class StoreError(WheelError):
    """The store could not do what was asked."""


class StoreUnavailable(StoreError):
    """The store does not answer now. Calling again later is safe and is what to do."""


class StoreFull(StoreUnavailable):
    """The store has no room for what is put into it; it answers other calls."""


class SchemaVersionError(StoreError):
    """The store was made by a newer release. Upgrade this worker, or name another store."""

    def __init__(self, found: int, known: int, where: str) -> None:
        super().__init__(
            f"the store {where} has schema version {found}, this release knows {known}: "
            "upgrade celery-wheel on this worker, or point wheel_store at another store"
        )


class CorruptRow(StoreError, ValueError):
    """A row's envelope can't be read. The row is kept; the message names it."""


class WheelStopped(WheelError, RuntimeError):
    """A timer was used after it was stopped."""


class TooManyPending(WheelError, RuntimeError):
    """A timer holds ``max_pending`` timeouts already."""

    def __init__(self, pending: int, max_pending: int) -> None:
        super().__init__(
            f"{pending} timeouts are pending and max_pending is {max_pending}: "
            "wait for some to expire, cancel some, or raise max_pending"
        )
