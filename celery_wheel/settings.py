"""The ``wheel_*`` settings: read from the Celery app, checked, and frozen, once.

The dataclass below *is* the table: each field carries the name the user writes, its default,
what is allowed and one sentence. Reading, checking, error texts and ``docs/settings.md`` come
from it. Attributes carry their unit (``tick_ms``, ``lease_ttl_s``); the user writes seconds.

Knows Celery's configuration object only by its mapping methods; imports nothing of Celery.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

from celery_wheel.errors import ConfigError

__all__ = ("Settings", "hide_password", "settings_table")

_DAY_S = 86_400
_TEN_YEARS_S = 3650 * _DAY_S


def hide_password(url: str) -> str:
    """``url`` as it may be shown: every password in it is replaced by ``***``."""
    if "://" not in url:  # no URL: what stands before the last @ may be a password
        return re.sub(r".*@", "***@", url, flags=re.DOTALL)
    shown = re.sub(r"(://[^:/?#;]*):(?:(?!://).)*@", r"\1:***@", url)
    return re.sub(r"(?i)((?:password|passwd|secret|token)=)[^&;#]*", r"\1***", shown)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a value may be: ``parse`` returns it in the attribute's unit or raises ValueError."""

    type: str
    unit: str
    allowed: str
    parse: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Spec:
    """One row of the table."""

    name: str
    default: Any
    kind: _Kind
    doc: str

    def read(self, value: Any, spelling: str) -> Any:
        """The value in the attribute's unit.

        Raises:
            ConfigError: it has another type or is out of range.
        """
        try:
            return self.kind.parse(value)
        except (TypeError, ValueError, OverflowError):
            shown = hide_password(repr(value))
            raise ConfigError(f"{spelling} = {shown[:200]}: must be {self.kind.allowed}") from None


def _number(value: Any, kind: type[int | float]) -> Any:
    """``value`` as a finite number; text is accepted where it holds nothing but a number."""
    if isinstance(value, str):
        pattern = r"-?\d+" if kind is int else r"-?\d+(\.\d+)?"
        if not re.fullmatch(pattern, value.strip(), re.ASCII):
            raise ValueError(value)
        return kind(value)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        raise TypeError(value)
    if not math.isfinite(value):
        raise ValueError(value)
    return value


def _within(low: float, high: float | None) -> str:
    return f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"


def _check(value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        raise ValueError(value)


def _seconds(low: float, high: float | None = None, *, whole_ms: bool = True) -> _Kind:
    """A duration; the attribute is whole milliseconds, or seconds as a float."""

    def parse(value: Any) -> int | float:
        if isinstance(value, timedelta):
            value = value.total_seconds()
        seconds = float(_number(value, float))
        _check(seconds, low, high)
        if not whole_ms:
            return seconds
        if abs(seconds * 1000 - round(seconds * 1000)) > 1e-6 * max(1.0, seconds):
            raise ValueError(value)
        return round(seconds * 1000)

    allowed = f"a number of seconds (or a timedelta) {_within(low, high)}"
    return _Kind("number", "s", allowed + ", in whole milliseconds" * whole_ms, parse)


def _whole(low: int, high: int | None = None, *, power_of_two: bool = False) -> _Kind:
    def parse(value: Any) -> int:
        number = int(_number(value, int))
        _check(number, low, high)
        if power_of_two and number & (number - 1):
            raise ValueError(value)
        return number

    what = "a power of two" if power_of_two else "a whole number"
    return _Kind("int", "", f"{what} {_within(low, high)}", parse)


def _one_of(*choices: str) -> _Kind:
    def parse(value: Any) -> str:
        if value not in choices:
            raise ValueError(value)
        return str(value)

    return _Kind("str", "", "one of " + ", ".join(f'"{choice}"' for choice in choices), parse)


def _identifier() -> _Kind:
    def parse(value: str) -> str:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,39}", value):
            raise ValueError(value)
        return value

    return _Kind(
        "str", "", "1 to 40 letters, digits and underscores, not beginning with a digit", parse
    )


def _store_url() -> _Kind:
    def parse(value: str | None) -> str | None:
        if value is None:
            return None
        if not re.match(r"[a-z][a-z0-9+.-]*://", value):
            raise ValueError(value)
        return value

    allowed = (
        'a URL such as "sqlite:///wheel.db", "redis://host/1", "postgresql://host/db" or '
        '"broker://", or None'
    )
    return _Kind("str or None", "", allowed, parse)


def _setting(name: str, default: Any, kind: _Kind, doc: str, *, show: bool = True) -> Any:
    """A dataclass field that is also a row of the table."""
    spec = _Spec(name, default, kind, doc)
    return field(default=kind.parse(default), metadata={"spec": spec}, repr=show)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every ``wheel_*`` setting, checked. Immutable, so safe to share between threads."""

    store_url: str | None = _setting(
        "wheel_store",
        None,
        _store_url(),
        "Where delayed tasks are kept. `None`: in the broker's own Redis, else as `broker://`, "
        "which leaves them with the broker, unacknowledged.",
        show=False,
    )
    namespace: str = _setting(
        "wheel_namespace",
        "celery_wheel",
        _identifier(),
        "The prefix of table names and keys: separates applications that share one store.",
    )
    kind: str = _setting(
        "wheel_kind",
        "hierarchical",
        _one_of("hierarchical", "hashed"),
        "Which timing wheel: the hierarchical one, or a single hashed wheel with rounds.",
    )
    tick_ms: int = _setting(
        "wheel_tick",
        0.01,
        _seconds(0.001, 10),
        "The length of a tick: a task runs at its ETA rounded up to the next tick.",
    )
    size: int = _setting(
        "wheel_size",
        4096,
        _whole(16, 65_536, power_of_two=True),
        "The wheel size: how many buckets one wheel has.",
    )
    horizon_ms: int = _setting(
        "wheel_horizon",
        60,
        _seconds(1, _TEN_YEARS_S),
        "How far ahead tasks are taken from the store into memory.",
    )
    resident_limit: int = _setting(
        "wheel_resident_limit",
        50_000,
        _whole(1),
        "How many tasks at most are in memory; the rest wait in the store.",
    )
    lease_ttl_s: float = _setting(
        "wheel_lease_ttl",
        15,
        _seconds(1, 3600, whole_ms=False),
        "The lease: how long after a worker's last sign of life its tasks go to other workers.",
    )
    broker_lease_s: float = _setting(
        "wheel_broker_lease",
        600,
        _seconds(1, _TEN_YEARS_S, whole_ms=False),
        "RabbitMQ, where it keeps the tasks: how long a message is held at most before it goes "
        "back to the end of its queue; less than the broker's `consumer_timeout`.",
    )
    seen_ttl_ms: int = _setting(
        "wheel_seen_ttl",
        3600,
        _seconds(0, _TEN_YEARS_S),
        "How long a finished task is remembered, so that a late copy from the broker is dropped.",
    )
    revoke_ttl_ms: int = _setting(
        "wheel_revoke_ttl",
        30 * _DAY_S,
        _seconds(1, _TEN_YEARS_S),
        "How long a revoke is remembered, across restarts.",
    )
    inspect_limit: int = _setting(
        "wheel_inspect_limit",
        100,
        _whole(0),
        "How many tasks `inspect scheduled` answers with at most, nearest ETA first.",
    )
    batch_size: int = _setting(
        "wheel_batch_size",
        128,
        _whole(1, 10_000),
        "How many messages are committed to the store together at most.",
    )
    batch_wait_s: float = _setting(
        "wheel_batch_wait",
        0.005,
        _seconds(0, 1, whole_ms=False),
        "How long a batch waits for another message; at most ten times that in all.",
    )
    checks: str = _setting(
        "wheel_checks",
        "warn",
        _one_of("warn", "error", "ignore"),
        "What a start-up check that fails does: log a warning, stop the worker, or nothing.",
    )

    redis_wait_replicas: int = _setting(
        "wheel_redis_wait_replicas",
        0,
        _whole(0, 100),
        "Redis store: how many replicas must have a task before its message is acknowledged.",
    )
    metrics_port: int = _setting(
        "wheel_metrics_port",
        0,
        _whole(0, 65_535),
        "The port on which a worker shows Prometheus metrics (extra `metrics`); 0: nowhere.",
    )
    beat_missed: str = _setting(
        "wheel_beat_missed",
        "stock",
        _one_of("stock", "skip", "once", "all"),
        "Beat: what becomes of runs that fell due while beat was down or the clock was moved.",
    )
    beat_missed_cap: int = _setting(
        "wheel_beat_missed_cap",
        100,
        _whole(1, 100_000),
        'Beat: how many missed runs of one entry `"all"` makes up for at most.',
    )

    @property
    def store_shown(self) -> str:
        """The store's URL without its password, for logs and people."""
        return hide_password(self.store_url or "broker://")

    @classmethod
    def from_app(cls, app: Any) -> Settings:
        """Read the settings of a Celery app, namespaced (Django) or not.

        Nothing is written to the app's configuration: its defaults would win over values
        that stand under a namespace.

        Raises:
            ConfigError: a value is wrong, or a ``wheel_*`` name is unknown or has no effect.
        """
        app.conf.get("wheel_store")  # an untouched app.conf is a stand-in without prefix
        conf = app.conf
        specs = _specs()
        prefix = conf.prefix or ""
        _refuse_unknown([key for key in conf if isinstance(key, str)], set(specs), prefix)
        missing = object()
        values: dict[str, Any] = {}
        for name, (attribute, spec) in specs.items():
            value = conf.get(name, missing)
            if value is not missing:
                values[attribute] = spec.read(value, _spell(name, prefix))
        return cls(**values)


def _specs() -> dict[str, tuple[str, _Spec]]:
    """Setting name → attribute name and table row, in the table's order."""
    rows = ((item.name, item.metadata["spec"]) for item in fields(Settings))
    return {spec.name: (attribute, spec) for attribute, spec in rows}


def _spell(name: str, prefix: str) -> str:
    """``name`` as it is written under the app's namespace."""
    return prefix + (name.upper() if prefix.isupper() else name)


def _refuse_unknown(keys: Iterable[str], known: set[str], prefix: str) -> None:
    """Raise for the first key that was meant for us and would be passed over in silence."""
    for key in keys:
        name = key.lower()
        for start in {prefix.lower(), "celery_"} - {""}:
            name = name.removeprefix(start)
        if not name.startswith("wheel_"):
            continue
        wanted = _spell(name, prefix)
        if name in known:
            if key not in {name, wanted}:
                raise ConfigError(f"{key} has no effect: write {wanted}")
        # Bare capitals may be anybody's in a module of Django settings.
        elif key != name.upper():
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{key} is not a setting: did you mean {_spell(nearest, prefix)}? "
                f"There are {', '.join(sorted(known))}"
            )


_INTRO = """\
# Settings

<!-- Made by `python -m celery_wheel.settings > docs/settings.md`; a test compares the two. -->

All are optional and are read once, when the worker starts, from the Celery app's configuration
(`app.conf.wheel_tick = 0.05`). Under a namespace, as with Django, they carry its prefix:
`CELERY_WHEEL_TICK`. Numbers may be given as text (`"0.05"`), as they come from an environment
variable. A wrong value, an unknown `wheel_*` name and a spelling that has no effect stop the
worker with one line that says what to write.

| Setting | Type | Unit | Default | Must be | What it does |
|---|---|---|---|---|---|
"""


def settings_table() -> str:
    """``docs/settings.md``, as Markdown."""
    rows = (
        f"| `{spec.name}` | {spec.kind.type} | {spec.kind.unit} | `{spec.default!r}` "
        f"| {spec.kind.allowed} | {spec.doc} |\n"
        for _, spec in _specs().values()
    )
    return _INTRO + "".join(rows).replace("`'", '`"').replace("'`", '"`')


if __name__ == "__main__":
    sys.stdout.write(settings_table())
