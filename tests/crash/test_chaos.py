"""Half a minute of a storm; ``make soak`` has a longer one."""

from __future__ import annotations

import pytest

from tests.crash.chaos import Storm, chaos_conf
from tests.crash.journal import JOURNAL_VARIABLE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broker", "late"),
    [
        pytest.param("redis", False, id="redis-early-ack"),
        pytest.param("rabbitmq", True, id="rabbitmq-late-ack"),
    ],
    indirect=["broker"],
)
def test_a_storm_loses_nothing_and_doubles_only_what_ran(late, broker, conf, app, worker, tmp_path):
    """Two workers killed at random: each task runs, none early, and only those that a killed
    worker was running run twice."""
    conf.update(chaos_conf(broker, tmp_path))

    def start(name):
        env = {JOURNAL_VARIABLE: str(tmp_path / "journal")}
        return worker(name=name, concurrency=2, ready=False, env=env)

    storm = Storm(app, start, tmp_path, late=late, seed=7)
    books = storm.run(20)
    print(books)
    assert books.published > 50
    assert books.kills["SIGKILL"] >= 3
    # Redis gives a message away before kombu writes down who has it.
    assert len(books.unread) <= (books.kills.total() if broker.kind == "redis" else 0)
    assert books.lost == books.early_s == books.unexplained == []
