"""Private servers on free ports: redis for each test process, RabbitMQ for the whole run."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import socket
import subprocess
import tempfile
import uuid
from pathlib import Path

import redis

from tests.support.processes import Process, find_program, leash_folder, wait_for

__all__ = ("RabbitServer", "RedisServer", "free_port", "shared_rabbit")

#: RabbitMQ comes up with these virtual hosts, so that test processes don't meet.
VHOSTS = ("/", *(f"gw{number}" for number in range(8)))


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A redis-server without persistence. ``url`` ends before the number of the database."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="redis-", dir=leash_folder()))
        self._options = options
        self.client = redis.Redis(port=self.port)
        self.start()

    def start(self) -> None:
        """Start it, on the same port when it was stopped, and wait until it answers."""
        argv = [find_program("redis-server"), "--port", str(self.port), "--bind", "127.0.0.1"]
        argv += ["--save", "", "--appendonly", "no", "--dir", str(self.folder), *self._options]
        self.process = Process(argv, self.folder / "log")
        wait_for(self._answers, 10, every_s=0.01, what="redis-server answers")

    def _answers(self) -> bool:
        if self.process.returncode is not None:
            raise RuntimeError(f"redis-server did not start:\n{self.process.log()}")
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def stop(self) -> None:
        """End it at once."""
        self.client.close()
        self.process.kill()


class RabbitServer:
    """A RabbitMQ node with its own name, home, data and epmd. ``url`` is that of ``/``."""

    def __init__(self, *settings: str) -> None:
        self.port, self._epmd_port = free_port(), free_port()
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}"
        self.folder = Path(tempfile.mkdtemp(prefix="rabbitmq-", dir=leash_folder()))
        self.env = self._environment()
        self._write_configuration(settings)
        self.start()

    def start(self) -> None:
        """Start it, with what it kept when it was stopped, and wait until it answers."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        epmd = [find_program("epmd", "/usr/lib/erlang/bin"), "-port", str(self._epmd_port)]
        # Started here: erl would leave a daemon.
        self._epmd = Process(epmd, self.folder / "epmd.log", env=self.env)
        self.process = Process([self._program("rabbitmq-server")], log, env=self.env)
        wait_for(self._answers, 60, what="rabbitmq-server has started")

    @staticmethod
    def _program(name: str) -> str:
        # What Debian has in /usr/sbin changes the user first.
        return find_program(name, "/usr/lib/rabbitmq/bin", "/usr/sbin")

    def _environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"test-{uuid.uuid4().hex[:12]}@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(self.folder / "advanced.config"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "enabled_plugins"),
            # An idle scheduler that spins takes a core from the tests.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 2:2 +sbwt none +sbwtdcpu none",
        }

    def _write_configuration(self, settings: tuple[str, ...]) -> None:
        definitions = self.folder / "definitions.json"
        definitions.write_text(json.dumps(_definitions()))
        lines = (
            f"listeners.tcp.1 = 127.0.0.1:{self.port}",
            "loopback_users = none",
            "log.console.level = info",
            "disk_free_limit.absolute = 1MB",
            "vm_memory_high_watermark.absolute = 1GB",
            f"load_definitions = {definitions}",
            *settings,
        )
        (self.folder / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        # How often a channel looks whether consumer_timeout has passed: a minute by default.
        (self.folder / "advanced.config").write_text("[{rabbit, [{channel_tick_interval, 1000}]}].")
        (self.folder / "enabled_plugins").write_text("[].\n")

    def _answers(self) -> bool:
        if self.process.returncode is not None:
            raise RuntimeError(f"rabbitmq-server did not start:\n{self.process.log()}")
        return "Server startup complete" in self.process.log()

    def control(self, *arguments: str) -> str:
        """The output of ``rabbitmqctl``; it costs a second of CPU."""
        done = subprocess.run(
            [self._program("rabbitmqctl"), "-q", *arguments],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        return done.stdout

    def stop(self) -> None:
        """End it at once."""
        self.process.kill()
        self._epmd.kill()


def _definitions() -> dict[str, list[dict[str, str]]]:
    """The user guest, and a handful of virtual hosts of its own for each test process."""
    salt = b"salt"
    password = base64.b64encode(salt + hashlib.sha256(salt + b"guest").digest()).decode()
    user = {"name": "guest", "password_hash": password, "tags": "administrator"}
    everything = {"user": "guest", "configure": ".*", "write": ".*", "read": ".*"}
    return {
        "users": [{**user, "hashing_algorithm": "rabbit_password_hashing_sha256"}],
        "vhosts": [{"name": name} for name in VHOSTS],
        "permissions": [{**everything, "vhost": name} for name in VHOSTS],
    }


#: Never stopped: other test processes may need it longer than the one that started it. The
#: leash ends it.
_for_all: list[RabbitServer] = []


def shared_rabbit() -> str:
    """The URL of this run's RabbitMQ, without a virtual host; the first caller starts it."""
    folder = leash_folder()
    with (folder / "rabbitmq.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = folder / "rabbitmq.url"
        if not known.exists():
            _for_all.append(RabbitServer())
            known.write_text(_for_all[0].url)
        return known.read_text()
