"""A place to measure in: own queues, own folder, worker processes of either side.

The broker's database (Redis) and queues (RabbitMQ) are the benchmark's own and emptied.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from benchmarks.support import wait_for
from benchmarks.worker.app import CONF, MARKS, READY, make_app
from celery_wheel.envelope import pack
from celery_wheel.stores import open_store
from celery_wheel.task import DelayedTask, task_key

__all__ = ("OURS", "SIDES", "STOCK", "Node", "Site", "eta_text")

STOCK, OURS = "stock", "ours"
SIDES = (STOCK, OURS)

Etas = Callable[[int], float | None]


def eta_text(at: float) -> str:
    """An ETA as Celery writes it into the header."""
    return datetime.fromtimestamp(at, timezone.utc).isoformat()


class Site:
    """One round of one side: make it, load it, start nodes; everything is gone on exit.

    Args:
        side: ``stock`` or ``ours``.
        broker: the broker's URL.
        folder: where logs, marks and the wheel's file are.
        conf: further settings of the app.
    """

    def __init__(
        self, side: str, broker: str, folder: Path, conf: dict[str, Any] | None = None
    ) -> None:
        self.side, self.broker = side, broker
        self.folder = folder / f"{side}-{uuid.uuid4().hex[:6]}"
        self.folder.mkdir(parents=True)
        self.queue = f"wheel-bench-{uuid.uuid4().hex[:8]}"
        self.store_url = f"sqlite:///{self.folder / 'wheel.db'}"
        self.conf: dict[str, Any] = {
            "broker_url": broker,
            "task_default_queue": self.queue,
            "broker_connection_retry_on_startup": True,
            "worker_send_task_events": False,
        }
        if side == OURS:
            self.conf |= {"worker_consumer": "celery_wheel:Consumer", "wheel_store": self.store_url}
            self.conf |= conf or {}
        else:
            self.conf |= {k: v for k, v in (conf or {}).items() if not k.startswith("wheel_")}
        self.app: Celery = make_app({**self.conf, "worker_consumer": None})
        self.nodes: list[Node] = []
        self.on_redis = broker.startswith("redis")

    def __enter__(self) -> Site:
        if self.on_redis:
            self.redis = redis.Redis.from_url(self.broker)
            self.redis.flushdb()
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        if self.on_redis:
            self.redis.flushdb()
            self.redis.close()
        else:
            with self.app.connection() as connection:
                connection.default_channel.queue_delete(self.queue)
        self.app.close()

    # -- load ----------------------------------------------------------------------------------

    def publish(self, count: int, eta: Etas) -> list[str]:
        """Send ``count`` tasks; ``eta(i)`` is UTC seconds, ``None`` for at once."""
        ids = [str(uuid.uuid4()) for _ in range(count)]
        if self.on_redis:
            self._push(ids, eta)
        else:
            with self.app.producer_pool.acquire(block=True) as producer:
                for number, task_id in enumerate(ids):
                    at = eta(number)
                    when = None if at is None else datetime.fromtimestamp(at, timezone.utc)
                    self.app.send_task("mark", task_id=task_id, eta=when, producer=producer)
        return ids

    def _push(self, ids: list[str], eta: Etas) -> None:
        """Put copies of one message, with its id and ETA changed, straight into the list."""
        templates = {with_eta: self._template(with_eta=with_eta) for with_eta in (True, False)}
        pipe = self.redis.pipeline(transaction=False)
        for number, task_id in enumerate(ids):
            at = eta(number)
            text = templates[at is not None].replace("THE-ID", task_id)
            if at is not None:
                text = text.replace("THE-ETA", eta_text(at))
            pipe.lpush(self.queue, text.replace("THE-TAG", str(uuid.uuid4())))
            if number % 1000 == 999:
                pipe.execute()
        pipe.execute()

    def _template(self, *, with_eta: bool) -> str:
        now = datetime.now(timezone.utc)
        self.app.send_task("mark", task_id="THE-ID", eta=now if with_eta else None, queue="THE-Q")
        raw = self.redis.rpop("THE-Q")
        self.redis.delete("_kombu.binding.THE-Q")
        message = json.loads(raw)
        message["properties"]["delivery_tag"] = "THE-TAG"
        if with_eta:
            message["headers"]["eta"] = "THE-ETA"
        return json.dumps(message).replace("THE-Q", self.queue)

    def put(self, count: int, eta: Callable[[int], float], *, name: str = "mark") -> None:
        """Put rows straight into the wheel's store, as if they had been taken in before."""
        message = self.app.amqp.as_task_v2("THE-ID", name, eta=datetime.now(timezone.utc))
        body, content_type, encoding = _dump(message.body)
        store = open_store(self.store_url, "celery_wheel")
        store.open()
        for start in range(0, count, 5000):
            rows = []
            for number in range(start, min(count, start + 5000)):
                task_id, at = str(uuid.uuid4()), eta(number)
                headers = {**message.headers, "id": task_id, "eta": eta_text(at)}
                headers |= {"root_id": task_id, "task": name}
                properties = {"correlation_id": task_id, "priority": 0, "delivery_mode": 2}
                info = {"exchange": "", "routing_key": self.queue}
                rows.append(
                    DelayedTask(
                        key=task_key(self.queue, task_id, 0, 0, headers["eta"]),
                        id=task_id,
                        name=name,
                        queue=self.queue,
                        due_ms=-int(-at * 1000 // 1),
                        envelope=pack(headers, properties, info, content_type, encoding, body),
                        arrival=number,
                    )
                )
            store.put(rows, int(time.time() * 1000))
        store.close()

    def ready(self) -> int:
        """Messages in the queue that nobody has."""
        if self.on_redis:
            return int(self.redis.llen(self.queue))
        with self.app.connection_for_read() as connection:
            queue = connection.default_channel.queue_declare(self.queue, passive=True)
            return int(queue.message_count)

    def taken(self) -> bool:
        """Whether the worker has everything: queue empty, and for us nothing unacknowledged."""
        if self.ready():
            return False
        return self.side == STOCK or not self.on_redis or self.redis.hlen("unacked") == 0

    # -- workers -------------------------------------------------------------------------------

    def start(
        self, pool: str = "prefork", concurrency: int = 2, *, args: tuple[str, ...] = ()
    ) -> Node:
        """Start a worker and wait until it consumes."""
        node = Node(self, pool, concurrency, args)
        self.nodes.append(node)
        node.wait_ready()
        return node

    def marks(self) -> dict[str, float]:
        """When each task that has run began; of two runs the first."""
        path = self.folder / "marks"
        found: dict[str, float] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                task_id, _, at = line.partition(" ")
                found.setdefault(task_id, float(at))
        return found

    def runs(self) -> int:
        """How many runs there were, doubles included."""
        path = self.folder / "marks"
        return path.read_bytes().count(b"\n") if path.exists() else 0


def _dump(body: Any) -> tuple[bytes, str, str]:
    return json.dumps(body).encode(), "application/json", "utf-8"


class Node:
    """A worker process."""

    def __init__(self, site: Site, pool: str, concurrency: int, args: tuple[str, ...]) -> None:
        self.site, self.name = site, f"{site.side}-{uuid.uuid4().hex[:6]}@bench"
        self._ready = site.folder / f"ready-{self.name}"
        self.log = site.folder / f"{self.name}.log"
        argv = [sys.executable, "-m", "celery", "-A", "benchmarks.worker.app", "worker"]
        argv += ["-n", self.name, "-P", pool, "-c", str(concurrency), "-l", "WARNING"]
        argv += ["--without-mingle", "--without-gossip", "--without-heartbeat", *args]
        env = {
            **os.environ,
            CONF: json.dumps(site.conf),
            READY: str(self._ready),
            MARKS: str(site.folder / "marks"),
        }
        self.began_at = time.perf_counter()
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env,
                start_new_session=True,
            )  # fmt: skip
        self.ready_s = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until it consumes."""
        done = wait_for(
            lambda: self._ready.exists() or self._process.poll() is not None, 60, every_s=0.005
        )
        self.ready_s = time.perf_counter() - self.began_at
        if not done or self._process.poll() is not None:
            raise RuntimeError(f"the worker did not start:\n{self.log.read_text()}")

    def stop(self, timeout_s: float = 180) -> float:
        """SIGTERM; returns the seconds to its end."""
        began = time.perf_counter()
        os.kill(self.pid, signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            print(f"    {self.name} did not end within {timeout_s:.0f} s", flush=True)
        return time.perf_counter() - began

    def kill(self) -> None:
        """End it and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def ask(self, method: str, *arguments: Any, timeout_s: float = 30) -> tuple[Any, float]:
        """An ``inspect`` command: the answer (``None`` for none) and the seconds it took."""
        inspect = self.site.app.control.inspect([self.name], timeout=timeout_s, limit=1)
        began = time.perf_counter()
        answer = getattr(inspect, method)(*arguments)
        return (answer or {}).get(self.name), time.perf_counter() - began

    def wheel(self) -> dict[str, Any]:
        """The answer of ``inspect wheel``."""
        replies = self.site.app.control.broadcast(
            "wheel", {}, [self.name], reply=True, timeout=30, limit=1
        )
        return dict(replies[0][self.name]) if replies else {}

    def pings(self, until: Callable[[], bool], timeout_s: float) -> Iterator[float]:
        """Ping in turn until ``until()``; gives the seconds each took."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and not until():
            yield self.ask("ping")[1]
            time.sleep(0.02)
