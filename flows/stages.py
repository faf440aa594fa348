"""What searches in stages share: train, pause, rank and go on, each at its time by the clock."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Flow,
    Pause,
    Paused,
    Reported,
    Sampling,
    Scale,
    Stop,
    Tick,
    Train,
    Traits,
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows.drawing import check_counts
from dagsel.planning.brackets import Stage, StagePlan
from dagsel.planning.budget import Budget, read_budget, to_seconds

#: Epochs that a trial is given ahead, so that none waits for the answer to its last report.
EPOCHS_AHEAD = 2
#: Share of the deadline that is kept free for the last pause; without it the deadline would come
#: before the last evaluation.
LAST_PAUSE = 0.001


@dataclass(slots=True)
class StagedTrial:
    """A trial of a search in stages."""

    bracket: int
    gang: int = 0  # workers that it was given
    epochs: int = 0
    n_given: int = 0
    loss: float = math.inf
    has_value: bool = False  # it was scored, after an epoch or at a pause
    is_paused: bool = True
    is_done: bool = False  # trained to its last epoch, and stopped


@dataclass(slots=True)
class StagedState:
    """The state of a search in stages; trials that come first are the first to get workers."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    n_workers: int = 0  # that are there
    n_wanted: int = 0  # that were asked for
    stage: int = 0
    trials: dict[int, StagedTrial] = field(default_factory=dict)
    pausing: set[int] = field(default_factory=set)
    n_pausing: int = 0  # trials of the last pause
    paused_at: float | None = None  # when the last pause began
    is_halfway: bool = False  # that pause is in the middle of the last stage, to be timed
    pause_s: float = 0.0  # how long a pause and its evaluation took, at most
    trial_s: float = 0.0  # the same for one trial on one worker
    seconds: float = 0.0
    n_billed: int = 0  # the most that were asked for since then
    spent: float = 0.0  # worker-seconds that were asked for so far
    finished: bool = False


@dataclass
class StagedSearch(Flow):
    """A search whose trials are ranked at fixed times.

    A subclass makes the plan. The ends of the stages are counted from the beginning of the run, and
    a pause begins earlier by the time that the longest one took so far (longer if there are more
    trials on a worker now): if something is slower than planned, the stage is shorter, but its end
    does not move. A search of one stage pauses halfway to see how long a pause takes. A trial that
    has reached `max_epochs` is complete; it stays in the rankings.
    """

    deadline: float | str
    budget: float | str
    _: KW_ONLY
    max_epochs: int | None = None
    price_per_worker_hour: str | float | None = None
    state: StagedState = field(default_factory=StagedState, init=False, repr=False, compare=False)
    deadline_s: float = field(init=False, repr=False, compare=False)
    cost: Budget = field(init=False, repr=False, compare=False)
    #: What is done if nothing fails and every worker comes at once.
    plan: StagePlan = field(init=False, repr=False, compare=False)
    sampling: Sampling = field(default="study", init=False, repr=False)

    def __post_init__(self) -> None:
        check_staged(max_epochs=self.max_epochs)
        self.deadline_s = to_seconds("deadline", self.deadline)
        self.cost = read_budget(self.budget, self.price_per_worker_hour)
        self.plan = self.make_plan()

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(
            self.max_epochs,
            self.sampling,
            deadline_s=self.deadline_s,
            budget=self.cost,
            plan=self.plan,
        )

    @abstractmethod
    def make_plan(self) -> StagePlan:
        """Return the stages; raise if there is no room for one."""

    def is_ranked(self, bracket: int) -> bool:
        """Whether the trials of a bracket are ranked after this stage; if not, they train on."""
        later = self.next_stage
        return later is None or later.n_trials[bracket] < self.stage.n_trials[bracket]

    def assign(self, survivors: list[int]) -> dict[int, int]:
        """Return in which bracket each survivor goes on; the best comes first."""
        return {trial: self.state.trials[trial].bracket for trial in survivors}

    @property
    def stage(self) -> Stage:
        """The present stage."""
        return self.plan.stages[self.state.stage]

    @property
    def next_stage(self) -> Stage | None:
        """The stage after it, if it is not the last one."""
        return next(iter(self.plan.stages[self.state.stage + 1 :]), None)

    def places(self) -> list[int]:
        """Return the bracket of each place of the stage, those with the most workers first."""
        workers, n_trials = self.plan.workers, self.stage.n_trials
        order = sorted(range(len(workers)), key=lambda bracket: -workers[bracket])
        return [bracket for bracket in order for _ in range(n_trials[bracket])]

    def start(self, context: Context) -> list[Decision]:
        """Ask for the workers and the trials of the first stage."""
        state, stage = self.state, self.stage
        state.context, state.n_workers = context, context.n_workers
        ask = Ask(sum(stage.n_trials), self.sampling)
        return [*self._scale(stage.n_workers), Wake(self._end()), ask]

    def handle(self, event: Event) -> list[Decision]:
        """Train until the stage is over, then rank and give the best their new workers."""
        state = self.state
        if state.finished:
            return []
        if not isinstance(event, Reported | Paused | Tick | DeadlineReached):
            return self._answer(event)
        state.spent += state.n_billed * (event.seconds - state.seconds)
        state.seconds = event.seconds
        decisions = self._answer(event)
        state.n_billed = state.n_wanted
        return decisions

    def _answer(self, event: Event) -> list[Decision]:
        state = self.state
        match event:
            case Asked(trials):
                places = zip(trials, self.places(), strict=False)
                state.trials |= {trial: StagedTrial(bracket) for trial, bracket in places}
                if not trials:
                    return self._finish("no trial can be drawn")
                return [*self._release(), *self._train()]
            case Reported(trial) if trial in state.trials:
                return self._note_epoch(event)
            case Paused(trial) if trial in state.pausing:
                return self._note_pause(event)
            case TrialFailed(trial) if trial in state.trials:
                del state.trials[trial]
                return self._go_on_without(trial)
            case WorkersChanged(n_workers):
                # Lost workers are asked for again: they cost nothing since, so the plan can pay.
                is_lost = n_workers < min(state.n_workers, state.n_wanted)
                state.n_workers = n_workers
                again: list[Decision] = [Scale(state.n_wanted)] if is_lost else []
                return again if state.pausing else [*again, *self._train()]
            case Tick() if not state.pausing:
                return self._pause()
            case DeadlineReached():
                return self._finish("the time is over")
            case _:
                return []

    def _training(self) -> dict[int, StagedTrial]:
        return {trial: one for trial, one in self.state.trials.items() if not one.is_done}

    # ---- a stage

    def _end(self) -> float:
        """Return when the trials of this stage have to pause."""
        state = self.state
        end, n_trials = self.plan.ends[state.stage], len(self._training())
        pause_s = max(state.pause_s, state.trial_s * n_trials / max(1, state.n_wanted))
        if self.next_stage is None:  # the last stage pays for what the others cost too much
            left = self.cost.worker_seconds - state.spent
            end = min(end, state.seconds + left / max(1, state.n_wanted))
            if state.paused_at is None:  # how long a pause takes is not known yet
                return (state.seconds + end) / 2
            pause_s = max(pause_s, LAST_PAUSE * self.deadline_s)
        return max(state.seconds, end - pause_s)

    def _scale(self, n_workers: int) -> list[Decision]:
        state, n_workers = self.state, max(1, n_workers)
        if n_workers == state.n_wanted:
            return []
        state.n_wanted = n_workers
        state.n_billed = max(state.n_billed, n_workers)
        return [Scale(n_workers)]

    def _release(self) -> list[Decision]:
        wanted = sum(self.plan.workers[one.bracket] for one in self._training().values())
        return self._scale(min(self.stage.n_workers, wanted))

    def _train(self) -> list[Decision]:
        """Divide the workers that are there among all that train, the first ones first."""
        training = self._training()
        n_workers = max(1, self.state.n_workers)
        least = min(self.plan.workers[0], n_workers)
        free = max(0, n_workers - least * len(training))
        decisions: list[Decision] = []
        for trial, one in training.items():
            more = min(free, self.plan.workers[one.bracket] - least)
            free -= more
            decisions += self._train_on(trial, least + more)
        return decisions

    def _train_on(self, trial: int, gang: int) -> list[Decision]:
        one = self.state.trials[trial]
        until = min(one.epochs + EPOCHS_AHEAD, self.max_epochs or sys.maxsize)
        n = until - one.n_given
        if not (n or one.is_paused or gang != one.gang):
            return []
        one.n_given, one.gang, one.is_paused = until, gang, False
        return [Train(trial, n, gang=gang)]

    def _note_epoch(self, event: Reported) -> list[Decision]:
        one = self.state.trials[event.trial]
        one.epochs, one.has_value = event.epoch, True
        one.loss = self.state.context.loss(event.value)
        if event.trial in self.state.pausing:
            return []
        if event.epoch == self.max_epochs:
            return [self._complete(event.trial), *self._go_on_without(event.trial)]
        return self._train_on(event.trial, one.gang)

    def _complete(self, trial: int) -> Stop:
        self.state.trials[trial].is_done = True
        return Stop(trial, f"trained to the end, {self.max_epochs} epochs", "complete")

    def _go_on_without(self, trial: int) -> list[Decision]:
        """Go on after a trial has paused or ended."""
        state = self.state
        if trial in state.pausing:
            state.pausing.discard(trial)
            return [] if state.pausing else self._rank()
        if state.pausing:
            return []
        if not self._training():
            return self._finish("no trial is left to train")
        return [*self._release(), *self._train()]

    # ---- its end

    def _pause(self) -> list[Decision]:
        """Evaluate the trials of the brackets that are to be ranked."""
        state, training = self.state, self._training()
        state.is_halfway = self.next_stage is None and state.paused_at is None
        state.paused_at = state.seconds
        state.pausing = {trial for trial, one in training.items() if self.is_ranked(one.bracket)}
        state.n_pausing = len(state.pausing)
        pauses: list[Decision] = [Pause(trial, evaluate=True) for trial in sorted(state.pausing)]
        return pauses or self._rank()

    def _note_pause(self, event: Paused) -> list[Decision]:
        one = self.state.trials[event.trial]
        one.is_paused = True
        if event.value is not None:
            one.loss, one.has_value = self.state.context.loss(event.value), True
        is_complete = one.epochs == self.max_epochs
        stops: list[Decision] = [self._complete(event.trial)] if is_complete else []
        return [*stops, *self._go_on_without(event.trial)]

    def _rank(self) -> list[Decision]:
        """End a stage; begin the next one with the best of each bracket."""
        state, later = self.state, self.next_stage
        self._time_pause()
        if state.is_halfway and self._training() and self._end() > state.seconds:
            return [*self._train(), Wake(self._end())]
        if later is None:
            return self._finish("the last stage is over")
        ranked = sorted(state.trials, key=lambda trial: (state.trials[trial].loss, trial))
        decisions: list[Decision] = []
        survivors = set[int]()
        for bracket, n in enumerate(later.n_trials):
            members = [trial for trial in ranked if state.trials[trial].bracket == bracket]
            survivors |= {*members[:n]}
            place = f"is not among the best {min(n, len(members))} of {len(members)}"
            for trial in members[n:]:
                value = state.context.loss(state.trials[trial].loss)
                told = f"{value:.6g}" if math.isfinite(value) else "no finite value"
                if not state.trials[trial].is_done:
                    decisions.append(Stop(trial, f"stage {state.stage + 1}: {told} {place}"))
        state.stage += 1
        # A trial that is done needs no workers: it takes one of the last places.
        order = [trial for trial in ranked if trial in survivors]
        order.sort(key=lambda trial: state.trials[trial].is_done)
        state.trials = {trial: state.trials[trial] for trial in order}
        for trial, bracket in self.assign(order).items():
            state.trials[trial].bracket = bracket
        if not self._training():
            return [*decisions, *self._finish("no trial is left to train")]
        return [*decisions, *self._release(), *self._train(), Wake(self._end())]

    def _time_pause(self) -> None:
        state = self.state
        took_s = 0.0 if state.paused_at is None else state.seconds - state.paused_at
        n_workers = max(1, min(state.n_workers, state.n_wanted))
        state.pause_s = max(state.pause_s, took_s)
        state.trial_s = max(state.trial_s, took_s * n_workers / max(1, state.n_pausing))

    def _finish(self, reason: str) -> list[Decision]:
        self.state.finished = True
        scored = [(one.loss, trial) for trial, one in self.state.trials.items() if one.has_value]
        _, best = min(scored, default=(math.inf, None))
        return end_all(self._training(), best, reason)


def end_all(trials: Iterable[int], best: int | None, reason: str) -> list[Decision]:
    """End a search; what its best trial has trained counts as complete.

    Examples
    --------
    >>> end_all([4, 2], 2, "the time is over")[1:]
    [Stop(trial=2, reason='the time is over; it is the best', outcome='complete'), Finish()]
    """
    stops = [
        Stop(trial, f"{reason}; it is the best", "complete")
        if trial == best
        else Stop(trial, reason)
        for trial in trials
    ]
    return [*stops, Finish()]


def check_staged(**counts: Any) -> None:
    """Check counts of 1 or more, and factors of 2 or more; None is a default.

    Raises
    ------
    SearchError
        Naming the wrong value.
    """
    counts = {name: count for name, count in counts.items() if count is not None}
    check_counts(**counts)
    for name in counts.keys() & {"reduction_factor", "parallelism_factor"}:
        if counts[name] < 2:
            raise SearchError(f"{name} must be 2 or more, got {counts[name]!r}")
