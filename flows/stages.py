"""What searches in stages share: train, pause, rank and go on, each at its time by the clock."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

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

#: Epochs that a trial has before it, so that none waits while the flow hears of its last one.
EPOCHS_AHEAD = 2
#: Share of the deadline that is kept free for the last pause, lest the deadline come before it.
LAST_WORD = 0.001


@dataclass(slots=True)
class Contender:
    """A trial of a search in stages."""

    bracket: int
    wanted: int  # workers that the plan gives it
    gang: int = 0  # workers that it was given
    epochs: int = 0
    n_given: int = 0
    loss: float = math.inf
    is_evaluated: bool = False  # at a pause
    rests: bool = True
    is_done: bool = False  # trained to its last epoch, and stopped

    @property
    def has_value(self) -> bool:
        """Whether it was scored, after an epoch or at a pause."""
        return self.epochs > 0 or self.is_evaluated


@dataclass(slots=True)
class StagedState:
    """The state of a search in stages; its contenders stand in the order of their service."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    n_workers: int = 0  # that are there
    n_wanted: int = 0  # that were asked for
    stage: int = 0
    contenders: dict[int, Contender] = field(default_factory=dict)
    pausing: set[int] = field(default_factory=set)
    paused_at: float | None = None  # when the last pause began
    is_rehearsal: bool = False  # that pause is to tell how long one takes
    pause_s: float = 0.0  # how long a pause and its evaluation took, at most
    trial_s: float = 0.0  # the same for one trial on one worker
    n_pausing: int = 0  # trials of that pause
    seconds: float = 0.0
    n_billed: int = 0  # the most that were asked for since then
    spent: float = 0.0  # worker-seconds that were asked for so far
    finished: bool = False


class WithinBudget(Flow):
    """A search that may last so long and cost so much.

    A subclass is a dataclass with the fields below.
    """

    deadline: float | str
    budget: float | str
    price_per_worker_hour: float | None

    @property
    def deadline_s(self) -> float:
        """Seconds that the search may last."""
        return to_seconds("deadline", self.deadline)

    @property
    def budget_worker_s(self) -> float:
        """Worker-seconds that it may cost."""
        return self._budget.worker_seconds

    @property
    def _budget(self) -> Budget:
        return read_budget(self.budget, self.price_per_worker_hour)


class StagedSearch(WithinBudget):
    """A search whose trials are ranked at fixed times.

    A subclass is a dataclass with the fields below; it gives the plan. The ends of the
    stages are counted from the beginning of the run, and a pause begins as much before as the
    longest one took so far: what goes slower than planned shortens a stage, it moves no end. With
    more trials on a worker than then it counts as longer, and a search of one stage pauses halfway
    to see how long it takes. A trial that has reached `max_epochs` is complete; its value counts in
    the rankings on.
    """

    max_epochs: int | None
    state: StagedState

    sampling: Sampling = "study"
    #: Whether the best of all brackets get the most workers, or each stays in its bracket.
    across: ClassVar[bool] = False

    @property
    def plan(self) -> StagePlan:
        """What is done if nothing fails and every worker comes at once."""
        raise NotImplementedError

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        limits = (self.deadline_s, self._budget)
        return Traits(self.max_epochs, self.sampling, False, None, *limits, self.plan)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the workers and the trials of the first stage."""
        state, stage = self.state, self._stage
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
        match event:
            case Asked(trials):
                return self._admit(trials)
            case Reported(trial) if trial in self.state.contenders:
                return self._note_epoch(event)
            case Paused(trial) if trial in self.state.pausing:
                return self._note_pause(event)
            case TrialFailed(trial) if trial in self.state.contenders:
                del self.state.contenders[trial]
                return self._let_go(trial)
            case WorkersChanged(n_workers):
                return self._staff(n_workers)
            case Tick() if not self.state.pausing:
                return self._pause()
            case DeadlineReached():
                return self._finish("the time is over")
            case _:
                return []

    @property
    def _stage(self) -> Stage:
        return self.plan.stages[self.state.stage]

    @property
    def _is_last(self) -> bool:
        return self.state.stage == len(self.plan.stages) - 1

    def _training(self) -> dict[int, Contender]:
        contenders = self.state.contenders.items()
        return {trial: one for trial, one in contenders if not one.is_done}

    def _end(self) -> float:
        """When the trials of this stage have to pause."""
        state = self.state
        end, n_trials = self.plan.ends[state.stage], len(self._training())
        pause_s = max(state.pause_s, state.trial_s * n_trials / max(1, state.n_wanted))
        if self._is_last:  # what the stages before have cost too much has to be saved now
            left = self.budget_worker_s - state.spent
            end = min(end, state.seconds + left / max(1, state.n_wanted))
            if state.paused_at is None:  # nobody knows how long a pause takes: this one tells
                return (state.seconds + end) / 2
            pause_s = max(pause_s, LAST_WORD * self.deadline_s)
        return max(state.seconds, end - pause_s)

    # ---- workers

    def _scale(self, n_workers: int) -> list[Decision]:
        state = self.state
        n_workers = max(1, n_workers)
        if n_workers == state.n_wanted:
            return []
        state.n_wanted = n_workers
        state.n_billed = max(state.n_billed, n_workers)
        return [Scale(n_workers)]

    def _release(self) -> list[Decision]:
        wanted = sum(one.wanted for one in self._training().values())
        return self._scale(min(self._stage.n_workers, wanted))

    def _staff(self, n_workers: int) -> list[Decision]:
        state = self.state
        before, state.n_workers = state.n_workers, n_workers
        decisions: list[Decision] = []
        if n_workers < min(before, state.n_wanted):
            # The lost ones cost no more, so the plan has the money for others.
            decisions.append(Scale(state.n_wanted))
        return decisions if state.pausing else [*decisions, *self._train()]

    def _train(self) -> list[Decision]:
        """Give all that train the workers that are there, the first ones first."""
        training = self._training()
        n_workers = max(1, self.state.n_workers)
        least = min(self.plan.workers[0], n_workers)
        free = max(0, n_workers - least * len(training))
        decisions: list[Decision] = []
        for trial, one in training.items():
            more = min(free, one.wanted - least)
            free -= more
            decisions += self._go_on(trial, least + more)
        return decisions

    def _go_on(self, trial: int, gang: int) -> list[Decision]:
        one = self.state.contenders[trial]
        until = one.epochs + EPOCHS_AHEAD
        if self.max_epochs is not None:
            until = min(until, self.max_epochs)
        n = until - one.n_given
        if not (n or one.rests or gang != one.gang):
            return []
        one.n_given, one.gang = until, gang
        one.rests = False
        return [Train(trial, n, gang=gang)]

    # ---- trials

    def _admit(self, trials: tuple[int, ...]) -> list[Decision]:
        state = self.state
        for trial, bracket in zip(trials, self._seats(), strict=False):
            state.contenders[trial] = Contender(bracket, self.plan.workers[bracket])
        if not trials:
            return self._finish("no trial can be drawn")
        return [*self._release(), *self._train()]

    def _seats(self) -> list[int]:
        """Give the bracket of each place of the stage, those with the most workers first."""
        workers, n_trials = self.plan.workers, self._stage.n_trials
        order = sorted(range(len(workers)), key=lambda bracket: -workers[bracket])
        return [bracket for bracket in order for _ in range(n_trials[bracket])]

    def _note_epoch(self, event: Reported) -> list[Decision]:
        state = self.state
        one = state.contenders[event.trial]
        one.epochs = event.epoch
        one.loss = state.context.loss(event.value)
        if event.trial in state.pausing:
            return []
        if event.epoch == self.max_epochs:
            return [self._complete(event.trial), *self._let_go(event.trial)]
        return self._go_on(event.trial, one.gang)

    def _note_pause(self, event: Paused) -> list[Decision]:
        state = self.state
        one = state.contenders[event.trial]
        one.rests = True
        if event.value is not None:
            one.loss, one.is_evaluated = state.context.loss(event.value), True
        decisions: list[Decision] = []
        if one.epochs == self.max_epochs:
            decisions = [self._complete(event.trial)]
        return [*decisions, *self._let_go(event.trial)]

    def _complete(self, trial: int) -> Stop:
        self.state.contenders[trial].is_done = True
        return Stop(trial, f"trained to the end, {self.max_epochs} epochs", "complete")

    def _let_go(self, trial: int) -> list[Decision]:
        """Go on without a trial that is paused or has ended."""
        state = self.state
        if trial in state.pausing:
            state.pausing.discard(trial)
            return [] if state.pausing else self._rank()
        if state.pausing:
            return []
        if not self._training():
            return self._finish("no trial is left to train")
        return [*self._release(), *self._train()]

    def _pause(self) -> list[Decision]:
        state = self.state
        state.is_rehearsal = self._is_last and state.paused_at is None
        state.paused_at = state.seconds
        keep = None if self._is_last else self.plan.stages[state.stage + 1].n_trials
        now = self._stage.n_trials
        state.pausing = {
            trial
            for trial, one in self._training().items()
            if self.across or keep is None or keep[one.bracket] < now[one.bracket]
        }
        state.n_pausing = len(state.pausing)
        pauses: list[Decision] = [Pause(trial, evaluate=True) for trial in sorted(state.pausing)]
        return pauses or self._rank()

    def _rank(self) -> list[Decision]:
        """End a stage; begin the next one with the best of each bracket."""
        state = self.state
        self._time_pause()
        if state.is_rehearsal and self._training() and self._end() > state.seconds:
            return [*self._train(), Wake(self._end())]
        if self._is_last:
            return self._finish("the last stage is over")
        keep = self.plan.stages[state.stage + 1].n_trials
        ranked = sorted(state.contenders, key=lambda trial: (state.contenders[trial].loss, trial))
        decisions: list[Decision] = []
        survivors: list[int] = []
        for bracket, n in enumerate(keep):
            members = [trial for trial in ranked if state.contenders[trial].bracket == bracket]
            survivors += members[:n]
            best = f"{min(n, len(members))} of {len(members)}"
            decisions += [
                Stop(trial, self._miss(state.contenders[trial], best))
                for trial in members[n:]
                if not state.contenders[trial].is_done
            ]
        state.stage += 1
        self._seat([trial for trial in ranked if trial in survivors])
        if not self._training():
            return [*decisions, *self._finish("no trial is left to train")]
        return [*decisions, *self._release(), *self._train(), Wake(self._end())]

    def _time_pause(self) -> None:
        state = self.state
        took_s = 0.0 if state.paused_at is None else state.seconds - state.paused_at
        state.pause_s = max(state.pause_s, took_s)
        n_workers = max(1, min(state.n_workers, state.n_wanted))
        trial_s = took_s * n_workers / max(1, state.n_pausing)
        state.trial_s = max(state.trial_s, trial_s)

    def _seat(self, survivors: list[int]) -> None:
        state = self.state
        # What has no epoch left needs no workers: it keeps the last places.
        order = sorted(survivors, key=lambda trial: state.contenders[trial].is_done)
        state.contenders = {trial: state.contenders[trial] for trial in order}
        if self.across:
            for trial, bracket in zip(order, self._seats(), strict=False):
                one = state.contenders[trial]
                one.bracket, one.wanted = bracket, self.plan.workers[bracket]

    def _miss(self, one: Contender, best: str) -> str:
        stage = f"stage {self.state.stage + 1}"
        if not math.isfinite(one.loss):
            return f"{stage}: no finite value is not among the best {best}"
        return f"{stage}: {self.state.context.loss(one.loss):.6g} is not among the best {best}"

    def _finish(self, reason: str) -> list[Decision]:
        state = self.state
        state.finished = True
        scored = [(one.loss, trial) for trial, one in state.contenders.items() if one.has_value]
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


def check_staged(**counts: int | None) -> None:
    """Refuse counts and factors that are none; None is a default.

    Raises
    ------
    SearchError
        Naming the culprit.
    """
    check_counts(**{name: count for name, count in counts.items() if count is not None})
    for name in ("reduction_factor", "parallelism_factor"):
        factor = counts.get(name)
        if factor is not None and factor < 2:
            raise SearchError(f"{name} must be 2 or more, got {factor!r}")
