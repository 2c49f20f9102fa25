"""What is particular to the Redis store: steps, crashes between them, and a failing server."""

from __future__ import annotations

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgpack
import pytest
from redis.crc import key_slot

from celery_wheel.envelope import pack
from celery_wheel.errors import ConfigError, SchemaVersionError, StoreUnavailable
from celery_wheel.stores import open_store
from celery_wheel.stores.base import Counts, Filter
from celery_wheel.stores.redis import RedisStore
from tests.stores.redis_child import ACTS, COUNT, all_keys, tasks
from tests.stores.rows import LATER, NOW, claimed, dispatched, everything, ids, owner, task
from tests.stores.stores import KINDS, redis_server
from tests.support.servers import RedisServer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path) -> Iterator[RedisStore]:
    made = KINDS["redis"](tmp_path)
    made.open()
    yield made
    made.close()


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server that this test may spoil."""
    server = RedisServer()
    yield server
    server.stop()


@contextmanager
def opened(server: RedisServer) -> Iterator[RedisStore]:
    made = open_store(f"{server.url}/0")
    made.open()
    yield made
    made.close()


def check(store: RedisStore) -> None:
    """Every index agrees with the rows: nothing is missing, nothing is left."""
    client, base = redis_server().client, store.server.base
    rows = {row.key: row for row in everything(store)}
    assert rows.keys() == set(client.hkeys(base + "rows"))
    lines = Counter()
    for key in client.scan_iter(base + "line:*"):
        assert client.sismember(base + "lines", key.removeprefix(f"{base}line:".encode()))
        for member in client.zrange(key, 0, -1):
            lines[member[8:]] += 1
    assert lines == Counter(rows.keys())
    by_id = {name.decode(): joined for name, joined in client.hgetall(base + "ids").items()}
    assert by_id == {row.id: row.key for row in rows.values()}
    carriers = {
        (key.decode().partition("stamp:")[2], member)
        for key in client.scan_iter(base + "stamp:*")
        for member in client.smembers(key)
    }
    assert carriers == {(stamp, row.key) for row in rows.values() for stamp in row.stamps}
    pending = {row.key for row in rows.values() if row.state == "pending"}
    assert set(client.zrange(base + "expires", 0, -1)) == pending


@pytest.mark.parametrize("act", ACTS)
def test_a_client_killed_between_steps(store, act):
    """Whoever is killed after two steps of a call leaves whole rows, and the call repeated by
    another does the rest."""
    if act != "put":
        store.put(tasks(), NOW)
    if act in ("confirm", "release", "reap"):
        store.claim("w1", LATER, COUNT)
    command = [sys.executable, "-m", "tests.stores.redis_child", act, store.server.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, store.server.namespace], cwd=ROOT, text=True, stdin=pipe, stdout=pipe
    ) as child:
        for _ in range(2 + (act == "reap")):
            assert child.stdout.readline()
            print("go", file=child.stdin, flush=True)
        assert child.stdout.readline() != ""  # the steps before are done, this one waits
        child.kill()
    check(store)
    half = store.count()
    ACTS[act](store)
    check(store)
    done = store.count()
    assert half != done
    expected = {
        "put": Counts(pending=COUNT),
        "claim": Counts(pending=COUNT, owned=COUNT),
        "confirm": Counts(dispatched=COUNT, owned=COUNT),
        "release": Counts(pending=COUNT),
        "reap": Counts(pending=COUNT),
    }
    assert done == expected.get(act, Counts())
    if act == "settle":
        assert store.put(tasks(), NOW).known == set(all_keys())
    if act == "cancel":
        assert store.put(tasks(), NOW).cancelled == set(all_keys())


def test_nothing_is_left_of_rows_that_are_gone(store):
    """Once every row is settled and a reap went by, one key is left: the schema's version."""
    rows = [task("a", retries=n, stamps=("s=1", "s=1"), expires_ms=LATER) for n in range(3)]
    claimed(store, *rows, task("b", queue="other"))
    store.heartbeat(owner("w1"), -1)
    dispatched(store, task("c"))
    store.settle([row.key for row in everything(store)])
    store.reap()
    left = redis_server().client.keys(store.server.base + "*")
    assert left == [f"{store.server.base}meta".encode()]


def test_all_keys_are_in_one_slot(store):
    """Every key begins with the namespace in braces, so a cluster keeps them together."""
    dispatched(store, task("a", stamps=("s={x}",), queue="q{y}", expires_ms=LATER))
    store.put([task("b", queue="q{y}", expires_ms=LATER)], NOW)
    store.heartbeat(owner("w{1}"), 60)
    store.cancel(["z"], ["s={z}"], LATER)
    store.settle([task("c").key], LATER)
    client = redis_server().client
    mine = client.keys(f"*{store.server.namespace}*")
    assert len(mine) == 12
    assert {key_slot(key) for key in mine} == {key_slot(store.server.namespace.encode())}


def test_namespaces_do_not_meet(store):
    """Two applications on one database see their own rows only."""
    store.put([task("a")], NOW)
    other = open_store(store.server.url, "another")
    other.open()
    assert everything(other) == []
    other.close()


def test_unknown_tasks_are_stepped_over_in_steps(store):
    """Behind more unknown tasks than one step looks at, the known ones are found, in order."""
    unknown = [task(f"u{n}", NOW, name="unknown") for n in range(600)]
    known = [task(f"k{n}", NOW + 1 - n % 2) for n in range(6)]
    store.put(unknown + known, NOW)
    rows = store.claim("w1", LATER, 4, unknown=["unknown"])
    assert ids(rows) == ["k1", "k3", "k5", "k0"]
    assert store.count().owned == 4


def test_pages_go_through_one_due_time(store):
    """Pages follow each other within hundreds of rows of one ETA, in the order of arrival."""
    store.put([task(f"t{n}", NOW, queue=f"q{n % 3}") for n in range(620)], NOW)
    seen, cursor = [], None
    while True:
        page = store.find(Filter(), 130, cursor)
        seen += ids(page.rows)
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == [f"t{n}" for n in range(620)]


def test_reap_deletes_any_number_of_old_tombstones(store):
    """More tombstones than one step deletes are gone after one reap."""
    store.settle([bytes(8) + n.to_bytes(8, "big") for n in range(600)], seen_until_ms=1000)
    store.cancel([f"t{n}" for n in range(600)], [], 1000)
    store.reap()
    client, base = redis_server().client, store.server.base
    assert client.exists(base + "seen", base + "cancelled") == 0


def test_rows_of_one_batch_may_be_large(store):
    """A batch of many megabytes goes in pieces and comes back whole."""
    large = [task(f"t{n}", envelope=bytes([n]) * 1_500_000 + uuid.uuid4().bytes) for n in range(9)]
    assert len(store.put(large, NOW).new) == 9
    assert everything(store) == large


def typical(number: int) -> bytes:
    """The envelope of an ordinary message; some 850 bytes."""
    task_id = str(uuid.uuid5(uuid.NAMESPACE_URL, str(number)))
    headers = {
        "lang": "py",
        "task": "shop.orders.tasks.send_reminder",
        "id": task_id,
        "shadow": None,
        "eta": "2026-05-14T09:41:17.204963+00:00",
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": task_id,
        "parent_id": None,
        "argsrepr": f"({number},)",
        "kwargsrepr": "{'template': 'second_reminder', 'locale': 'de'}",
        "origin": "gen48213@web-5d7f9c8b6d-x2x4q",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
    }
    properties = {
        "correlation_id": task_id,
        "reply_to": str(uuid.uuid5(uuid.NAMESPACE_DNS, str(number))),
        "delivery_mode": 2,
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": str(uuid.uuid5(uuid.NAMESPACE_OID, str(number))),
    }
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    body = json.dumps([[number], {"template": "second_reminder", "locale": "de"}, embed])
    place = {"exchange": "", "routing_key": "celery"}
    return pack(headers, properties, place, "application/json", "utf-8", body)


def test_a_held_task_takes_less_than_a_kilobyte(own_server):
    """All in all, with an ordinary message of 850 bytes, by the server's own count."""
    count = 3000
    held = [
        task(f"{uuid.uuid5(uuid.NAMESPACE_URL, str(n))}", NOW + n * 977 % 10**9)
        for n in range(count)
    ]
    held = [dataclasses.replace(row, envelope=typical(n)) for n, row in enumerate(held)]
    with opened(own_server) as store:
        before = own_server.client.info("memory")["used_memory"]
        store.put(held, NOW)
        store.claim("w1", LATER, count // 2)
        taken = own_server.client.info("memory")["used_memory"] - before
        assert taken / count < 1024
        assert everything(store)[0].envelope == held[0].envelope


def test_a_server_that_evicts_is_refused(own_server):
    """A maxmemory-policy that would delete tasks is an error that says what to set."""
    own_server.client.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match=r"allkeys-lru.*set it to noeviction"):
        open_store(f"{own_server.url}/0").open()


def test_a_full_server_takes_nothing_in_and_lets_everything_out(own_server):
    """Without memory a put changes nothing and can be tried again; held tasks go on."""
    with opened(own_server) as store:
        first = [task(f"t{n}") for n in range(9)]
        store.put(first, NOW)
        own_server.client.config_set("maxmemory", 1_000_000)
        with pytest.raises(StoreUnavailable, match="maxmemory"):
            store.put([task("new")], NOW)
        assert store.count() == Counts(pending=9)
        assert store.heartbeat(owner("w1"), 60)
        rows = store.claim("w1", LATER, 6)
        assert len(store.confirm("w1", [(row.key, 0) for row in rows], LATER)) == 6
        assert store.settle([row.key for row in rows[:4]], seen_until_ms=LATER) == 4
        assert store.release("w1") == 2
        assert store.cancel(["t8"], [], LATER).outcomes == {"t8": "cancelled"}
        assert store.reap() == 0
        own_server.client.config_set("maxmemory", 0)
        assert len(store.put([task("new")], NOW).new) == 1
        assert store.count() == Counts(pending=5)


def test_a_read_only_server_is_tried_again(own_server):
    """What became a replica in a failover refuses to write: unavailable, not an error."""
    with opened(own_server) as store:
        own_server.client.execute_command("REPLICAOF", "127.0.0.1", "1")
        for call in (lambda: store.put([task("a")], NOW), lambda: store.claim("w1", LATER, 1)):
            with pytest.raises(StoreUnavailable, match="read only"):
                call()
        own_server.client.execute_command("REPLICAOF", "NO", "ONE")
        assert len(store.put([task("a")], NOW).new) == 1


def test_a_server_that_comes_back_needs_nothing_but_another_call(own_server):
    """Down: unavailable. Started anew, without a script it knew: the same object goes on."""
    with opened(own_server) as store:
        store.put([task("a")], NOW)
        own_server.stop()
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="does not answer"):
                store.put([task("a")], NOW)
        own_server.start()
        assert len(store.put([task("b")], NOW).new) == 1


@contextmanager
def answering(line: bytes) -> Iterator[str]:
    """The URL of a server that says one thing only; nothing where ``line`` is empty."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    while connection.recv(65_536):
                        if line:
                            connection.sendall(line + b"\r\n")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = listener.getsockname()[1]
        # Without a handshake each request has one answer.
        options = "socket_timeout=0.2&protocol=2&lib_name=&lib_version="
        yield f"redis://127.0.0.1:{port}/0?{options}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@pytest.mark.parametrize(
    "line",
    [
        b"-LOADING Redis is loading the dataset in memory",
        b"-OOM command not allowed when used memory > 'maxmemory'.",
        b"-ERR Error running script (call to f_1): @user_script:9: -OOM command not allowed.",
        b"-READONLY You can't write against a read only replica.",
        b"-MISCONF Redis is configured to save RDB snapshots, but it is unable to persist on disk.",
        b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL.",
        b"-CLUSTERDOWN The cluster is down",
        b"",
    ],
)
def test_what_passes_is_tried_again(line):
    """Answers of a server that can't do it now, and no answer at all, are unavailable."""
    with answering(line) as url:
        store = RedisStore(url, "celery_wheel")
        with pytest.raises(StoreUnavailable):
            store.open()
        store.close()


def test_a_newer_schema_is_an_error(store):
    """A place that a newer release made is left alone."""
    redis_server().client.hset(store.server.base + "meta", "schema", 2)
    with pytest.raises(SchemaVersionError, match="schema version 2, this release knows 1"):
        store.sibling().open()


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("/99", "DB index is out of range"),
        ("/0?no_such_option=1", "no_such_option"),
        ("/0?socket_timeout=soon", "socket_timeout"),
    ],
)
def test_a_wrong_url_says_so(ending, why):
    """What only the user can put right is a configuration error, and nothing is tried again."""
    with pytest.raises(ConfigError, match=why):
        open_store(redis_server().url + ending).open()


@pytest.mark.parametrize("password", ["wrong", "wr/ng", "wr@ng"])
def test_a_wrong_password_is_not_repeated(password):
    """It is a configuration error whose text holds no piece of the password."""
    url = f"redis://somebody:{password}@{redis_server().url.partition('//')[2]}/0"
    with pytest.raises(ConfigError, match="redis://user:password@host") as error:
        open_store(url).open()
    assert "wr" not in str(error.value).partition("write redis://")[0].replace("write", "")


def test_a_server_that_wants_a_password(own_server):
    """Without one it is a configuration error."""
    own_server.client.config_set("requirepass", "secret")
    with pytest.raises(ConfigError, match="authenticated"):
        open_store(f"{own_server.url}/0").open()
    own_server.client.execute_command("AUTH", "secret")


def test_a_unix_socket(tmp_path):
    """unix:// reaches a server on a socket, with the number of the database as an option."""
    path = tmp_path / "redis.sock"
    server = RedisServer("--unixsocket", str(path))
    store = open_store(f"unix://{path}?db=3")
    store.open()
    store.put([task("a")], NOW)
    assert server.client.info("keyspace")["db3"]["keys"] > 0
    store.close()
    server.stop()


def test_without_the_package_the_error_says_what_to_install():
    """Without redis-py a Redis URL is a configuration error that names the extra."""
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from celery_wheel.stores import open_store\n"
        "try:\n    open_store('redis://localhost')\n"
        "except Exception as exc:\n    print(type(exc).__name__, exc)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("ConfigError")
    assert "pip install 'celery-wheel[redis]'" in done.stdout


def test_rows_are_plain_msgpack(store):
    """What lies in Redis can be read without this package but for the last field."""
    store.put([task("a", expires_ms=LATER)], NOW)
    (packed,) = redis_server().client.hvals(store.server.base + "rows")
    state, by, due_ms, *_, rest = msgpack.unpackb(packed, raw=True)
    assert (state, by, due_ms) == (0, False, NOW)
    assert rest.endswith(b"envelope of a") or rest[0] == 1
