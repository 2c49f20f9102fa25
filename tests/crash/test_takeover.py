"""Who runs the tasks of a worker that was killed, stopped, or cut off; on every store."""

from __future__ import annotations

import signal
import time
from urllib.parse import urlsplit

import pytest

from tests.support.fixtures import SHARED, on
from tests.support.processes import wait_for
from tests.support.proxy import Proxy

TTL_S = 3
#: A lease that no test waits for.
LONG_TTL_S = 300
#: What a machine with other things to do may need.
SLACK_S = 5


def check_once(probes, label, count):
    """Each of so many ran once, none early; the runs."""
    runs = probes.wait(label, count, 40)
    time.sleep(0.5)  # for a run that nobody should have started
    runs = probes.runs(label)
    assert len({run.task_id for run in runs}) == len(runs) == count
    assert min(run.late_s for run in runs) >= 0
    return runs


def share(store, owned, node, publish):
    """Delayed tasks of which a worker among others owns some, a moment before they are due."""
    for _ in range(30):
        publish("probe", "shared", countdown=5)
    # What is still a message is the broker's: Redis keeps it for an hour when its worker dies.
    wait_for(lambda: store.count().pending == 30, 4, every_s=0.02, what="all are committed")
    wait_for(lambda: owned(node) >= 3, 15, every_s=0.02, what=f"{node} owns rows")


@on("redis-sqlite", *SHARED)
def test_others_take_over_within_the_lease(sow, owned, publish, probes):
    """Kill -9 of one of two workers: what it held, and what it ran, is run by the other before
    the lease could have been over twice."""
    victim = sow("victim@test", wheel_lease_ttl=TTL_S)
    publish("late_probe", "running", 60, countdown=0.2)
    probes.wait("running")
    sow("heir@test", wheel_lease_ttl=TTL_S)
    assert owned("victim@test") == 1
    victim.kill()
    killed_at = time.monotonic()
    wait_for(lambda: owned("victim@test") == 0, 30, every_s=0.02, what="its row is freed")
    assert time.monotonic() - killed_at < TTL_S + SLACK_S
    first, second = probes.wait("running", 2)
    assert (first.hostname, first.redelivered) == ("victim@test", False)
    assert (second.hostname, second.redelivered) == ("heir@test", True)


@on("redis-sqlite", *SHARED)
def test_what_a_killed_worker_held_is_run_by_the_other(sow, store, owned, publish, probes):
    """Kill -9 of one of two workers just before tasks of both fall due: each runs once, the
    victim's as soon as its lease is over."""
    victim = sow("victim@test", wheel_lease_ttl=TTL_S)
    sow("heir@test", wheel_lease_ttl=TTL_S)
    share(store, owned, "victim@test", publish)
    victim.kill()
    killed_at = time.time()
    runs = check_once(probes, "shared", 30)
    after = [run for run in runs if run.at > killed_at + 0.5]
    assert {run.hostname for run in after} <= {"heir@test"}
    assert max(run.at for run in runs) < max(killed_at, runs[0].at) + TTL_S + SLACK_S


@on("redis-sqlite", *SHARED)
def test_the_next_incarnation_takes_over_at_once(sow, owned, publish, probes):
    """A worker that is killed and started again on its host does not wait for its own lease."""
    victim = sow("same@test", wheel_lease_ttl=LONG_TTL_S)
    publish("late_probe", "running", 3, countdown=0.2)
    probes.wait("running")
    victim.kill()
    for _ in range(10):
        publish("probe", "arrived meanwhile", countdown=0.5)
    sow("same@test", wheel_lease_ttl=LONG_TTL_S)
    ready_at = time.time()
    second = probes.wait("running", 2)[1]
    assert second.redelivered
    assert second.at < ready_at + SLACK_S
    check_once(probes, "arrived meanwhile", 10)
    wait_for(lambda: owned("same@test") == 0, 30, what="nothing is left")
    assert len(probes.runs("running")) == 2


@on("redis-sqlite", *SHARED)
def test_two_that_live_under_one_name_do_not_rob_each_other(sow, owned, publish, probes):
    """A namesake that starts while the first one runs a task for longer than the lease lasts
    leaves it alone; all tasks run once."""
    sow("same@test", wheel_lease_ttl=TTL_S)
    publish("late_probe", "running", 2 * TTL_S, countdown=0.2)
    probes.wait("running")
    assert owned("same@test") == 1
    sow("same@test", wheel_lease_ttl=TTL_S)
    for _ in range(10):
        publish("probe", "held", countdown=2)
    check_once(probes, "held", 10)
    wait_for(lambda: owned("same@test") == 0, 30, what="the long task is done")
    check_once(probes, "running", 1)


@on("redis-sqlite", *SHARED)
def test_a_graceful_stop_frees_at_once(sow, store, owned, publish, probes):
    """After SIGTERM nothing is owned by the worker that went, and another runs all on time."""
    leaver = sow("leaver@test", wheel_lease_ttl=LONG_TTL_S)
    sow("heir@test", wheel_lease_ttl=LONG_TTL_S)
    share(store, owned, "leaver@test", publish)
    leaver.kill(signal.SIGTERM)
    leaver.wait(20)
    assert owned("leaver@test") == 0
    runs = check_once(probes, "shared", 30)
    assert max(run.late_s for run in runs) < 2 * SLACK_S


def stop_past_the_lease(stopped, probes):
    """SIGSTOP until another has run everything."""
    stopped.process.signal(signal.SIGSTOP)
    try:
        probes.wait("shared", 30, 40)
    finally:
        stopped.process.signal(signal.SIGCONT)


@on(*SHARED)
def test_a_worker_that_was_stopped_runs_nothing_of_others(sow, store, owned, publish, probes):
    """SIGSTOP past the lease: another runs the tasks; after SIGCONT the fence refuses them, and
    the worker goes on."""
    stopped = sow("stopped@test", wheel_lease_ttl=TTL_S)
    sow("heir@test", wheel_lease_ttl=TTL_S)
    share(store, owned, "stopped@test", publish)
    stop_past_the_lease(stopped, probes)
    stopped.wait_log("lease had run out", 20)
    check_once(probes, "shared", 30)
    assert stopped.process.returncode is None


@pytest.fixture
def proxied_store(custody):
    """The network between one worker and the store, and the URL that goes through it."""
    port = urlsplit(custody["wheel_store"]).port
    proxy = Proxy(port)
    yield proxy, custody["wheel_store"].replace(f":{port}", f":{proxy.port}")
    proxy.stop()


@on(*SHARED)
def test_a_worker_that_was_cut_off_runs_nothing_of_others(
    proxied_store, sow, store, owned, publish, probes
):
    """No network to the store past the lease: another runs the tasks; when it is back the fence
    refuses them, and the worker goes on."""
    proxy, url = proxied_store
    cut = sow("cut@test", wheel_lease_ttl=TTL_S, wheel_store=url)
    heir = sow("heir@test", wheel_lease_ttl=TTL_S)
    share(store, owned, "cut@test", publish)
    proxy.cut()
    wait_for(lambda: owned("cut@test") == 0, 30, what="its rows are freed")
    proxy.mend()
    cut.wait_log("lease had run out", 20)
    check_once(probes, "shared", 30)
    heir.stop()
    publish("probe", "then", countdown=1)
    (then,) = probes.wait("then")
    assert then.hostname == "cut@test"
