"""Where delayed tasks are kept when no store is named."""

from __future__ import annotations

import ssl

import pytest
from celery import Celery

from celery_wheel.places import BROKER, broker_store_url, settings_of
from celery_wheel.stores.redis_server import Server


def app_of(broker: str, **conf: object) -> Celery:
    app = Celery("t", broker=broker, set_as_current=False)
    app.conf.update(conf)
    return app


@pytest.mark.parametrize(
    ("broker", "expected"),
    [
        ("redis://", "redis://localhost:6379/0"),
        ("redis://h:7000/3", "redis://h:7000/3"),
        ("redis://:p%40ss@h/1", "redis://:p%40ss@h:6379/1"),
        ("redis://user:pw@h/1", "redis://user:pw@h:6379/1"),
        ("amqp://guest:guest@h//", None),
        ("memory://", None),
        ("sentinel://h:26379/0", None),
        ("redis://one/0;redis://two/0", None),
    ],
)
def test_the_brokers_own_redis_is_the_place(broker, expected):
    """A single Redis server is; everything else is left to broker custody."""
    app = app_of(broker)
    assert broker_store_url(app) == expected
    assert settings_of(app).store_url == (expected or BROKER)


def test_a_named_store_stays(tmp_path):
    """What the user names is taken as it is."""
    app = app_of("redis://", wheel_store="broker://")
    assert settings_of(app).store_url == "broker://"


def test_tls_and_prefix_are_the_brokers():
    """The broker's TLS options and key prefix hold for the store, too."""
    app = app_of(
        "rediss://h/0",
        broker_use_ssl={"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca.pem"},
        broker_transport_options={"global_keyprefix": "shop:"},
    )
    url = broker_store_url(app)
    assert url is not None
    server = Server(url, "celery_wheel")
    assert server.key("x") == "shop:{celery_wheel}:x"
    options = server._client.connection_pool.connection_kwargs
    assert (options["ssl_cert_reqs"], options["ssl_ca_certs"]) == ("required", "/ca.pem")
    assert "wheel_prefix" not in options
