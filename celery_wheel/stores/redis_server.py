"""A connection to a Redis server: scripts, errors, and what a server must be like.

Thread-safety: one thread at a time. Fork-safety: a child that uses it makes a connection of
its own, and closing it there closes nothing of the parent's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_wheel.errors import (
    ConfigError,
    SchemaVersionError,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from celery_wheel.stores._namespace import check_namespace
from celery_wheel.stores.redis_rows import pack
from celery_wheel.stores.redis_urls import master_client, own_options

__all__ = ("SCHEMA_VERSION", "Server")

SCHEMA_VERSION = 1
#: Seconds until a server that does not answer counts as unreachable.
TIMEOUT_S = 5.0

_PATIENCE = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}

#: Answers of a server that can't do it now, and will be able to later.
_PASSING = (
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.TryAgainError,
)
#: The same in texts: not all have a class, and from within a script older servers give none.
_PASSING_TEXT = re.compile(r"\b(LOADING|READONLY|MISCONF|MASTERDOWN|NOREPLICAS|BUSY)\b")
_FULL_TEXT = re.compile(r"\bOOM\b|used memory > 'maxmemory'")


@cache
def _script(name: str) -> str:
    folder = resources.files("celery_wheel.stores") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in ("lib", name))


class Server:
    """A server, or one database of it, under one namespace.

    Args:
        url: ``redis://``, ``rediss://`` or ``unix://``, with redis-py's options, or
            ``redis+sentinel://``; and the options of :mod:`~celery_wheel.stores.redis_urls`.
        namespace: the prefix of all keys, in braces: in a cluster they share a slot.

    Attributes:
        where: the place, for messages; without a password.

    Raises:
        ConfigError: of the constructor, where the URL or the namespace can't be used.
    """

    def __init__(self, url: str, namespace: str) -> None:
        check_namespace(namespace)
        self.url, self.namespace = url, namespace
        url, own = own_options(url)
        self.base = f"{own.get('wheel_prefix', '')}{{{namespace}}}:"
        self._replicas = int(own.get("wheel_wait_replicas") or 0)
        scheme, _, rest = url.partition("?")[0].partition("://")
        self.where = f"{scheme}://{rest.rpartition('@')[2]}"
        self._client = self._make_client(url)
        self._scripts: dict[str, Any] = {}

    def _make_client(self, url: str) -> Any:
        if url.startswith("redis+sentinel://"):
            try:
                return master_client(url, _PATIENCE)
            except (ValueError, TypeError) as exc:
                raise self._unusable(str(exc)) from None
        # Celery's broker URLs write CERT_NONE where redis-py writes none.
        url = re.sub(r"(ssl_cert_reqs=)CERT_(\w+)", lambda m: m[1] + m[2].lower(), url)
        path = urlsplit(url).path.strip("/")
        if not url.startswith("unix://") and path and not path.isdigit():
            raise self._unusable("its database is no number")
        try:
            urlsplit(url).port  # noqa: B018 - raises where it is no number
        except ValueError:
            # The reason is not repeated: it may be a piece of the password.
            raise self._unusable("its port is no number; in a password write / as %2F") from None
        try:
            # No second try behind our back: a claim that is repeated takes other rows.
            return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_PATIENCE)
        except (ValueError, exceptions.RedisError) as exc:
            raise self._unusable(str(exc)) from exc

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"wheel_store {self.where} can't be used ({why}): write "
            "redis://user:password@host:6379/0, rediss://…, unix:///path/to/redis.sock?db=0 or "
            "redis+sentinel://user:password@host:26379,host2:26379/service/0"
        )

    def key(self, name: str) -> str:
        """The name of a key; see ``lua/lib.lua``."""
        return self.base + name

    def open(self) -> None:
        """Connect, see whether the server forgets nothing, and make the layout if it is new.

        Raises:
            SchemaVersionError: a newer release made it.
            StoreUnavailable: it can't be reached.
            ConfigError: it can't be used until somebody changes something.
        """
        try:
            memory = self.command("INFO", "memory")
            found = self.run("open", SCHEMA_VERSION)
        except StoreUnavailable as exc:
            if isinstance(exc.__cause__, exceptions.AuthenticationError):
                raise self._unusable(str(exc.__cause__)) from exc
            raise
        except (TypeError, StoreError) as exc:  # an option of the URL that there is not; a refusal
            raise self._unusable(str(exc.__cause__ or exc)) from exc
        policy = memory.get("maxmemory_policy", "noeviction")
        # No key of ours has a time to live, so a volatile-* policy never takes one.
        if policy != "noeviction" and not policy.startswith("volatile-"):
            raise ConfigError(
                f"wheel_store {self.where}: the server's maxmemory-policy is {policy}, with "
                "which it deletes tasks when memory is short: set it to noeviction, or name "
                "another server"
            )
        if found > SCHEMA_VERSION:
            self.close()
            raise SchemaVersionError(found, SCHEMA_VERSION, self.where)

    def close(self) -> None:
        """Close the connection; the next call makes a new one."""
        with suppress(exceptions.RedisError):
            self._client.close()
            self._client.connection_pool.disconnect()

    def run(self, name: str, *arguments: Any) -> Any:
        """Run the script of ``lua/<name>.lua``, one atomic step.

        Raises:
            StoreUnavailable: the server does not answer, or can't do it now; of these
                StoreFull: its memory is used up.
            StoreError: it refused.
        """
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self._client.register_script(_script(name))
        with self._errors():
            return script(keys=[self.base], args=[pack(arguments)])

    def replicated(self) -> None:
        """Return once as many replicas as asked for have what this connection wrote.

        Raises:
            StoreUnavailable: they have not in time; what was written is there all the same.
        """
        if not self._replicas:
            return
        with self._errors():
            # WAIT asks about writes of its own connection; after a reconnect there is none.
            pipeline = self._client.pipeline(transaction=False)
            pipeline.incr(self.key("waits"))
            pipeline.execute_command("WAIT", self._replicas, int(TIMEOUT_S * 500))
            have = pipeline.execute()[1]
        if have < self._replicas:
            raise StoreUnavailable(
                f"the store {self.where}: {have} of {self._replicas} replicas "
                "(wheel_redis_wait_replicas) have the write"
            )

    def command(self, *words: Any) -> Any:
        """Run one command.

        Raises:
            StoreUnavailable, StoreError: as :meth:`run` does.
        """
        with self._errors():
            return self._client.execute_command(*words)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (exceptions.ConnectionError, exceptions.TimeoutError) as exc:
            raise StoreUnavailable(f"the store {self.where} does not answer: {exc}") from exc
        except exceptions.RedisError as exc:
            if _FULL_TEXT.search(str(exc)):
                raise StoreFull(f"the store {self.where} is full: {exc}") from exc
            if isinstance(exc, _PASSING) or _PASSING_TEXT.search(str(exc)):
                raise StoreUnavailable(f"the store {self.where} can't now: {exc}") from exc
            raise StoreError(f"the store {self.where} refused a call: {exc}") from exc
