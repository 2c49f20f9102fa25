"""The settings: what is read, what is refused, and with which words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_wheel.errors import ConfigError
from celery_wheel.settings import Settings, hide_password, settings_table


def read(**conf: Any) -> Settings:
    app = Celery("test", set_as_current=False)
    app.conf.update(conf)
    return Settings.from_app(app)


def read_namespaced(namespace: str | None, **module: Any) -> Settings:
    """As Django does it: names of a module, under a prefix."""
    app = Celery("test", set_as_current=False)
    app.config_from_object(SimpleNamespace(**module), namespace=namespace)
    return Settings.from_app(app)


def refusal(**conf: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**conf)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_app_that_sets_nothing_gets_the_defaults():
    """Without any wheel setting every attribute has its documented default."""
    assert read() == Settings()
    assert Settings().tick_ms == 10
    assert Settings().horizon_ms == 60_000
    assert Settings().revoke_ttl_ms == 30 * 86_400_000
    assert Settings().store_url is None


def test_attributes_carry_the_unit_they_are_named_for():
    """Seconds become whole milliseconds where the attribute ends in _ms and floats in _s."""
    settings = read(wheel_tick=0.05, wheel_horizon=90, wheel_lease_ttl=4, wheel_batch_wait=0.01)
    assert (settings.tick_ms, settings.horizon_ms) == (50, 90_000)
    assert (settings.lease_ttl_s, settings.batch_wait_s) == (4.0, 0.01)


def test_reading_leaves_the_configuration_as_it_was():
    """No default is written into the app's configuration, where it would beat the user's."""
    app = Celery("test", set_as_current=False)
    Settings.from_app(app)
    assert not [key for key in app.conf if "wheel" in key.lower()]


def test_settings_are_frozen():
    """A settings object can't be changed after it was read."""
    with pytest.raises(FrozenInstanceError):
        Settings().tick_ms = 5


def test_django_names_work_under_their_namespace():
    """CELERY_WHEEL_TICK in a module of settings is read under the namespace CELERY."""
    settings = read_namespaced("CELERY", CELERY_WHEEL_TICK=0.02, CELERY_WHEEL_STORE="broker://")
    assert settings.tick_ms == 20
    assert settings.store_url == "broker://"


def test_a_plain_module_of_settings_works():
    """Lower-case names in a configuration module are read."""
    assert read_namespaced(None, wheel_tick=0.02).tick_ms == 20


def test_foreign_capitals_in_a_django_module_are_left_alone():
    """A project's own WHEEL_COLOUR is not ours and is no error."""
    assert read_namespaced("CELERY", WHEEL_COLOUR="red") == Settings()


@pytest.mark.parametrize(
    ("conf", "wanted"),
    [
        ({"CELERY_WHEEL_TICK": 1}, "CELERY_WHEEL_TICK has no effect: write wheel_tick"),
        ({"WHEEL_TICK": 1}, "WHEEL_TICK has no effect: write wheel_tick"),
        ({"celery_wheel_tick": 1}, "celery_wheel_tick has no effect: write wheel_tick"),
    ],
)
def test_a_spelling_without_effect_is_an_error(conf: dict[str, Any], wanted: str):
    """A known name in a spelling that Celery would pass over says which one to write."""
    assert refusal(**conf) == wanted


def test_a_spelling_without_effect_under_a_namespace_is_an_error():
    """Under the namespace CELERY a bare WHEEL_TICK says to write CELERY_WHEEL_TICK."""
    with pytest.raises(ConfigError, match=r"^WHEEL_TICK has no effect: write CELERY_WHEEL_TICK$"):
        read_namespaced("CELERY", WHEEL_TICK=1)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("wheel_tik", "wheel_tick"),
        ("wheel_lease", "wheel_lease_ttl"),
        ("wheel_resident_limits", "wheel_resident_limit"),
        ("CELERY_WHEEL_STOR", "wheel_store"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(name: str, nearest: str):
    """A misspelt setting is refused with the name that was probably meant."""
    assert refusal(**{name: 1}).startswith(f"{name} is not a setting: did you mean {nearest}?")


def test_an_unknown_name_under_a_namespace_is_an_error():
    """The nearest name is spelt as it must be written under the namespace."""
    with pytest.raises(ConfigError, match=r"CELERY_WHEEL_TIK .* did you mean CELERY_WHEEL_TICK\?"):
        read_namespaced("CELERY", CELERY_WHEEL_TIK=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("wheel_tick", 0),
        ("wheel_tick", -1),
        ("wheel_tick", 10.001),
        ("wheel_tick", 0.0105),
        ("wheel_tick", float("nan")),
        ("wheel_tick", float("inf")),
        ("wheel_tick", True),
        ("wheel_tick", None),
        ("wheel_tick", "ten"),
        ("wheel_tick", "1e-2"),
        ("wheel_tick", "nan"),
        ("wheel_tick", [1]),
        ("wheel_size", 1000),
        ("wheel_size", 8),
        ("wheel_size", 131_072),
        ("wheel_size", 4096.0),
        ("wheel_size", "4096.0"),
        ("wheel_horizon", 0.5),
        ("wheel_horizon", 10**400),
        ("wheel_resident_limit", 0),
        ("wheel_resident_limit", False),
        ("wheel_lease_ttl", 0.9),
        ("wheel_seen_ttl", -1),
        ("wheel_inspect_limit", -1),
        ("wheel_batch_size", 0),
        ("wheel_batch_wait", 2),
        ("wheel_kind", "Hierarchical"),
        ("wheel_kind", 1),
        ("wheel_checks", "fatal"),
        ("wheel_namespace", "my-app"),
        ("wheel_namespace", "1st"),
        ("wheel_namespace", ""),
        ("wheel_namespace", "x" * 41),
        ("wheel_namespace", None),
        ("wheel_store", "wheel.db"),
        ("wheel_store", ""),
        ("wheel_store", 5),
    ],
)
def test_a_wrong_value_names_the_setting_the_value_and_what_is_allowed(name: str, value: Any):
    """Every wrong type or range is refused with one line that holds all three."""
    text = refusal(**{name: value})
    assert text.startswith(f"{name} = {value!r}"[:60])
    assert ": must be " in text


@pytest.mark.parametrize(
    ("name", "value", "attribute", "expected"),
    [
        ("wheel_tick", "0.05", "tick_ms", 50),
        ("wheel_tick", "1", "tick_ms", 1000),
        ("wheel_tick", timedelta(milliseconds=2), "tick_ms", 2),
        ("wheel_tick", 0.001, "tick_ms", 1),
        ("wheel_tick", 10, "tick_ms", 10_000),
        ("wheel_size", "1024", "size", 1024),
        ("wheel_size", 16, "size", 16),
        ("wheel_size", 65_536, "size", 65_536),
        ("wheel_lease_ttl", " 20 ", "lease_ttl_s", 20.0),
        ("wheel_seen_ttl", timedelta(days=2), "seen_ttl_ms", 172_800_000),
        ("wheel_inspect_limit", 0, "inspect_limit", 0),
        ("wheel_kind", "hashed", "kind", "hashed"),
        (
            "wheel_store",
            "postgresql+psycopg://u:p@h/db",
            "store_url",
            "postgresql+psycopg://u:p@h/db",
        ),
    ],
)
def test_an_allowed_value_is_read(name: str, value: Any, attribute: str, expected: Any):
    """Bounds, numbers written as text, and timedeltas are accepted."""
    got = getattr(read(**{name: value}), attribute)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host/1",
        "redis://user:hunter2@host/1",
        "redis://user:hunter2/@:x@host/1",
        "sentinel://:hunter2@a:1;sentinel://:hunter2@b:1",
        "postgresql://host/db?user=me&password=hunter2",
        "redis:/user:hunter2@host",
        "user:hunter2@host",
    ],
)
def test_a_password_is_never_shown(url: str):
    """Neither the display of a URL, nor an error, nor a repr holds the store's password."""
    assert "hunter2" not in hide_password(url)
    assert "hunter2" not in repr(Settings(store_url=url))
    assert "hunter2" not in Settings(store_url=url).store_shown
    if "://" not in url:
        assert "hunter2" not in refusal(wheel_store=url)
    assert "hunter2" not in refusal(wheel_store=[url])


def test_a_url_without_password_is_shown_as_it_is():
    """Hiding passwords changes nothing else."""
    assert hide_password("sqlite:////var/lib/wheel.db") == "sqlite:////var/lib/wheel.db"
    assert Settings().store_shown == "broker://"


def test_the_settings_page_is_in_step():
    """docs/settings.md is exactly what the settings render."""
    page = Path(__file__).parents[2] / "docs" / "settings.md"
    assert page.read_text() == settings_table(), (
        "run: python -m celery_wheel.settings > docs/settings.md"
    )
