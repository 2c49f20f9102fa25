"""Replicas that must have a write, and masters that sentinels name."""

from __future__ import annotations

import pytest

from celery_wheel.errors import ConfigError, StoreUnavailable
from celery_wheel.stores import open_store
from tests.stores.rows import NOW, task
from tests.support.processes import Process, wait_for
from tests.support.servers import RedisServer, find_program, free_port


@pytest.fixture
def master():
    server = RedisServer()
    yield server
    server.stop()


def test_a_put_waits_for_replicas(master, monkeypatch):
    """Without the replica a put is not answered; with it the same put goes on."""
    monkeypatch.setattr("celery_wheel.stores.redis_server.TIMEOUT_S", 0.2)
    store = open_store(f"{master.url}/0?wheel_wait_replicas=1")
    store.open()
    one = task("a")
    with pytest.raises(StoreUnavailable, match="0 of 1 replicas"):
        store.put([one], NOW)
    replica = RedisServer("--replicaof", "127.0.0.1", str(master.port))
    try:
        wait_for(lambda: master.client.info("replication")["connected_slaves"] == 1, 20)
        wait_for(lambda: replica.client.info("replication")["master_link_status"] == "up", 20)
        monkeypatch.setattr("celery_wheel.stores.redis_server.TIMEOUT_S", 20)
        assert store.put([one], NOW).known == {one.key}
    finally:
        store.close()
        replica.stop()


def test_sentinels_name_the_master(master, tmp_path):
    """The store finds its server through a sentinel."""
    port = free_port()
    conf = tmp_path / "sentinel.conf"
    conf.write_text(f"port {port}\nsentinel monitor shop 127.0.0.1 {master.port} 1\n")
    sentinel = Process([find_program("redis-server"), str(conf), "--sentinel"], tmp_path / "log")
    try:
        store = open_store(f"redis+sentinel://127.0.0.1:{port}/shop/0")

        def opened() -> bool:
            try:
                store.open()
            except (StoreUnavailable, ConfigError):
                return False
            return True

        wait_for(opened, 20)
        assert store.put([task("a")], NOW).new
        assert master.client.dbsize() > 0
        store.close()
    finally:
        sentinel.kill()


def test_a_sentinel_url_without_a_service_says_so():
    """The message shows how it is written."""
    with pytest.raises(ConfigError, match="names no service"):
        open_store("redis+sentinel://localhost:26379")
