"""The fixtures of tests on real brokers. All is started when first asked for."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from tests.support.app import make_app
from tests.support.broker import Broker
from tests.support.databases import MariaServer, PostgresServer, shared_database
from tests.support.proxy import Proxy
from tests.support.servers import VHOSTS, RedisServer, shared_rabbit
from tests.support.worker import Probes, Worker

__all__ = (
    "SHARED",
    "app",
    "broker",
    "conf",
    "custody",
    "on",
    "probes",
    "proxied",
    "publish",
    "redis_server",
    "worker",
    "worker_logs",
)

SERVERS = {"postgresql": PostgresServer, "mysql": MariaServer}
#: The stores that a fleet shares, each with one broker: for tests about custody and sharing.
SHARED = ("redis-redis", "rabbitmq-postgresql", "redis-mysql")
MATRIX = "CELERY_WHEEL_MATRIX" in os.environ

worker_logs = pytest.StashKey[dict[str, Path]]()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """This test process's redis-server."""
    server = RedisServer()
    yield server
    server.stop()


def _rabbit_url() -> str:
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % (len(VHOSTS) - 1)
    return f"{shared_rabbit()}/gw{number}"


@pytest.fixture(params=["redis", "rabbitmq"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Broker:
    """A broker with a queue that no other test uses; both real ones unless parametrised."""
    queue = f"q{uuid.uuid4().hex[:10]}"
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.client.flushall()
        return Broker("redis", f"{server.url}/0", queue)
    if request.param == "rabbitmq":
        return Broker("rabbitmq", _rabbit_url(), queue)
    if request.param == "filesystem":
        folders = {
            "data_folder_in": str(tmp_path / "messages"),
            "data_folder_out": str(tmp_path / "messages"),
            "control_folder": str(tmp_path / "control"),
        }
        for folder in folders.values():
            Path(folder).mkdir(exist_ok=True)
        return Broker("filesystem", "filesystem://", queue, folders)
    raise ValueError(f"no such broker: {request.param}")


@pytest.fixture
def custody(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The settings of a kind of custody: a store ("sqlite" unless parametrised) or "broker"."""
    kind = getattr(request, "param", "sqlite")
    url = {"sqlite": f"sqlite:///{tmp_path / 'wheel.db'}", "broker": "broker://"}.get(kind)
    if kind == "redis":
        url = f"{request.getfixturevalue('redis_server').url}/2"
    elif kind in SERVERS:
        url = shared_database(SERVERS[kind])
    assert url is not None, f"no such custody: {kind}"
    return {
        "worker_consumer": "celery_wheel:Consumer",
        "wheel_store": url,
        # Tests share the database servers.
        "wheel_namespace": f"t{uuid.uuid4().hex[:10]}",
    }


def on(*pairs: str) -> pytest.MarkDecorator:
    """Run a test on these pairs of broker and custody: ``on("redis-sqlite", …)``.

    ``CELERY_WHEEL_MATRIX=1`` adds every other store with both brokers to tests on SQLite.
    """
    if MATRIX and any(pair.endswith("-sqlite") for pair in pairs):
        every = [f"{b}-{c}" for b in ("redis", "rabbitmq") for c in ("redis", *SERVERS)]
        pairs = tuple(dict.fromkeys([*pairs, *every]))
    values = [pytest.param(*pair.split("-"), id=pair) for pair in pairs]
    return pytest.mark.parametrize(("broker", "custody"), values, indirect=True)


@pytest.fixture
def conf(broker: Broker, redis_server: RedisServer) -> dict[str, Any]:
    """What worker and test have in common: broker and result backend. Tests may add to it."""
    return {**broker.conf(), "result_backend": f"{redis_server.url}/1"}


@pytest.fixture
def app(conf: dict[str, Any]) -> Iterator[Celery]:
    """The test's own app, for publishing and control commands."""
    made = make_app(conf)
    yield made
    made.close()


@pytest.fixture
def proxied(broker: Broker, conf: dict[str, Any], app: Celery) -> Iterator[Proxy]:
    """A proxy between workers and broker that can be cut; the test's own app goes past it."""
    head, _, tail = broker.url.rpartition(":")
    port, _, path = tail.partition("/")
    proxy = Proxy(int(port))
    conf["broker_url"] = f"{head}:{proxy.port}/{path}"
    yield proxy
    proxy.stop()


@pytest.fixture
def probes(tmp_path: Path) -> Probes:
    """What the worker's tasks have run."""
    return Probes(tmp_path / "probes")


@pytest.fixture
def publish(app: Celery) -> Callable[..., Any]:
    """``publish("probe", "label", countdown=2)``: send a task by its name."""

    def send(name: str, *arguments: Any, **options: Any) -> Any:
        return app.tasks[name].apply_async(arguments, **options)

    return send


@pytest.fixture
def worker(
    request: pytest.FixtureRequest,
    app: Celery,
    conf: dict[str, Any],
    custody: dict[str, str],
    tmp_path: Path,
) -> Iterator[Callable[..., Worker]]:
    """Start worker processes: ``worker(wheel=True, pool=…, conf={…})``; see :class:`Worker`.

    ``wheel=False`` gives a stock worker; ``ready=False`` does not wait for it.
    """
    started: list[Worker] = []

    def start(
        *,
        wheel: bool = True,
        ready: bool = True,
        conf: dict[str, Any] | None = None,
        **options: Any,
    ) -> Worker:
        plugin = custody if wheel else {}
        made = Worker(app, tmp_path, conf={**common, **plugin, **(conf or {})}, **options)
        started.append(made)
        logs = request.node.stash.setdefault(worker_logs, {})
        logs[made.nodename] = made.process.log_path
        return made.wait_ready() if ready else made

    common = conf
    yield start
    for made in started:
        made.process.kill()
