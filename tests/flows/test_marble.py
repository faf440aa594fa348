"""Marble, LSF, MarginalGain, Optimus pass a search on, keep pauses and wakes, refuse nonsense."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Ended,
    Event,
    Extended,
    Finish,
    Flow,
    Pause,
    Paused,
    Reported,
    Stop,
    Tick,
    Train,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows import ASHA, PBT, JobQueue, Marble, RandomSearch, Range
from dagsel.flows.allocation import Job
from dagsel.flows.baselines import LSF, MarginalGain, Optimus
from dagsel.flows.baselines.optimus import over_nodes
from dagsel.flows.marble import marble
from dagsel.planning.scaling import Scaling, ScalingModel, UniversalScaling
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
from dagsel.testing import FlowSuite
from tests.driver.scripted import Scripted

SCALING: dict[str, ScalingModel] = {
    "narrow": Scaling({2: 1.2, 3: 1.2}),
    "wide": Scaling({4: 4.0}),
    "curved": UniversalScaling(0.1, 0.05),
}


@dataclass(slots=True)
class Resting:
    live: dict[int, int] = field(default_factory=dict)  # trial: epochs that it has left
    paused: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)
    rest_s: float = 4.0


@dataclass
class Restless(Flow):
    """Trains in quanta; every few seconds it lets all trials rest, and begins again."""

    quantum_s: float | None = None
    state: Resting = field(default_factory=Resting, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        return [Ask(5)]

    def handle(self, event: Event) -> list[Decision]:
        state = self.state
        match event:
            case DeadlineReached():
                return [Finish()]
            case Asked(trials):
                state.live = dict.fromkeys(trials, 3)
                trains = [Train(trial, 3, trial % 2, 1, self.quantum_s) for trial in trials]
                return [*trains, Wake(state.rest_s)] if trials else [Finish()]
            case Reported(trial):
                state.live[trial] -= 1
            case TrialFailed(trial):
                state.live.pop(trial, None)
                state.awaited.discard(trial)
                state.paused.discard(trial)
            case Paused(trial):
                state.awaited.discard(trial)
                state.paused.add(trial)
            case Tick(seconds):
                state.rest_s = seconds + 4.0
                resting = state.live.keys() - state.paused - state.awaited
                state.awaited |= resting
                return [*(Pause(trial, evaluate=True) for trial in sorted(resting)), *self.go_on()]
        return self.go_on()

    def go_on(self) -> list[Decision]:
        state = self.state
        if state.awaited or (state.paused < state.live.keys() and not self.quantum_s):
            ready = set[int]()
        else:
            ready = state.paused
        done = [trial for trial in state.live if not state.live[trial]]
        done = [trial for trial in done if trial not in state.awaited]
        for trial in done:
            del state.live[trial]
        trains = [
            Train(trial, 0, trial % 2, 1, self.quantum_s) for trial in sorted(ready - {*done})
        ]
        state.paused -= {*ready, *done}
        stops = [Stop(trial, "trained to the end", "complete") for trial in done]
        if not state.live:
            return [*stops, Finish()]
        return [*stops, *trains, Wake(state.rest_s)]


class Suite(FlowSuite):
    n_workers = 4

    def configs(self, trial: int) -> Mapping[str, Any]:
        return {"architecture": list(SCALING)[trial % 3], "epochs": 1 + trial % 4, "lr": 0.1}


class TestQueue(Suite):
    n_points = 9
    n_concurrent = 3

    def make_flow(self) -> Flow:
        return JobQueue(n_concurrent=3)


class TestMarble(Suite):
    n_points = 9

    def make_flow(self) -> Flow:
        return Marble(JobQueue(), SCALING)


class TestMarbleOfAsha(Suite):
    n_concurrent = 5

    def make_flow(self) -> Flow:
        return Marble(ASHA(max_epochs=9, n_trials=9, n_concurrent=5), SCALING, switch_s=0.0)


class TestMarbleOfPbt(Suite):
    def make_flow(self) -> Flow:
        mutations: dict[str, Any] = {"architecture": list(SCALING), "lr": Range(1e-4, 1)}
        return Marble(PBT(max_epochs=4, n_trials=5, mutations=mutations), SCALING)


class TestRestless(Suite):
    def make_flow(self) -> Flow:
        return Restless()


class TestMarbleOfRestless(Suite):
    def make_flow(self) -> Flow:
        return Marble(Restless(), SCALING, switch_s=0.0)


class TestMarbleOfQuanta(Suite):
    def make_flow(self) -> Flow:
        return Marble(Restless(quantum_s=3.0), SCALING, switch_s=0.0)


class TestLsf(Suite):
    n_concurrent = 1

    def make_flow(self) -> Flow:
        return LSF(RandomSearch(max_epochs=3, n_trials=7))


class TestMarginalGain(Suite):
    n_points = 9

    def make_flow(self) -> Flow:
        return MarginalGain(JobQueue(), SCALING, interval_s=5.0)


class TestMarginalGainOfRestless(Suite):
    def make_flow(self) -> Flow:
        return MarginalGain(Restless(), SCALING, interval_s=7.0)


class TestOptimus(Suite):
    n_points = 9

    def make_flow(self) -> Flow:
        return Optimus(JobQueue(), dict.fromkeys(SCALING, over_nodes(4)), interval_s=5.0)


WIDE = {"architecture": "wide", "epochs": 8}
NARROW = {"architecture": "narrow", "epochs": 8}


def begun(flow: Flow, *configs: Mapping[str, Any], n_workers: int = 5) -> list[Decision]:
    flow.start(Context(n_workers))
    return flow.handle(Asked(tuple(range(len(configs))), exhausted=True, configs=configs))


def test_who_was_served_last_gives_way_when_workers_are_lost() -> None:
    flow = Marble(JobQueue(), SCALING)
    assert begun(flow, NARROW, WIDE) == [Train(0, 8, gang=2), Train(1, 8, gang=3)]
    assert flow.handle(WorkersChanged(3)) == [Train(1, 0)]
    assert flow.handle(WorkersChanged(1)) == [Train(0, 0)]
    assert flow.handle(WorkersChanged(0)) == []
    assert flow.handle(WorkersChanged(6)) == [Train(0, 0, gang=2), Train(1, 0, gang=4)]


def test_a_promotion_must_pay() -> None:
    for switch_s, promoted in [(90.1, []), (90.0, []), (89.9, [Train(1, 0, gang=4)])]:
        flow = Marble(JobQueue(), SCALING, switch_s=switch_s)
        assert begun(flow, WIDE, WIDE, n_workers=5) == [Train(0, 8, gang=4), Train(1, 8)]
        flow.handle(Reported(1, 1, 0.5, {}, seconds=20.0))
        flow.handle(Reported(1, 2, 0.5, {}, seconds=40.0))
        # 20 s an epoch on one worker, and 6 epochs are left: 120 s, on four workers 30.
        assert flow.handle(TrialFailed(0, "it broke")) == promoted


def test_what_is_left_makes_no_job_slower() -> None:
    uneven = Scaling({2: 1.8, 3: 1.5, 4: 2.9})
    assert marble([Job(0, gang=2, least=1, most=4, scaling=uneven)], 3) == {0: 2}
    assert marble([Job(0, gang=2, least=1, most=4, scaling=uneven)], 4) == {0: 4}
    waiting = [Job(trial, most=5, scaling=uneven) for trial in (0, 1)]
    assert marble(waiting, 7) == {0: 4, 1: 2}


def test_what_was_held_back_is_stopped_paused_and_resumed() -> None:
    flow = Marble(Restless(), SCALING)
    decided = begun(flow, WIDE, WIDE, WIDE, n_workers=4)
    assert decided == [Wake(4.0), Train(1, 3, 1.0, gang=4)]  # the others wait
    assert flow.handle(Tick(4.0))[:3] == [Pause(trial, evaluate=True) for trial in range(3)]
    assert flow.handle(Paused(0, 0.0, 4.0)) == [Wake(8.0)]
    assert flow.handle(Paused(1, 1.5, 4.0)) == [Wake(8.0)]
    assert flow.handle(Paused(2, 0.0, 4.0)) == [Wake(8.0), Train(1, 0, 1.0, gang=4)]
    assert flow.handle(TrialFailed(1, "it broke")) == [Wake(8.0), Train(0, 3, 0.0, gang=4)]


def test_a_limit_stops_no_trial_of_before_that_still_waits_to_train_on() -> None:
    flow = LSF(RandomSearch(max_epochs=1, n_trials=2))
    flow.start(Context(n_workers=1))
    flow.handle(Asked((0, 1)))
    for trial in (0, 1):
        flow.handle(Reported(trial, 1, 0.5, {}, 1.0))
    ended = (Ended(0, 1, 0.5), Ended(1, 1, 0.5))
    assert flow.handle(Extended(0, 3, 2, ended)) == [Train(0, 2)]
    stop = Stop(0, "the time or the budget is over")
    assert flow.handle(DeadlineReached(2.0)) == [stop, Finish()]


def test_a_trial_of_the_user_trains_on_with_one_worker() -> None:
    flow = Marble(RandomSearch(max_epochs=1, n_trials=1), SCALING)
    flow.start(Context(n_workers=4))
    flow.handle(Asked((0,), configs=({"architecture": "wide"},)))
    flow.handle(Reported(0, 1, 0.5, {}, 1.0))
    ended = (Ended(7, 2, 0.4), Ended(0, 1, 0.5))  # the search has never heard of trial 7
    assert flow.handle(Extended(0, 3, 2, ended)) == [Train(7, 1), Train(0, 2, gang=3)]


def test_who_is_about_to_pause_is_left_alone() -> None:
    @dataclass
    class Pauses(Restless):
        def handle(self, event: Event) -> list[Decision]:
            match event:
                case Asked(trials):
                    return [Train(trial, 3) for trial in trials]
                case Tick():
                    return [Pause(1)]
            return []

    flow = Marble(Pauses(), SCALING)
    assert begun(flow, NARROW, WIDE) == [Train(0, 3, gang=2), Train(1, 3, gang=3)]
    flow.handle(Tick(4.0))
    assert flow.handle(WorkersChanged(4)) == [Train(0, 0)]
    assert flow.handle(Paused(1, 0.5, 5.0)) == [Train(0, 0, gang=2)]


def test_a_clone_may_bring_another_architecture() -> None:
    @dataclass
    class Copies(Restless):
        def handle(self, event: Event) -> list[Decision]:
            match event:
                case Asked(trials):
                    return [Train(trial, 1) for trial in trials]
                case Reported(1, 1):
                    return [Clone(0, 1, {}), Train(1, 1)]
                case Reported(1, 2):
                    return [Clone(0, 1, {"architecture": "narrow"}), Train(1, 1)]
            return []

    flow = Marble(Copies(), SCALING, switch_s=0.0)
    assert begun(flow, WIDE, NARROW, n_workers=6) == [Train(0, 1, gang=4), Train(1, 1, gang=2)]
    flow.handle(Reported(0, 1, 0.5, {}, 1.0))
    assert flow.handle(Reported(1, 1, 0.5, {}, 1.0))[1:] == [Train(1, 1, gang=4)]
    assert flow.handle(Reported(1, 2, 0.5, {}, 1.0))[1:] == [Train(1, 1, gang=4)]  # none is taken


def test_a_job_that_trains_for_a_stated_time_is_disturbed_only_where_workers_were_lost() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked((0,)):
                return [Train(0, 5, seconds=1000.0)]
            case Asked((1,)):
                return [Train(1, 5)]
        return []

    flow = MarginalGain(Scripted([Ask(2)], answer), SCALING, interval_s=100.0)
    flow.start(Context(4))
    assert flow.handle(Asked((0,), configs=(WIDE,))) == [Train(0, 5, gang=4, seconds=1000.0)]
    assert flow.handle(Asked((1,), configs=(WIDE,))) == []
    assert flow.handle(Tick(100.0)) == [Wake(200.0)]
    assert flow.handle(WorkersChanged(3))[0] == Train(0, 0, gang=2, seconds=1000.0)


def test_marble_asks_no_profile_while_nothing_is_free() -> None:
    class Silent(Scaling):
        def best(self, most: int, *, within: float = 0.03) -> int:
            raise AssertionError("nothing is free")

    jobs = [Job(0, gang=4, least=1), Job(1, scaling=Silent({}))]
    assert marble(jobs, 4) == {0: 4, 1: 0}


def test_marginal_gain_waits_for_its_interval() -> None:
    flow = MarginalGain(JobQueue(), SCALING, interval_s=10.0)
    begun(flow, {**WIDE, "epochs": 1}, WIDE, WIDE, n_workers=2)
    stop, *rest = flow.handle(Reported(0, 1, 0.5, {}, seconds=3.0))
    assert isinstance(stop, Stop)
    assert rest == []
    assert flow.handle(Tick(10.0)) == [Train(2, 8), Wake(20.0)]
    assert flow.handle(Tick(20.0)) == [Wake(30.0)]
    # Both are late in their first epoch, by the 3 s that trial 0 took, and have more of them.
    assert flow.handle(WorkersChanged(4)) == [Train(1, 0, gang=2), Train(2, 0, gang=2)]


def test_marginal_gain_wakes_the_search_inside() -> None:
    flow = MarginalGain(Restless(), SCALING, interval_s=7.0)
    assert begun(flow, WIDE, n_workers=1) == [Train(0, 3), Wake(4.0)]
    assert flow.handle(Tick(4.0)) == [Pause(0, evaluate=True), Wake(7.0)]
    assert flow.handle(Tick(7.0)) == [Wake(8.0)]
    assert flow.handle(Paused(0, 0.5, 7.5)) == [Train(0, 0), Wake(8.0)]


def test_optimus_begins_no_job_with_a_single_node_where_there_are_two() -> None:
    speeds = dict.fromkeys(SCALING, over_nodes(3))
    for n_nodes, trains in [
        (1, [Train(0, 8)]),
        (2, [Train(0, 8, gang=2)]),
        (3, [Train(0, 8, gang=3)]),
    ]:
        assert begun(Optimus(JobQueue(), speeds), WIDE, WIDE, n_workers=n_nodes) == trains


def test_a_profile_stands_for_its_scaling() -> None:
    measured = cast(Any, SimpleNamespace(scaling=SCALING["narrow"]))
    assert Marble(JobQueue(), {"vgg": measured}).scaling == {"vgg": SCALING["narrow"]}


def test_an_architecture_may_be_a_number() -> None:
    def space(trial: Any) -> dict[str, Any]:
        return {"width": trial.suggest_categorical("width", [64, 128])}

    profiles: Any = {width: Scaling({2: 1.8}) for width in (64, 128)}
    flow = Marble(RandomSearch(max_epochs=2, n_trials=3), profiles, by="width")
    run = simulate(flow, PowerLaw(epoch_s=60.0), SimulatedCluster(4), space=space)
    assert {unit.gang for unit in run.record.units} == {1, 2}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Marble(cast(Any, "asha"), SCALING),
            "Marble goes around a search such as RandomSearch",
        ),
        (lambda: Marble(JobQueue(), {}), "needs a scaling profile of each architecture; measure"),
        (
            lambda: Marble(JobQueue(), cast(Any, {"vgg": 2.0})),
            r"scaling\['vgg'\] must be a scaling profile",
        ),
        (lambda: Marble(JobQueue(), SCALING, switch_s=-1.0), "switch_s must be 0 or more"),
        (lambda: MarginalGain(JobQueue(), SCALING, interval_s=0.0), "interval_s must be above 0"),
        (
            lambda: MarginalGain(JobQueue(), {"vgg": Scaling({2: 1.0, 4: 3.0})}),
            r"scaling\['vgg'\] does not rise from 1 to 2 workers and is higher on 4, .* again, or",
        ),
        (lambda: over_nodes(3, traffic=-1.0), "traffic must be 0 or more"),
        (lambda: over_nodes(0), "n_nodes must be a whole number of 1 or more"),
        (
            lambda: begun(Marble(JobQueue(epochs_by="steps"), SCALING), {"architecture": "wide"}),
            "job 0 must say its epochs, 1 or more, under 'steps', got None; add them to its",
        ),
        (lambda: JobQueue(n_trials=0), "n_trials must be a whole number"),
        (
            lambda: begun(Marble(JobQueue(), SCALING), {"epochs": 1, "lr": 0.1}),
            "configuration of trial 0 has no 'architecture'.* it has 'epochs', 'lr': .* with by=",
        ),
        (
            lambda: begun(Marble(JobQueue(), SCALING), {"architecture": "vgg", "epochs": 1}),
            "trial 0 has the architecture 'vgg', which has no scaling profile .*; measure it with",
        ),
        (
            lambda: begun(LSF(JobQueue()), {"epochs": 2.5}),
            "job 0 must say its epochs, 1 or more, under 'epochs', got 2.5",
        ),
    ],
)
def test_bad_input_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(SearchError, match=says):
        make()


def test_what_the_study_reads_off_a_search_is_read_through() -> None:
    flow = Marble(LSF(JobQueue()), SCALING)
    assert flow.traits.sampling == "grid"
    assert flow.traits.pruner is None
    assert Marble(ASHA(max_epochs=9, n_trials=9), SCALING).traits.max_epochs == 9


def test_what_a_switch_costs_is_measured() -> None:
    """Without `switch_s` the last switches of the job's architecture say what the next one costs.

    On four workers the second job would be done 90 s earlier: see `test_a_promotion_must_pay`.
    """
    for cost_s, promoted in [(90.1, []), (89.9, [Train(1, 0, gang=4)])]:
        flow = Marble(JobQueue(), SCALING)
        begun(flow, WIDE, WIDE, n_workers=5)
        flow.handle(Reported(1, 1, 0.5, {}, seconds=20.0, switches=(1000.0, cost_s)))
        flow.handle(Reported(1, 2, 0.5, {}, seconds=40.0, switches=(1.0,)))
        assert flow.handle(TrialFailed(0, "it broke")) == promoted


def test_another_architecture_says_what_a_switch_costs_before_a_job_s_own_has_one() -> None:
    for cost_s, promoted in [(90.1, []), (89.9, [Train(1, 0, gang=4)])]:
        flow = Marble(JobQueue(), SCALING)
        begun(flow, NARROW, WIDE, n_workers=3)
        flow.handle(Reported(0, 1, 0.5, {}, seconds=10.0, switches=(cost_s,)))
        flow.handle(Reported(1, 1, 0.5, {}, seconds=20.0))
        flow.handle(Reported(1, 2, 0.5, {}, seconds=40.0))
        flow.handle(WorkersChanged(5))
        assert flow.handle(TrialFailed(0, "it broke")) == promoted
