"""A world for flows: a model of the runner, which checks every decision that it performs.

It tells a flow what came of its decisions in any order that a cluster may bring about. An `Ask` is
answered before anything else happens, as the runner does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
)

#: A search of a suite's size that has not ended by then goes on for ever.
MAX_EVENTS = 2000


@dataclass(frozen=True, slots=True)
class Step:
    """An event and the flow's answer to it; the first step, the flow's start, has no event."""

    event: Event | None
    decisions: tuple[Decision, ...]


@dataclass(slots=True)
class Tape:
    """Choices, one a byte, over and over; zeros make the simplest run."""

    choices: bytes
    place: int = 0

    def choose(self, n: int) -> int:
        """Choose one of n."""
        byte = self.choices[self.place % len(self.choices)]
        self.place += 1
        return byte % n

    def rewind(self) -> None:
        """Go back to the first choice."""
        self.place = 0


@dataclass(slots=True)
class World:
    """Performs a flow's decisions, with trials that end in any order, some of them badly.

    Parameters
    ----------
    flow
        The flow under test.
    context
        What it knows at the start.
    tape
        Chooses what happens.
    configs
        The configuration of a trial.
    n_points
        Size of the search space.
    deadline
        After how many events the deadline comes.
    """

    flow: Flow
    context: Context
    tape: Tape
    configs: Callable[[int], Mapping[str, Any]]
    n_points: int | None = None
    deadline: int | None = None
    steps: list[Step] = field(default_factory=list)
    reported: dict[int, int] = field(default_factory=dict)  # live trial: epochs that it reported
    training: dict[int, int] = field(default_factory=dict)  # live trial: epochs still to train
    ended: dict[int, str] = field(default_factory=dict)
    waiting: deque[Ask | TrialFailed] = field(default_factory=deque)
    n_drawn: int = 0
    seconds: float = 0.0
    finished: bool = False
    most_training: int = 0

    def run(self) -> None:
        """Play until the flow finishes."""
        try:
            self._perform(None, self.flow.start(self.context))
            while not self.finished:
                assert len(self.steps) < MAX_EVENTS, f"not finished after {MAX_EVENTS} events"
                event = self._next()
                if event is not None:
                    self._perform(event, self.flow.handle(event))
        except Exception as error:
            lines = [f"{step.event or self.context} -> {[*step.decisions]}" for step in self.steps]
            error.add_note("\n".join(["The run, at its end:", *lines[-20:]]))
            raise

    def _next(self) -> Event | None:
        if self.waiting:
            match self.waiting.popleft():
                case Ask(n):
                    return self._draw(n)
                case TrialFailed(trial) as failed:
                    return self._end(failed) if trial in self.reported else None
        if self.deadline is not None and len(self.steps) > self.deadline:
            return DeadlineReached(self.seconds)
        return self._happen()

    def _draw(self, n: int) -> Event:
        left = n if self.n_points is None else min(n, self.n_points - self.n_drawn)
        # A study may hold trials of before, so numbers need not begin at 0.
        trials = tuple(range(5 + self.n_drawn, 5 + self.n_drawn + left))
        self.n_drawn += left
        self.reported |= dict.fromkeys(trials, 0)
        self.training |= dict.fromkeys(trials, 0)
        # With some configurations nothing can be trained: their trials fail before all else.
        refused = [trial for trial in trials if self.tape.choose(24) == 23]
        self.waiting.extendleft(TrialFailed(trial, "refused") for trial in reversed(refused))
        exhausted = self.n_points == self.n_drawn
        return Asked(trials, exhausted, tuple(self.configs(trial) for trial in trials))

    def _happen(self) -> Event:
        training = sorted(trial for trial, epochs in self.training.items() if epochs)
        assert training, (
            f"deadlock: nothing trains and the flow has not finished; live are "
            f"{sorted(self.reported)}; its last answer was {self.steps[-1]}"
        )
        what = self.tape.choose(32)
        if what == 31:
            return WorkersChanged(self.tape.choose(2 * self.context.n_workers + 1))
        trial = training[self.tape.choose(len(training))]
        if what >= 29:
            return self._end(TrialFailed(trial, "it broke"))
        self.training[trial] -= 1
        self.reported[trial] += 1
        self.seconds += 1.0 + self.tape.choose(3)
        value, epoch = self._value(), self.reported[trial]
        prune = hasattr(self.flow, "pruner") and self.tape.choose(6) == 5
        return Reported(trial, epoch, value, {"metric": value}, self.seconds, prune)

    def _value(self) -> float:
        if self.tape.choose(6) == 5:
            return (math.nan, math.inf, -math.inf)[self.tape.choose(3)]
        return (self.tape.choose(32) - 8) / 8  # few enough for ties

    def _end(self, failed: TrialFailed) -> TrialFailed:
        del self.reported[failed.trial], self.training[failed.trial]
        self.ended[failed.trial] = "has failed"
        return failed

    def _perform(self, event: Event | None, answer: list[Decision]) -> None:
        step = Step(event, tuple(answer))
        self.steps.append(step)
        for decision in step.decisions:
            assert not self.finished, f"{decision} comes after Finish"
            if isinstance(event, DeadlineReached):
                assert isinstance(decision, Stop | Finish), f"{decision} comes after the deadline"
            self._apply(decision)
        if isinstance(event, DeadlineReached):
            assert self.finished, "DeadlineReached was not answered by Finish"
        elif self.finished:
            training = sorted(trial for trial, epochs in self.training.items() if epochs)
            assert not training, f"the flow finishes while trials {training} train"
            assert not self.waiting, f"the flow finishes before {self.waiting[0]}"
        self.most_training = max(self.most_training, sum(map(bool, self.training.values())))

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Ask(n):
                assert n > 0, f"{decision} asks for nothing"
                self.waiting.append(decision)
            case Train(trial, epochs):
                self._check_live(decision, trial)
                assert epochs > 0, f"{decision} trains nothing"
                self.training[trial] += epochs
            case Stop(trial, _, outcome):
                self._check_live(decision, trial)
                assert self.reported[trial] or outcome == "pruned", f"{decision} has no value"
                del self.reported[trial], self.training[trial]
                self.ended[trial] = "was stopped"
            case Clone(source, target):
                self._check_live(decision, source)
                self._check_live(decision, target)
                assert source != target, f"{decision} changes nothing"
                assert self.reported[source], f"{decision}: the source has not reported"
                assert self.reported[target], f"{decision}: the target has not reported"
                assert not self.training[target], f"{decision}: the target is not paused"
            case Finish():
                self.finished = True
            case _:
                raise AssertionError(f"{decision!r} is no decision")

    def _check_live(self, decision: Decision, trial: int) -> None:
        state = self.ended.get(trial, "was never drawn")
        assert trial in self.reported, f"{decision}, but the trial {state}"


def replay(
    flow: Flow,
    context: Context,
    steps: list[Step],
    change: Callable[[float], float] = lambda value: value,
) -> Iterator[tuple[Step, tuple[Decision, ...]]]:
    """Tell a fresh flow the events of a run, their values changed; give both answers to each."""
    yield steps[0], tuple(flow.start(context))
    for step in steps[1:]:
        assert step.event is not None
        event = step.event
        if isinstance(event, Reported):
            value = change(event.value)
            event = replace(event, value=value, metrics={"metric": value})
        yield step, tuple(flow.handle(event))
