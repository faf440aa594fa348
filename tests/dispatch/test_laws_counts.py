"""Laws of what is counted: remaining work after shards move, evidence, what is not known yet."""

from __future__ import annotations

from math import exp, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    DropShard,
    Instruction,
    RoundAdded,
    TrialHeld,
    TrialRests,
    UnitReady,
    UnitStarted,
    WorkerAdded,
)
from dagsel.dispatch.suspicion import Seen, Suspect
from dagsel.dispatch.unit_times import COST_VARIANCE, UnitTimes
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.simulation.virtual_cluster import VirtualCluster

BUSY = settings(deadline=None)


def test_what_waits_for_a_worker_is_counted_anew_when_it_drops_a_shard():
    dispatcher = Dispatcher(DispatchConfig(n_shards=8))
    n_drops = 0

    def check(out: list[Instruction]) -> None:
        nonlocal n_drops
        if any(isinstance(i, DropShard) for i in out) and not any(isinstance(i, Bind) for i in out):
            n_drops += 1
            counted = dict(dispatcher.list_scheduler.load)
            dispatcher.state.work_left.recount(dispatcher.trials, dispatcher.state.now)
            assert counted == pytest.approx(dispatcher.list_scheduler.load)

    cluster = VirtualCluster(dispatcher, lambda u, w, s: 2.0, load_seconds=0.7, watch=check)
    cluster.add_workers({"0": 1.0})
    for i in range(1, 6):
        cluster.at(5.3 * i, WorkerAdded(str(i), frozenset()))
    chains = tuple(Chain(trial, range(1, 3), 8, evaluate=False) for trial in range(4))
    cluster.add_round(Round(0, chains))
    cluster.run()
    assert n_drops > 0


@BUSY
@given(st.permutations(range(3)), st.integers(0, 2))
def test_a_trial_at_rest_is_reported_though_others_still_run(order: list[int], n_running: int):
    dispatcher = Dispatcher(DispatchConfig(n_shards=1, replicas=2))
    workers = [WorkerAdded(str(i), frozenset({0})) for i in range(n_running)]
    chains = tuple(Chain(trial, range(1, 2), 1, evaluate=False) for trial in range(3))
    out = dispatcher.handle(
        *workers,
        RoundAdded(Round(0, chains)),
        *(UnitReady(Unit("train", trial, 1, 0)) for trial in range(3)),
        now_s=0.0,
    )
    running = {i.unit.trial for i in out if isinstance(i, Bind)}
    assert len(running) == n_running
    started = [UnitStarted(i.unit, i.worker) for i in out if isinstance(i, Bind)]
    dispatcher.handle(*started, now_s=1.0)
    out = dispatcher.handle(*(TrialHeld(trial) for trial in order), now_s=2.0)
    rests = {i.trial for i in out if isinstance(i, TrialRests)}
    assert rests == {0, 1, 2} - running


seconds = st.integers(0, 100)


@BUSY
@given(
    st.lists(st.tuples(seconds, seconds, *2 * (st.integers(0, 3),)), min_size=2, max_size=5),
    st.tuples(seconds, seconds, *2 * (st.integers(0, 9),)),
    st.integers(1, 4),
)
def test_what_was_before_a_death_is_no_evidence(
    steps: list[tuple[int, int, int, int]], before: tuple[int, int, int, int], nth: int
):
    def found(own_s: float, other_s: float, n_own: int, n_other: int) -> object:
        moments = []
        for own, other, ours, others in steps:
            own_s, other_s, n_own, n_other = (
                own_s + own,
                other_s + other,
                n_own + ours,
                n_other + others,
            )
            moments.append(Seen(own_s + other_s, n_own + n_other, own_s, n_own))
        return Suspect(deaths=moments[:-1]).evidence(min(nth, len(moments) - 1), moments[-1])

    assert found(0.0, 0.0, 0, 0) == found(*before)
    since = steps[-min(nth, len(steps) - 1) :]
    evidence = Suspect(deaths=[Seen()]).evidence(1, Seen(7.0, 3, 2.0, 1))
    assert (evidence.own_s, evidence.other_s, evidence.n_other) == (2.0, 5.0, 2)
    assert found(0.0, 0.0, 0, 0).own_s == sum(own for own, *_ in since)  # type: ignore[attr-defined]


def test_a_trial_of_which_nothing_is_known_may_cost_two_deviations_more():
    times = UnitTimes()
    times.add_trial(0)
    times.add_trial(1, cost=0.5)
    times.add_worker("a", 1.0)
    assert times.optimism(0) == pytest.approx(exp(2 * sqrt(COST_VARIANCE)), rel=0.01)
    assert times.optimism(1) == 1
    times.observe(0, "a", 3.0)
    assert times.optimism(0) == 1


@pytest.mark.parametrize(("late_s", "is_same"), [(0.0, True), (0.5, True), (1.5, False)])
def test_workers_of_a_gang_that_are_lost_soon_after_another_are_one_death(
    late_s: float, is_same: bool
):
    suspect = Suspect(gang={"b"}, died_s=10.0)
    assert suspect.was_in_gang("b", 10.0 + late_s) is is_same
    assert not suspect.was_in_gang("c", 10.0 + late_s)
    suspect.broke = Seen()  # no loss is known yet: it may be heard of whenever
    assert suspect.was_in_gang("b", 1e6)
