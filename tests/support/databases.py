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
from urllib.parse import urlsplit

import psycopg
import pymysql

from tests.support.processes import Process, find_program, leash_folder, wait_for
from tests.support.servers import free_port

__all__ = ("DatabaseServer", "MariaServer", "PostgresServer", "shared_database")

NOBODY = 65534


def _run(argv: Sequence[str]) -> None:
    """Run a program to its end; show what it said where it fails."""
    done = subprocess.run(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{argv[0]} ended with {done.returncode}:\n{done.stdout}")


class DatabaseServer(ABC):
    """A server with an empty database ``wheel`` of the user ``wheel``, which ``url`` names.

    There is a user ``admin``, who may do everything, with the same password.
    """

    scheme: str

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

    @staticmethod
    @abstractmethod
    def connect(url: str) -> Any:
        """A DB-API connection of an administrator, in autocommit mode, to what a URL names."""

    @staticmethod
    @abstractmethod
    def waits(url: str, connection: int) -> bool:
        """Whether the connection of this number waits for a lock."""

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
            self._first_connection().close()
        except (psycopg.OperationalError, pymysql.OperationalError):
            return False
        return True

    @abstractmethod
    def _first_connection(self) -> Any:
        """A connection before there is a database."""

    @classmethod
    def execute(cls, url: str, *statements: str) -> list[Any]:
        """Run statements as an administrator; the rows of the last."""
        connection = cls.connect(url)
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

    def _make_data(self) -> None:
        leash_folder().chmod(0o711)
        if os.geteuid() == 0:
            os.chown(self.folder, NOBODY, NOBODY)
        secret = self.folder / "secret"
        secret.write_text("wh#el")
        initdb = [*self._program("initdb"), "-D", str(self.folder / "data"), "-U", "admin"]
        initdb += ["--auth=scram-sha-256", f"--pwfile={secret}", "-E", "UTF8", "--locale=C"]
        _run([*initdb, "--no-sync"])

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

    @staticmethod
    def connect(url: str) -> Any:
        """See :meth:`DatabaseServer.connect`."""
        return psycopg.connect(url, user="admin", autocommit=True)

    @staticmethod
    def waits(url: str, connection: int) -> bool:
        """See :meth:`DatabaseServer.waits`."""
        locks = f"SELECT 1 FROM pg_locks WHERE pid = {connection} AND NOT granted"
        return bool(PostgresServer.execute(url, locks))

    def _first_connection(self) -> Any:
        return psycopg.connect(self.url, user="admin", dbname="postgres", autocommit=True)

    def _make_database(self) -> None:
        with self._first_connection() as connection:
            connection.execute("CREATE USER wheel PASSWORD 'wh#el'")
            connection.execute("CREATE DATABASE wheel OWNER wheel")


class MariaServer(DatabaseServer):
    """MariaDB. The database has the collation that is the worst for ids."""

    scheme = "mysql"

    def _make_data(self) -> None:
        make = [find_program("mariadb-install-db"), "--no-defaults", "--skip-test-db"]
        make += [f"--datadir={self.folder / 'data'}", "--auth-root-authentication-method=normal"]
        # A server that starts sweeps its folder of temporary tables, others' included.
        make.append(f"--tmpdir={self.folder}")
        _run([*make, *self._user()])

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
            "innodb-flush-log-at-trx-commit": 2,  # what was committed outlives the process
            "innodb-flush-method": "nosync",
            "innodb-doublewrite": 0,
            "tmpdir": self.folder,
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

    @staticmethod
    def connect(url: str) -> Any:
        """See :meth:`DatabaseServer.connect`."""
        parts = urlsplit(url)
        place = {"host": parts.hostname, "port": parts.port, "database": parts.path[1:]}
        level = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
        login = {"user": "admin", "password": "wh#el", "init_command": level}
        return pymysql.connect(**place, **login, autocommit=True)

    @staticmethod
    def waits(url: str, connection: int) -> bool:
        """See :meth:`DatabaseServer.waits`."""
        waiting = (
            "SELECT 1 FROM information_schema.innodb_trx "
            f"WHERE trx_mysql_thread_id = {connection} AND trx_state = 'LOCK WAIT'"
        )
        return bool(MariaServer.execute(url, waiting))

    def _first_connection(self) -> Any:
        return pymysql.connect(
            unix_socket=str(self.folder / "socket"), user="root", autocommit=True, connect_timeout=5
        )

    def _make_database(self) -> None:
        connection = self._first_connection()
        for statement in (
            "CREATE DATABASE wheel CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
            "CREATE USER wheel@'127.0.0.1' IDENTIFIED BY 'wh#el'",
            "GRANT ALL ON wheel.* TO wheel@'127.0.0.1'",
            "GRANT ALL ON *.* TO admin@'127.0.0.1' IDENTIFIED BY 'wh#el' WITH GRANT OPTION",
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
