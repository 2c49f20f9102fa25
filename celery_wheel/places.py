"""Which place ``wheel_store`` means when nothing is named: the broker's own Redis.

With a Redis broker every delayed task lives in that server anyway, so keeping it there as a
row costs nobody a new server and is as durable as the message was. Other brokers keep their
messages themselves (broker custody).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

from celery_wheel.settings import Settings

__all__ = ("BROKER", "broker_store_url", "in_place", "settings_of")

#: The URL of broker custody.
BROKER = "broker://"


def settings_of(app: Any) -> Settings:
    """The app's settings, with the place filled in that it did not name.

    Raises:
        ConfigError: as :meth:`Settings.from_app`.
    """
    settings = Settings.from_app(app)
    return in_place(settings, settings.store_url or broker_store_url(app) or BROKER)


def in_place(settings: Settings, url: str) -> Settings:
    """The settings with this store, and with what they say of it in its URL."""
    replicas = settings.redis_wait_replicas
    if replicas and "redis" in url.partition("://")[0] and "wheel_wait_replicas" not in url:
        url += f"{'&' if '?' in url else '?'}wheel_wait_replicas={replicas}"
    return replace(settings, store_url=url)


def broker_store_url(app: Any) -> str | None:
    """The URL of the broker's Redis as a store, or ``None`` where there is no such thing.

    Its database, credentials, TLS and ``global_keyprefix`` are the broker's. Sentinel, unix
    sockets and brokers of several URLs are left to broker custody.
    """
    connection = app.connection_for_read()
    scheme = connection.as_uri().partition("://")[0]
    if scheme not in ("redis", "rediss") or len(connection.alt or ()) > 1:
        return None
    user, password = connection.userid, connection.password
    login = ""
    if password:
        login = f"{quote(user or '', safe='')}:{quote(password, safe='')}@"
    host = connection.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    database = str(connection.virtual_host or "0").strip("/") or "0"
    tls = connection.ssl
    query = _tls_options(tls if isinstance(tls, dict) else {})
    prefix = (connection.transport_options or {}).get("global_keyprefix")
    if prefix:
        query["wheel_prefix"] = str(prefix)
    url = f"{'rediss' if tls or scheme == 'rediss' else 'redis'}://{login}{host}"
    url += f":{connection.port or 6379}/{database}"
    return f"{url}?{urlencode(query)}" if query else url


def _tls_options(tls: dict[str, Any]) -> dict[str, str]:
    """The options of ``broker_use_ssl`` as redis-py has them in a URL."""
    options = {}
    for given, value in tls.items():
        if value is None:
            continue
        name = given if given.startswith("ssl_") else f"ssl_{given}"
        # CERT_REQUIRED and its like are an enum, a number or a text.
        text = getattr(value, "name", None) or str(value)
        if name == "ssl_cert_reqs":
            text = {"0": "none", "1": "optional", "2": "required"}.get(text, text)
            text = text.removeprefix("CERT_").lower()
        options[name] = text
    return options
