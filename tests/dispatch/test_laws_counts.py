"""Laws of what is counted: remaining work after shards move, evidence, what is not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    DropShard,
    Instruction,
    RoundAdded,
    TrialHeld,
    TrialRests,
    UnitDone,
    UnitReady,
    UnitStarted,
    WorkerAdded,
)
from dagsel.dispatch.remaining_work import FEW, SHIFT, RemainingWork
from dagsel.dispatch.suspicion import Seen, Suspect
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.unit_times import COST_VARIANCE, EVALUATION_RATIO, UnitTimes
from dagsel.dispatch.units import Begun, Chain, Round, Unit
from dagsel.simulation.virtual_cluster import VirtualCluster

BUSY = settings(deadline=None)


def test_what_waits_for_a_worker_is_counted_anew_when_it_drops_a_shard():
    n_drops = 0
    for every_s in (2.3, 3.3, 4.3, 5.3, 6.3, 7.3):
        dispatcher = Dispatcher(DispatchConfig(n_shards=8))

        def check(out: list[Instruction], dispatcher: Dispatcher = dispatcher) -> None:
            nonlocal n_drops
            kinds = {type(instruction) for instruction in out}
            if DropShard in kinds and Bind not in kinds:
                n_drops += 1
                counted = dict(dispatcher.list_scheduler.load)
                dispatcher.state.work_left.recount(dispatcher.trials, dispatcher.state.now)
                assert counted == pytest.approx(dispatcher.list_scheduler.load)

        cluster = VirtualCluster(dispatcher, lambda u, w, s: 2.0, load_seconds=0.7, watch=check)
        cluster.add_workers({"0": 1.0})
        for i in range(1, 6):
            cluster.at(every_s * i, WorkerAdded(str(i), frozenset()))
        chains = tuple(Chain(trial, range(1, 3), 8, evaluate=False) for trial in range(4))
        cluster.add_round(Round(0, chains))
        cluster.run()
    assert n_drops > 5


def test_trials_that_are_paused_are_not_looked_at_when_work_is_counted(monkeypatch):
    looked_at: list[int] = []
    recount = RemainingWork.recount

    def counts(self: RemainingWork, trials: Mapping[int, Trial], now_s: float) -> None:
        looked_at.append(len(trials))
        recount(self, trials, now_s)

    monkeypatch.setattr(RemainingWork, "recount", counts)
    dispatcher = Dispatcher(DispatchConfig(n_shards=2))
    cluster = VirtualCluster(dispatcher, lambda u, w, s: 2.0)
    cluster.add_workers({"a": 1.0, "b": 1.0})
    for number in range(50):  # each trains an epoch, and stays
        chains = tuple(Chain(trial, range(1, 2), 2) for trial in (2 * number, 2 * number + 1))
        cluster.add_round(Round(number, chains))
        cluster.run()
    assert len(dispatcher.trials) == 100
    assert len(looked_at) >= 50
    assert max(looked_at) <= 4  # those of a round, and those that have just ended theirs


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
    rests = {i for i in out if isinstance(i, TrialRests)}
    assert rests == {TrialRests(trial, 0) for trial in {0, 1, 2} - running}


@dataclass
class Left:
    """What is left, shard by shard and trial by trial, as the definitions say."""

    rem: dict[int, float]
    demand: dict[int, float]
    load: dict[str, float]
    target: float

    @staticmethod
    def of(dispatcher: Dispatcher) -> Left:
        times, hosts = dispatcher.times, dispatcher.workers
        shards = range(dispatcher.config.n_shards)
        holders = {s: [worker for worker in hosts if hosts[worker].holds(s)] for s in shards}
        is_replicated = any(len(there) > 1 for there in holders.values())
        rem, demand = dict.fromkeys(dispatcher.trials, 0.0), dict.fromkeys(shards, 0.0)
        for number, trial in dispatcher.trials.items():
            cost = times.cost(number)
            for which, epoch in trial.epochs.items():
                runs = trial.active is not None and trial.active.epoch == which
                for shard in shards:
                    if epoch.left >> shard & 1 and not (runs and trial.visiting >> shard & 1):
                        paces = [times.pace[worker] for worker in holders[shard] or hosts]
                        rem[number] += cost * times.unit_s * fmean(paces or [1.0])
                        demand[shard] += cost
                    if epoch.unscored >> shard & 1:
                        demand[shard] += times.ratio * cost
        load = {
            worker: sum(
                times.unit_s
                * times.pace[worker]
                * demand[shard]
                / (len(holders[shard]) if is_replicated else 1)
                for shard in shards
                if worker in holders[shard]
            )
            for worker in hosts
        }
        now, free_at = dispatcher.state.now, dispatcher.list_scheduler.free_at
        ends = [max(now, free_at[worker]) + load[worker] for worker in load]
        return Left(rem, demand, load, max(now, *(now + left for left in rem.values()), *ends))


def check_counted(dispatcher: Dispatcher) -> None:
    """What the list scheduler has counted is what the definitions say."""
    left, counted = Left.of(dispatcher), dispatcher.list_scheduler
    assert counted.rem == pytest.approx(left.rem)
    assert counted.demand == pytest.approx(left.demand)
    assert counted.load == pytest.approx(left.load)
    assert counted.target == pytest.approx(left.target)


shard_sets = st.frozensets(st.integers(0, 2))


@BUSY
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 2.0]),  # what a unit costs
            st.integers(1, 2),  # epochs
            st.permutations(range(3)).flatmap(lambda p: st.integers(0, 3).map(lambda n: p[:n])),
            shard_sets,  # that are scored
            st.booleans(),  # whether it is evaluated
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.tuples(shard_sets, st.sampled_from([0.5, 1.0])), max_size=3),
    st.integers(0, 3),
)
def test_what_is_left_is_the_sum_over_trials_epochs_and_shards(
    trials: list[tuple[float, int, list[int], frozenset[int], bool]],
    workers: list[tuple[frozenset[int], float]],
    n_ready: int,
):
    dispatcher = Dispatcher(DispatchConfig(n_shards=3, rebalance=False))
    chains, ready = [], []
    for number, (cost, n_epochs, visits, scored, evaluate) in enumerate(trials):
        dispatcher.times.add_trial(number, cost)
        begun = (Begun(tuple(visits), scored),)
        chain = Chain(number, range(1, 1 + n_epochs), 3, evaluate=evaluate, begun=begun)
        chains.append(chain)
        ready += [UnitReady(unit) for unit in list(chain.units)[:1]]
    for number, (held, speed) in enumerate(workers):
        dispatcher.handle(WorkerAdded(str(number), held, speed), now_s=0.0)
    dispatcher.handle(RoundAdded(Round(0, tuple(chains))), *ready[:n_ready], now_s=2.0)
    dispatcher.state.work_left.recount(dispatcher.trials, dispatcher.state.now)
    check_counted(dispatcher)


@BUSY
@given(
    st.lists(st.tuples(shard_sets, st.sampled_from([0.5, 1.0])), max_size=3),
    st.lists(st.tuples(st.integers(1, 3), shard_sets), min_size=1, max_size=6),
)
@example([(frozenset({0}), 1.0), (frozenset({1, 2}), 1.0)], [(1, frozenset({1, 2}))] * 60)
def test_chains_that_are_added_one_by_one_are_counted_as_if_all_were_counted_anew(
    workers: list[tuple[frozenset[int], float]], added: list[tuple[int, frozenset[int]]]
):
    """One in sixteen trials has to get a chain until all are counted anew."""
    n_trials = FEW * len(added)
    dispatcher = Dispatcher(DispatchConfig(n_shards=3, rebalance=False))
    for number, (held, speed) in enumerate(workers):
        dispatcher.handle(WorkerAdded(str(number), held, speed), now_s=0.0)
    # Of each trial one shard is left, so that a worker with others soon has more to do.
    visits = [(1, 2), (0, 2)]
    there = tuple(
        Chain(number, range(1, 2), 3, evaluate=False, begun=(Begun(visits[number % 2]),))
        for number in range(n_trials)
    )
    dispatcher.handle(RoundAdded(Round(0, there)), now_s=1.0)
    for number, (n_epochs, scored) in enumerate(added):
        begun = (Begun((), scored),)
        chain = Chain(n_trials + number, range(1, 1 + n_epochs), 3, begun=begun)
        dispatcher.handle(RoundAdded(Round(1 + number, (chain,))), now_s=2.0)
        dispatcher.check()
    check_counted(dispatcher)


@BUSY
@given(
    st.lists(st.integers(1, 2), min_size=1, max_size=4),
    st.integers(1, 3),
    st.lists(st.integers(0, 2), max_size=20),
    st.booleans(),
)
def test_units_that_start_and_end_leave_what_a_new_count_would_find(
    n_epochs: list[int], n_workers: int, ends: list[int], is_replicated: bool
):
    dispatcher = Dispatcher(DispatchConfig(n_shards=3, rebalance=False))
    scheduler = dispatcher.list_scheduler
    chains = [
        Chain(number, range(1, 1 + n), 3, evaluate=False) for number, n in enumerate(n_epochs)
    ]
    ready = [UnitReady(Unit("train", chain.trial, 1, 0)) for chain in chains]
    held = {str(i): frozenset(range(3) if is_replicated else {i}) for i in range(n_workers)}
    workers = [WorkerAdded(worker, shards) for worker, shards in held.items()]
    out = dispatcher.handle(*workers, RoundAdded(Round(0, tuple(chains))), *ready, now_s=0.0)
    runs = [i for i in out if isinstance(i, Bind)]
    for which in ends:
        left = Left.of(dispatcher)
        assert scheduler.rem == pytest.approx(left.rem)
        assert scheduler.demand == pytest.approx(left.demand)
        if not is_replicated:
            assert scheduler.load == pytest.approx(left.load)
        if which < len(runs):
            bound = runs.pop(which)
            unit, chain = bound.unit, chains[bound.unit.trial]
            units = list(chain.units)
            after = units[units.index(unit) + 1 :][:1]
            done = UnitDone(unit, 0.0, bound.shard)  # a time of 0 teaches nothing
            out = dispatcher.handle(done, *map(UnitReady, after), now_s=dispatcher.state.now)
            runs += [i for i in out if isinstance(i, Bind)]


@BUSY
@given(st.lists(st.sampled_from([0.3, 1.0, 1.02, 3.0, 9.0]), min_size=1, max_size=12))
def test_work_is_counted_anew_when_the_worker_proves_faster_or_slower(took_s: list[float]):
    dispatcher = Dispatcher(DispatchConfig(n_shards=3, rebalance=False))
    chain = Chain(0, range(1, 5), 3, evaluate=False)
    workers = WorkerAdded("a", frozenset(range(3))), WorkerAdded("b", frozenset(), max_shards=0)
    dispatcher.handle(*workers, RoundAdded(Round(0, (chain,))), now_s=0.0)
    times, counted_s = dispatcher.times, dispatcher.times.unit_s
    for now_s, (unit, seconds) in enumerate(zip(chain.units, took_s, strict=False)):
        (bound,) = dispatcher.handle(UnitReady(unit), now_s=now_s)
        assert isinstance(bound, Bind)
        dispatcher.handle(UnitDone(unit, seconds, bound.shard), now_s=now_s)
        unit_s = times.unit_s * times.pace["a"]
        if abs(unit_s / counted_s - 1.0) > SHIFT:
            counted_s = unit_s
            assert dispatcher.list_scheduler.load == pytest.approx(Left.of(dispatcher).load)
            speed = dispatcher.list_scheduler.speed
            assert speed["a"] / speed["b"] == pytest.approx(times.pace["b"] / times.pace["a"])


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
    times.observe(0, "a", [3.0])
    assert times.optimism(0) == 1


@BUSY
@given(st.floats(0.01, 100.0), st.floats(0.01, 10.0), st.integers(1, 8))
def test_how_long_scoring_takes_comes_nearer_to_what_was_seen_and_never_beyond(
    unit_s: float, ratio: float, n: int
):
    times = UnitTimes()
    times.add_trial(0)
    times.add_worker("a", 1.0)
    times.observe_evaluation(0, "a", 5.0)  # beside what is not known
    assert times.ratio == pytest.approx(EVALUATION_RATIO)
    for _ in range(30):
        times.observe(0, "a", [unit_s])
    far, seconds = abs(log(times.ratio / ratio)), ratio * times.seconds(0, "a")
    weight, surprise = 1.0, times.noise**2 + COST_VARIANCE / 4
    for nth in range(n):
        before = times.ratio
        times.observe_evaluation(0, "a", seconds)
        low, high = sorted((before, ratio))
        assert low * (1 - 1e-9) <= times.ratio <= high * (1 + 1e-9)
        if abs(log(before / ratio)) > 1e-3:  # each one weighs less than the one before
            weight_before, weight = weight, 1.0 - log(times.ratio / ratio) / log(before / ratio)
            assert weight <= weight_before
            variance = max(0.01, surprise / (surprise + nth))  # it never becomes certain
            assert weight == pytest.approx(variance / (variance + surprise), rel=1e-4)
    assert abs(log(times.ratio / ratio)) <= far / (1 + n) + 1e-9


@BUSY
@given(st.permutations(range(3)), st.sets(st.integers(1, 2), min_size=1))
def test_of_results_that_were_lost_the_next_one_is_made_again_with_its_own_shard(
    visits: list[int], lost: set[int]
):
    trial = Trial(0)
    trial.add(Chain(0, range(1, 3), 3, evaluate=False))
    units = [Unit("train", 0, 1, position) for position in range(3)]
    for unit, shard in zip(units, visits, strict=True):
        assert trial.record(unit, shard)
    trial.ready = [units[position] for position in sorted(lost)]
    assert trial.need_after(units[0], visits[0]) == 1 << visits[min(lost)]
    trial.ready = []
    assert trial.need_after(units[2], visits[2]) == 0b111  # of the next epoch


@pytest.mark.parametrize(("late_s", "is_same"), [(0.0, True), (0.5, True), (1.5, False)])
def test_workers_of_a_gang_that_are_lost_soon_after_another_are_one_death(
    late_s: float, is_same: bool
):
    suspect = Suspect(gang={"b"}, died_s=10.0)
    assert suspect.was_in_gang("b", 10.0 + late_s) is is_same
    assert not suspect.was_in_gang("c", 10.0 + late_s)
    suspect.broke = Seen()  # no loss is known yet: it may be heard of whenever
    assert suspect.was_in_gang("b", 1e6)
