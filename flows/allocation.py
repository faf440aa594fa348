"""How workers are divided among the trials that want to train: what all policies share.

A policy is a pure function of jobs in the order in which they are served.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, ClassVar

from dagsel.errors import SearchError
from dagsel.flow import (
    Asked,
    Clone,
    Context,
    Decision,
    Event,
    Extended,
    Finish,
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
from dagsel.flows.wrapper import Wrapper
from dagsel.planning.scaling import Scaling, ScalingModel
from dagsel.planning.small_population import SWITCH_S

#: The median of an architecture's last switches is taken as the cost of its next one.
N_SWITCHES = 20
#: No worker makes a trial any faster.
FLAT = Scaling({})


@dataclass(frozen=True, slots=True)
class Job:
    """A trial that has something to train.

    Parameters
    ----------
    trial
        Its number.
    gang
        Workers that it has now; 0 while it waits.
    least, most
        It may not have fewer, nor more. A job that has begun keeps one worker at least. The number
        of one that is about to pause, or trains for a stated time, does not change; the latter's
        does if workers were lost.
    scaling
        λ of its architecture.
    left_s
        Seconds that one worker would need for what it has left; None if nothing is known.
    switch_s
        Seconds that it takes to suspend and resume it, as measured so far; else an assumption.
    """

    trial: int
    gang: int = 0
    least: int = 0
    most: int = 1
    scaling: ScalingModel = FLAT
    left_s: float | None = None
    switch_s: float = SWITCH_S

    def won_s(self, gang: int, more: int) -> float:
        """Return the time that more workers save; infinite if nothing is known of what is left.

        Examples
        --------
        >>> Job(0, scaling=Scaling({2: 1.5}), left_s=60.0).won_s(1, 2)
        20.0
        """
        if self.left_s is None:
            return math.inf
        return self.left_s / self.scaling.speedup(gang) - self.left_s / self.scaling.speedup(more)


def keep(jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
    """Return how many workers each job keeps: all of its own unless there are too few now.

    Where workers were lost, jobs that are served last give theirs up first, down to one each.

    Examples
    --------
    >>> running = [Job(0, gang=4, least=1), Job(1, gang=2, least=1), Job(2)]
    >>> keep(running, 6), keep(running, 4), keep(running, 1)
    ({0: 4, 1: 2, 2: 0}, {0: 3, 1: 1, 2: 0}, {0: 1, 1: 1, 2: 0})
    """
    gangs = {job.trial: job.gang for job in jobs}
    missing = sum(gangs.values()) - n_workers
    for job in reversed(jobs):
        given = min(max(missing, 0), job.gang - job.least)
        gangs[job.trial] -= given
        missing -= given
    return gangs


@dataclass(slots=True)
class Work:
    """What is known of a live trial."""

    architecture: str
    left: int = 0  # epochs that the search has given it and that it has not reported
    owed: int = 0  # of these, how many were not passed on
    wants: bool = False  # to train; else it is paused, or about to be
    has_ended: bool = False  # as the search was extended, and no `Train` was sent since
    gang: int = 0  # workers that it has
    is_told: bool = True  # all that the search has decided was passed on
    place: int = 0  # in the queue
    priority: float = 0.0  # of its last Train
    seconds: float | None = None  # of its last Train
    epochs: int = 0  # reported so far
    worked_s: float = 0.0  # what it has trained, in seconds of one worker
    reported_s: float = 0.0  # how much of that is reported


@dataclass(slots=True)
class WorkBook:
    """The state of an `Allocator`."""

    n_workers: int = 1
    now_s: float = 0.0
    n_places: int = 0
    live: dict[int, Work] = field(default_factory=dict)
    architectures: dict[int, str] = field(default_factory=dict)  # of all trials, by number
    trained: dict[str, tuple[float, int]] = field(default_factory=dict)  # seconds and epochs
    switched: dict[str, list[float]] = field(default_factory=dict)  # what the last switches cost

    def pass_time(self, now_s: float, scaling: Mapping[str, ScalingModel]) -> None:
        """Count what the trials have trained since the last event."""
        for work in self.live.values():
            if work.gang:
                speed = scaling.get(work.architecture, FLAT).speedup(work.gang)
                work.worked_s += max(0.0, now_s - self.now_s) * speed
        self.now_s = max(now_s, self.now_s)

    def count(self, report: Reported) -> None:
        """Count an epoch, and what the changes of the trial's number of workers have cost."""
        work = self.live[report.trial]
        trained_s, epochs = self.trained.get(work.architecture, (0.0, 0))
        trained_s += work.worked_s - work.reported_s
        self.trained[work.architecture] = trained_s, epochs + 1
        work.left -= 1
        work.epochs += 1
        work.reported_s = work.worked_s
        if report.switches:
            known = [*self.switched.get(work.architecture, []), *report.switches]
            self.switched[work.architecture] = known[-N_SWITCHES:]

    def left_s(self, work: Work) -> float | None:
        """Return the time on one worker that a trial has left; None if no epoch was timed.

        An epoch that already takes longer than those before takes as much longer as it is late, and
        the next ones no less.
        """
        known_s, epochs = work.reported_s, work.epochs
        if not epochs:
            known_s, epochs = self.trained.get(work.architecture, (0.0, 0))
        if not epochs:
            return None
        epoch_s, this_s = known_s / epochs, work.worked_s - work.reported_s
        return abs(epoch_s - this_s) + (work.left - 1) * max(epoch_s, this_s)

    def switch_s(self, architecture: str) -> float:
        """Return what a switch costs: of this architecture, of others, or an assumption."""
        everywhere = [seconds for known in self.switched.values() for seconds in known]
        return median(self.switched.get(architecture) or everywhere or [SWITCH_S])


@dataclass
class Allocator(Wrapper):
    """Divide the workers among the trials of a search; trials that get none wait.

    What the search decides is passed on, but for `Train`: that is sent when the trial gets workers,
    and again when it gets another number of them. Trials are served by their priority, then in the
    order in which the search told them to train; one that is told to train on when its epochs end
    keeps its place and its workers. A ``gang`` that the search names is replaced. No more workers
    are given than there are; but when so many are lost that more trials train, each keeps one, and
    the engine lets them wait for each other.

    A subclass implements `divide`. The fields are those of `Marble`.

    Raises
    ------
    SearchError
        If there is no profile at all, or something else in its place; or, when a trial is drawn, if
        its configuration names no architecture or one without a profile.
    """

    scaling: Mapping[str, ScalingModel] = field(default_factory=dict)
    by: str = field(default="architecture", kw_only=True)
    own: WorkBook = field(default_factory=WorkBook, init=False, repr=False, compare=False)

    #: Whether it is to know how each architecture scales.
    needs_profiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needs_profiles and not self.scaling:
            raise SearchError(
                f"{type(self).__name__} needs a scaling profile of each architecture; measure "
                "them with dagsel.profile or give them by hand, as Scaling({1: 1.0, 2: 1.8})"
            )
        if not isinstance(self.scaling, Mapping):
            raise SearchError(
                f"scaling must be a mapping of architectures to profiles, got {self.scaling!r}; "
                'write scaling={"resnet": Scaling({1: 1.0, 2: 1.8})}'
            )
        # What `dagsel.profile` returns has one of them. A parameter may be a number, such as 64.
        self.scaling = {str(name): getattr(it, "scaling", it) for name, it in self.scaling.items()}
        for architecture, model in self.scaling.items():
            if not isinstance(model, ScalingModel):
                raise SearchError(
                    f"scaling[{architecture!r}] must be a scaling profile such as "
                    f"Scaling({{1: 1.0, 2: 1.8}}), got {model!r}"
                )

    @property
    def traits(self) -> Traits:
        """All that the search inside says of itself; and whether configurations are read."""
        inner = self.flow.traits
        reads = "reads the architecture off configurations"
        return replace(inner, reads_configs=reads) if self.needs_profiles else inner

    def start(self, context: Context) -> list[Decision]:
        """Begin the search inside."""
        self.own.n_workers = max(1, context.n_workers)
        return self.pass_on(self.flow.start(context))

    def handle(self, event: Event) -> list[Decision]:
        """Divide the workers anew after the answer of the search inside."""
        self.note(event)
        return self.pass_on(self.flow.handle(event))

    @abstractmethod
    def divide(self, jobs: Sequence[Job], n_workers: int) -> Mapping[int, int]:
        """Return how many workers each job gets; 0 for one that waits on."""

    def note(self, event: Event) -> None:
        """Keep the book of what has happened."""
        own = self.own
        if isinstance(event, Reported | Paused | Tick):
            own.pass_time(event.seconds, self.scaling)
        match event:
            case Asked(trials, _, configs):
                known = dict(zip(trials, configs, strict=False))
                for trial in trials:
                    architecture = self._architecture(trial, known.get(trial, {}))
                    own.architectures[trial] = architecture
                    own.live[trial] = Work(architecture)
            case Reported():
                own.count(event)
            case Paused(trial):
                own.live[trial].wants, own.live[trial].gang = False, 0
            case TrialFailed(trial):
                own.live.pop(trial, None)
            case WorkersChanged(n_workers):
                own.n_workers = max(1, n_workers)  # with none the engine waits for one
            case Extended():
                own.live.clear()

    def pass_on(self, decided: Iterable[Decision]) -> list[Decision]:
        """Pass on what the search decides, and divide the workers anew."""
        passed = [decision for decision in decided if self._passes(decision)]
        if any(isinstance(decision, Finish) for decision in passed):
            return passed
        for work in self.own.live.values():
            if not work.left:
                work.wants, work.gang = False, 0
        return [*passed, *self._allot()]

    def _passes(self, decision: Decision) -> bool:
        own = self.own
        match decision:
            case Train(trial, epochs, priority, _, seconds):
                if trial not in own.live:  # it had ended, and trains on
                    # The architecture of one that the user has added is not known.
                    own.live[trial] = Work(own.architectures.get(trial, ""), has_ended=True)
                work = own.live[trial]
                if not work.gang:
                    work.place = own.n_places
                    own.n_places += 1
                is_same = (priority, seconds) == (work.priority, None) and work.gang > 0
                work.is_told &= is_same and not epochs
                work.left += epochs
                work.owed += epochs
                work.priority, work.seconds, work.wants = float(priority), seconds, True
                return False
            case Pause(trial):
                own.live[trial].wants = False
            case Stop(trial):
                return not own.live.pop(trial).has_ended
            case Clone(source, target, config):
                work, before = own.live[target], own.live[source].architecture
                architecture = self._architecture(target, config, before)
                if architecture != work.architecture:  # its times say nothing of what comes
                    own.live[target] = replace(
                        work, architecture=architecture, epochs=0, worked_s=0.0, reported_s=0.0
                    )
        return True

    def _allot(self) -> list[Decision]:
        live, n_workers = self.own.live, self.own.n_workers
        queue = [trial for trial, work in live.items() if work.gang or work.wants]
        queue.sort(key=lambda trial: (-live[trial].priority, live[trial].place))
        is_short = sum(work.gang for work in live.values()) > n_workers
        gangs = self.divide([self._job(trial, is_short) for trial in queue], n_workers)
        # Trials that give workers up come before those that get them.
        queue.sort(key=lambda trial: gangs[trial] >= live[trial].gang)
        decisions: list[Decision] = []
        for trial in queue:
            work, gang = live[trial], gangs[trial]
            work.is_told &= gang == work.gang
            if work.wants and not work.is_told and gang:
                decisions.append(Train(trial, work.owed, work.priority, gang, work.seconds))
                work.gang, work.owed, work.is_told, work.has_ended = gang, 0, True, False
        return decisions

    def _job(self, trial: int, is_short: bool) -> Job:
        own, work = self.own, self.own.live[trial]
        is_timed = work.seconds is not None
        least = min(work.gang, 1) if work.wants and (is_short or not is_timed) else work.gang
        is_fixed = work.gang and (is_timed or not work.wants)
        most = work.gang if is_fixed else own.n_workers
        scaling = self.scaling.get(work.architecture, FLAT)
        rest = own.left_s(work), own.switch_s(work.architecture)
        return Job(trial, work.gang, least, most, scaling, *rest)

    def _architecture(self, trial: int, config: Mapping[str, Any], source: str = "") -> str:
        # Whose profile counts; where a clone's configuration does not say, its source's.
        if not self.needs_profiles or (self.by not in config and source):
            return source
        if self.by not in config:
            raise SearchError(
                f"the configuration of trial {trial} has no {self.by!r}, by which its scaling "
                f"profile is found; it has {', '.join(map(repr, config)) or 'nothing'}: name the "
                "architecture's key with by="
            )
        architecture = str(config[self.by])
        if architecture not in self.scaling:
            raise SearchError(
                f"trial {trial} has the architecture {architecture!r}, which has no scaling "
                f"profile (those of {', '.join(self.scaling)} are known); measure it with "
                "dagsel.profile or give one by hand"
            )
        return architecture
