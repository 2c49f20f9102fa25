"""The documentation holds what a machine can check: links, code, settings, commands."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from celery_wheel.settings import Settings

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
)
PYTHON = sorted((ROOT / "examples").rglob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_relative_links_lead_somewhere(page: Path):
    """Every relative link names a file of the repository, and an anchor of it if it names one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_python_in_the_pages_compiles(page: Path):
    """Every block of Python is Python."""
    for language, code in FENCE.findall(page.read_text()):
        if language == "python":
            ast.parse(code, str(page))


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_settings_that_are_named_exist(page: Path):
    """What a page calls `wheel_…` in code marks is a setting."""
    known = {item.metadata["spec"].name for item in fields(Settings)}
    named = re.findall(r"`(?:CELERY_)?(wheel_\w+|WHEEL_\w+)\b(?!\()", prose(page))
    assert not {name.lower() for name in named} - known


@pytest.mark.parametrize("path", PYTHON, ids=ids(PYTHON))
def test_examples_compile(path: Path):
    """Every example is Python."""
    ast.parse(path.read_text(), str(path))


def test_the_readme_is_short():
    """It stays within 150 lines."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_readmes_quick_start_has_twelve_lines():
    """The app of the quick start is small, and turns the wheel on."""
    code = next(
        code for _, code in FENCE.findall((ROOT / "README.md").read_text()) if "shop.py" in code
    )
    assert len(code.splitlines()) <= 12
    assert 'worker_consumer = "celery_wheel:Consumer"' in code


def test_make_targets_that_are_named_exist():
    """Every `make x` of a page is a target."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for line in re.findall(r"^\$ make ([a-z -]+?)(?: {2,}#|$)", page.read_text(), re.MULTILINE):
            assert set(line.split()) <= targets, f"{page.name}: make {line}"


def test_the_compose_file_is_valid():
    """Docker Compose accepts docker-compose.yml, where it is installed; else YAML does."""
    path = ROOT / "docker-compose.yml"
    services = compose_config(path)
    if services is None:
        yaml = pytest.importorskip("yaml", reason="neither docker compose nor PyYAML is here")
        services = yaml.safe_load(path.read_text())["services"]
    assert {"redis", "rabbitmq", "postgres", "worker"} <= set(services)
    for service in services.values():
        assert "/" not in service["image"], "an official image, without a registry"


def compose_config(path: Path) -> dict[str, Any] | None:
    """The services as Docker Compose reads them; ``None`` where it is not installed."""
    docker = shutil.which("docker")
    if docker is None:
        return None
    if subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        return None
    command = [docker, "compose", "-f", str(path), "config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)["services"])
