"""The thread that talks to the store: retries, complaints, errors, and its end."""

from __future__ import annotations

import threading

import pytest

from celery_wheel.clock import FakeClock
from celery_wheel.errors import ConfigError, StoreError, StoreFull, StoreUnavailable
from celery_wheel.stores.memory import MemoryStore
from celery_wheel.worker.store_thread import LOG_EVERY_S, RETRY_MOST_S, StoreThread


class Shaky(MemoryStore):
    """Is away as often as told; moves the clock by as much as a try takes."""

    def __init__(self, clock):
        super().__init__(clock)
        self.clock = clock
        self.away = 0
        self.seconds_per_try = 0.0
        self.tries = 0
        self.open_error = None
        self.closed = threading.Event()

    def open(self):
        if self.open_error is not None:
            raise self.open_error

    def count(self):
        self.tries += 1
        self.clock.advance(self.seconds_per_try)
        if self.away:
            self.away -= 1
            raise StoreUnavailable("nobody answers")
        return super().count()

    def close(self):
        self.closed.set()


@pytest.fixture
def store():
    """A store that can be away."""
    return Shaky(FakeClock())


@pytest.fixture
def thread(store):
    """Its thread, and the semaphore that tells of answers."""
    made = StoreThread(store, store.clock)
    made.answered = threading.Semaphore(0)
    made.wake = made.answered.release
    yield made
    if made._thread.is_alive():
        store.away = 0
        made.stop(10)


def ask(thread, count=1):
    """Submit counts and run their answers here."""
    answers = []
    for _ in range(count):
        thread.submit("count", lambda store: store.count(), answers.append)
    for _ in range(count):
        assert thread.answered.acquire(timeout=10)
    thread.drain()
    return answers


def test_calls_run_in_order_and_answers_wait_for_the_drain(thread):
    """A callback never runs in the store's thread, and as many as asked for run at once."""
    thread.start()
    seen, ran_in = [], set()

    def note(answer):
        seen.append(answer)
        ran_in.add(threading.current_thread())

    for number in range(5):
        thread.submit("name", lambda _store, number=number: number, note)
    for _ in range(5):
        assert thread.answered.acquire(timeout=10)
    assert seen == []
    assert thread.drain(3)
    assert seen == [0, 1, 2]
    assert not thread.drain(3)
    assert seen == [0, 1, 2, 3, 4]
    assert ran_in == {threading.current_thread()}


def test_a_store_that_is_away_is_asked_until_it_answers(thread, store, caplog):
    """One complaint, one all-clear, and the caller of what was repeated is told to look."""
    recovered = []
    thread.on_recovered = lambda: recovered.append(thread.healthy)
    thread.start()
    store.away = 3
    assert ask(thread) == [MemoryStore().count()]
    assert store.tries == 4
    assert recovered == [True]
    assert caplog.text.count("The store does not answer") == 1
    assert caplog.text.count("The store answers again") == 1
    ask(thread)
    assert recovered == [True]


def test_one_complaint_per_interval(thread, store, caplog):
    """However often it is tried, the log gets one line in ten seconds."""
    thread.start()
    store.away, store.seconds_per_try = 5, LOG_EVERY_S / 2
    ask(thread)
    assert caplog.text.count("The store does not answer") == 3


def test_what_a_full_store_refuses_holds_nothing_up(thread, store, caplog):
    """Calls that came later run first; the one that was refused runs when there is room."""
    thread.start()
    full, answers = [True], []

    def put(_store):
        if full.pop():
            raise StoreFull("no room")
        return "put"

    full.insert(0, False)
    thread.submit("put", put, answers.append)
    for _ in range(2):
        assert ask(thread) == [MemoryStore().count()]
    assert answers == []
    store.clock.advance(RETRY_MOST_S)
    thread.submit("count", lambda one: one.count())
    assert thread.answered.acquire(timeout=10)
    thread.drain()
    assert answers == ["put"]
    assert caplog.text.count("The store is full") == 1
    assert thread.healthy


def test_an_error_that_is_no_outage_goes_to_its_caller(thread, caplog):
    """It is logged, nothing is tried again, and later calls run."""
    thread.start()
    failures = []

    def refuse(_store):
        raise StoreError("never")

    thread.submit("put", refuse, None, failures.append)
    thread.submit("put", refuse)
    assert thread.answered.acquire(timeout=10)
    assert ask(thread) == [MemoryStore().count()]
    assert [str(failure) for failure in failures] == ["never"]
    assert caplog.text.count("The store's put failed") == 2
    assert thread.healthy


@pytest.mark.parametrize("error", [ConfigError("wrong"), StoreError("newer")])
def test_a_store_that_cant_be_opened(thread, store, error):
    """What an operator has to put right is raised where the worker starts."""
    store.open_error = error
    with pytest.raises(type(error), match=str(error)):
        thread.start()


def test_stop_runs_what_was_submitted(thread, store):
    """Nothing that was submitted is dropped, and the store is closed by its own thread."""
    thread.start()
    ran = []
    for number in range(100):
        thread.submit("name", lambda _store, number=number: ran.append(number))
    assert thread.stop(10)
    assert ran == list(range(100))
    assert store.closed.is_set()


def test_stop_gives_up_a_dead_store(thread, store):
    """A store that never answers does not keep the worker: the thread ends, and says so."""
    thread.start()
    store.away = 10**9
    thread.submit("count", lambda one: one.count())
    assert not thread.stop(0.05)
    thread._thread.join(10)
    assert not thread._thread.is_alive()
