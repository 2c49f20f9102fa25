"""From a URL to a store."""

from __future__ import annotations

import subprocess
import sys

import pytest

from celery_wheel.errors import ConfigError
from celery_wheel.stores import open_store


@pytest.mark.parametrize("url", ["mongodb://u:secret@host/db", "secret", "", "sqlite", "://secret"])
def test_unknown_urls_list_what_there_is(url):
    """A URL without a store is refused; the message lists the schemes and keeps the secret."""
    known = r"sqlite://, redis://, .* postgresql://, .* mysql://, .* memory://"
    with pytest.raises(ConfigError, match=known) as error:
        open_store(url)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    ["sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite://host/x.db", "sqlite:///x?a=b"],
)
def test_sqlite_needs_a_file(url):
    """Forms that name no file are refused with the two that do."""
    with pytest.raises(ConfigError, match=r"sqlite:///relative\.db or sqlite:////absolute\.db"):
        open_store(url)


def test_a_store_is_made_unopened(tmp_path):
    """Making the object touches nothing."""
    open_store(f"sqlite:///{tmp_path / 'wheel.db'}")
    assert list(tmp_path.iterdir()) == []


def test_drivers_are_imported_when_needed():
    """Importing the package of stores loads no database library."""
    code = "import sys, celery_wheel.stores; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
