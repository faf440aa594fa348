"""FlowSuite passes a good flow, and each way to be a bad one is caught by the law that names it."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self
from unittest import SkipTest

import numpy as np
import pytest

from dagsel.errors import DagselError, SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Commanded,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Extended,
    Finish,
    Flow,
    Outcome,
    Pause,
    Paused,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    Traits,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows.wrapper import Wrapper
from dagsel.testing import FlowSuite, check
from dagsel.testing.flows import _TOLD


@dataclass(slots=True)
class Learnt:
    context: Context = field(default_factory=lambda: Context(1))
    live: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    n_halved: int = 0


@dataclass
class Halving(Flow):
    """Train all for an epoch, go on with the better half, until one is left."""

    n_trials: int = 6
    state: Learnt = field(default_factory=Learnt, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        self.state.context = context
        return [Ask(self.n_trials)]

    def handle(self, event: Event) -> list[Decision]:
        match event:
            case DeadlineReached():
                return [Finish()]
            case Asked(trials):
                self.state.live.update(trials)
                return [Train(trial, 1) for trial in trials]
            case Reported(trial, _, value):
                self.state.losses[trial] = self.loss(value)
            case TrialFailed(trial):
                self.forget(trial)
        return self.go_on() if self.state.losses.keys() == self.state.live else []

    def loss(self, value: float) -> float:
        return self.state.context.loss(value)

    def forget(self, trial: int) -> None:
        self.state.live.discard(trial)
        self.state.losses.pop(trial, None)

    def go_on(self) -> list[Decision]:
        ranking = self.rank()
        self.state.losses.clear()
        self.state.n_halved += 1
        n_kept = len(ranking) // 2
        kept, left = ranking[:n_kept], ranking[n_kept:]
        self.state.live.difference_update(left)
        outcome: Outcome = "pruned" if kept else "complete"
        stops = [Stop(trial, f"round {self.state.n_halved}", outcome) for trial in left]
        return [*stops, *self.end(kept, left)]

    def rank(self) -> list[int]:
        losses = self.state.losses
        return sorted(losses, key=lambda trial: (losses[trial], trial))

    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        return [Train(trial, 1) for trial in kept] or [Finish()]


class TestHalving(FlowSuite):
    n_concurrent = 6

    def make_flow(self) -> Flow:
        return Halving()


class TrainsTheStopped(Halving):
    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        return [Train(trial, 1) for trial in kept or left] or [Finish()]


class ForgetsTheFailed(Halving):
    def forget(self, trial: int) -> None:
        pass


class CountsOnEveryTrial(Halving):
    def handle(self, event: Event) -> list[Decision]:
        decisions = super().handle(event)
        n_left = self.n_trials >> self.state.n_halved
        return decisions if len(self.state.live) >= n_left or not decisions else []


class GrowsWithTheCluster(Halving):
    def handle(self, event: Event) -> list[Decision]:
        if isinstance(event, WorkersChanged) and len(self.state.live) < 12:
            return [Ask(event.n_workers + 1)]
        return super().handle(event)


class ForgetsThePruned(Halving):
    @property
    def traits(self) -> Traits:
        return Traits(uses_pruner=True)

    def handle(self, event: Event) -> list[Decision]:
        if isinstance(event, Reported) and event.prune:
            return [Stop(event.trial, "pruned"), *super().handle(event)]
        return super().handle(event)


class TrainsLongerThanItSays(Halving):
    @property
    def traits(self) -> Traits:
        return Traits(max_epochs=2)


class FinishesEarly(Halving):
    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        return [*super().end(kept, left), *([] if len(kept) > 1 or not kept else [Finish()])]


class GoesOnAfterFinish(Halving):
    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        return [*super().end(kept, left), *([] if kept else [Ask(1)])]


class NeverEnds(Halving):
    def go_on(self) -> list[Decision]:
        self.state.losses.clear()
        return [Train(trial, 1) for trial in sorted(self.state.live)] or [Finish()]


class ClonesWhatTrains(Halving):
    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        clones = [Clone(kept[0], trial, {}) for trial in kept[1:]]
        return [*super().end(kept, left), *clones]


class ClonesTheStopped(Halving):
    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        return [*(Clone(left[0], trial, {}) for trial in kept), *super().end(kept, left)]


class DecidesInNumpy(Halving):
    def end(self, kept: list[int], left: list[int]) -> list[Decision]:
        return [Train(trial, 1, np.arange(2)) for trial in kept] or [Finish()]  # type: ignore[arg-type]


class DrawsGlobally(Halving):
    def rank(self) -> list[int]:
        return random.sample(sorted(self.state.losses), len(self.state.losses))


class DrawsGloballyInNumpy(Halving):
    def rank(self) -> list[int]:
        return [int(trial) for trial in np.random.permutation(sorted(self.state.losses))]


class RemembersOtherRuns(Halving):
    seen: ClassVar[list[int]] = []

    def rank(self) -> list[int]:
        self.seen.append(0)
        return super().rank()[:: (-1) ** len(self.seen)]


@dataclass
class RemembersOutsideItsState(Halving):
    best: dict[int, float] = field(default_factory=dict, init=False, compare=False)

    def loss(self, value: float) -> float:
        self.best[0] = min(self.best.get(0, math.inf), super().loss(value))
        return self.best[0]


@dataclass
class ComparesItsState(Halving):
    state: Learnt = field(default_factory=Learnt, init=False)


@dataclass(eq=False)
class EqualsNoCopy(Halving):
    __eq__ = object.__eq__


@dataclass
class KeepsABareState(Halving):
    state: dict[str, int] = field(default_factory=dict, init=False, compare=False)  # type: ignore[assignment]


class ChangesItsConfiguration(Halving):
    def forget(self, trial: int) -> None:
        super().forget(trial)
        object.__setattr__(self, "n_trials", self.n_trials - 1)


class IgnoresTheDeadline(Halving):
    def handle(self, event: Event) -> list[Decision]:
        return [] if isinstance(event, DeadlineReached) else super().handle(event)


class TrainsAfterTheDeadline(Halving):
    def handle(self, event: Event) -> list[Decision]:
        if isinstance(event, DeadlineReached):
            return [*(Train(trial, 1) for trial in self.state.live), Finish()]
        return super().handle(event)


class IgnoresTheDirection(Halving):
    def loss(self, value: float) -> float:
        return value if math.isfinite(value) else math.inf


class RanksTheInfiniteFirst(Halving):
    def loss(self, value: float) -> float:
        return super().loss(value) if math.isfinite(value) else -math.inf


class RanksByTheBareValue(Halving):
    def loss(self, value: float) -> float:
        return value if self.state.context.direction == "minimize" else -value


@dataclass(slots=True)
class Turns:
    context: Context = field(default_factory=lambda: Context(1))
    losses: dict[int, float] = field(default_factory=dict)  # live: when last scored
    begun: set[int] = field(default_factory=set)
    turn: int | None = None
    awaited: bool = False
    n_workers: int = 1


@dataclass
class InTurn(Flow):
    """Train the best trial alone, new ones first; look again after two seconds, or at a score."""

    n_trials: int = 3
    state: Turns = field(default_factory=Turns, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        self.state.context, self.state.n_workers = context, context.n_workers
        return [Ask(self.n_trials), *self.prepare()]

    def prepare(self) -> list[Decision]:
        return [Scale(4), Wake(3.0)]

    def handle(self, event: Event) -> list[Decision]:
        state = self.state
        match event:
            case DeadlineReached():
                return [Finish()]
            case Asked(trials):
                state.losses = dict.fromkeys(trials, -math.inf)
                return self.next()
            case Reported(trial, epoch, value):
                state.losses[trial] = state.context.loss(value)
                return self.end(trial) if epoch == 2 else []
            case Paused(trial, value=value):
                state.awaited = False
                if value is not None:
                    state.losses[trial] = self.loss(value)
                return self.next()
            case TrialFailed(trial):
                del state.losses[trial]
                return self.next() if trial == state.turn or not state.losses else []
            case WorkersChanged(n_workers):
                return self.resize(max(n_workers, 1))
            case Tick(seconds):
                return [*self.pause(), Wake(seconds + 3.0)]
            case Extended() | Commanded():
                raise AssertionError

    def loss(self, value: float) -> float:
        return self.state.context.loss(value)

    def end(self, trial: int) -> list[Decision]:
        del self.state.losses[trial]
        return [Stop(trial, "trained to the end", "complete"), *self.next()]

    def next(self) -> list[Decision]:
        state = self.state
        state.awaited = False
        if not state.losses:
            return [Finish()]
        state.turn = min(state.losses, key=lambda trial: (state.losses[trial], trial))
        is_new = state.turn not in state.begun
        state.begun.add(state.turn)
        return [self.train(state.turn, 2 if is_new else 0)]

    def train(self, trial: int, epochs: int) -> Train:
        return Train(trial, epochs, gang=self.gang(), seconds=2.0)

    def gang(self) -> int:
        return min(2, self.state.n_workers)

    def resize(self, n_workers: int) -> list[Decision]:
        before, self.state.n_workers = self.gang(), n_workers
        if before == self.gang() or self.state.awaited or self.state.turn is None:
            return []
        return [self.train(self.state.turn, 0)]

    def pause(self) -> list[Decision]:
        if self.state.awaited or self.state.turn is None:
            return []
        self.state.awaited = True
        return [Pause(self.state.turn, evaluate=True)]


class TestInTurn(FlowSuite):
    n_concurrent = 1

    def make_flow(self) -> Flow:
        return InTurn()


class ResumesWhatHasNoEpochs(InTurn):
    def train(self, trial: int, epochs: int) -> Train:
        return super().train(trial, 0)


class TakesEpochsAway(InTurn):
    def train(self, trial: int, epochs: int) -> Train:
        return super().train(trial, epochs or -1)


class ResumesWhatTrainsAlready(InTurn):
    def next(self) -> list[Decision]:
        decisions = super().next()
        trains = [replace(each, seconds=None) for each in decisions if isinstance(each, Train)]
        return [train for train in trains for _ in range(2)] or decisions


class ResumesTheStopped(InTurn):
    def end(self, trial: int) -> list[Decision]:
        return [*super().end(trial), self.train(trial, 0)]


class PausesTheStopped(InTurn):
    def end(self, trial: int) -> list[Decision]:
        return [*super().end(trial), Pause(trial)]


class PausesTwice(InTurn):
    def pause(self) -> list[Decision]:
        self.state.awaited = False
        return super().pause()


class ResumesBeforeTheAnswer(InTurn):
    def resize(self, n_workers: int) -> list[Decision]:
        turn = self.state.turn
        return [] if turn is None else [self.train(turn, 0)]


class ForgetsToResume(InTurn):
    def handle(self, event: Event) -> list[Decision]:
        return [] if isinstance(event, Paused) else super().handle(event)


class TrainsOnNobody(InTurn):
    def gang(self) -> int:
        return 0


class TrainsForNoTime(InTurn):
    def train(self, trial: int, epochs: int) -> Train:
        return Train(trial, epochs, seconds=0.0)


class NeedsMoreWorkersThanThereAre(InTurn):
    def prepare(self) -> list[Decision]:
        return [Scale(4)]

    def gang(self) -> int:
        return 4


class WaitsForWorkers(InTurn):
    def prepare(self) -> list[Decision]:
        return [Scale(4)]

    def next(self) -> list[Decision]:
        return super().next() if self.state.n_workers == 4 else []


class LetsAllWorkersGo(InTurn):
    def prepare(self) -> list[Decision]:
        return [Scale(0)]


class WakesAtNoTime(InTurn):
    def prepare(self) -> list[Decision]:
        return [Wake(math.nan)]


class ClonesIntoThePaused(InTurn):
    def handle(self, event: Event) -> list[Decision]:
        decisions = super().handle(event)
        paused = event.trial if isinstance(event, Paused) and event.epochs > 1 else None
        others = [trial for trial in self.state.losses if trial != paused]
        if paused is None or not others:
            return decisions
        return [Clone(others[0], paused, {}), *decisions]


class RanksThePausedByTheBareValue(InTurn):
    def loss(self, value: float) -> float:
        return value if math.isfinite(value) else math.inf


@dataclass
class RemembersPausesOutsideItsState(InTurn):
    scored: list[int] = field(default_factory=list, init=False, compare=False)

    def loss(self, value: float) -> float:
        self.scored.append(0)
        return 9.0 * (-1) ** len(self.scored)


class FreshSharesItsState(Halving):
    def fresh(self) -> Self:
        return copy.copy(self)


class FreshGoesOn(Halving):
    def fresh(self) -> Self:
        return copy.deepcopy(self)


class FreshForgetsItsConfiguration(Halving):
    def fresh(self) -> Self:
        return type(self)(n_trials=7)


class FreshSharesAPart(Halving):
    def fresh(self) -> Self:
        flow = replace(self)
        flow.state.losses = self.state.losses
        return flow


class HasNoTraits:
    """Halves, but does not inherit `Flow`."""

    def __init__(self) -> None:
        self.flow = Halving()
        self.state, self.start, self.handle = self.flow.state, self.flow.start, self.flow.handle

    def fresh(self) -> Self:
        return type(self)()


CONCURRENT = "test_no_more_than_n_concurrent_train_at_once"
LEGAL = "test_decisions_are_legal_and_the_search_ends"
FRESH = "test_a_fresh_flow_has_not_begun"
SAME = "test_the_same_events_give_the_same_decisions"


@pytest.mark.parametrize(
    ("bad", "law", "says"),
    [
        (TrainsTheStopped, LEGAL, "but the trial was stopped"),
        (ForgetsTheFailed, LEGAL, "but the trial has failed|deadlock"),
        (CountsOnEveryTrial, LEGAL, "deadlock"),
        (ForgetsThePruned, LEGAL, "but the trial was stopped"),
        (TrainsLongerThanItSays, LEGAL, r"trained \{\d+: 3\} epochs, above traits.max_epochs, 2"),
        (FinishesEarly, LEGAL, r"finishes while trials \[\d+\] train"),
        (GoesOnAfterFinish, LEGAL, "comes after Finish"),
        (NeverEnds, LEGAL, "not finished after"),
        (ClonesWhatTrains, LEGAL, "the target has epochs to train"),
        (ClonesTheStopped, LEGAL, "but the trial was stopped"),
        (DecidesInNumpy, LEGAL, "has no form in JSON"),
        (GrowsWithTheCluster, CONCURRENT, r"\d+ trials train at once, 6|not finished after"),
        (DrawsGlobally, SAME, "random numbers of the process"),
        (DrawsGloballyInNumpy, SAME, "random numbers of the process"),
        (RemembersOtherRuns, SAME, "two copies differ"),
        (
            RemembersOutsideItsState,
            "test_a_state_goes_through_json_between_any_two_events",
            "restored, it differs",
        ),
        (ComparesItsState, "test_a_run_leaves_the_flow_as_it_was", "state is compared"),
        (EqualsNoCopy, "test_is_a_flow", "must be equal"),
        (HasNoTraits, "test_is_a_flow", "HasNoTraits has no traits"),
        (FreshSharesItsState, FRESH, "share their state"),
        (FreshSharesAPart, FRESH, "share their state"),
        (FreshGoesOn, FRESH, "has begun already"),
        (FreshForgetsItsConfiguration, FRESH, "has another configuration"),
        (KeepsABareState, "test_is_a_flow", "must be a dataclass"),
        (ChangesItsConfiguration, "test_a_run_leaves_the_flow_as_it_was", "has changed"),
        (IgnoresTheDeadline, "test_a_deadline_ends_the_search_at_once", "not answered by Finish"),
        (TrainsAfterTheDeadline, "test_a_deadline_ends_the_search_at_once", "after the deadline"),
        (IgnoresTheDirection, "test_a_mirrored_metric_changes_nothing", "the mirrored search"),
        (RanksTheInfiniteFirst, "test_what_is_not_finite_ranks_last", "yet preferred to bad ones"),
        (ResumesWhatHasNoEpochs, LEGAL, "trains nothing: the trial has no epoch left"),
        (TakesEpochsAway, LEGAL, "takes epochs away"),
        (ResumesWhatTrainsAlready, LEGAL, "it trains like that|no epoch left"),
        (ResumesTheStopped, LEGAL, "but the trial was stopped|comes after Finish"),
        (PausesTheStopped, LEGAL, "but the trial was stopped|comes after Finish"),
        (PausesTwice, LEGAL, r"but Pause\(trial=\d+, evaluate=True\) is not answered yet"),
        (ResumesBeforeTheAnswer, LEGAL, r"Train\(.*, but Pause\(.*\) is not answered yet"),
        (ForgetsToResume, LEGAL, "deadlock: nothing trains|not finished after"),
        (TrainsOnNobody, LEGAL, "has no worker"),
        (TrainsForNoTime, LEGAL, "has no time"),
        (NeedsMoreWorkersThanThereAre, LEGAL, r"deadlock: gangs \{\d+: 4\} do not fit on"),
        (WaitsForWorkers, LEGAL, "deadlock: nothing trains"),
        (LetsAllWorkersGo, LEGAL, "leaves no worker"),
        (WakesAtNoTime, LEGAL, "is at no time"),
        (ClonesIntoThePaused, LEGAL, "has epochs to train|has not reported"),
        (
            RemembersPausesOutsideItsState,
            "test_a_state_goes_through_json_between_any_two_events",
            "restored, it differs",
        ),
        (RanksThePausedByTheBareValue, "test_a_mirrored_metric_changes_nothing", "the mirrored"),
        (RanksByTheBareValue, "test_what_is_not_finite_ranks_last", "not treated alike|preferred"),
    ],
)
def test_a_bad_flow_is_caught(bad: type[Halving | InTurn], law: str, says: str) -> None:
    class Suite(FlowSuite):
        n_concurrent = 6

        def make_flow(self) -> Flow:
            return bad()

    with pytest.raises((AssertionError, ValueError, TypeError, SearchError), match=says):
        getattr(Suite(), law)()


@dataclass
class Around(Wrapper):
    """Says all that the inner flow says but for a field."""

    silent: str = ""

    @property
    def traits(self) -> Traits:
        told = self.flow.traits
        return replace(told, **{self.silent: getattr(Traits(), self.silent)} if self.silent else {})


class TestAround(FlowSuite):
    def make_flow(self) -> Flow:
        return Around(Around(Halving()))


@pytest.mark.parametrize("name", [f.name for f in fields(Traits)])
def test_a_wrapper_that_loses_a_trait_is_caught(name: str) -> None:
    assert getattr(_TOLD, name) != getattr(Traits(), name)

    class Suite(FlowSuite):
        def make_flow(self) -> Flow:
            return Around(Halving(), silent=name)

    with pytest.raises(AssertionError, match=f"Around.traits loses {name} of flow"):
        Suite().test_a_wrapper_loses_no_trait()


class Three:
    """A suite with a law that is kept, one for others, and one that is kept or broken."""

    is_good = True

    def test_a(self) -> None:
        pass

    def test_b(self) -> None:
        raise SkipTest("it is for others")

    def test_c(self) -> None:
        assert self.is_good, "it is bad"


def test_without_pytest_a_suite_is_checked_and_the_broken_law_is_named() -> None:
    class Bad(Three):
        is_good = False

    assert check(Three) == ["test_a", "test_c"]
    with pytest.raises(AssertionError, match="it is bad") as caught:
        check(Bad)
    assert caught.value.__notes__ == ["Bad.test_c has failed"]
    nothing: list[Any] = [Flow, Three(), 3]
    for given in nothing:
        with pytest.raises(DagselError, match="has no tests: inherit FlowSuite or WorkloadSuite"):
            check(given)
