"""A model of the runner and its cluster for tests of flows: it checks each decision of a flow.

Events come in any order that a cluster may bring about; a `Tape` of choices decides. An `Ask` is
answered before anything else happens, as by the runner; but what has happened together with the
event that led to it is told before its answer. Workers that are asked for may come late, only in
part, or never; a gang for which there are too few workers waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    Goal,
    Losses,
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
from dagsel.planning.capacity import Plan, fewer

#: A search as small as in a suite should have ended after so many events.
MAX_EVENTS = 2000
#: A pause comes at the latest after so many other events.
PAUSE_EVENTS = 100
#: Batches of an epoch; a trial can pause after each of them.
BATCHES = 4


@dataclass(frozen=True, slots=True)
class Step:
    """An event and the flow's answer; the first step, the flow's start, has no event."""

    event: Event | None
    decisions: tuple[Decision, ...]


@dataclass(slots=True)
class World:
    """Performs a flow's decisions; trials end in any order, and some fail."""

    flow: Flow
    context: Context
    tape: Tape
    configs: Callable[[int], Mapping[str, Any]]
    n_points: int | None = None  # of the search space; None: infinite
    deadline: int | None = None  # after how many events; None: never
    steps: list[Step] = field(default_factory=list)
    live: dict[int, LiveTrial] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    # Trials that were stopped, and the numbers of those that may train on.
    stopped: dict[int, LiveTrial] = field(default_factory=dict)
    resumable: set[int] = field(default_factory=set)
    waiting: deque[Ask | TrialFailed] = field(default_factory=deque)
    n_drawn: int = 0
    n_workers: int = field(init=False)
    n_wanted: int = field(init=False)
    wake_s: float | None = None
    seconds: float = 0.0
    finished: bool = False
    comes_alone: bool = True  # nothing else has happened together with the last event
    most_training: int = 0

    def __post_init__(self) -> None:
        self.n_workers = self.n_wanted = self.context.n_workers

    def run(self) -> None:
        """Run until the flow finishes."""
        self._go_on(None)

    def extend(
        self, n_trials: int, more_epochs: int, n_best: int, deadline: int | None = None
    ) -> None:
        """Extend the search that has finished, and run until the flow finishes again.

        After so many events the deadline comes, if there is one.
        """
        for number in [*self.live]:
            self._stop(number)
        most = self.flow.traits.max_epochs
        ended = [
            Ended(number, trial.epochs, trial.reported)
            for number, trial in self.stopped.items()
            if trial.epochs
        ]
        ended.sort(key=lambda it: (self.context.loss(it.value), it.trial))
        self.resumable = {it.trial for it in ended}
        self.finished, self.wake_s, self.comes_alone = False, None, True
        self.deadline = None if deadline is None else len(self.steps) + deadline
        self.waiting.clear()
        max_epochs = most + more_epochs if more_epochs and most is not None else None
        self._go_on(Extended(n_trials, max_epochs, n_best, tuple(ended)))

    def _go_on(self, begins: Extended | None) -> None:
        try:
            start = self.flow.start(self.context) if begins is None else self.flow.handle(begins)
            self._perform(begins, start)
            while not self.finished:
                assert len(self.steps) < MAX_EVENTS, f"not finished after {MAX_EVENTS} events"
                event = self._next()
                if event is not None:
                    self._perform(event, self.flow.handle(event))
        except Exception as error:
            lines = [f"{step.event or self.context} -> {[*step.decisions]}" for step in self.steps]
            error.add_note("\n".join(["The run, at its end:", *lines[-20:]]))
            raise

    # ---- what happens

    def _next(self) -> Event | None:
        if self.waiting:
            event, self.comes_alone = self._meanwhile(), True
            if event is not None:
                return event
            match self.waiting.popleft():
                case Ask(n):
                    return self._draw(n)
                case TrialFailed(trial) as failed:
                    return self._end(failed) if trial in self.live else None
        self.comes_alone = False
        return self._at_deadline() or self._happen()

    def _meanwhile(self) -> Event | None:
        """Return what had happened by the time that an `Ask` was decided, or None.

        The runner may hear of several events at once. It tells the flow of all of them before it
        does what was decided.
        """
        if self.comes_alone or self.tape.choose(2) == 0:
            return None
        if (over := self._at_deadline()) is not None:
            return over
        event, decided = self.steps[-1].event, self.steps[-1].decisions
        is_awake = isinstance(event, Tick) or any(isinstance(it, Wake) for it in decided)
        if self.wake_s is not None and not is_awake and self.tape.choose(2) == 0:
            return self._tick(self.wake_s)
        trials = {
            getattr(it, name, None) for it in decided for name in ("trial", "source", "target")
        }
        live = [trial for number, trial in self.live.items() if number not in trials]
        return self._move(live) if any(map(self._may_move, live)) else None

    def _at_deadline(self) -> DeadlineReached | None:
        is_over = self.deadline is not None and len(self.steps) > self.deadline
        return DeadlineReached(self.seconds) if is_over else None

    def _draw(self, n: int) -> Event:
        left = n if self.n_points is None else min(n, self.n_points - self.n_drawn)
        # A study may have older trials, so numbers need not begin at 0.
        trials = tuple(range(5 + self.n_drawn, 5 + self.n_drawn + left))
        self.n_drawn += left
        self.live |= {trial: LiveTrial(trial) for trial in trials}
        # Some configurations are refused: their trials fail before anything else happens.
        refused = [trial for trial in trials if self.tape.choose(24) == 23]
        self.waiting.extendleft(TrialFailed(trial, "refused") for trial in reversed(refused))
        exhausted = self.n_points == self.n_drawn
        return Asked(trials, exhausted, tuple(self.configs(trial) for trial in trials))

    def _happen(self) -> Event:
        can_move = any(map(self._may_move, self.live.values()))
        if self.wake_s is not None and self._is_tick_next(self.wake_s, can_move):
            return self._tick(self.wake_s)
        assert can_move, self._deadlock()
        return self._move([*self.live.values()])

    def _tick(self, wake_s: float) -> Tick:
        self.seconds, self.wake_s = max(self.seconds, wake_s), None
        return Tick(self.seconds)

    def _move(self, live: list[LiveTrial]) -> Event:
        movers = sorted(filter(self._may_move, live), key=lambda trial: trial.number)
        what = self.tape.choose(32)
        if what == 31:
            return self._staff(self.tape.choose(2 * self.context.n_workers + 1))
        if what >= 24 and (missing := self.n_wanted - self.n_workers):
            come = 1 + self.tape.choose(abs(missing))
            return self._staff(self.n_workers + (come if missing > 0 else -come))
        if what >= 29:
            # A trial that waits between two decisions fails if its state cannot be read any more.
            begun = [trial for trial in live if trial.epochs or trial.batches]
            victims = sorted({trial.number for trial in [*movers, *begun]})
            return self._end(TrialFailed(victims[self.tape.choose(len(victims))], "it broke"))
        since = len(self.steps) - PAUSE_EVENTS
        movers = [trial for trial in movers if trial.awaited and trial.asked_at < since] or movers
        trial = movers[self.tape.choose(len(movers))]
        before_s, prunes = trial.trained_s, self.flow.traits.uses_pruner
        event = trial.go_on(
            self.tape, runs=self._runs(trial), prunes=prunes, goals=self.context.goals
        )
        self.seconds += trial.trained_s - before_s
        return replace(event, seconds=self.seconds)

    def _is_tick_next(self, wake_s: float, others: bool) -> bool:
        if not others:
            return True
        if isinstance(self.steps[-1].event, Tick):
            return False  # trials train even if the flow sets one Wake after the other
        return wake_s <= self.seconds + self.tape.choose(4) and self.tape.choose(4) < 3

    def _staff(self, n_workers: int) -> WorkersChanged:
        self.n_workers = n_workers
        return WorkersChanged(n_workers, float(self.seconds))

    def _runs(self, trial: LiveTrial) -> bool:
        return trial.trains and trial.gang <= max(1, self.n_workers)

    def _may_move(self, trial: LiveTrial) -> bool:
        return self._runs(trial) or trial.awaited is not None

    def _deadlock(self) -> str:
        gangs = {trial: self.live[trial].gang for trial in self._training()}
        why = f"gangs {gangs} do not fit on {self.n_workers} workers" if gangs else "nothing trains"
        return (
            f"deadlock: {why}, no Wake is set and the flow has not finished; live are "
            f"{sorted(self.live)}; its last answer was {self.steps[-1]}"
        )

    def _end(self, failed: TrialFailed) -> TrialFailed:
        trial = self.live.pop(failed.trial)
        self.ended[failed.trial] = "has failed"
        if failed.trial in self.stopped:  # it had ended before: it keeps what it has
            self.stopped[failed.trial] = trial
        return failed

    # ---- what the flow decides

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
            training = [number for number in self._training() if not self.live[number].awaited]
            assert not training, f"the flow finishes while trials {training} train"
            owed = [it for it in self.waiting if it in step.decisions]
            assert not owed, f"the flow finishes before {owed[0]}"
        self.most_training = max(self.most_training, len(self._training()))

    def _training(self) -> list[int]:
        return sorted(number for number, trial in self.live.items() if trial.trains)

    def _apply(self, decision: Decision) -> None:
        match decision:
            case Ask(n):
                assert n > 0, f"{decision} asks for nothing"
                self.waiting.append(decision)
            case Train(number):
                if number in self.resumable:
                    self.resumable.remove(number)
                    self.live[number] = LiveTrial(number, self.stopped[number].epochs)
                self._find(decision, number).take(decision)
            case Pause(number):
                trial = self._find(decision, number)
                assert not trial.awaited, f"{decision}, but {trial.awaited} is not answered yet"
                trial.awaited, trial.asked_at = decision, len(self.steps)
            case Stop(number, _, outcome):
                trial = self._find(decision, number)
                has_value = trial.epochs or trial.metrics is not None
                assert has_value or outcome == "pruned", f"{decision} has no value"
                self._stop(number)
            case Clone(source, target):
                giver, taker = self._find(decision, source), self._find(decision, target)
                assert source != target, f"{decision} changes nothing"
                assert giver.epochs, f"{decision}: the source has not reported"
                assert taker.epochs, f"{decision}: the target has not reported"
                assert not taker.left, f"{decision}: the target has epochs to train"
                taker.metrics = None
            case Scale(n_workers):
                assert n_workers >= 1, f"{decision} leaves no worker to train on"
                self.n_wanted = fewer(n_workers, self.context.capacity)
            case Wake(seconds):
                assert math.isfinite(seconds), f"{decision} is at no time"
                self.wake_s = seconds
            case Plan():
                pass
            case Finish():
                self.finished = True
            case _:
                raise AssertionError(f"{decision!r} is no decision")

    def _stop(self, number: int) -> None:
        self.stopped[number] = self.live.pop(number)
        self.ended[number] = "was stopped"

    def _find(self, decision: Decision, trial: int) -> LiveTrial:
        state = self.ended.get(trial, "was never drawn")
        assert trial in self.live, f"{decision}, but the trial {state}"
        return self.live[trial]


def replay(
    flow: Flow,
    context: Context,
    steps: list[Step],
    change: Callable[[str, float], float] = lambda name, value: value,
) -> Iterator[tuple[Step, tuple[Decision, ...]]]:
    """Replay a run's events, with changed values, to a fresh flow; yield both answers to each."""
    yield steps[0], tuple(flow.start(context))
    for step in steps[1:]:
        assert step.event is not None
        event = step.event
        if isinstance(event, Reported | Paused) and event.value is not None:
            metrics = {name: change(name, value) for name, value in event.metrics.items()}
            event = replace(event, value=next(iter(metrics.values())), metrics=metrics)
        elif isinstance(event, Extended):
            ended = (replace(it, value=change("metric", it.value)) for it in event.ended)
            event = replace(event, ended=tuple(ended))
        yield step, tuple(flow.handle(event))


@dataclass(slots=True)
class Tape:
    """Choices, one per byte, repeated at the end; zeros make the simplest run."""

    choices: bytes
    place: int = 0

    def choose(self, n: int) -> int:
        """Choose a number below n."""
        byte = self.choices[self.place % len(self.choices)]
        self.place += 1
        return byte % n

    def rewind(self) -> None:
        """Start again with the first choice."""
        self.place = 0

    def value(self) -> float:
        """Choose a value of the metric."""
        if self.choose(6) == 5:
            return (math.nan, math.inf, -math.inf)[self.choose(3)]
        return (self.choose(32) - 8) / 8  # few enough for ties

    def losses(self, n: int) -> Losses:
        """Choose the training losses of n batches."""
        if not n:
            return Losses()
        low = self.choose(32) / 8
        return Losses(n, low, low + (self.choose(8) / 8 if n > 1 else 0.0))


@dataclass(slots=True)
class LiveTrial:
    """A live trial: its progress, its work, and the answer that the flow waits for."""

    number: int
    epochs: int = 0  # reported ones
    batches: int = 0  # of the next epoch
    left: int = 0  # epochs to train that are not reported
    gang: int = 1
    priority: float = 0.0
    limit_s: float | None = None
    trained_s: float = 0.0  # since its last Train
    n_losses: int = 0  # since its last Train
    suspended: bool = False
    awaited: Pause | None = None  # not answered yet
    asked_at: int = 0  # after how many events the pause was asked for
    metrics: dict[str, float] | None = None  # of its state, if that was evaluated
    reported: float = math.nan  # its value after its last epoch
    stalled: bool = False  # it paused without a batch: the next time it must train one

    @property
    def trains(self) -> bool:
        """Whether it trains as soon as there are workers."""
        return self.left > 0 and not self.suspended

    def take(self, train: Train) -> None:
        """Take a `Train`, or raise ``AssertionError`` if it is not legal."""
        assert train.epochs >= 0, f"{train} takes epochs away"
        assert train.gang >= 1, f"{train} has no worker"
        assert train.seconds is None or train.seconds > 0, f"{train} has no time"
        assert not self.awaited, f"{train}, but {self.awaited} is not answered yet"
        if not train.epochs:
            assert self.left, f"{train} trains nothing: the trial has no epoch left"
            how = (train.priority, train.gang) != (self.priority, self.gang)
            timed = train.seconds is not None or self.limit_s is not None  # the limit starts anew
            assert self.suspended or how or timed, f"{train} changes nothing: it trains like that"
        self.left += train.epochs
        self.gang, self.priority, self.limit_s = train.gang, train.priority, train.seconds
        self.suspended, self.trained_s, self.n_losses = False, 0.0, 0

    def go_on(
        self, tape: Tape, *, runs: bool, prunes: bool, goals: Sequence[Goal]
    ) -> Paused | Reported:
        """Train for a while, if there are workers; return the event, still without a time."""
        room = BATCHES - 1 - self.batches  # batches that do not end the epoch
        missing_s = max(0.0, (self.limit_s or 0.0) - self.trained_s)
        if self.awaited:
            may_pause = room > 0 or not self.stalled
            if not runs or (may_pause and tape.choose(2) == 0):
                least = 1 if self.stalled else 0
                self._train(min(least + tape.choose(BATCHES), room) if runs else 0, 0.0, tape)
                return self._pause(tape, goals)
        elif self.limit_s is not None and not missing_s:
            return self._pause(tape, goals)
        elif self.limit_s is not None and room and tape.choose(2) == 0:
            self._train(min(1 + tape.choose(BATCHES), room), missing_s, tape)
            return self._pause(tape, goals)
        return self._report(tape, goals, prunes=prunes)

    def _train(self, batches: int, least_s: float, tape: Tape) -> None:
        self.stalled = not batches
        if batches:
            self.batches += batches
            self.n_losses += batches
            self.trained_s += max(least_s, 1.0 + tape.choose(3))
            self.metrics = None

    def _pause(self, tape: Tape, goals: Sequence[Goal]) -> Paused:
        metrics, trained = dict[str, float](), self.epochs + self.batches / BATCHES
        if self.awaited and self.awaited.evaluate and trained:
            self.metrics = metrics = _scored(tape, goals) if self.metrics is None else self.metrics
        self.suspended, self.awaited = True, None
        value = next(iter(metrics.values()), None)
        losses = tape.losses(self.n_losses)
        return Paused(self.number, trained, 0.0, self.trained_s, losses, value, metrics)

    def _report(self, tape: Tape, goals: Sequence[Goal], *, prunes: bool) -> Reported:
        self._train(BATCHES - self.batches, 0.0, tape)
        self.epochs, self.batches, self.left = self.epochs + 1, 0, self.left - 1
        self.metrics = metrics = _scored(tape, goals)
        self.reported = next(iter(metrics.values()))
        prune = prunes and tape.choose(6) == 5
        value = next(iter(metrics.values()))
        return Reported(self.number, self.epochs, value, metrics, 0.0, prune)


def _scored(tape: Tape, goals: Sequence[Goal]) -> dict[str, float]:
    """Choose the metrics of a state."""
    return {name: tape.value() for name in [goal.metric for goal in goals] or ["metric"]}
