"""Time-sharing: more trials than workers; each worker trains its trials in turn.

Trials are placed by Algorithms 1 and 2 of the paper of `Hermes`: evenly, so many on each worker at
most, and the others wait. Schedulers differ in which of a worker's trials runs next, and for how
long.
"""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, field

from dagsel.checks import flag
from dagsel.flow import (
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
    Stop,
    Tick,
    Train,
    Traits,
    TrialFailed,
    WorkersChanged,
)
from dagsel.flows.drawing import Drawing, check_counts, stop_all
from dagsel.planning.budget import to_seconds


@dataclass(slots=True)
class Turns:
    """The turns of a live trial."""

    begun: bool = False
    quantum_s: float | None = None  # of the latest turn
    was_short: bool = False  # the latest turn was one batch, longer than the quantum
    leaves: bool = False  # it is about to pause, because its worker is gone
    n_waited: int = 0  # turns of others on its worker since its own


@dataclass(slots=True)
class SharedWorker:
    """The trials of a worker, the one that has waited longest first, and whose turn it is."""

    trials: list[int] = field(default_factory=list)
    turn: int | None = None


@dataclass(slots=True)
class SharedWorkers(Drawing):
    """The state of a scheduler that shares workers."""

    trials: dict[int, Turns] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # trials that are on no worker
    workers: list[SharedWorker] = field(default_factory=list)
    has_warned: bool = False


@dataclass
class TimeSharing(Flow):
    """Train every trial to the end, one at a time on each worker.

    A subclass says how urgent a trial is, and how long its turn lasts. Which machine a turn runs on
    is decided by the engine, by where the trial's state and its shards are.
    """

    max_epochs: int
    n_trials: int
    _: KW_ONLY
    quantum: float | str = "10 s"
    max_trials_per_worker: int = 4
    migrate: bool = True
    aging: int | None = field(default=None, init=False, repr=False)
    state: SharedWorkers = field(
        default_factory=SharedWorkers, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        check_counts(
            max_epochs=self.max_epochs,
            n_trials=self.n_trials,
            max_trials_per_worker=self.max_trials_per_worker,
            aging=1 if self.aging is None else self.aging,
        )
        to_seconds("quantum", self.quantum)
        flag("migrate", self.migrate)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs, n_trials=self.n_trials)

    def urgency(self, trial: int) -> float:
        """Return how soon a trial is to run; of equals the one that has waited longest is next."""
        return 0.0

    def quantum_s(self, trial: int) -> float | None:
        """Return how long the next turn of a trial lasts; None if it lasts to its end."""
        return to_seconds("quantum", self.quantum)

    def learn(self, event: Event) -> None:
        """Note what an event says of a trial."""

    def start(self, context: Context) -> list[Decision]:
        """Ask for as many trials as the workers have room for."""
        return [*self._resize(context.n_workers), *self._go_on()]

    def handle(self, event: Event) -> list[Decision]:
        """End the turn that is over and begin the next one."""
        state = self.state
        if state.finished:
            return []
        self.learn(event)
        decisions: list[Decision] = []
        match event:
            case Asked(trials):
                state.receive(event)
                state.trials |= {trial: Turns() for trial in trials}
                state.waiting += trials
            case Paused(trial):
                self._warn_of_long_batches(event)
                state.trials[trial].leaves = False
                self._end_turn(trial)
            case Reported(trial, epoch):
                if epoch < self.max_epochs:
                    return []
                self._remove(trial)
                decisions.append(Stop(trial, "trained to the end", "complete"))
            case TrialFailed(trial):
                self._remove(trial)
            case WorkersChanged(n_workers):
                decisions += self._resize(n_workers)
            case DeadlineReached():
                state.finished = True
                return stop_all(state.trials)
            case Tick():
                return []
        return [*decisions, *self._go_on()]

    # ---- placement: Algorithms 1 and 2

    def _resize(self, n_workers: int) -> list[Decision]:
        """Follow the number of workers; the trials of a worker that is gone wait for room."""
        state, decisions = self.state, list[Decision]()
        n_workers = max(1, n_workers)  # with none the engine waits for one
        state.workers += [SharedWorker() for _ in range(n_workers - len(state.workers))]
        while len(state.workers) > n_workers:
            # The newest one of those with the fewest trials, and an idle one if there is any.
            worker = min(reversed(state.workers), key=lambda w: (w.turn is not None, len(w.trials)))
            state.workers.remove(worker)
            state.waiting += worker.trials
            if worker.turn is not None:
                state.trials[worker.turn].leaves = True
                decisions.append(Pause(worker.turn))
        return decisions

    def _place(self) -> None:
        """Place the trials that wait and have paused, each on the worker with the fewest."""
        state = self.state
        for trial in [t for t in state.waiting if not state.trials[t].leaves]:
            worker = min(state.workers, key=lambda w: len(w.trials))
            if len(worker.trials) >= self.max_trials_per_worker:
                return
            state.waiting.remove(trial)
            worker.trials.append(trial)

    def _migrate_to(self, worker: SharedWorker) -> None:
        """Move trials to an idle worker until no other has two more."""
        while len(worker.trials) < self.max_trials_per_worker:
            others = [w for w in self.state.workers if w is not worker and self._ready(w)]
            if not others:
                return
            fullest = max(others, key=lambda w: len(w.trials))
            if self._ready(worker) and len(fullest.trials) - len(worker.trials) < 2:
                return
            moved = self._next(self._ready(fullest))
            fullest.trials.remove(moved)
            worker.trials.append(moved)

    # ---- turns

    def _go_on(self) -> list[Decision]:
        state = self.state
        self._place()
        places = len(state.workers) * self.max_trials_per_worker
        decisions = state.ask(places - len(state.trials) - state.n_awaited, n_trials=self.n_trials)
        for may_migrate in (False, self.migrate and not state.n_awaited):
            for worker in state.workers:
                if worker.turn is None:
                    if may_migrate:
                        self._migrate_to(worker)
                    decisions += self._begin_turn(worker)
        if not state.trials and not state.n_awaited:
            state.finished = True
            decisions.append(Finish())
        return decisions

    @staticmethod
    def _ready(worker: SharedWorker) -> list[int]:
        return [trial for trial in worker.trials if trial != worker.turn]

    def _next(self, ready: list[int]) -> int:
        n_waited = {trial: self.state.trials[trial].n_waited for trial in ready}
        if self.aging is not None and max(n_waited.values()) >= self.aging:
            return max(n_waited, key=n_waited.__getitem__)
        return max(ready, key=self.urgency)

    def _begin_turn(self, worker: SharedWorker) -> list[Decision]:
        ready = self._ready(worker)
        if not ready:
            return []
        worker.turn = self._next(ready)
        trial = self.state.trials[worker.turn]
        epochs = 0 if trial.begun else self.max_epochs
        trial.begun, trial.quantum_s = True, self.quantum_s(worker.turn)
        return [Train(worker.turn, epochs, seconds=trial.quantum_s)]

    def _end_turn(self, trial: int) -> None:
        for worker in self.state.workers:
            if worker.turn == trial:
                worker.turn = None
                worker.trials.remove(trial)
                for other in worker.trials:
                    self.state.trials[other].n_waited += 1
                worker.trials.append(trial)
                self.state.trials[trial].n_waited = 0

    def _remove(self, trial: int) -> None:
        self._end_turn(trial)
        self.state.trials.pop(trial, None)
        for trials in (self.state.waiting, *(worker.trials for worker in self.state.workers)):
            if trial in trials:
                trials.remove(trial)

    def _warn_of_long_batches(self, paused: Paused) -> None:
        trial, took_s = self.state.trials[paused.trial], paused.trained_s
        quantum_s, was_short = trial.quantum_s, trial.was_short
        if quantum_s is None:
            return
        trial.was_short = paused.losses.n == 1 and took_s > quantum_s
        # Once may be something else than the batch: a shard was loaded, the machine was busy.
        if trial.was_short and was_short and not self.state.has_warned:
            self.state.has_warned = True
            warnings.warn(
                f"a batch of trial {paused.trial} took {took_s:.3g} s, longer than the "
                f"quantum of {quantum_s:g} s: its turns are one batch long; raise quantum",
                stacklevel=3,
            )


@dataclass
class RoundRobin(TimeSharing):
    """The trials of a worker train in turn, a quantum each: the early feedback of Gandiva.

    Xiao et al., Gandiva: Introspective Cluster Scheduling for Deep Learning, OSDI 2018.

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many trials to draw.
    quantum
        How long a turn lasts: seconds of training, or a text such as ``"10 s"``. A turn is never
        shorter than one batch.
    max_trials_per_worker
        G_thres of Hermes' Algorithm 2: how many trials share a worker.
    migrate
        Whether trials move to a worker that would be idle, until no other has two more.

    Raises
    ------
    SearchError
        If the quantum is no time, or a number is below 1.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Paused
    >>> flow = RoundRobin(max_epochs=5, n_trials=2, quantum="10 s")
    >>> flow.start(Context(n_workers=1))
    [Ask(n=2, sampling='study')]
    >>> flow.handle(Asked((0, 1)))
    [Train(trial=0, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(0, 1.25, seconds=10.0, trained_s=10.0))
    [Train(trial=1, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(1, 1.5, seconds=20.0, trained_s=10.0))
    [Train(trial=0, epochs=0, seconds=10.0)]
    """
