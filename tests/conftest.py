"""What every test run needs; the fixtures themselves are in ``tests/support``."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import docker
import pytest
from docker.errors import DockerException
from hypothesis import settings

from tests.support.fixtures import (
    app,
    broker,
    conf,
    custody,
    probes,
    proxied,
    publish,
    redis_server,
    worker,
    worker_logs,
)
from tests.support.procdocker import ProcessDocker
from tests.support.processes import hold_leash

__all__ = (
    "app",
    "broker",
    "conf",
    "custody",
    "docker_client",
    "probes",
    "proxied",
    "publish",
    "redis_server",
    "worker",
)

settings.register_profile("celery-wheel", deadline=None, derandomize=True)
settings.load_profile("celery-wheel")

_leash = pytest.StashKey[subprocess.Popen[bytes]]()


def pytest_configure(config: pytest.Config) -> None:
    """The controller of the run holds the leash; xdist's processes inherit its folder."""
    if not hasattr(config, "workerinput"):
        config.stash[_leash] = hold_leash()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Let go: whatever still runs is killed."""
    leash = config.stash.get(_leash, None)
    if leash is not None:
        leash.communicate()


#: Tests on real processes and servers: they wait for a machine that has other things to do.
REAL = ("crash", "worker", "beat")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes first, since they take longest; a second try where the machine was busy.

    A second try is shown in the summary. Tests without processes get none.
    """

    def real(item: pytest.Item) -> bool:
        return item.path.parent.name in REAL

    for item in filter(real, items):
        item.add_marker(pytest.mark.flaky(reruns=1))
    items.sort(key=lambda item: REAL.index(item.path.parent.name) if real(item) else len(REAL))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Show the end of each worker's log where a test fails."""
    report: Any = yield
    if report.failed:
        for name, path in item.stash.get(worker_logs, {}).items():
            text = path.read_text(errors="replace") if path.exists() else ""
            report.sections.append((f"log of {name}", text[-6000:]))
    return report


@pytest.fixture(scope="session")
def docker_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Docker where an engine answers; otherwise processes stand in for containers."""
    try:
        client: Any = docker.from_env()
        client.ping()
    except DockerException:
        client = ProcessDocker(tmp_path_factory.mktemp("docker"))
    yield client
    client.close()
