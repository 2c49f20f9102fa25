"""Private PostgreSQL and MariaDB servers on free ports, as fast and as forgetful as they go.

One of each serves a whole test run; a test that stops or slows its server starts its own.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pymysql

from tests.support.processes import Process, find_program, leash_folder, wait_for
from tests.support.servers import free_port

__all__ = ("DatabaseServer", "MariaServer", "PostgresServer", "shared_database")

NOBODY = 65534


class DatabaseServer(ABC):
    """A server with an empty database ``wheel`` of the user ``wheel``.

    ``url`` and ``admin_url`` name it; the administrator's password is ``admin``.
    """

    scheme: str
    user: str

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        place = f"127.0.0.1:{self.port}/wheel"
        self.url = f"{self.scheme}://wheel:wh%23el@{place}"
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.scheme}-", dir=leash_folder()))
        self._options = options
        self._make_data()
        self.start()
        self._make_database()

    @abstractmethod
    def _make_data(self) -> None: ...

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    @abstractmethod
    def connect(self, database: str = "wheel") -> Any:
        """A DB-API connection of the administrator, in autocommit mode."""

    @abstractmethod
    def _make_database(self) -> None: ...

    def start(self) -> None:
        """Start it, on the same port when it was stopped, and wait until it answers."""
        self.process = Process(self._command(), self.folder / "log")
        wait_for(self._answers, 30, every_s=0.02, what=f"{self.scheme} answers")

    def _answers(self) -> bool:
        if self.process.returncode is not None:
            raise RuntimeError(f"the server did not start:\n{self.process.log()}")
        try:
            self.connect(self.user).close()
        except (psycopg.OperationalError, pymysql.OperationalError):
            return False
        return True

    def execute(self, *statements: str) -> list[Any]:
        """Run statements as the administrator; the rows of the last."""
        connection = self.connect()
        try:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            connection.close()

    def pause(self) -> None:
        """Let it hang: connections stay, nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def go_on(self) -> None:
        """End a pause."""
        self._signal_all(signal.SIGCONT)

    def _signal_all(self, number: int) -> None:
        # PostgreSQL's own processes are not of the group of the first one.
        listed = subprocess.check_output(["ps", "-e", "-o", "pid=,ppid="], text=True)
        pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
        for pid in [self.process.pid, *(pid for pid, of in pairs if of == self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self) -> None:
        """End it at once, as a power cut does. May be called twice."""
        self.go_on()
        self._signal_all(signal.SIGKILL)
        self.process.kill()

    def remove(self) -> None:
        """Stop it and take its data away."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class PostgresServer(DatabaseServer):
    """PostgreSQL; it refuses to run as root, and then runs as nobody."""

    scheme = "postgresql"
    user = "postgres"

    def _make_data(self) -> None:
        leash_folder().chmod(0o711)
        if os.geteuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        secret = self.folder / "secret"
        secret.write_text("admin")
        initdb = [*self._program("initdb"), "-D", str(self.folder / "data"), "-U", self.user]
        initdb += ["--auth=scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C"]
        subprocess.run([*initdb, "--no-sync"], check=True, capture_output=True)

    @staticmethod
    def _program(name: str) -> list[str]:
        versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        program = [find_program(name, *map(str, versions))]
        if os.geteuid() != 0:
            return program
        ids = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        return [find_program("setpriv"), *ids, *program]

    def _command(self) -> Sequence[str]:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",
            "full_page_writes": "off",
            "autovacuum": "off",
            "max_connections": 60,
            "shared_buffers": "32MB",
        }
        chosen = [f"-c{name}={value}" for name, value in settings.items()]
        return [
            *self._program("postgres"),
            "-D",
            str(self.folder / "data"),
            *chosen,
            *self._options,
        ]

    def connect(self, database: str = "wheel") -> Any:
        """See :meth:`DatabaseServer.connect`."""
        return psycopg.connect(
            f"postgresql://{self.user}:admin@127.0.0.1:{self.port}/{database}", autocommit=True
        )

    def _make_database(self) -> None:
        with self.connect("postgres") as connection:
            connection.execute("CREATE USER wheel PASSWORD 'wh#el'")
            connection.execute("CREATE DATABASE wheel OWNER wheel")


class MariaServer(DatabaseServer):
    """MariaDB. The database has the collation that is the worst for ids."""

    scheme = "mysql"
    user = "mysql"

    def _make_data(self) -> None:
        make = [find_program("mariadb-install-db"), "--no-defaults", "--skip-test-db"]
        make += [f"--datadir={self.folder / 'data'}", "--auth-root-authentication-method=normal"]
        # The time zones and help texts of the server's own tables are of no use here.
        subprocess.run([*make, *self._user()], check=True, capture_output=True)

    @staticmethod
    def _user() -> list[str]:
        return ["--user=root"] if os.geteuid() == 0 else []

    def _command(self) -> Sequence[str]:
        settings = {
            "datadir": self.folder / "data",
            "socket": self.folder / "socket",
            "pid-file": self.folder / "pid",
            "port": self.port,
            "bind-address": "127.0.0.1",
            "innodb-flush-log-at-trx-commit": 0,
            "innodb-flush-method": "nosync",
            "innodb-doublewrite": 0,
            "innodb-buffer-pool-size": "64M",
            "innodb-log-file-size": "16M",
            "innodb-fast-shutdown": 2,
            "max-connections": 60,
            "skip-name-resolve": 1,
            "skip-log-bin": 1,
        }
        chosen = [f"--{name}={value}" for name, value in settings.items()]
        server = find_program("mariadbd", "/usr/sbin")
        return [server, "--no-defaults", *chosen, *self._user(), *self._options]

    def connect(self, database: str = "wheel") -> Any:
        """See :meth:`DatabaseServer.connect`."""
        socket = str(self.folder / "socket")
        return pymysql.connect(
            unix_socket=socket, user="root", database=database, autocommit=True, connect_timeout=5
        )

    def _make_database(self) -> None:
        connection = self.connect("mysql")
        for statement in (
            "CREATE DATABASE wheel CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
            "CREATE USER wheel@'127.0.0.1' IDENTIFIED BY 'wh#el'",
            "GRANT ALL ON wheel.* TO wheel@'127.0.0.1'",
        ):
            connection.cursor().execute(statement)
        connection.close()


#: Never stopped: other test processes may need them longer than the one that started them. The
#: leash ends them.
_for_all: list[DatabaseServer] = []


def shared_database(kind: type[DatabaseServer]) -> str:
    """The URL of this run's server of a kind; the first caller starts it."""
    folder = leash_folder()
    with (folder / f"{kind.scheme}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = folder / f"{kind.scheme}.url"
        if not known.exists():
            _for_all.append(kind())
            known.write_text(_for_all[-1].url)
        return known.read_text()
