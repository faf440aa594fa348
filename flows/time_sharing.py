"""Time-sharing: more trials than workers, each for a quantum at a time.

The placement is Algorithm 1 of the paper of `Hermes`: trials are spread evenly, so many on each
worker at most, and the rest waits. Which of a worker's trials runs next is what the schedulers
differ in; `Fifo` and `RoundRobin` are here, `dagsel.flows.hermes` has the others.
"""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass, field

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
class Job:
    """A live trial; a quantum is one turn of it, the paper's i."""

    begun: bool = False
    is_short: bool = False  # its last turn was one batch, longer than the quantum
    leaves: bool = False  # it is to pause, for its worker is gone
    n_waited: int = 0  # turns of others on its worker since its own
    first_loss: float | None = None  # of its first quantum
    loss: float | None = None  # of its latest quantum
    convergence: float | None = None  # C of its latest quantum
    n_milestones: int = 0  # passed


@dataclass(slots=True)
class Place:
    """What shares a worker: the one that waits longest first, and whose turn it is."""

    residents: list[int] = field(default_factory=list)
    turn: int | None = None


@dataclass(slots=True)
class Sharing(Drawing):
    """The state of a scheduler."""

    has_losses: bool = False  # whether any trial has told a loss that is a number
    has_warned: bool = False
    jobs: dict[int, Job] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)  # trials that have no place
    places: list[Place] = field(default_factory=list)


@dataclass
class TimeSharing(Flow):
    """Train every trial to the end, one at a time on each worker.

    Places stand for workers: as many as there are, but which of them a trial runs on is the
    engine's to say, by where its state and its shards lie. The fields are those of `Fifo`.
    """

    max_epochs: int
    n_trials: int
    state: Sharing = field(default_factory=Sharing, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_counts(max_epochs=self.max_epochs, n_trials=self.n_trials)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return Traits(self.max_epochs)

    def start(self, context: Context) -> list[Decision]:
        """Ask for as many trials as have a place."""
        self.state.context = context
        return [*self._staff(context.n_workers), *self._go_on()]

    def handle(self, event: Event) -> list[Decision]:
        """End a turn, and give the next one."""
        state = self.state
        if state.finished:
            return []
        decisions: list[Decision] = []
        match event:
            case Asked(trials):
                state.receive(event)
                state.jobs |= {trial: Job() for trial in trials}
                state.waiting += trials
            case Paused(trial):
                self._learn(event)
                state.jobs[trial].leaves = False
                self._end_turn(trial)
            case Reported(trial, epoch):
                self._check_losses(event)
                if epoch < self.max_epochs:
                    return []
                self._remove(trial)
                decisions.append(Stop(trial, "trained to the end", "complete"))
            case TrialFailed(trial):
                self._remove(trial)
            case WorkersChanged(n_workers):
                decisions += self._staff(n_workers)
            case DeadlineReached():
                state.finished = True
                return stop_all(state.jobs)
            case Tick():
                return []
        return [*decisions, *self._go_on()]

    # ---- what a scheduler says

    def _n_residents(self) -> int:
        """Say how many trials may share a worker."""
        return 1

    def _quantum_s(self, job: Job) -> float | None:
        """Say how long a trial's turn lasts; None for to its end."""

    def _next(self, trials: list[int]) -> int:
        """Say which of a worker's trials runs next; the first has waited longest."""
        return trials[0]

    def _migrates(self) -> bool:
        """Say whether trials may move to a worker that would idle."""
        return False

    def _learn(self, paused: Paused) -> None:
        """Learn from what a trial did in its turn."""

    def _check_losses(self, report: Reported) -> None:
        """Refuse a workload that does not say what the scheduler needs."""

    # ---- turns

    def _go_on(self) -> list[Decision]:
        state = self.state
        self._settle()
        decisions = self._ask()
        for may_move in (False, self._migrates() and not state.n_awaited):
            for place in state.places:
                if place.turn is None:
                    if may_move:
                        self._level(place)
                    decisions += self._give_turn(place)
        if not state.jobs and not state.n_awaited:
            state.finished = True
            decisions.append(Finish())
        return decisions

    def _settle(self) -> None:
        """Give places to those that wait, evenly."""
        state = self.state
        while state.waiting:
            place = min(state.places, key=lambda place: len(place.residents))
            if len(place.residents) >= self._n_residents():
                return
            place.residents.append(state.waiting.pop(0))

    def _ask(self) -> list[Decision]:
        state = self.state
        room = len(state.places) * self._n_residents() - len(state.jobs) - state.n_awaited
        return state.ask(room, n_trials=self.n_trials)

    def _level(self, place: Place) -> None:
        """Move trials to a place that idles, until none has two more."""
        while len(place.residents) < self._n_residents():
            others = [other for other in self.state.places if other is not place]
            fullest = max(
                (other for other in others if self._ready(other)),
                key=lambda other: len(other.residents),
                default=place,
            )
            is_level = len(fullest.residents) - len(place.residents) < 2
            if fullest is place or (is_level and self._ready(place)):
                return
            moved = self._next(self._ready(fullest))
            fullest.residents.remove(moved)
            place.residents.append(moved)

    def _ready(self, place: Place) -> list[int]:
        jobs = self.state.jobs
        return [t for t in place.residents if t != place.turn and not jobs[t].leaves]

    def _give_turn(self, place: Place) -> list[Decision]:
        ready = self._ready(place)
        if not ready:
            return []
        place.turn = self._next(ready)
        job = self.state.jobs[place.turn]
        epochs, job.begun = 0 if job.begun else self.max_epochs, True
        return [Train(place.turn, epochs, seconds=self._quantum_s(job))]

    def _end_turn(self, trial: int) -> None:
        for place in self.state.places:
            if place.turn == trial:
                place.turn = None
                place.residents.remove(trial)
                for other in place.residents:
                    self.state.jobs[other].n_waited += 1
                place.residents.append(trial)
                self.state.jobs[trial].n_waited = 0

    def _remove(self, trial: int) -> None:
        self._end_turn(trial)
        self.state.jobs.pop(trial, None)
        for trials in (self.state.waiting, *(place.residents for place in self.state.places)):
            if trial in trials:
                trials.remove(trial)

    def _staff(self, n_workers: int) -> list[Decision]:
        """Have a place for each worker; those of a place that goes wait for room."""
        state, decisions = self.state, list[Decision]()
        n_workers = max(1, n_workers)  # with none the engine waits for one
        state.places += [Place() for _ in range(n_workers - len(state.places))]
        while len(state.places) > n_workers:
            # The newest of the emptiest: an idle one, if there is any.
            place = min(
                reversed(state.places), key=lambda p: (p.turn is not None, len(p.residents))
            )
            state.places.remove(place)
            state.waiting += place.residents
            if place.turn is not None:
                state.jobs[place.turn].leaves = True
                decisions.append(Pause(place.turn))
        return decisions


@dataclass
class Fifo(TimeSharing):
    """First in, first out: a trial keeps its worker to the end.

    With it the authors of `Hermes` compare theirs (Son et al., Electronics 2021, Section 4).

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many trials to draw.

    Raises
    ------
    SearchError
        If one of them is below 1.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> flow = Fifo(max_epochs=5, n_trials=3)
    >>> flow.start(Context(n_workers=1)) + flow.handle(Asked((0,)))
    [Ask(n=1, sampling='study'), Train(trial=0, epochs=5)]
    """


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
        How long a turn lasts: seconds of training, or a text such as ``"10 s"``. Of a trial whose
        batches take longer it is one batch.
    max_trials_per_worker
        G_thres: how many trials share a worker.
    migrate
        Whether trials move to a worker that would idle, until no other has two more.

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

    _: KW_ONLY
    quantum: float | str = "10 s"
    max_trials_per_worker: int = 4
    migrate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(max_trials_per_worker=self.max_trials_per_worker)
        to_seconds("quantum", self.quantum)

    def _n_residents(self) -> int:
        return self.max_trials_per_worker

    def _quantum_s(self, job: Job) -> float:
        return to_seconds("quantum", self.quantum)

    def _migrates(self) -> bool:
        return self.migrate

    def _learn(self, paused: Paused) -> None:
        job = self.state.jobs[paused.trial]
        quantum_s, was_short = self._quantum_s(job), job.is_short
        job.is_short = paused.losses.n == 1 and paused.trained_s > quantum_s
        # Once, something else than the batch may have taken the time: a shard that was loaded.
        is_sure = was_short or paused.trained_s > 2 * quantum_s
        if job.is_short and is_sure and not self.state.has_warned:
            self.state.has_warned = True
            warnings.warn(
                f"a batch of trial {paused.trial} took {paused.trained_s:.3g} s, longer than the "
                f"quantum of {quantum_s:g} s: its turns are one batch long; raise quantum",
                stacklevel=3,
            )
