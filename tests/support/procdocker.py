"""A stand-in for the Docker client: pytest-celery's containers as plain processes.

pytest-celery reaches Docker only through the fixture ``docker_client``. Where no engine answers,
this object is what that fixture gives: the same tests then run on local processes. It offers
what pytest-docker-tools calls, and three images: redis, rabbitmq, and a worker in this test's
own environment.

What differs from containers: all share one host, user and file system; ``CELERY_VERSION`` is
ignored; node addresses must be taken from ``celeryconfig``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from pytest_docker_tools.wrappers import container as wrapper

from tests.support.processes import ROOT, Process
from tests.support.servers import RabbitServer, RedisServer

__all__ = ("ProcessDocker",)


class _RedisNode(RedisServer):
    """The image ``redis``."""

    def __init__(self, container: _Container) -> None:
        super().__init__(*container.command[1:])
        self.ports = {"6379/tcp": self.port}


class _RabbitNode(RabbitServer):
    """The image ``rabbitmq``."""

    def __init__(self, container: _Container) -> None:
        super().__init__()
        self.ports = {"5672/tcp": self.port}


class _WorkerNode:
    """The image of a worker: its volume is the working directory."""

    def __init__(self, container: _Container) -> None:
        self.ports: dict[str, int] = {}
        self._container = container
        self.start()

    def start(self) -> None:
        """Run the container's command."""
        container = self._container
        command = [word.replace("%h", container.id[:12]) for word in container.command]
        command[0] = str(Path(sys.executable).parent / command[0])
        log = container.folder / f"{container.id[:12]}.log"
        self.process = Process(command, log, env=container.environment, cwd=container.folder)

    def stop(self) -> None:
        """As ``docker stop`` after its grace: the whole container ends."""
        self.process.kill()


#: How an image's name begins → what runs in its place.
_IMAGES = {"redis": _RedisNode, "rabbitmq": _RabbitNode, "pytest-celery/": _WorkerNode}


class _Container:
    """What docker-py calls a container. ``status`` is a snapshot, renewed by ``reload``."""

    def __init__(self, volumes: Mapping[str, Path], image: str, options: Mapping[str, Any]) -> None:
        self.id = uuid.uuid4().hex * 2
        self.name = options.get("name") or f"process-{self.id[:12]}"
        self.labels = options.get("labels") or {}
        self.command = list(options.get("command") or [])
        mounts = [volumes[name] for name in options.get("volumes") or {} if name in volumes]
        self.folder = mounts[0] if mounts else ROOT
        paths = [str(self.folder), str(ROOT)]
        self.environment = {
            **(options.get("environment") or {}),
            "PYTHONPATH": os.pathsep.join(paths),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        self._network = options.get("network") or "host"
        make = next(node for start, node in _IMAGES.items() if image.startswith(start))
        self._node: Any = make(self)
        self.status = "running"

    @property
    def attrs(self) -> dict[str, Any]:
        """The parts of ``docker inspect`` that are looked at."""
        ports = self._node.ports
        # With the port in it, a URL made of the host's name is right for a local worker.
        address = "".join(f"127.0.0.1:{port}" for port in ports.values())
        bindings = {
            inside: [{"HostIp": "127.0.0.1", "HostPort": str(outside)}]
            for inside, outside in ports.items()
        }
        environment = [f"{name}={value}" for name, value in self.environment.items()]
        return {
            "Config": {
                "Hostname": address or self.id[:12],
                "Env": environment,
                "Labels": self.labels,
            },
            "HostConfig": {"PortBindings": bindings},
            "NetworkSettings": {
                "Networks": {self._network: {"IPAddress": "127.0.0.1"}},
                "Ports": bindings,
            },
        }

    def reload(self) -> None:
        """Look again whether it lives; a container ends with its main process."""
        if self._node.process.returncode is None:
            self.status = "running"
        else:
            self._node.process.kill()
            self.status = "exited"

    def logs(self, **_: Any) -> bytes:
        """Everything written so far."""
        return str(self._node.process.log()).encode()

    def kill(self, signal: str | int | None = None) -> None:
        """Signal the main process, as Docker does; SIGKILL ends the container."""
        number = _signal_number(signal)
        if number == 9:
            self._node.process.kill()
        else:
            self._node.process.signal(number)

    def restart(self, timeout: float = 10) -> None:
        """SIGTERM, at most ``timeout`` seconds of grace, then start anew."""
        if self._node.process.returncode is None:
            self._node.process.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._node.process.wait(timeout)
        self._node.stop()
        self._node.start()
        self.reload()

    def remove(self, **_: Any) -> bool:
        """As ``docker rm -f``."""
        self._node.stop()
        return True

    def wait(self, timeout: float | None = None) -> dict[str, int]:
        """Wait for the end."""
        return {"StatusCode": self._node.process.wait(timeout or 60)}

    def exec_run(self, cmd: str | list[str], **_: Any) -> tuple[int, bytes]:
        """Run a command beside the main process."""
        words = shlex.split(cmd) if isinstance(cmd, str) else cmd
        if words[:2] == ["cat", "/proc/net/tcp"]:
            return 0, self._listening()
        done = subprocess.run(
            words,
            cwd=self.folder,
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        return done.returncode, done.stdout

    def _listening(self) -> bytes:
        """The table that readiness is read from: a server that was started listens."""
        ports = [int(name.partition("/")[0]) for name in self._node.ports]
        return "\n".join(f"0: 00000000:{port:04X} 00000000:0000 0A" for port in ports).encode()


def _signal_number(given: str | int | None) -> int:
    if given is None:
        return signal.SIGKILL
    if isinstance(given, int):
        return given
    name = given.upper()
    return signal.Signals[name if name.startswith("SIG") else f"SIG{name}"]


class ProcessDocker:
    """The client. Volumes are folders below ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._volumes: dict[str, Path] = {}
        self._containers: list[_Container] = []
        self.containers = SimpleNamespace(run=self._run, create=self._create)
        self.images = SimpleNamespace(build=self._build, pull=self._pull)
        self.networks = SimpleNamespace(create=self._named)
        self.volumes = SimpleNamespace(create=self._make_volume)
        # In a container, ports are taken for those inside the other containers.
        self._inside_container = wrapper.tests_inside_container
        wrapper.tests_inside_container = lambda: False

    def close(self) -> None:
        """End what tests have left running."""
        for container in self._containers:
            container.remove()
        wrapper.tests_inside_container = self._inside_container

    def _run(self, image: str, **options: Any) -> _Container:
        container = _Container(self._volumes, image, options)
        self._containers.append(container)
        return container

    def _create(self, volumes: Mapping[str, Any], **_: Any) -> SimpleNamespace:
        """The helper container that a volume is filled through."""
        target = self._volumes[next(iter(volumes))]

        def put_archive(_path: str, data: IO[bytes]) -> None:
            with tarfile.open(fileobj=data) as archive:
                archive.extractall(target)

        return SimpleNamespace(put_archive=put_archive, remove=lambda **_: None)

    @staticmethod
    def _build(tag: str = "scratch", **_: Any) -> tuple[SimpleNamespace, list[Any]]:
        return SimpleNamespace(id=tag, tags=[tag]), []

    @staticmethod
    def _pull(repository: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(id=repository, tags=[repository])

    @staticmethod
    def _named(name: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(name=name, attrs={}, remove=lambda *_: None)

    def _make_volume(self, name: str, **_: Any) -> SimpleNamespace:
        folder = self._volumes[name] = self._folder / name
        folder.mkdir()
        return SimpleNamespace(
            name=name, attrs={}, remove=lambda *_: shutil.rmtree(folder, ignore_errors=True)
        )
