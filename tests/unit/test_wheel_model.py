"""Both wheels against a sorted list, with random operations."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from celery_wheel.wheels import hashed, hierarchical
from celery_wheel.wheels.hashed import HashedWheel
from celery_wheel.wheels.hierarchical import PRESETS, HierarchicalWheel

SIZES = [(2,), (4,), (8,), (3, 5), (16, 2), *PRESETS.values()]

#: Distances from now: near ones, edges of wheels of many sizes, and years.
DISTANCES = st.one_of(
    st.integers(-5, 40),
    st.builds(
        lambda base, power, off: base**power + off,
        st.sampled_from([2, 4, 8, 60]),
        st.integers(1, 7),
        st.integers(-2, 2),
    ),
    st.integers(0, 3 * 10**11),
)


class WheelMachine(RuleBasedStateMachine):
    """A wheel and the list that it has to agree with."""

    wheel: Any

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[int, int, Any]] = []
        self.count = 0
        self.target = 0
        self.before = 0

    def start(self, wheel: Any, now: int) -> None:
        self.wheel = wheel
        self.target = self.before = now

    @rule(distance=DISTANCES, many=st.integers(1, 9))
    def schedule(self, distance: int, many: int) -> None:
        for _ in range(many):
            self._schedule(distance)

    @rule(distances=st.lists(st.integers(-1, 20), max_size=20))
    def schedule_near(self, distances: list[int]) -> None:
        for distance in distances:
            self._schedule(distance)

    @rule(distance=st.integers(0, 6), limit=st.sampled_from([2, 1000]))
    def advance_a_little(self, distance: int, limit: int) -> None:
        self.target += distance
        self._advance(limit)

    @rule(data=st.data())
    def detach(self, data: st.DataObject) -> None:
        if self.held:
            entry = data.draw(st.sampled_from(self.held))
            self.held.remove(entry)
            assert self.wheel.detach(entry[2])
            assert entry[2].detached
            assert entry[2].item is None
            assert not self.wheel.detach(entry[2])

    @rule(every=st.integers(1, 3))
    def detach_many(self, every: int) -> None:
        for entry in self.held[::every]:
            self.held.remove(entry)
            assert self.wheel.detach(entry[2])

    @rule(distance=DISTANCES, limit=st.integers(0, 12))
    def advance(self, distance: int, limit: int) -> None:
        self.target = max(self.target, self.target + distance)
        self._advance(limit)

    @rule(limit=st.integers(1, 12))
    def advance_to_next(self, limit: int) -> None:
        tick = self.wheel.next_expiry()
        if tick is not None:
            self.target = max(self.target, tick)
            self._advance(limit)

    @rule()
    def drain_what_is_due(self) -> None:
        self._advance(5)
        while self.wheel.behind:
            self._advance(5)
        assert self.wheel.now_tick == self.target
        tick = self.wheel.next_expiry()
        assert tick is None or tick > self.target

    def _schedule(self, distance: int) -> None:
        due = self.target + distance
        self.held.append((due, self.count, self.wheel.schedule(due, self.count)))
        self.count += 1

    def _advance(self, limit: int) -> None:
        expected = sorted(entry for entry in self.held if entry[0] <= self.target)
        out = self.wheel.advance(self.target, limit)
        assert len(out) <= limit
        taken = expected[: len(out)]
        assert out == [entry[1] for entry in taken]
        if not self.wheel.behind:
            assert len(out) == len(expected)
        for entry in taken:
            self.held.remove(entry)
            assert entry[2].detached

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "wheel"):
            return
        assert len(self.wheel) == len(self.held)
        assert {node.item for node in self.wheel} == {entry[1] for entry in self.held}
        assert sum(level.entries for level in self.wheel.occupancy()) == len(self.held)
        assert self.before <= self.wheel.now_tick <= self.target
        self.before = self.wheel.now_tick
        self.wheel.check()
        tick = self.wheel.next_expiry()
        assert (tick is None) == (not self.held)
        assert tick is None or tick <= min(self.held)[0]
        self.wheel.check()


class HierarchicalMachine(WheelMachine):
    @initialize(
        sizes=st.sampled_from(SIZES),
        now=st.one_of(st.integers(-300, 300), st.just(170_000_000_000)),
        ahead=st.integers(0, 70),
    )
    def make(self, sizes: tuple[int, ...], now: int, ahead: int) -> None:
        self.start(HierarchicalWheel(sizes=sizes, start_tick=now, demote_ahead=ahead), now)


class HashedMachine(WheelMachine):
    @initialize(
        size=st.sampled_from([1, 2, 4, 8, 512]),
        now=st.one_of(st.integers(-300, 300), st.just(170_000_000_000)),
    )
    def make(self, size: int, now: int) -> None:
        self.start(HashedWheel(size=size, start_tick=now), now)


SETTINGS = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchical, "PART_SIZE", 4)
    monkeypatch.setattr(hierarchical, "DEMOTE_LIMIT", 3)
    monkeypatch.setattr(hashed, "PART_SIZE", 4)
    monkeypatch.setattr(hashed, "SCAN_LIMIT", 7)


def run(machine: type[RuleBasedStateMachine]) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=SETTINGS)  # type: ignore[no-untyped-call]


def test_the_hierarchical_wheel_agrees_with_a_sorted_list() -> None:
    """Whatever is done to the wheel, it hands out what a sorted list would."""
    run(HierarchicalMachine)


def test_big_buckets_and_tiny_limits_agree_with_a_sorted_list(short_parts: None) -> None:
    """The same where every bucket counts as big and every call stops for its limit."""
    run(HierarchicalMachine)


def test_the_hashed_wheel_agrees_with_a_sorted_list() -> None:
    """Whatever is done to the hashed wheel, it hands out what a sorted list would."""
    run(HashedMachine)


def make_hashed(rng: random.Random, now: int) -> Any:
    return HashedWheel(size=rng.choice([1, 2, 4, 8, 64]), start_tick=now)


def make_hierarchical(rng: random.Random, now: int) -> Any:
    return HierarchicalWheel(
        sizes=rng.choice(SIZES), start_tick=now, demote_ahead=rng.choice([0, 1, 30])
    )


def walk(seed: int, make: Callable[[random.Random, int], Any]) -> None:
    """Fifty random steps among near ticks, where the interesting collisions are."""
    rng = random.Random(seed)
    machine = WheelMachine()
    now = rng.choice([0, -50, 170_000_000_000])
    machine.start(make(rng, now), now)
    reach = rng.choice([6, 20, 300])
    for _ in range(50):
        what = rng.random()
        if what < 0.5:
            machine._schedule(rng.randrange(-1, reach))
        elif what < 0.6 and machine.held:
            assert machine.wheel.detach(machine.held.pop(rng.randrange(len(machine.held)))[2])
        else:
            machine.target += rng.randrange(1 + reach // 3)
            machine._advance(rng.choice([1, 3, 1000]))
        machine.agree()
    machine._advance(1000)


def test_random_walks_over_the_hierarchical_wheel() -> None:
    """Many short walks among near ticks agree with the sorted list."""
    for seed in range(300):
        walk(seed, make_hierarchical)


def test_random_walks_with_big_buckets(short_parts: None) -> None:
    """The same where every bucket counts as big."""
    for seed in range(300, 700):
        walk(seed, make_hierarchical)


def test_random_walks_over_the_hashed_wheel() -> None:
    """Many short walks among near ticks agree with the sorted list."""
    for seed in range(300):
        walk(seed, make_hashed)


def test_random_walks_over_the_hashed_wheel_with_tiny_limits(short_parts: None) -> None:
    """The same where every visit stops for its limits."""
    for seed in range(300, 600):
        walk(seed, make_hashed)
