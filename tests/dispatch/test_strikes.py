"""Whom lost workers are held against: units that kill them, and no others.

A storm kills workers whatever they run; a poison unit kills its own. Both in virtual time, with the
dispatcher as it is.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    FailTrial,
    GangBroke,
    Instruction,
    RoundAdded,
    TimerFired,
    TrialAllowed,
    TrialStopped,
    UnitDone,
    UnitReady,
    UnitReturned,
    UnitStarted,
    UnitTrains,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.suspicion import Evidence, binomial_tail
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.simulation.virtual_cluster import VirtualCluster

N_STORMS = int(os.environ.get("ATTACK_CASES", "60"))
UNIT = Unit("train", 0, 1, 0)


# ---- the test


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 10))
def test_the_chance_is_that_of_a_binomial_tail(n: int, m: int, tenths: int) -> None:
    share = Fraction(tenths, 10)
    exact = sum(
        math.comb(n + m, k) * share**k * (1 - share) ** (n + m - k) for k in range(n, n + m + 1)
    )
    assert binomial_tail(n, n + m, tenths / 10) == pytest.approx(float(exact), rel=1e-6, abs=1e-11)


@given(st.integers(1, 40), st.integers(0, 400), st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_more_deaths_elsewhere_speak_for_a_unit_and_more_of_its_own_against_it(
    n: int, m: int, own_s: float, other_s: float
) -> None:
    chance, rounding = Evidence(n, own_s, m, other_s).chance, 1e-9
    assert 0.0 <= chance <= 1.0
    assert Evidence(n, own_s, m + 1, other_s).chance >= chance - rounding
    assert Evidence(n + 1, own_s, m, other_s).chance <= chance + rounding
    assert Evidence(n, own_s, m, 2 * other_s).chance <= chance + rounding


def test_a_unit_that_runs_all_the_time_is_blamed_for_nothing() -> None:
    assert Evidence(100, own_s=10.0, n_other=0, other_s=0.0).chance == 1.0


# ---- events by hand


class Hand:
    """A dispatcher with one shard, whose worker is lost and comes again."""

    def __init__(self, **config: object) -> None:
        self.dispatcher = Dispatcher(DispatchConfig(n_shards=1, **config))  # type: ignore[arg-type]
        self.now = 0.0
        self.names = (f"w{k}" for k in itertools.count())
        self(RoundAdded(Round(0, (Chain(0, range(1, 2), 1),))), UnitReady(UNIT))

    def __call__(self, *events: object, after: float = 0.0) -> list[object]:
        self.now += after
        out: list[object] = list(self.dispatcher.handle(*events, now_s=self.now))  # type: ignore[arg-type]
        self.dispatcher.check()
        return out

    def bind(self) -> Bind:
        """Let a worker come, and time pass until the unit is bound to it."""
        out = self(WorkerAdded(next(self.names), frozenset({0})))
        while not any(isinstance(i, Bind | FailTrial) for i in out):
            wake_at = self.dispatcher.wake_at
            assert wake_at is not None, "the unit is never bound again"
            out = self(TimerFired(), after=wake_at - self.now)
        found = next(i for i in out if isinstance(i, Bind | FailTrial))
        if isinstance(found, FailTrial):
            raise Failed(found.reason)
        return found

    def lose(self, worker: str, after: float = 1.0) -> None:
        self(WorkerRemoved(worker), UnitReady(UNIT), after=after)


class Failed(Exception):
    """The trial has failed."""


def deaths_until_failure(begins: Callable[[Hand, Bind], object], **config: object) -> int:
    hand = Hand(**config)
    for count in range(1000):
        try:
            bind = hand.bind()
        except Failed:
            return count
        begins(hand, bind)
        hand.lose(bind.worker)
    return 1000


def test_a_unit_that_kills_its_worker_as_it_trains_fails_within_six_deaths() -> None:
    n = deaths_until_failure(
        lambda h, b: h(UnitStarted(UNIT, b.worker), UnitTrains(UNIT, b.worker))
    )
    assert 3 <= n <= 6


def test_workers_that_are_lost_before_the_unit_trains_are_not_held_against_it() -> None:
    hand = Hand()
    for _ in range(10):
        bind = hand.bind()
        hand(UnitStarted(UNIT, bind.worker))
        hand.lose(bind.worker)
    assert hand.bind().unit == UNIT  # else its trial has failed


def test_but_if_that_never_ends_and_happens_to_no_other_worker_it_fails() -> None:
    assert deaths_until_failure(lambda h, b: None) == 12


def test_a_unit_is_a_suspect_from_its_first_death_on() -> None:
    hand = Hand()
    first = hand.bind()
    assert not first.is_suspect
    hand.lose(first.worker)
    assert hand.bind().is_suspect


def test_a_worker_that_was_asked_to_go_or_was_idle_is_held_against_nobody() -> None:
    hand = Hand()
    for _ in range(10):
        bind = hand.bind()
        hand(UnitTrains(UNIT, bind.worker))
        hand(WorkerRemoved(bind.worker, expected=True), UnitReady(UNIT), after=1.0)
    for _ in range(10):
        bind = hand.bind()
        hand(UnitTrains(UNIT, bind.worker))
        hand(WorkerAdded("idle", frozenset({0})))
        hand(WorkerRemoved("idle"), UnitReturned(UNIT), after=1.0)
        hand(WorkerRemoved(bind.worker), UnitReady(UNIT))
    assert hand.bind().unit == UNIT


def test_progress_clears_a_unit() -> None:
    hand = Hand()
    for _ in range(20):
        bind = hand.bind()
        hand(UnitTrains(UNIT, bind.worker))
        hand(UnitReturned(UNIT, 0, 1.0), after=1.0)
        (again,) = [i for i in hand(UnitReady(UNIT)) if isinstance(i, Bind)]
        hand(UnitTrains(UNIT, again.worker))
        hand.lose(again.worker)
    assert hand.bind().unit == UNIT


def gang(hand: Hand) -> Bind:
    hand(TrialAllowed(0, 2))
    hand(WorkerAdded(next(hand.names), frozenset({0})))
    bind = hand.bind()
    assert bind.members
    hand(UnitTrains(UNIT, bind.worker))
    return bind


@pytest.mark.parametrize("heard_first", ["loss", "break"])
def test_a_gang_that_loses_workers_to_a_storm_is_no_broken_gang(heard_first: str) -> None:
    hand = Hand()
    for _ in range(10):
        bind = gang(hand)
        lost, broke = WorkerRemoved(bind.members[0]), GangBroke(UNIT, "it lost one")
        both = (lost, broke) if heard_first == "loss" else (broke, lost)
        hand(WorkerAdded("idle", frozenset({0})), after=1.0)
        for event in both:
            assert not [i for i in hand(event) if isinstance(i, FailTrial)]
        for worker in ("idle", bind.worker):
            hand(WorkerRemoved(worker), after=2.0)
        hand(UnitReady(UNIT))


def test_a_gang_that_breaks_without_a_loss_fails_its_trial_at_the_third_time() -> None:
    hand = Hand()
    gang(hand)
    for count in range(1, 4):
        out = hand(GangBroke(UNIT, "no way there"), UnitReturned(UNIT), UnitReady(UNIT))
        failed = [i for i in out if isinstance(i, FailTrial)]
        assert bool(failed) is (count == 3)
    assert "3 strikes" in failed[0].reason


def test_a_gang_that_breaks_before_all_have_come_is_not_suspected() -> None:
    hand = Hand()
    hand(TrialAllowed(0, 2), WorkerAdded(next(hand.names), frozenset({0})))
    bind = hand.bind()
    out = hand(GangBroke(UNIT, "one cannot come"), UnitReturned(UNIT), UnitReady(UNIT))
    (again,) = [i for i in out if isinstance(i, Bind)]
    assert bind.members
    assert again.members
    assert not again.is_suspect


def break_gang(hand: Hand) -> None:
    """Let a gang come, break without a loss and go."""
    bind = gang(hand)
    broke = hand(GangBroke(UNIT, "no way there"), UnitReturned(UNIT))
    assert not [i for i in broke if isinstance(i, FailTrial)]
    leave(hand, bind)


def leave(hand: Hand, bind: Bind) -> None:
    for worker in (bind.worker, *bind.members):
        hand(WorkerRemoved(worker, expected=True))
    hand(UnitReady(UNIT))


def test_strikes_from_before_a_unit_got_on_do_not_count() -> None:
    hand = Hand()
    for _ in range(5):
        break_gang(hand)
        break_gang(hand)  # the third would be one too many
        bind = gang(hand)
        hand(UnitReturned(UNIT, 0, 1.0), after=1.0)
        leave(hand, bind)


@pytest.mark.parametrize("end", [UnitDone(UNIT, 1.0, 0), TrialStopped(0)])
def test_nothing_is_held_against_a_unit_that_is_over(end: UnitDone | TrialStopped) -> None:
    hand = Hand()
    break_gang(hand)
    state = hand.dispatcher.state
    assert state.strikes.keys() == state.suspects.keys() == {UNIT}
    gang(hand)
    hand(end, after=1.0)
    assert not state.strikes
    assert not state.suspects


# ---- storms


def storm(
    seed: int, n_workers: int, *, poisons: float | None = None, every_s: float = 0.5
) -> tuple[dict[int, str], int, VirtualCluster]:
    """Kill a worker every so often for a minute; give who failed, and the deaths of the poison.

    If `poisons`, trial 0's first unit kills its worker after so many seconds.
    """
    chance = random.Random(seed)
    n_deaths, bound = 0, dict[str, Unit]()

    def seconds(unit: Unit, worker: str, shard: int) -> float:
        return 1e9 if unit == UNIT and poisons is not None else chance.uniform(0.2, 2.0)

    def watch(instructions: list[Instruction]) -> None:
        nonlocal n_deaths
        dispatcher.check()
        for i in instructions:
            if isinstance(i, Bind):
                bound[i.worker] = i.unit
                if poisons is not None and i.unit == UNIT:
                    n_deaths += 1
                    at_s = cluster.now_s + poisons
                    cluster.at(at_s, WorkerRemoved(i.worker))
                    come(at_s)

    def come(now_s: float) -> str:
        name, there_s = f"w{next(names)}", now_s + chance.uniform(1.0, 5.0)
        cluster.at(there_s, WorkerAdded(name))
        alive.append((there_s, name))
        return name

    dispatcher = Dispatcher(DispatchConfig(n_shards=2))
    names, alive = itertools.count(), list[tuple[float, str]]()
    cluster = VirtualCluster(dispatcher, seconds, load_seconds=0.1, watch=watch)
    for _ in range(n_workers):
        come(0.0)
    chains = tuple(Chain(trial, range(1, 4), 2) for trial in range(4))
    cluster.add_round(Round(0, chains), 0.5)
    now_s = 0.0
    while now_s < 60.0 and every_s < math.inf:
        now_s += every_s
        while cluster.step(now_s):
            pass
        there = [pair for pair in alive if pair[0] <= now_s and pair[1] in cluster.workers]
        if there:
            pair = chance.choice(there)
            alive.remove(pair)
            cluster.at(now_s, WorkerRemoved(pair[1]))
            come(now_s)
    while cluster.step(3600.0):
        pass
    return cluster.outcome.failed, n_deaths, cluster


@pytest.mark.parametrize("n_workers", [1, 2, 4])
@pytest.mark.parametrize("every_s", [0.5, 3.0])
def test_a_storm_fails_no_innocent_trial(n_workers: int, every_s: float) -> None:
    for seed in range(N_STORMS):
        failed, _, cluster = storm(seed, n_workers, every_s=every_s)
        assert not failed, (seed, failed)
        assert len(cluster.outcome.timeline) == 4 * 3 * 2 * 2, seed


@pytest.mark.parametrize("n_workers", [1, 2, 4])
@pytest.mark.parametrize("poisons", [0.01, 1.0, 30.0])
def test_a_poison_unit_fails_within_six_deaths(n_workers: int, poisons: float) -> None:
    for seed in range(5):
        failed, n_deaths, _ = storm(seed, n_workers, poisons=poisons, every_s=math.inf)
        assert failed.keys() == {0}, seed
        assert n_deaths <= 6, (seed, n_deaths)


@pytest.mark.parametrize("every_s", [0.5, 3.0])
def test_a_poison_unit_fails_in_a_storm_too_and_no_other(every_s: float) -> None:
    deaths = []
    for seed in range(20):
        failed, n_deaths, _ = storm(seed, 3, poisons=0.05, every_s=every_s)
        assert failed.keys() == {0}, seed
        deaths.append(n_deaths)
    assert max(deaths) <= 20, deaths
