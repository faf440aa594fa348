"""HyperSched: ASHA that knows its deadline, and gives the workers of the bad trials to the best."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from dagsel.flow import (
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
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
from dagsel.flows.drawing import Drawing
from dagsel.flows.stages import EPOCHS_AHEAD, LAST_WORD, WithinBudget, check_staged, end_all
from dagsel.planning.brackets import n_workers_of


@dataclass(slots=True)
class Candidate:
    """A live trial."""

    epochs: int = 0
    n_given: int = 0
    gang: int = 0  # 0 while it stands on a rung
    rests: bool = False  # in a pause of all
    rung: int = 0  # how many it has passed
    loss: float = math.inf
    since: float = 0.0  # when its present epoch began


@dataclass(slots=True)
class HyperSchedState(Drawing):
    """The state of HyperSched."""

    n_workers: int = 0
    seconds: float = 0.0
    explores: bool = True
    candidates: dict[int, Candidate] = field(default_factory=dict)
    rungs: list[list[tuple[float, int]]] = field(default_factory=list)  # loss and trial, sorted
    best: tuple[float, int] | None = None  # loss and trial, of those that are complete
    pausing: set[int] = field(default_factory=set)
    paused_at: float = 0.0  # when they were told to
    pause_s: float | None = None  # how long a pause and its evaluation took
    n_timed: int = 0  # epochs on one worker, and what they took
    timed_s: float = 0.0


@dataclass
class HyperSched(WithinBudget):
    """Explore as ASHA does as long as there is time; then reallocate the workers to the best.

    Liaw et al., HyperSched: Dynamic Resource Reallocation for Model Development on a Deadline, SoCC
    2019. The paper leaves the numbers of its policies to the implementation. Here, so is assumed:

    - the cluster has as many workers, from beginning to end, as the budget pays for until the
      deadline;
    - a new trial begins only while one worker could take it by the deadline as far as the furthest
      trial is now, at the mean time of an epoch so far;
    - from then on there are no rungs: the best trials, as many as there are workers, go on,
      wherever they stand; each time half of the time that was left has gone, the worse half of them
      is stopped, and the workers are shared equally among the others;
    - once, halfway, all pause and are evaluated: the last pause begins as much before the deadline
      as that one took.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    min_epochs
        Epochs up to the first rung; each next one is at η times as many.
    reduction_factor
        η: the best 1/η of a rung go on.
    max_workers
        Workers of a trial, at most; None for no limit.

    Raises
    ------
    SearchError
        If a value is none, or the budget is less than a worker until the deadline.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> flow = HyperSched(deadline="10 min", budget="40 worker-minutes")
    >>> flow.start(Context(n_workers=4))
    [Scale(n_workers=4), Wake(seconds=299.7), Ask(n=4, sampling='study')]
    >>> flow.handle(Asked(trials=(0, 1)))[0]
    Train(trial=0, epochs=1)
    """

    deadline: float | str
    budget: float | str
    min_epochs: int = field(default=1, kw_only=True)
    reduction_factor: int = field(default=4, kw_only=True)
    max_workers: int | None = field(default=None, kw_only=True)
    max_epochs: int | None = field(default=None, kw_only=True)
    price_per_worker_hour: float | None = field(default=None, kw_only=True)
    state: HyperSchedState = field(
        default_factory=HyperSchedState, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_staged(
            min_epochs=self.min_epochs,
            reduction_factor=self.reduction_factor,
            max_workers=self.max_workers,
            max_epochs=self.max_epochs,
        )
        _ = self.n_workers  # refuses a budget that pays for none

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs, deadline_s=self.deadline_s, budget=self._budget)

    @property
    def end_s(self) -> float:
        """When the trials that are left are evaluated for the last time."""
        return self.deadline_s - max(LAST_WORD * self.deadline_s, self.state.pause_s or 0.0)

    @cached_property
    def n_workers(self) -> int:
        """Workers that the budget pays for until the deadline."""
        return n_workers_of(self.deadline_s, self.budget_worker_s)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the workers, and for a trial for each that is there."""
        self.state.context, self.state.n_workers = context, context.n_workers
        return [Scale(self.n_workers), Wake(self.end_s / 2), *self._explore()]

    def handle(self, event: Event) -> list[Decision]:
        """Judge what stands on a rung; from some time on only who keeps its workers."""
        state = self.state
        if state.finished:
            return []
        if isinstance(event, Reported | Paused | Tick | DeadlineReached):
            state.seconds = event.seconds
        match event:
            case Asked(trials):
                state.receive(event)
                decisions = [self._train(trial, Candidate()) for trial in trials]
                return [*decisions, *self._go_on()]
            case Reported(trial) if trial in state.candidates:
                return self._note(event)
            case Paused(trial, value=value) if trial in state.pausing:
                state.candidates[trial].rests = True
                if value is not None:
                    state.candidates[trial].loss = state.context.loss(value)
                return self._let_go(trial)
            case TrialFailed(trial) if trial in state.candidates:
                del state.candidates[trial]
                return self._let_go(trial)
            case WorkersChanged(n_workers):
                before, state.n_workers = state.n_workers, n_workers
                is_lost = n_workers < min(before, self.n_workers)
                again: list[Decision] = [Scale(self.n_workers)] if is_lost else []
                return [*again, *self._go_on()]
            case Tick(seconds) if not state.pausing:
                is_due = state.pause_s is None or seconds >= self.end_s
                return self._pause() if is_due else self._reallocate()
            case DeadlineReached():
                return self._finish("the time is over")
            case _:
                return []

    def _note(self, event: Reported) -> list[Decision]:
        state, candidate = self.state, self.state.candidates[event.trial]
        candidate.epochs, candidate.loss = event.epoch, state.context.loss(event.value)
        if candidate.gang == 1:
            state.n_timed += 1
            state.timed_s += event.seconds - candidate.since
        candidate.since = event.seconds
        if event.epoch == self.max_epochs:
            result = (candidate.loss, event.trial)
            state.best = result if state.best is None else min(state.best, result)
            del state.candidates[event.trial]
            reason = f"trained to the end, {event.epoch} epochs"
            return [Stop(event.trial, reason, "complete"), *self._let_go(event.trial)]
        if event.trial in state.pausing:
            return []
        if state.explores and event.epoch < candidate.n_given:
            return []
        if state.explores:
            self._stand(event.trial, candidate)
            return self._go_on()
        return self._grant(event.trial, candidate)

    def _let_go(self, trial: int) -> list[Decision]:
        state = self.state
        if trial in state.pausing:
            state.pausing.discard(trial)
            return [] if state.pausing else self._resume()
        return self._go_on()

    # ---- exploring

    def _stand(self, trial: int, candidate: Candidate) -> None:
        """Let a trial pause on its rung."""
        rungs = self.state.rungs
        if candidate.rung == len(rungs):
            rungs.append([])
        rungs[candidate.rung] = sorted([*rungs[candidate.rung], (candidate.loss, trial)])
        candidate.gang = 0

    def _train(self, trial: int, candidate: Candidate) -> Train:
        until = self.min_epochs * self.reduction_factor**candidate.rung
        if self.max_epochs is not None:
            until = min(until, self.max_epochs)
        n = until - candidate.epochs
        candidate.n_given, candidate.gang, candidate.since = until, 1, self.state.seconds
        self.state.candidates[trial] = candidate
        return Train(trial, n)

    def _go_on(self) -> list[Decision]:
        state = self.state
        if state.pausing:
            return []
        if state.explores and not self._has_time():
            return self._reallocate()
        decisions = self._explore() if state.explores else self._share()
        if not state.n_awaited and not any(
            candidate.gang for candidate in state.candidates.values()
        ):
            return [*decisions, *self._finish("no trial is left to train")]
        return decisions

    def _has_time(self) -> bool:
        state = self.state
        if state.exhausted and not any(candidate.gang for candidate in state.candidates.values()):
            return False  # nothing new can come: what pauses may have the workers
        furthest = max((candidate.epochs for candidate in state.candidates.values()), default=0)
        epoch_s = state.timed_s / max(1, state.n_timed)
        return state.seconds + epoch_s * furthest < self.end_s

    def _explore(self) -> list[Decision]:
        """Give free workers to promoted trials, then to new ones."""
        state = self.state
        n_busy = sum(candidate.gang for candidate in state.candidates.values()) + state.n_awaited
        free = min(max(1, state.n_workers), self.n_workers) - n_busy
        decisions: list[Decision] = []
        while free > 0 and (trial := self._promoted()) is not None:
            candidate = state.candidates[trial]
            candidate.rung += 1
            decisions.append(self._train(trial, candidate))
            free -= 1
        return [*decisions, *state.ask(free)]

    def _promoted(self) -> int | None:
        candidates = self.state.candidates
        for rung in reversed(range(len(self.state.rungs))):
            results = self.state.rungs[rung]
            for _, trial in results[: len(results) // self.reduction_factor]:
                if (
                    trial in candidates
                    and not candidates[trial].gang
                    and candidates[trial].rung == rung
                ):
                    return trial
        return None

    # ---- reallocating

    def _reallocate(self) -> list[Decision]:
        """Stop the worse half, or at first what has no worker; share the workers anew."""
        state = self.state
        ranked = sorted(state.candidates, key=lambda trial: (state.candidates[trial].loss, trial))
        n = self.n_workers if state.explores else math.ceil(len(ranked) / 2)
        state.explores = False
        decisions: list[Decision] = []
        for trial in ranked[n:]:
            del state.candidates[trial]
            decisions.append(Stop(trial, "its workers go to better trials"))
        state.candidates = {trial: state.candidates[trial] for trial in ranked[:n]}
        if not state.candidates and not state.n_awaited:
            return [*decisions, *self._finish("no trial is left to train")]
        rest_s = self.end_s - state.seconds
        is_last = len(state.candidates) <= 1 or rest_s < LAST_WORD * self.deadline_s
        wake = Wake(self.end_s if is_last else self.end_s - rest_s / 2)
        return [*decisions, *self._share(), wake]

    def _share(self) -> list[Decision]:
        """Share the workers equally, the best trials first; no trial is left without one."""
        state = self.state
        n, k = min(max(1, state.n_workers), self.n_workers), len(state.candidates)
        decisions: list[Decision] = []
        for place, (trial, candidate) in enumerate(state.candidates.items()):
            gang = max(1, n // k + (place < n % k))
            gang = gang if self.max_workers is None else min(gang, self.max_workers)
            decisions += self._grant(trial, candidate, gang)
        return decisions

    def _grant(self, trial: int, candidate: Candidate, gang: int | None = None) -> list[Decision]:
        gang = candidate.gang if gang is None else gang
        until = candidate.epochs + EPOCHS_AHEAD
        if self.max_epochs is not None:
            until = min(until, self.max_epochs)
        n = max(0, until - candidate.n_given)
        if not (n or candidate.rests or gang != candidate.gang):
            return []
        candidate.rests = False
        candidate.n_given += n
        candidate.gang = gang
        return [Train(trial, n, gang=gang)]

    # ---- pauses of all

    def _pause(self) -> list[Decision]:
        """Evaluate what has trained on since its last epoch."""
        state = self.state
        running = sorted(trial for trial, candidate in state.candidates.items() if candidate.gang)
        state.pausing, state.paused_at = set(running), state.seconds
        return [Pause(trial, evaluate=True) for trial in running] or self._resume()

    def _resume(self) -> list[Decision]:
        """Go on after the first pause, which tells how long the last one takes; then end."""
        state = self.state
        state.pause_s = max(state.pause_s or 0.0, state.seconds - state.paused_at)
        if state.seconds >= self.end_s:
            return self._finish("the deadline is there")
        for trial, candidate in state.candidates.items():
            if state.explores and candidate.gang and candidate.epochs == candidate.n_given:
                self._stand(trial, candidate)  # its last epoch ended in the pause
        if not state.explores or not self._has_time():
            return self._reallocate()
        decisions: list[Decision] = [Wake(self.end_s)]
        for trial, candidate in state.candidates.items():
            if candidate.gang and candidate.rests:
                decisions.append(Train(trial, 0))
            candidate.rests = False
        return [*decisions, *self._go_on()]

    def _finish(self, reason: str) -> list[Decision]:
        state = self.state
        state.finished = True
        scored = [
            (one.loss, trial)
            for trial, one in state.candidates.items()
            if one.epochs or one.loss < math.inf
        ]
        _, best = min([*scored, *([] if state.best is None else [state.best])], default=(0.0, None))
        return end_all(state.candidates, best, reason)
