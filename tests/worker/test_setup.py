"""The test bench itself, on stock Celery: brokers, worker processes, probes, pytest-celery."""

from __future__ import annotations

import pytest
from pytest_celery import CeleryTestSetup, RabbitMQTestBroker, RedisTestBroker, ping


def test_a_stock_worker_runs_tasks_on_each_broker(broker, worker, publish, probes):
    """An immediate task runs, a countdown is not early, and results come back."""
    stock = worker(wheel=False)
    delayed = publish("probe", "delayed", countdown=1)
    assert publish("probe", "now").get(timeout=10) == "now"
    assert delayed.get(timeout=10) == "delayed"
    (run,) = probes.wait("delayed")
    assert 0 <= run.late_s < 5
    assert run.hostname == stock.nodename
    assert broker.depth() == 0
    assert stock.stop() == 0


@pytest.mark.parametrize("broker", ["filesystem"], indirect=True)
def test_a_stock_worker_runs_tasks_without_a_server(worker, publish, probes):
    """The filesystem transport works in the same fixtures."""
    worker(wheel=False)
    publish("probe", "label")
    assert len(probes.wait("label")) == 1


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_cut_connection_comes_back(broker, proxied, worker, publish, probes):
    """A worker behind a proxy loses its broker and finds it again."""
    stock = worker(wheel=False)
    proxied.cut()
    stock.wait_log("Connection to broker lost")
    proxied.mend()
    publish("probe", "label", retry=True)
    assert len(probes.wait("label", timeout_s=30)) == 1


@pytest.fixture(params=["celery_redis_broker", "celery_rabbitmq_broker"])
def celery_broker(request):
    """pytest-celery's own node of each broker."""
    broker = request.getfixturevalue(request.param)
    yield broker
    broker.teardown()


@pytest.fixture
def celery_backend(celery_redis_backend):
    """Results in redis."""
    return celery_redis_backend


def test_pytest_celery_runs_here_with_docker_or_without(celery_setup: CeleryTestSetup):
    """A test in pytest-celery's own idiom passes, whether nodes are containers or processes."""
    assert isinstance(celery_setup.broker, (RedisTestBroker, RabbitMQTestBroker))
    (worker,) = celery_setup.worker_cluster
    assert ping.s().apply_async(queue=worker.worker_queue).get(timeout=30) == "pong"
