"""SEER keeps every law of a flow, and ends its stages as the paper's Algorithm 1 says."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dagsel
from dagsel.errors import SearchError, TooLittleTimeError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Finish,
    Pause,
    Paused,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows import HyperSched, Lookahead
from dagsel.flows.baselines import ElasticGrid, ElasticHyperband
from dagsel.flows.seer import SEER
from dagsel.planning.capacity import ClusterCapacity, Plan
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.testing import FlowSuite


class TestPaper(FlowSuite):
    def make_flow(self) -> SEER:
        return SEER(10, 60, reduction_factor=2, min_stage=1, mode="paper")


class TestFill(FlowSuite):
    def make_flow(self) -> SEER:
        return SEER(20, 80, reduction_factor=2, min_stage=2, max_epochs=4)


class TestMeasured(FlowSuite):
    def make_flow(self) -> SEER:
        return SEER(40, 80, reduction_factor=2)


class TestCompleteBeforeMeasured(FlowSuite):
    def make_flow(self) -> SEER:
        return SEER(60, 120, reduction_factor=2, max_epochs=1)


class TestWideTrials(FlowSuite):
    def make_flow(self) -> SEER:
        return SEER(
            20,
            160,
            reduction_factor=2,
            min_stage=4,
            min_workers_per_trial=2,
            max_workers_per_trial=4,
        )


@pytest.mark.parametrize(
    ("changed", "workers", "n_stages"),
    [
        ({}, (1, 2, 4), 6),
        ({"parallelism_factor": 3}, (1, 3, 9), 6),  # p_min·ν^k workers a trial
        ({"min_workers_per_trial": 2}, (2, 4, 8), 6),
        ({"max_workers_per_trial": 2}, (1, 2), 6),
        ({"reduction_factor": 3}, (1, 2, 4), 4),  # fewer, shorter stages
        ({"min_stage": 5}, (1, 2, 4, 8), 4),
    ],
)
def test_each_parameter_reaches_the_plan(
    changed: dict[str, Any], workers: tuple[int, ...], n_stages: int
) -> None:
    usual: dict[str, Any] = {"reduction_factor": 2, "min_stage": 1, "mode": "paper"}
    flow = SEER(100, 3200, **{**usual, **changed})
    assert flow.brackets.workers == workers
    assert flow.brackets.n_stages == len(flow.plan.stages) == n_stages


def example(n_workers: int = 16, n_trials: int = 12, *, max_epochs: int | None = None) -> SEER:
    """The worked example, begun: stages end at 10/7, 30/7 and 10 s, on 16, 8 and 4 workers."""
    flow = SEER(10, 80, reduction_factor=2, min_stage=1, mode="paper", max_epochs=max_epochs)
    flow.start(Context(n_workers))
    flow.handle(Asked(tuple(range(n_trials))))
    return flow


def gangs(decisions: Sequence[Decision]) -> dict[int, int]:
    return {d.trial: d.gang for d in decisions if isinstance(d, Train)}


def end_stage(
    flow: SEER, at: float, trials: Sequence[int], *, until: float | None = None
) -> list[Decision]:
    """Pause the trials; the higher a number, the better it is."""
    pauses = flow.handle(Tick(at))
    assert pauses == [Pause(trial, evaluate=True) for trial in sorted(trials)]
    for trial in trials:
        value = 1.0 - trial / 100
        decisions = flow.handle(Paused(trial, 0.5, at if until is None else until, value=value))
        if trial != trials[-1]:
            assert not decisions
    return decisions


def test_the_worked_example_is_done_as_it_is_planned() -> None:
    flow = SEER(10, 80, reduction_factor=2, min_stage=1, mode="paper")
    assert flow.start(Context(16))[1:] == [Scale(16), Wake(10 / 7), Ask(12)]
    begun = flow.handle(Asked(tuple(range(12))))
    assert begun == [Train(trial, 2, gang=2 if trial < 4 else 1) for trial in range(12)]

    # Of the 4 trials with 2 workers the best 2 stay, of the 8 others the best 4; the best of all of
    # them get the 2 workers, wherever they come from.
    decisions = end_stage(flow, 10 / 7, range(12))
    stopped = [d.trial for d in decisions if isinstance(d, Stop)]
    assert stopped == [7, 6, 5, 4, 1, 0]
    assert gangs(decisions) == {11: 2, 10: 2, 9: 1, 8: 1, 3: 1, 2: 1}
    assert all(d.epochs == 0 for d in decisions if isinstance(d, Train))
    assert [d for d in decisions if isinstance(d, Scale | Wake)] == [Scale(8), Wake(30 / 7)]

    decisions = end_stage(flow, 30 / 7, (2, 3, 8, 9, 10, 11))
    assert [d.trial for d in decisions if isinstance(d, Stop)] == [3, 2, 10]
    assert gangs(decisions) == {11: 2, 9: 1, 8: 1}
    assert [d for d in decisions if isinstance(d, Scale | Wake)] == [Scale(4), Wake(9.99)]

    decisions = end_stage(flow, 9.99, (8, 9, 11))
    ended = {d.trial: d.outcome for d in decisions if isinstance(d, Stop)}
    assert ended == {11: "complete", 9: "pruned", 8: "pruned"}
    assert decisions[-1] == Finish()


def test_a_trial_never_runs_dry_and_resumes_in_mid_epoch() -> None:
    flow = example()
    assert flow.handle(Reported(5, 1, 0.3, {}, 0.5)) == [Train(5, 1)]
    assert flow.handle(Reported(0, 1, 0.3, {}, 0.6)) == [Train(0, 1, gang=2)]
    flow.handle(Tick(10 / 7))
    assert flow.handle(Reported(11, 1, 0.0, {}, 1.45)) == []  # it pauses, and gets nothing now
    for trial in range(12):
        decisions = flow.handle(Paused(trial, 1.5, 1.45, value=1.0 - trial / 100))
    resumed = {d.trial: d.epochs for d in decisions if isinstance(d, Train)}
    assert resumed == {11: 1, 10: 0, 9: 0, 8: 0, 3: 0, 2: 0}  # each has two epochs before it


def test_what_a_pause_takes_moves_no_end() -> None:
    flow = example()
    decisions = end_stage(flow, 10 / 7, range(12), until=10 / 7 + 0.25)
    assert Wake(30 / 7 - 0.25) in decisions
    decisions = end_stage(flow, 30 / 7 - 0.25, (2, 3, 8, 9, 10, 11), until=30 / 7 + 0.5)
    # 8 + 4 workers were held longer than planned; the last stage pays for what is above the budget.
    spent = 16 * (10 / 7 + 0.25) + 8 * (30 / 7 + 0.5 - 10 / 7 - 0.25)
    end = min(10.0, 30 / 7 + 0.5 + (80 - spent) / 4) - 0.75
    (wake,) = [d for d in decisions if isinstance(d, Wake)]
    assert wake.seconds == pytest.approx(end)


def test_what_was_overspent_shortens_the_last_stage() -> None:
    flow = example()
    end_stage(flow, 10 / 7, range(12), until=4.0)
    decisions = end_stage(flow, 4.0, (2, 3, 8, 9, 10, 11), until=4.0)
    (wake,) = [d for d in decisions if isinstance(d, Wake)]
    assert 16 * 4.0 + 4 * (wake.seconds + 10 / 7 - 4.0) <= 80
    assert wake.seconds < 10.0 - (4.0 - 10 / 7)


def test_late_workers_are_folded_in() -> None:
    flow = SEER(10, 80, reduction_factor=2, min_stage=1, mode="paper")
    flow.start(Context(1))
    assert set(gangs(flow.handle(Asked(tuple(range(12))))).values()) == {1}
    assert flow.handle(WorkersChanged(12)) == []
    assert flow.handle(WorkersChanged(14)) == [Train(0, 0, gang=2), Train(1, 0, gang=2)]
    assert flow.handle(WorkersChanged(16)) == [Train(2, 0, gang=2), Train(3, 0, gang=2)]


def test_lost_workers_are_asked_for_again_and_gangs_shrink() -> None:
    flow = example()
    assert flow.handle(WorkersChanged(14)) == [
        Scale(16),
        Train(2, 0, gang=1),
        Train(3, 0, gang=1),
    ]
    assert flow.handle(WorkersChanged(16)) == [Train(2, 0, gang=2), Train(3, 0, gang=2)]
    end_stage(flow, 10 / 7, range(12))
    assert flow.handle(WorkersChanged(9)) == []  # these were given back
    assert flow.handle(WorkersChanged(7))[0] == Scale(8)


def test_workers_of_a_trial_that_fails_are_released() -> None:
    flow = example()
    assert flow.handle(TrialFailed(0, "it broke")) == [Scale(14)]
    flow.handle(Tick(10 / 7))
    assert flow.handle(TrialFailed(1, "it broke")) == []
    for trial in range(2, 12):
        decisions = flow.handle(Paused(trial, 0.5, 1.5, value=1.0 - trial / 100))
    assert gangs(decisions) == {11: 2, 10: 2, 9: 1, 8: 1, 3: 1, 2: 1}


@pytest.mark.parametrize("n_workers", [13, 16])
def test_another_trial_is_drawn_in_the_place_of_a_complete_one(n_workers: int) -> None:
    """Its workers would be idle, or released, and most of the budget unused; no other gets them."""
    flow = example(n_workers, max_epochs=1)
    assert flow.handle(Reported(11, 1, 0.2, {}, 0.5)) == [
        Stop(11, "trained to the end, 1 epochs", "complete"),
        Ask(1),
    ]
    assert flow.handle(Asked((12,))) == [Train(12, 1)]
    flow.handle(Tick(10 / 7))
    flow.handle(Reported(3, 1, 0.1, {}, 1.43))  # its epoch ends as it pauses
    for trial in (it for it in range(13) if it != 11):
        decisions = flow.handle(Paused(trial, 0.5, 1.43, value=1.0 - trial / 100))
    assert gangs(decisions) == {12: 2, 10: 2, 9: 1, 8: 1, 2: 1, 1: 1}
    assert Scale(8) in decisions
    assert not of(Ask, decisions), "all places of the next stage are taken"
    assert flow.handle(Reported(12, 1, 0.3, {}, 2.0))[-1] == Ask(1)
    ended = flow.handle(DeadlineReached(3.0))
    assert {stop.outcome for stop in of(Stop, ended)} == {"pruned"}, "the best one is complete"


def test_trials_that_are_complete_as_a_stage_ends_leave_their_places_to_others() -> None:
    flow = example(max_epochs=1)
    flow.handle(Tick(10 / 7))
    for trial in range(12):
        flow.handle(Reported(trial, 1, 0.2, {}, 1.43))
        decisions = flow.handle(Paused(trial, 1.0, 1.43, value=0.2))
    assert of(Scale, decisions) == [Scale(8)]
    assert decisions[-1] == Ask(6), "one for each place of the next stage"
    begun = gangs(flow.handle(Asked(tuple(range(12, 18)))))
    assert sorted(begun.values()) == [1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("max_epochs", [1, 3])
def test_a_last_epoch_changes_how_many_are_tried_and_not_what_it_costs(max_epochs: int) -> None:
    runs = [
        dagsel.simulate(
            SEER(deadline="60 s", budget="2 worker-minutes", max_epochs=most),
            PowerLaw(epoch_s=1.0),
            SimulatedCluster(n_workers=2, n_shards=1, max_workers=2),
            space=lambda trial: {"q": trial.suggest_float("q", 0.0, 1.0)},
        )
        for most in (None, max_epochs)
    ]
    without, with_last = runs
    assert with_last.cost == pytest.approx(without.cost, rel=0.02)
    assert len(with_last.trials()) > 1.5 * len(without.trials())
    n_whole = with_last.trials()["reason"].str.startswith("trained to the end").sum()
    told = re.findall(r"Stage .*; (\d+) trained to the end", str(with_last.plan))
    assert sum(map(int, told)) == n_whole > 0


def test_one_that_comes_when_its_stage_is_over_has_no_place() -> None:
    flow = example(max_epochs=1)
    flow.handle(Reported(11, 1, 0.2, {}, 1.42))
    end_stage(flow, 10 / 7, range(11))
    assert flow.handle(Asked((12,))) == [Stop(12, "its stage is over")]


def test_a_small_space_takes_the_best_places() -> None:
    flow = SEER(10, 80, reduction_factor=2, min_stage=1, mode="paper")
    flow.start(Context(16))
    decisions = flow.handle(Asked((0, 1, 2), exhausted=True))
    assert gangs(decisions) == {0: 2, 1: 2, 2: 2}
    assert Scale(6) in decisions


def test_at_the_deadline_the_best_is_kept() -> None:
    flow = example()
    flow.handle(Reported(4, 1, 0.5, {}, 0.5))
    flow.handle(Reported(7, 1, 0.2, {}, 0.6))
    decisions = flow.handle(DeadlineReached(1.0))
    assert [d.trial for d in decisions if isinstance(d, Stop) and d.outcome == "complete"] == [7]
    assert decisions[-1] == Finish()


def test_the_default_first_stage_makes_three_stages() -> None:
    flow = SEER("10 min", "160 worker-minutes")
    assert len(flow.plan.stages) == 3
    assert flow.plan.seconds == 600
    assert flow.plan.stages[0].seconds >= 600 / 64


def test_bad_input_is_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"deadline": 0}, "deadline must be above 0"),
        ({"deadline": "soon"}, "deadline='soon' is no time"),
        ({"budget": -3}, "budget must be"),
        ({"budget": "5 USD"}, "price"),
        ({"min_stage": 20}, "no room for one stage of min_stage=20 s"),
        ({"budget": 0.5, "min_stage": 1}, "the smallest that works is 1 worker-seconds"),
        (
            {"min_workers_per_trial": 4, "max_workers_per_trial": 2},
            "max_workers_per_trial=2 is below min_workers_per_trial=4",
        ),
        ({"reduction_factor": 1}, "reduction_factor must be 2 or more"),
        ({"mode": "greedy"}, "mode must be one of 'fill', 'paper'"),
        ({"max_epochs": 0}, "max_epochs must be a whole number of 1 or more"),
        ({"deadline": math.nan}, "deadline must be above 0 and finite"),
    ]
    for bad, words in cases:
        with pytest.raises(SearchError, match=words):
            SEER(**{"deadline": 10, "budget": 80, **bad})


TWO = ClusterCapacity(most_workers=2)


def pause(flow: SEER, at: float, trained: dict[int, float], took_s: float = 0.0) -> list[Decision]:
    """Pause all trials for their scores; the lower a number, the better it is."""
    asked = flow.handle(Tick(at))
    assert asked == [Pause(trial, evaluate=True) for trial in sorted(trained)]
    for trial, epochs in trained.items():
        decisions = flow.handle(Paused(trial, epochs, at + took_s, value=trial / 100))
    return decisions


def of(kind: type[Any], decisions: Sequence[Decision]) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def test_on_two_workers_it_measures_an_epoch_before_it_draws_many() -> None:
    flow = SEER("64 s", 128)
    plan, scale, wake, ask = flow.start(Context(2, capacity=TWO))
    assert isinstance(plan, Plan)
    assert [stage.n_workers for stage in plan.stages] == [2, 2, 1]
    assert (scale, wake, ask) == (Scale(2), Wake(4.0), Ask(2))  # a 16th of the time
    flow.handle(Asked((0, 1)))
    # What comes first takes longer, and does not count.
    assert of(Wake, pause(flow, 4.0, {0: 0.5, 1: 0.5})) == [Wake(8.0)]
    decisions = pause(flow, 8.0, {0: 8.5, 1: 8.5})  # an epoch takes half a second
    (again,) = of(Plan, decisions)
    assert "0.5 worker-seconds" in again.reason
    assert again.stages[0].begins_s == 8.0
    assert again.ends[-1] == pytest.approx(64.0)
    assert of(Ask, decisions) == [Ask(sum(again.stages[0].n_trials) - 2)]
    assert gangs(decisions) == {0: 1, 1: 1}
    begun = flow.handle(Asked(tuple(range(2, sum(again.stages[0].n_trials)))))
    assert set(gangs(begun)) == set(range(2, sum(again.stages[0].n_trials)))


def test_how_long_the_first_pause_takes_does_not_count() -> None:
    """What workers do for the first time takes longer; it made of 24 trials 6."""
    told, n_trials = list[str](), list[int]()
    for first_s, second_s in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        flow = SEER("64 s", 128)
        flow.start(Context(2, capacity=TWO))
        flow.handle(Asked((0, 1)))
        wakes = pause(flow, 4.0, {0: 0.5, 1: 0.5}, first_s)
        (wake,) = of(Wake, wakes)
        decisions = pause(flow, wake.seconds, {0: 8.5, 1: 8.5}, second_s)
        (again,) = of(Plan, decisions)
        told.append(again.reason)
        n_trials.append(sum(again.stages[0].n_trials))
    assert n_trials == [24, 24, 6]
    assert "a score" not in told[1]
    assert "a score 1" in told[2]


def test_what_has_ended_in_the_pause_or_has_failed_was_trained_as_well() -> None:
    """An epoch was called half as long if one of two trials was complete then."""

    def epoch_s(*, max_epochs: int | None = None, fails: bool = False) -> str:
        flow = SEER("64 s", 128, max_epochs=max_epochs)
        flow.start(Context(2, capacity=TWO))
        flow.handle(Asked((0, 1)))
        pause(flow, 4.0, {0: 0.5, 1: 0.5})
        flow.handle(Reported(1, 1, 0.5, {}, 4.5))
        if fails:
            flow.handle(TrialFailed(0, "NaN"))
            flow.handle(Asked((2,)))
        flow.handle(Tick(8.0))
        flow.handle(Reported(1, 2, 0.5, {}, 8.0))
        flow.handle(Paused(1, 2.0, 8.0, value=0.5))
        decisions = flow.handle(Paused(2 if fails else 0, 1.5, 8.0, value=0.5))
        (again,) = of(Plan, decisions)
        return again.reason

    assert epoch_s() == epoch_s(max_epochs=2) == "an epoch takes about 3.2 worker-seconds"
    assert epoch_s(fails=True) == "an epoch takes about 2.67 worker-seconds"


def test_slow_epochs_make_fewer_trials_and_fewer_stages() -> None:
    stages = {}
    for epoch_s in (0.1, 2.0, 10.0):
        flow = SEER("64 s", 128)
        flow.start(Context(2, capacity=TWO))
        flow.handle(Asked((0, 1)))
        pause(flow, 4.0, {0: 0.1, 1: 0.1})
        decisions = pause(flow, 8.0, dict.fromkeys((0, 1), 0.1 + 4.0 / epoch_s))
        (again,) = of(Plan, decisions)
        stages[epoch_s] = [sum(stage.n_trials) for stage in again.stages]
    assert len(stages[0.1]) == 3
    assert len(stages[2.0]) == len(stages[10.0]) == 2
    assert stages[0.1][0] > stages[2.0][0] >= stages[10.0][0] >= 2


def test_trials_that_still_load_are_waited_for() -> None:
    flow = SEER("64 s", 128)
    flow.start(Context(2, capacity=TWO))
    flow.handle(Asked((0, 1)))
    wakes, at = [], 4.0
    while of(Wake, decisions := pause(flow, at, {0: 0.0, 1: 0.0})) and not of(Ask, decisions):
        (wake,) = of(Wake, decisions)
        wakes.append(at := wake.seconds)
    assert wakes == sorted(wakes)
    assert len(wakes) < 5
    assert wakes[-1] < 64.0 / 2
    assert of(Ask, decisions) == [Ask(24 - 2)]  # the first plan holds


def test_the_first_score_comes_within_a_quarter_of_the_deadline() -> None:
    for seconds, budget in product((15, 60, 600), (15, 120, 1200)):
        for most in (1, 2, 4):
            flow = SEER(seconds, budget)
            context = Context(most, capacity=ClusterCapacity(most, 3.0), seconds=3.0)
            (wake,) = of(Wake, flow.start(context))
            assert wake.seconds <= 3.0 + (seconds - 3.0) / 4


def test_what_has_passed_before_counts() -> None:
    flow = SEER("64 s", 128)
    context = Context(2, capacity=ClusterCapacity(2, 3.0), seconds=14.0, worker_seconds=28.0)
    (plan,) = of(Plan, flow.start(context))
    assert plan.stages[0].begins_s == 14.0
    assert plan.ends[-1] == pytest.approx(64.0)
    assert 28.0 + sum(stage.seconds * stage.n_workers for stage in plan.stages) <= 128


@pytest.mark.parametrize(("startup_s", "n_workers"), [(0.0, 16), (1.0, 13), (3.0, 5), (20.0, 2)])
def test_dear_starts_make_a_narrow_search(startup_s: float, n_workers: int) -> None:
    """No more than a tenth of the budget goes into starts that the search can do without."""
    flow = SEER("60 s", 120)
    context = Context(1, capacity=ClusterCapacity(16, startup_s))
    assert flow.workers_to_begin(context) == n_workers
    (plan,) = of(Plan, flow.start(context))
    cost = sum(stage.seconds * stage.n_workers for stage in plan.stages)
    assert (n_workers - 1) * startup_s + cost <= 120 + 1e-9
    assert plan.stages[0].begins_s == startup_s
    assert plan.ends[-1] <= 60 + 1e-9


@pytest.mark.parametrize(("budget", "n_workers"), [(15, 1), (120, 2), (1200, 16)])
def test_it_begins_with_as_many_as_use_up_the_budget_in_time(budget: int, n_workers: int) -> None:
    """How long starts take on a busy machine shows when the first workers have come."""
    capacity = ClusterCapacity(16, 3.0)
    assert SEER("60 s", budget).workers_to_begin(Context(0, capacity=capacity)) == n_workers


def test_starts_that_have_used_up_the_time_are_told_of() -> None:
    for seconds, spent in ((61.0, 20.0), (30.0, 121.0)):
        context = Context(2, capacity=TWO, seconds=seconds, worker_seconds=spent)
        with pytest.raises(TooLittleTimeError, match=f"the first workers came after {seconds:g} s"):
            SEER("60 s", 120).start(context)


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        (
            ClusterCapacity(4, 60.0),
            "60 s to come, and 60 s are left until the deadline: let it be more than 0 s later",
        ),
        (ClusterCapacity(4, 30.0, 4), "a job of 4 workers costs 120 worker-seconds"),
    ],
)
def test_what_no_worker_can_be_there_for_is_refused(capacity: ClusterCapacity, words: str) -> None:
    with pytest.raises(SearchError, match=words):
        SEER("60 s", 120).workers_to_begin(Context(0, capacity=capacity))


def test_a_start_that_took_long_makes_the_first_stage_shorter() -> None:
    flow = SEER("20 s", 40, min_stage=4)
    (plan,) = of(Plan, flow.start(Context(2, capacity=TWO, seconds=18.5, worker_seconds=37.0)))
    assert plan.ends[-1] <= 20.0
    assert plan.stages[0].seconds <= 1.5


@pytest.mark.parametrize("bills_requests", [True, False])
@pytest.mark.parametrize(
    "flow", [SEER(3600, 9000), ElasticHyperband(3600, 9000), Lookahead(3600, 9000)]
)
def test_the_first_worker_of_a_job_begins_however_long_it_was_in_the_queue(
    flow: SEER | ElasticHyperband | Lookahead, bills_requests: bool
) -> None:
    """The others come with it; a plan that waited for them had less than no time left."""
    capacity = ClusterCapacity(None, 2000.0, node_size=4, bills_requests=bills_requests)
    decisions = flow.fresh().start(Context(1, capacity=capacity, seconds=2000.0))
    for plan in of(Plan, decisions):
        assert plan.stages[0].begins_s == 2000.0
    assert {it.n_workers for it in of(Scale, decisions)} <= {1, 4}


@pytest.mark.parametrize("flow", [SEER(600, 1200, min_stage=10), Lookahead(600, 1200)])
@pytest.mark.parametrize("size", [1, 2])
def test_jobs_that_wait_in_a_queue_use_up_no_budget(flow: SEER | Lookahead, size: int) -> None:
    """The start of each costs as much as that of the first."""
    flow = flow.fresh()
    capacity = ClusterCapacity(8, 60.0, node_size=size, bills_requests=False)
    flow.start(Context(size, capacity=capacity, seconds=60.0, worker_seconds=5.0 * size))
    flow.handle(Asked(tuple(range(16))))
    flow.handle(Reported(0, 1, 0.5, {}, 100.0))
    assert flow.state.spent == (5.0 + 40.0) * size
    wakes = of(Wake, flow.handle(WorkersChanged(3 * size)))
    assert wakes
    flow.handle(Reported(0, 2, 0.5, {}, 110.0))
    assert flow.state.spent == (5.0 + 40.0 + 2 * 5.0 + 3 * 10.0) * size
    flow.handle(WorkersChanged(size))
    flow.handle(Reported(0, 3, 0.5, {}, 120.0))
    flow.handle(Reported(0, 4, 0.5, {}, 130.0))
    assert flow.state.spent == (85.0 + 3 * 10.0 + 10.0) * size


@pytest.mark.parametrize("flow", [SEER(600, 1200, min_stage=10), Lookahead(600, 1200)])
def test_jobs_cost_something_from_when_they_come_until_they_go(flow: SEER | Lookahead) -> None:
    """And not since the last epoch or pause, which may have been long before."""
    flow = flow.fresh()
    flow.start(Context(1, capacity=ClusterCapacity(8, 60.0, bills_requests=False)))
    flow.handle(Asked(tuple(range(16))))
    flow.handle(WorkersChanged(8, seconds=50.0))
    flow.handle(WorkersChanged(2, seconds=60.0))
    flow.handle(Reported(0, 1, 0.5, {}, 70.0))
    assert flow.state.spent == 50.0 + 8 * 10.0 + 2 * 10.0


QUEUE = ClusterCapacity(8, 60.0, bills_requests=False)


def test_jobs_that_come_early_leave_the_later_stages_their_budget() -> None:
    """A stage of 8 workers that was to wait for them for a minute used up all of it."""
    flow = SEER(600, 700)
    (plan,) = of(Plan, flow.start(Context(1, capacity=QUEUE)))
    first = plan.stages[0]
    assert (first.begins_s, first.n_workers) == (60.0, 8)
    flow.handle(Asked(tuple(range(16))))
    (wake,) = of(Wake, flow.handle(WorkersChanged(8, seconds=1.0)))
    assert 1.0 + 8 * (wake.seconds - 1.0) == pytest.approx(first.seconds * first.n_workers)


def test_jobs_that_never_come_leave_the_last_stage_their_budget() -> None:
    flow, at, n_drawn = SEER(600, 700), 0.0, 0
    decisions = flow.start(Context(1, capacity=QUEUE))
    while not of(Finish, decisions):
        if asks := of(Ask, decisions):
            n = sum(ask.n for ask in asks)
            decisions += flow.handle(Asked(tuple(range(n_drawn, n_drawn + n))))
            n_drawn += n
        at = of(Wake, decisions)[-1].seconds
        decisions = flow.handle(Tick(at))
        for pause in of(Pause, decisions):
            decisions = flow.handle(Paused(pause.trial, 0.5, at, value=float(pause.trial)))
    assert 590 < at < 600  # with one worker it lasts for longer than the time


def test_more_workers_for_a_trial_than_there_can_be_are_refused() -> None:
    flow = SEER("60 s", 1200, min_workers_per_trial=4)
    with pytest.raises(SearchError, match="min_workers_per_trial=4, and the cluster can have 2"):
        flow.start(Context(2, capacity=TWO))


@given(
    flow=st.sampled_from(
        [
            SEER(60, 600),
            SEER(60, 600, mode="paper", min_stage=2),
            ElasticHyperband(60, 600),
            ElasticGrid(60, 600, sampling="random"),
            HyperSched(60, 600),
            Lookahead(60, 600),
        ]
    ),
    most=st.integers(1, 20),
    startup_s=st.sampled_from([0.0, 1.0, 5.0]),
    n_there=st.integers(0, 20),
)
def test_no_search_asks_for_more_than_there_can_be(
    flow: Any, most: int, startup_s: float, n_there: int
) -> None:
    context = Context(min(n_there, most), capacity=ClusterCapacity(most, startup_s))
    assert 1 <= flow.workers_to_begin(context) <= most
    for scale in of(Scale, flow.fresh().start(context)):
        assert 1 <= scale.n_workers <= most


def test_a_pause_takes_at_least_as_long_as_one_before_it_did() -> None:
    """Of 12 trials on 16 workers 3 are left, which have more workers each."""
    flow = example()
    flow.handle(Tick(1.0))
    for trial in range(9):
        assert flow.handle(TrialFailed(trial, "it broke")) == []
    for trial in range(9, 12):
        decisions = flow.handle(Paused(trial, 0.5, 1.25, value=1.0 - trial / 100))
    assert Wake(30 / 7 - 0.25) in decisions


@pytest.mark.parametrize("until", [5.0, 7.0, 7.4, 7.5, 8.0, 9.99])
def test_a_search_of_one_stage_ends_at_its_pause_if_that_leaves_no_time_for_another(
    until: float,
) -> None:
    flow = SEER(10, 80, reduction_factor=2, min_stage=10, mode="paper")
    assert of(Wake, flow.start(Context(8))) == [Wake(5.0)]
    flow.handle(Asked((0, 1, 2, 3)))
    decisions = end_stage(flow, 5.0, (0, 1, 2, 3), until=until)
    if until >= 7.5:  # the next one would take as long, to 10 s at best
        assert decisions[-1] == Finish()
    else:
        (wake,) = of(Wake, decisions[-1:])
        assert wake.seconds == pytest.approx(min(9.99, 10.0 - (until - 5.0)))
        assert set(gangs(decisions)) == {0, 1, 2, 3}


@pytest.mark.parametrize("n_shards", [1, 4])
@pytest.mark.parametrize("epoch_s", [0.02, 0.08])
def test_on_a_small_cluster_all_trials_take_turns_and_the_best_is_there_at_the_end(
    n_shards: int, epoch_s: float
) -> None:
    """A trial of a smaller `q` is better after each epoch."""
    run = dagsel.simulate(
        SEER(deadline="20 s", budget="40 worker-seconds"),
        PowerLaw(asymptote=lambda config: config["q"], rate=1.0, epoch_s=epoch_s),
        SimulatedCluster(n_workers=2, n_shards=n_shards, max_workers=2),
        space=lambda trial: {"q": trial.suggest_float("q", 0.0, 1.0)},
    )
    trials = run.trials()
    measured = trials["trial"].isin([0, 1])  # what an epoch takes
    ended = trials[trials["reason"].str.startswith("stage 1") & ~measured]
    best = trials.sort_values("param_q").iloc[0]
    assert len(trials) > 4
    assert ended["epochs"].max() - ended["epochs"].min() <= 1
    assert trials["epochs"].min() > 0
    assert best["epochs"] == trials["epochs"].max()


def test_those_that_were_trained_least_in_this_stage_come_first() -> None:
    """A trial was not trained at all in a short first stage, where others had two epochs."""
    flow = example(n_workers=2)
    assert flow.handle(Reported(0, 1, 0.3, {}, 0.5)) == [Train(0, 1, priority=-1.0)]
    decisions = end_stage(flow, 10 / 7, range(12))
    assert {train.priority for train in of(Train, decisions)} == {0.0}, "a new stage"


def test_trials_of_two_workers_take_turns_where_there_are_fewer_than_two_for_each() -> None:
    flow = SEER(20, 160, reduction_factor=2, min_stage=4, min_workers_per_trial=2)
    flow.start(Context(4))
    flow.handle(Asked((0, 1, 2)))
    assert flow.handle(Reported(0, 1, 0.3, {}, 0.5)) == [Train(0, 1, priority=-1.0, gang=2)]
    flow.handle(WorkersChanged(6))
    assert flow.handle(Reported(0, 2, 0.3, {}, 1.0)) == [Train(0, 1, gang=2)]


@pytest.mark.parametrize("flow", [SEER(20, 40), Lookahead(20, 40)])
def test_others_are_drawn_for_the_first_trials_if_all_of_them_fail(flow: SEER | Lookahead) -> None:
    flow = flow.fresh()
    (first,) = (it.n for it in flow.start(Context(n_workers=2)) if isinstance(it, Ask))
    flow.handle(Asked(tuple(range(first))))
    decisions = [it for number in range(first) for it in flow.handle(TrialFailed(number, "NaN"))]
    assert any(isinstance(it, Ask) for it in decisions)
    assert not any(isinstance(it, Finish) for it in decisions)


def test_one_that_is_drawn_as_the_others_pause_begins_after_the_pause() -> None:
    """A trial fails in the very moment in which the time of the pause has come."""
    flow = SEER("64 s", 128)
    flow.start(Context(2, capacity=TWO))
    flow.handle(Asked((0, 1)))
    assert flow.handle(TrialFailed(0, "NaN"))[-1] == Ask(1)
    assert flow.handle(Tick(4.0)) == [Pause(1, evaluate=True)]
    assert flow.handle(Asked((2,))) == []
    assert gangs(flow.handle(Paused(1, 0.5, 4.5, value=0.5))) == {1: 1, 2: 1}


def test_they_are_not_drawn_without_end() -> None:
    flow, n_asked, decisions = SEER(20, 40), 0, list[Decision]()
    decisions += flow.start(Context(n_workers=2))
    while asks := [it for it in decisions if isinstance(it, Ask)]:
        numbers = range(n_asked, n_asked := n_asked + sum(it.n for it in asks))
        decisions = []
        for it, begin in zip(asks, range(numbers.start, numbers.stop), strict=False):
            decisions += flow.handle(Asked(tuple(range(begin, begin + it.n))))
        decisions += [it for trial in numbers for it in flow.handle(TrialFailed(trial, "NaN"))]
    assert n_asked < 100
    assert isinstance(decisions[-1], Finish)
