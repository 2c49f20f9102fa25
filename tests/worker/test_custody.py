"""What is held for long on RabbitMQ, and what its tasks refuse."""

from __future__ import annotations

import time
import uuid

import pytest
from kombu import Connection, Exchange, Queue

from tests.support.app import make_app
from tests.support.fixtures import on
from tests.support.killing import kill_at
from tests.support.processes import wait_for

LATE_S = 1.5
IMPATIENT = {"wheel_broker_lease": 2}


@on("rabbitmq-broker")
def test_a_held_message_is_parked_again_unchanged(worker, publish, probes, broker):
    """Held for several leases: the message that runs is the one that was sent, and runs once."""
    held = worker(conf=IMPATIENT)
    options = {"priority": 3, "headers": {"mine": "yes"}, "compression": "gzip"}
    publish("probe", "label", countdown=7, **options)
    for _ in range(450):
        publish("probe", "many", countdown=7)
    (run,) = probes.wait("label", timeout_s=20)
    assert 0 <= run.late_s < LATE_S
    assert (run.priority, run.headers) == (3, {"mine": "yes"})
    runs = probes.wait("many", 450, timeout_s=20)
    held.wait_held(0)
    assert min(run.late_s for run in runs) >= 0
    assert len({run.task_id for run in runs}) == len(probes.runs("many")) == 450
    wheel = held.wheel()
    assert wheel["received"] > 900
    assert wheel["duplicates"] == wheel["resident"] == 0
    assert broker.depth() == 0


@on("rabbitmq-broker")
def test_a_revoke_meets_a_parked_message(worker, publish, probes, app):
    """Revoked after some leases: gone at once, announced once, never run."""
    held = worker(conf=IMPATIENT)
    sent = [publish("probe", "label", countdown=20) for _ in range(100)]
    wait_for(lambda: held.wheel()["received"] > 200, 20, what="they came again")
    app.control.revoke([result.id for result in sent])
    held.wait_held(0)
    # Celery itself refuses those that were in the queue at that moment.
    wait_for(lambda: held.log().count("signal task_revoked") >= 100, what="100 are announced")
    time.sleep(3)  # longer than another lease
    assert held.log().count("signal task_revoked") == 100
    assert all(result.state == "REVOKED" for result in sent)
    assert probes.runs() == []


@on("rabbitmq-broker")
def test_two_copies_make_one_run(worker, publish, probes, broker):
    """Kill -9 between the copy and the ack: the broker has two, and one is dropped."""
    imports = {"imports": ["tests.support.killing"]}
    first = worker(conf={**IMPATIENT, **imports}, env=kill_at("repark", "before"))
    publish("probe", "label", countdown=9)
    first.wait(10)
    wait_for(lambda: broker.depth() == 2, what="there are two copies")
    second = worker()
    (run,) = probes.wait("label")
    assert 0 <= run.late_s < LATE_S
    second.wait_held(0)
    assert second.wheel()["duplicates"] == 1
    assert broker.depth() == 0
    assert len(probes.runs("label")) == 1


@on("rabbitmq-broker")
def test_two_workers_hand_parked_messages_to_each_other(worker, publish, probes):
    """Copies go to whoever takes them; each task runs once, on time."""
    one, two = worker(conf=IMPATIENT, ready=False), worker(conf=IMPATIENT)
    one.wait_ready()
    for _ in range(100):
        publish("probe", "label", countdown=7)
    runs = probes.wait("label", 100, timeout_s=20)
    one.wait_held(0)
    two.wait_held(0)
    assert min(run.late_s for run in runs) >= 0
    assert max(run.late_s for run in runs) < LATE_S
    assert len({run.task_id for run in runs}) == len(probes.runs("label")) == 100
    assert one.wheel()["received"] + two.wheel()["received"] > 200


@on("rabbitmq-sqlite")
def test_a_broadcast_queue_is_parked_again(conf, worker, probes, broker):
    """Broadcast queues stay with the broker, whatever the store; each worker runs its copy."""
    name = f"bcast{uuid.uuid4().hex[:8]}"
    conf["test_queues"] = [{"name": broker.queue}, {"kind": "broadcast", "name": name}]
    one, two = worker(conf=IMPATIENT, ready=False), worker(conf=IMPATIENT)
    one.wait_ready()
    with make_app(conf) as app:
        app.tasks["probe"].apply_async(("label",), countdown=6, queue=name)
    runs = probes.wait("label", 2)
    assert len({run.hostname for run in runs}) == 2
    assert all(0 <= run.late_s < LATE_S for run in runs)
    assert min(one.wheel()["received"], two.wheel()["received"]) > 1
    assert len(probes.runs("label")) == 2


@pytest.fixture
def graveyard(broker, conf):
    """A dead-letter exchange with a queue behind it; the test's queue leads there."""
    exchange = Exchange(f"dlx{uuid.uuid4().hex[:8]}", type="direct")
    queue = Queue(f"dead{uuid.uuid4().hex[:8]}", exchange, routing_key="buried")
    arguments = {
        "x-dead-letter-exchange": exchange.name,
        "x-dead-letter-routing-key": "buried",
    }
    conf["test_queues"] = [{"name": broker.queue, "queue_arguments": arguments}]
    with Connection(broker.url) as connection:
        bound = queue(connection.default_channel)
        bound.declare()
        yield bound


@on("rabbitmq-sqlite", "rabbitmq-broker")
def test_what_is_rejected_is_dead_lettered(graveyard, broker, worker, publish):
    """In both kinds of custody the message gets where RabbitMQ would have sent it, as it would."""
    held = worker()
    sent = publish("rejects", "label", False, countdown=1, headers={"mine": "yes"})
    message = wait_for(graveyard.get, what="it was dead-lettered")
    assert (message.headers["id"], message.headers["mine"]) == (sent.id, "yes")
    assert message.decode()[0] == ["label", False]
    (death,) = message.headers["x-death"]
    assert death.pop("time")
    assert death == {
        "count": 1,
        "exchange": "",
        "queue": broker.queue,
        "reason": "rejected",
        "routing-keys": [broker.queue],
    }
    first = {name: message.headers[f"x-first-death-{name}"] for name in ("queue", "reason")}
    assert first == {"queue": broker.queue, "reason": "rejected"}
    message.ack()
    held.wait_held(0)
    wait_for(lambda: held.wheel()["dispatched_rows"] == 0, what="the row is settled")
    assert graveyard.get() is None


@on("rabbitmq-sqlite")
def test_a_dead_letter_waits_for_the_broker(graveyard, proxied, worker, publish, probes):
    """Rejected while the broker is away: kept until the broker has it, then settled."""
    held = worker()
    publish("slow_reject", "label", 2, countdown=1)
    probes.wait("label")
    proxied.cut()
    time.sleep(3)
    assert graveyard.get() is None
    proxied.mend()
    wait_for(graveyard.get, 30, what="it was dead-lettered").ack()
    held.wait_log("Connected to")
    wait_for(lambda: held.wheel()["dispatched_rows"] == 0, 20, what="the row is settled")
    assert len(probes.runs("label")) == 1
