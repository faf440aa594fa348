"""HyperSched: ASHA that knows its deadline; the workers of the worse trials go to the best ones."""

from __future__ import annotations

import math
import sys
from dataclasses import KW_ONLY, dataclass, field

from dagsel.codec import LATER
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
    TrialFailed,
    Wake,
    WorkersChanged,
)
from dagsel.flows.budgeted import (
    EPOCHS_AHEAD,
    LAST_PAUSE,
    BudgetedFlow,
    BudgetedState,
    check_scaling,
    check_staged,
)
from dagsel.flows.rungs import check_rungs
from dagsel.planning.brackets import n_workers_of
from dagsel.planning.capacity import fewer
from dagsel.planning.scaling import ScalingModel

#: Trials in flight for each worker where an epoch has several shards. If there were one, a worker
#: would often wait for a trial that needs its shard and trains elsewhere.
IN_FLIGHT = 2


@dataclass(slots=True)
class HyperSchedTrial:
    """A live trial."""

    epochs: int = 0
    n_given: int = 0
    gang: int = 0  # 0 while it stands on a rung
    is_paused: bool = False  # in a pause of all
    is_scored: bool = False  # in a pause; at the end of an epoch each is
    rung: int = 0  # how many it has passed
    loss: float = math.inf
    since: float = 0.0  # when its present epoch began


@dataclass(slots=True)
class HyperSchedState(BudgetedState):
    """The state of HyperSched."""

    explores: bool = True
    trials: dict[int, HyperSchedTrial] = field(default_factory=dict)
    rungs: list[list[tuple[float, int]]] = field(default_factory=list)  # loss and trial, sorted
    n_timed: int = 0  # epochs on one worker, and what they took
    timed_s: float = 0.0
    # Workers that the trials that are left can use; the others were released.
    n_useful: int | None = field(default=None, metadata={LATER: True})


@dataclass
class HyperSched(BudgetedFlow):
    """Explore as ASHA does as long as there is time; then reallocate the workers to the best.

    Liaw et al., HyperSched: Dynamic Resource Reallocation for Model Development on a Deadline, SoCC
    2019. Dunlap et al., SoCC 2021 (Sections 2 and 6.3), who compare `SEER` with it, describe it as
    ASHA on a fixed cluster that tests no new configurations when the deadline is near, gives the
    promising ones more workers, and knows a scaling function. The numbers are assumptions:

    - the cluster has as many workers, from beginning to end, as the budget pays for until the
      deadline, or as it can have if these are fewer;
    - a new trial begins only while one worker could train it by the deadline as far as the furthest
      trial is now, at the mean time of an epoch so far;
    - if the space has no new trial, it stops exploring as soon as a worker has nothing to do;
    - then there are no rungs any more: the best trials, as many as there are workers, go on; each
      time half of the time that was left is over, the worse half of them is stopped, and the
      workers are shared equally among the others;
    - where an epoch has several shards, until the first of these stops, twice as many trials train
      as there are workers. Workers would be idle else: a trial needs the worker that has its next
      shard;
    - a trial gets no more workers than make it faster by the scaling function. So many trials go on
      that all workers are used; workers that no trial is left for are released;
    - once, halfway, all pause and are evaluated. The last pause begins before the deadline by the
      time that this one took.

    Parameters
    ----------
    deadline, budget, max_epochs, price_per_worker_hour
        In seconds, worker-seconds, epochs and money; see `SEER`.
    min_epochs
        Epochs up to the first rung; each next one is at η times as many.
    reduction_factor
        η: the best 1/η of a rung go on.
    max_workers_per_trial
        At most; None for no limit.
    scaling
        λ, the speed of a trial on so many workers; None for linear.

    Raises
    ------
    SearchError
        If a value is wrong, `min_epochs` is above `max_epochs`, or the budget is less than a worker
        until the deadline.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> flow = HyperSched(deadline="10 min", budget="40 worker-minutes")
    >>> flow.start(Context(n_workers=4))
    [Scale(n_workers=4), Wake(seconds=299.7), Ask(n=4, sampling='study')]
    >>> flow.handle(Asked(trials=(0, 1)))[0]
    Train(trial=0, epochs=1)
    """

    _: KW_ONLY
    min_epochs: int = 1
    reduction_factor: int = 4
    max_workers_per_trial: int | None = None
    scaling: ScalingModel | None = None
    state: HyperSchedState = field(
        default_factory=HyperSchedState, init=False, repr=False, compare=False
    )
    #: Workers that the budget pays for until the deadline.
    n_workers: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_staged(max_workers_per_trial=self.max_workers_per_trial)
        check_scaling(self.scaling)
        super().__post_init__()
        check_rungs(self.min_epochs, self.max_epochs or self.min_epochs, self.reduction_factor)
        self.n_workers = n_workers_of(self.deadline_s, self.cost.worker_seconds)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the workers, and for a trial for each that is there."""
        self.state.context, self.state.n_workers = context, context.n_workers
        return [Scale(self._n_wanted), Wake(self._end_s / 2), *self._explore()]

    def workers_to_begin(self, context: Context) -> int | None:
        """Return all workers."""
        left = (self.deadline_s - context.seconds, self.cost.worker_seconds)
        context.capacity.check(*left, context.n_workers)
        return fewer(self.n_workers, context.capacity)

    @property
    def _n_wanted(self) -> int:
        n_workers = fewer(self.n_workers, self.state.context.capacity)
        return min(n_workers, self.state.n_useful or n_workers)

    @property
    def _most_per_trial(self) -> int:
        most = min(self._n_wanted, self.max_workers_per_trial or self._n_wanted)
        return self.scaling.best(most) if self.scaling else most

    def handle(self, event: Event) -> list[Decision]:
        """Explore while there is time; then share the workers among fewer and fewer trials."""
        state = self.state
        if state.finished:
            return []
        if isinstance(event, Reported | Paused | Tick | DeadlineReached):
            state.seconds = event.seconds
        match event:
            case Asked(trials):
                state.receive(event)
                state.trials |= {trial: HyperSchedTrial() for trial in trials}
                return [*map(self._train_to_rung, trials), *self._go_on()]
            case Reported(trial) if trial in state.trials:
                return self._note_epoch(event)
            case Paused(trial, value=value) if trial in state.pausing:
                state.trials[trial].is_paused = True
                if value is not None:
                    one = state.trials[trial]
                    one.loss, one.is_scored = state.context.loss(value), True
                return self._go_on_without(trial)
            case TrialFailed(trial) if trial in state.trials:
                del state.trials[trial]
                return self._go_on_without(trial)
            case WorkersChanged(n_workers):
                is_lost = n_workers < min(state.n_workers, self._n_wanted)
                state.n_workers = n_workers
                again: list[Decision] = [Scale(self._n_wanted)] if is_lost else []
                return [*again, *self._go_on()]
            case Tick(seconds) if not state.pausing:
                is_due = state.pause_s is None or seconds >= self._end_s
                return self._pause() if is_due else self._reallocate()
            case DeadlineReached():
                return self._finish("the time or the budget is over")
            case _:
                return []

    def _note_epoch(self, event: Reported) -> list[Decision]:
        state, one = self.state, self.state.trials[event.trial]
        one.epochs, one.loss = event.epoch, state.context.loss(event.value)
        if one.gang == 1:
            state.n_timed += 1
            state.timed_s += event.seconds - one.since
        one.since = event.seconds
        if event.epoch == self.max_epochs:
            del state.trials[event.trial]
            stop = state.complete(event.trial, one.loss, event.epoch)
            return [stop, *self._go_on_without(event.trial)]
        if event.trial in state.pausing:
            return []
        if not state.explores:
            return self._train_ahead(event.trial, one.gang)
        if event.epoch < one.n_given:
            return []
        self._put_on_rung(event.trial)
        return self._go_on()

    def _go_on_without(self, trial: int) -> list[Decision]:
        """Go on after a trial has paused or ended."""
        state = self.state
        if trial in state.pausing:
            state.pausing.discard(trial)
            return [] if state.pausing else self._resume()
        return self._go_on()

    def _go_on(self) -> list[Decision]:
        state = self.state
        if state.pausing:
            return []
        if state.explores and not self._has_time():
            return self._reallocate()
        decisions = self._explore() if state.explores else self._share()
        if not state.n_awaited and not self._n_busy:
            return [*decisions, *self._finish("no trial is left to train")]
        return decisions

    @property
    def _n_busy(self) -> int:
        return sum(one.gang for one in self.state.trials.values())

    @property
    def _n_usable(self) -> int:
        return min(max(1, self.state.n_workers), self._n_wanted)

    @property
    def _end_s(self) -> float:
        # When the trials that are left are evaluated for the last time.
        return self.deadline_s - max(LAST_PAUSE * self.deadline_s, self.state.pause_s or 0.0)

    @property
    def _per_worker(self) -> int:
        return IN_FLIGHT if self.state.context.n_shards > 1 else 1

    # ---- exploring

    def _has_time(self) -> bool:
        """Whether a new trial can still be trained as far as the furthest one is."""
        state = self.state
        furthest = max((one.epochs for one in state.trials.values()), default=0)
        epoch_s = state.timed_s / max(1, state.n_timed)
        return state.seconds + epoch_s * furthest < self._end_s

    def _explore(self) -> list[Decision]:
        """Use free workers for promoted trials, then for new ones."""
        state, decisions = self.state, list[Decision]()
        room = self._per_worker * self._n_usable
        free = max(0, room - self._n_busy - state.n_awaited)
        promoted = self._promoted(free)
        if state.exhausted and self._n_busy + len(promoted) < self._n_usable:
            return self._reallocate()  # else workers would be idle
        for trial in promoted:
            state.trials[trial].rung += 1
            decisions.append(self._train_to_rung(trial))
        return [*decisions, *state.ask(free - len(promoted))]

    def _promoted(self, most: int) -> list[int]:
        """Return the trials to promote, those on the highest rung first."""
        trials = self.state.trials
        return [
            trial
            for rung, results in reversed([*enumerate(self.state.rungs)])
            for _, trial in results[: len(results) // self.reduction_factor]
            if trial in trials and not trials[trial].gang and trials[trial].rung == rung
        ][:most]

    def _train_to_rung(self, trial: int) -> Train:
        one = self.state.trials[trial]
        until = self.min_epochs * self.reduction_factor**one.rung
        until = min(until, self.max_epochs or sys.maxsize)
        one.n_given, one.gang, one.since = until, 1, self.state.seconds
        return Train(trial, until - one.epochs)

    def _put_on_rung(self, trial: int) -> None:
        one, rungs = self.state.trials[trial], self.state.rungs
        if one.rung == len(rungs):
            rungs.append([])
        rungs[one.rung] = sorted([*rungs[one.rung], (one.loss, trial)])
        one.gang = 0

    # ---- reallocating

    def _reallocate(self) -> list[Decision]:
        """Stop the worse half, or at first all for which there is no worker; share the workers."""
        state = self.state
        ranked = sorted(state.trials, key=lambda trial: (state.trials[trial].loss, trial))
        least = math.ceil(self._n_wanted / self._most_per_trial)  # that use all workers
        n = self._per_worker * self._n_wanted if state.explores else max(least, self._n_halved)
        state.explores = False
        stops = [Stop(trial, "its workers go to better trials") for trial in ranked[n:]]
        state.trials = {trial: state.trials[trial] for trial in ranked[:n]}
        if not state.trials and not state.n_awaited:
            return [*stops, *self._finish("no trial is left to train")]
        rest_s = self._end_s - state.seconds
        is_last = len(state.trials) <= least or rest_s < LAST_PAUSE * self.deadline_s
        wake = Wake(self._end_s if is_last else self._end_s - rest_s / 2)
        return [*stops, *self._share(), wake]

    @property
    def _n_halved(self) -> int:
        n = len(self.state.trials)
        return math.ceil((min(n, self._n_wanted) if self._per_worker > 1 else n) / 2)

    def _share(self) -> list[Decision]:
        """Share the workers equally, the best trials first; each trial keeps at least one."""
        state, most, decisions = self.state, self._most_per_trial, list[Decision]()
        k = len(state.trials)
        if k * most < self._n_wanted and not state.n_awaited:
            state.n_useful = max(1, k * most)
            decisions.append(Scale(state.n_useful))
        n = self._n_usable
        for place, trial in enumerate(state.trials):
            gang = max(1, n // k + (place < n % k))
            decisions += self._train_ahead(trial, min(gang, most))
        return decisions

    def _train_ahead(self, trial: int, gang: int) -> list[Decision]:
        one = self.state.trials[trial]
        until = min(one.epochs + EPOCHS_AHEAD, self.max_epochs or sys.maxsize)
        n = max(0, until - one.n_given)
        if not (n or one.is_paused or gang != one.gang):
            return []
        one.n_given, one.gang, one.is_paused = one.n_given + n, gang, False
        return [Train(trial, n, gang=gang)]

    # ---- pauses of all

    def _pause(self) -> list[Decision]:
        """Evaluate what has trained on since its last epoch."""
        state = self.state
        state.pausing = {trial for trial, one in state.trials.items() if one.gang}
        state.paused_at = state.seconds
        pauses = [Pause(trial, evaluate=True) for trial in sorted(state.pausing)]
        return [*pauses] or self._resume()

    def _resume(self) -> list[Decision]:
        """Go on after the first pause, which tells how long the last one takes; then end."""
        state = self.state
        state.pause_s = max(state.pause_s or 0.0, state.seconds - state.paused_at)
        if state.seconds >= self._end_s:
            return self._finish("the deadline is there")
        for trial, one in state.trials.items():
            if state.explores and one.gang and one.epochs == one.n_given:
                self._put_on_rung(trial)  # its last epoch ended in the pause
        if not state.explores or not self._has_time():
            return self._reallocate()
        decisions: list[Decision] = [Wake(self._end_s)]
        for trial, one in state.trials.items():
            if one.gang and one.is_paused:
                decisions.append(Train(trial, 0))
            one.is_paused = False
        return [*decisions, *self._go_on()]

    def _finish(self, reason: str) -> list[Decision]:
        trials = self.state.trials
        is_scored = (item for item in trials.items() if item[1].epochs or item[1].is_scored)
        return self.state.end(trials, ((one.loss, trial) for trial, one in is_scored), reason)
