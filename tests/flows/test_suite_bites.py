"""FlowSuite passes a good flow, and each way to be a bad one is caught by the law that names it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import pytest

from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Outcome,
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
)
from dagsel.testing import FlowSuite


@dataclass(slots=True)
class Learnt:
    context: Context = field(default_factory=lambda: Context(1))
    live: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    n_halved: int = 0


@dataclass(frozen=True)
class Halving:
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
        if isinstance(event, WorkersChanged):
            return [Ask(event.n_workers + 1)]
        return super().handle(event)


@dataclass(frozen=True)
class ForgetsThePruned(Halving):
    pruner: str = "median"

    def handle(self, event: Event) -> list[Decision]:
        if isinstance(event, Reported) and event.prune:
            return [Stop(event.trial, "pruned"), *super().handle(event)]
        return super().handle(event)


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


@dataclass(frozen=True)
class RemembersOutsideItsState(Halving):
    best: dict[int, float] = field(default_factory=dict, init=False, compare=False)

    def loss(self, value: float) -> float:
        self.best[0] = min(self.best.get(0, math.inf), super().loss(value))
        return self.best[0]


@dataclass(frozen=True)
class ComparesItsState(Halving):
    state: Learnt = field(default_factory=Learnt, init=False)


@dataclass(frozen=True, eq=False)
class EqualsNoCopy(Halving):
    __eq__ = object.__eq__


@dataclass(frozen=True)
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


CONCURRENT = "test_no_more_than_n_concurrent_train_at_once"
LEGAL = "test_decisions_are_legal_and_the_search_ends"
SAME = "test_the_same_events_give_the_same_decisions"


@pytest.mark.parametrize(
    ("bad", "law", "says"),
    [
        (TrainsTheStopped, LEGAL, "but the trial was stopped"),
        (ForgetsTheFailed, LEGAL, "but the trial has failed|deadlock"),
        (CountsOnEveryTrial, LEGAL, "deadlock"),
        (ForgetsThePruned, LEGAL, "but the trial was stopped"),
        (FinishesEarly, LEGAL, r"finishes while trials \[\d+\] train"),
        (GoesOnAfterFinish, LEGAL, "comes after Finish"),
        (NeverEnds, LEGAL, "not finished after"),
        (ClonesWhatTrains, LEGAL, "the target is not paused"),
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
        (KeepsABareState, "test_is_a_flow", "must be a dataclass"),
        (ChangesItsConfiguration, "test_a_run_leaves_the_flow_as_it_was", "has changed"),
        (IgnoresTheDeadline, "test_a_deadline_ends_the_search_at_once", "not answered by Finish"),
        (TrainsAfterTheDeadline, "test_a_deadline_ends_the_search_at_once", "after the deadline"),
        (IgnoresTheDirection, "test_a_mirrored_metric_changes_nothing", "the mirrored search"),
        (RanksTheInfiniteFirst, "test_what_is_not_finite_ranks_last", "yet preferred to bad ones"),
        (RanksByTheBareValue, "test_what_is_not_finite_ranks_last", "not treated alike|preferred"),
    ],
)
def test_a_bad_flow_is_caught(bad: type[Halving], law: str, says: str) -> None:
    class Suite(FlowSuite):
        n_concurrent = 6

        def make_flow(self) -> Flow:
            return bad()

    with pytest.raises((AssertionError, ValueError, TypeError), match=says):
        getattr(Suite(), law)()
