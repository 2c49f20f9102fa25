"""What a dead letter looks like: as RabbitMQ writes it."""

from __future__ import annotations

from celery_wheel.envelope import Envelope
from celery_wheel.worker.courier import letter_of
from celery_wheel.worker.dead_letters import dead_letter, with_death

DEATH = {"count": 1, "queue": "q", "reason": "rejected", "exchange": "x", "routing-keys": ["key"]}


def envelope(headers=None, properties=None):
    """A message that came through exchange x with the routing key "key"."""
    info = {"exchange": "x", "routing_key": "key", "redelivered": False}
    return Envelope(headers or {}, properties or {}, info, "application/json", "utf-8", b"[]")


def test_the_queue_may_set_the_routing_key():
    """Otherwise the message keeps its own; x-death tells the one that it came with."""
    kept = dead_letter(envelope(), "q", "dlx", None, 5_000)
    assert (kept.exchange, kept.routing_key) == ("dlx", "key")
    given = dead_letter(envelope(), "q", "dlx", "", 5_999)
    assert (given.exchange, given.routing_key) == ("dlx", "")
    (death,) = given.headers["x-death"]
    assert death["time"].timestamp() == 5
    del death["time"]
    assert death == DEATH


def test_a_time_to_live_ends_with_the_first_death():
    """RabbitMQ moves ``expiration`` into x-death, so that it can't expire in the graveyard."""
    sent = {"expiration": "60000", "priority": 3, "delivery_tag": 7}
    letter = dead_letter(envelope(properties=sent), "q", "dlx", None, 0)
    assert letter.properties == {"priority": 3}
    assert letter.headers["x-death"][0]["original-expiration"] == "60000"


def test_deaths_are_counted_and_the_latest_is_first():
    """A second death in one queue for one reason counts up; another one is put before it."""
    once = with_death({"mine": 1}, DEATH)
    assert once["mine"] == 1
    assert once["x-first-death-queue"] == "q"
    other = with_death(once, {**DEATH, "queue": "r"})
    assert [(one["queue"], one["count"]) for one in other["x-death"]] == [("r", 1), ("q", 1)]
    assert other["x-first-death-queue"] == "q"
    again = with_death(other, DEATH)
    assert [(one["queue"], one["count"]) for one in again["x-death"]] == [("q", 2), ("r", 1)]


def test_a_compressed_body_is_compressed_again():
    """The body was decompressed on arrival; a codec that this process lacks is left out."""
    letter = letter_of(envelope({"compression": "application/x-gzip"}), "", "q", mandatory=True)
    assert letter.headers["compression"] == "application/x-gzip"
    assert letter.body != b"[]"
    plain = letter_of(envelope({"compression": "application/x-unknown"}), "", "q", mandatory=True)
    assert (plain.headers, plain.body) == ({}, b"[]")
