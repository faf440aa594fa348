"""How the workers are divided among the trials that want to train: what all policies share.

A policy is a pure function of the jobs in the order of their service; `Job` is what it sees.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from dagsel.errors import SearchError
from dagsel.flow import (
    Asked,
    Clone,
    Context,
    Decision,
    Event,
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

#: Of each architecture so many switches, the last ones, say what the next will cost.
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
        It may not have fewer, nor more: a job that has begun keeps a worker, and one that is about
        to stop, or trains for a stated time, is not disturbed; the latter unless workers were lost.
    scaling
        λ of its architecture.
    left_s
        Seconds that one worker would need for what it has left; None if nothing is known.
    switch_s
        Seconds that it costs to suspend and resume it: as measured so far, else assumed.
    """

    trial: int
    gang: int = 0
    least: int = 0
    most: int = 1
    scaling: ScalingModel = FLAT
    left_s: float | None = None
    switch_s: float = SWITCH_S

    def won_s(self, gang: int, more: int) -> float:
        """Time that is won by more workers; infinite if nothing is known of what is left.

        Examples
        --------
        >>> Job(0, scaling=Scaling({2: 1.5}), left_s=60.0).won_s(1, 2)
        20.0
        """
        if self.left_s is None:
            return math.inf
        return self.left_s / self.scaling.speedup(gang) - self.left_s / self.scaling.speedup(more)


def keep(jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
    """Give what each job keeps of its workers: all of them unless there are too few now.

    Where workers were lost, those that were served last give theirs up first, down to one each.

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
    """What is known of a live trial.

    Attributes
    ----------
    architecture
        Whose scaling profile counts.
    left
        Epochs that the search has given it and that it has not reported.
    owed
        Of these, how many were not passed on.
    wants
        Whether it is to train; without it, it is paused or about to be.
    gang
        Workers that it has.
    is_told
        Whether all that the search has decided was passed on.
    place
        In the queue.
    priority, seconds
        Of its last `Train`.
    epochs
        Reported so far.
    worked_s, reported_s
        What it has trained, in seconds of one worker, and how much of that is reported.
    """

    architecture: str
    left: int = 0
    owed: int = 0
    wants: bool = False
    gang: int = 0
    is_told: bool = True
    place: int = 0
    priority: float = 0.0
    seconds: float | None = None
    epochs: int = 0
    worked_s: float = 0.0
    reported_s: float = 0.0


@dataclass(slots=True)
class Allotment:
    """The state of an `Allocator`."""

    n_workers: int = 1
    now_s: float = 0.0
    n_places: int = 0
    live: dict[int, Work] = field(default_factory=dict)
    trained: dict[str, tuple[float, int]] = field(default_factory=dict)  # seconds and epochs
    switched: dict[str, list[float]] = field(default_factory=dict)  # what the last switches cost


@dataclass
class Allocator(Wrapper):
    """Give the trials of a search their workers, and let those wait for whom there are none.

    What the search decides is passed on, but for `Train`: that comes when the trial gets workers,
    and again when it gets another number of them. Trials are served by their priority, then in the
    order in which the search let them train; one that is told to train on when its epochs end keeps
    its place and its workers. The number of workers is never above those that are there, unless
    so many were lost that the trials that train outnumber them: these keep one each, and the engine
    lets them wait for each other. A ``gang`` that the search names is replaced.

    A subclass gives `divide`.
    """

    own: Allotment = field(default_factory=Allotment, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        """Begin the search inside."""
        self.own.n_workers = max(1, context.n_workers)
        return self._answer(self.flow.start(context))

    def handle(self, event: Event) -> list[Decision]:
        """Let the search inside answer, and divide the workers anew."""
        self._note(event)
        return self._answer(self.flow.handle(event))

    def divide(self, jobs: Sequence[Job], n_workers: int) -> Mapping[int, int]:
        """Say how many workers each job gets; 0 for one that waits on."""
        raise NotImplementedError

    def architecture(self, trial: int, config: Mapping[str, Any], source: str = "") -> str:
        """Say whose profile counts for a configuration; where it does not say, its source's."""
        return source

    def profile(self, architecture: str) -> ScalingModel:
        """Give λ of an architecture."""
        return FLAT

    # ---- what happens

    def _note(self, event: Event) -> None:
        own = self.own
        match event:
            case Reported(seconds=now_s) | Paused(seconds=now_s) | Tick(now_s):
                self._pass_time(now_s)
        match event:
            case Asked(trials, _, configs):
                told = dict(zip(trials, configs, strict=False))
                for trial in trials:
                    own.live[trial] = Work(self.architecture(trial, told.get(trial, {})))
            case Reported(trial):
                self._count(own.live[trial])
                self._learn_switches(own.live[trial].architecture, event.switches)
            case Paused(trial):
                own.live[trial].wants, own.live[trial].gang = False, 0
            case TrialFailed(trial):
                own.live.pop(trial, None)
            case WorkersChanged(n_workers):
                own.n_workers = max(1, n_workers)  # on none the engine waits for one

    def _pass_time(self, now_s: float) -> None:
        own = self.own
        for work in own.live.values():
            if work.gang:
                speed = self.profile(work.architecture).speedup(work.gang)
                work.worked_s += max(0.0, now_s - own.now_s) * speed
        own.now_s = max(now_s, own.now_s)

    def _count(self, work: Work) -> None:
        trained_s, epochs = self.own.trained.get(work.architecture, (0.0, 0))
        trained_s += work.worked_s - work.reported_s
        self.own.trained[work.architecture] = trained_s, epochs + 1
        work.left -= 1
        work.epochs += 1
        work.reported_s = work.worked_s

    def _learn_switches(self, architecture: str, switches: Sequence[float]) -> None:
        if switches:
            known = self.own.switched.setdefault(architecture, [])
            known += switches
            del known[:-N_SWITCHES]

    def _switch_s(self, architecture: str) -> float:
        switched = self.own.switched
        everywhere = [seconds for known in switched.values() for seconds in known]
        return median(switched.get(architecture) or everywhere or [SWITCH_S])

    # ---- what the search decides

    def _answer(self, decided: Iterable[Decision]) -> list[Decision]:
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
                del own.live[trial]
            case Clone(source, target, config):
                work, before = own.live[target], own.live[source].architecture
                architecture = self.architecture(target, config, before)
                if architecture != work.architecture:  # its times say nothing of what comes
                    own.live[target] = replace(
                        work, architecture=architecture, epochs=0, worked_s=0.0, reported_s=0.0
                    )
        return True

    def _allot(self) -> list[Decision]:
        live = self.own.live
        queue = [trial for trial, work in live.items() if work.gang or work.wants]
        queue.sort(key=lambda trial: (-live[trial].priority, live[trial].place))
        is_short = sum(work.gang for work in live.values()) > self.own.n_workers
        gangs = self.divide([self._job(trial, is_short) for trial in queue], self.own.n_workers)
        for trial, gang in gangs.items():
            live[trial].is_told &= gang == live[trial].gang
        # Who gives workers up comes before who gets them.
        queue.sort(key=lambda trial: gangs[trial] >= live[trial].gang)
        return [self._train(trial, gangs[trial]) for trial in queue if self._is_due(trial, gangs)]

    def _is_due(self, trial: int, gangs: Mapping[int, int]) -> bool:
        work = self.own.live[trial]
        return work.wants and not work.is_told and gangs[trial] > 0

    def _train(self, trial: int, gang: int) -> Train:
        work = self.own.live[trial]
        train = Train(trial, work.owed, work.priority, gang, work.seconds)
        work.gang, work.owed, work.is_told = gang, 0, True
        return train

    def _job(self, trial: int, is_short: bool) -> Job:
        own = self.own
        work = own.live[trial]
        is_timed = work.seconds is not None
        least = min(work.gang, 1) if work.wants and (is_short or not is_timed) else work.gang
        is_fixed = work.gang and (is_timed or not work.wants)
        most = work.gang if is_fixed else own.n_workers
        architecture = work.architecture
        known = (self.profile(architecture), self._left_s(work), self._switch_s(architecture))
        return Job(trial, work.gang, least, most, *known)

    def _left_s(self, work: Work) -> float | None:
        known_s, epochs = work.reported_s, work.epochs
        if not epochs:
            known_s, epochs = self.own.trained.get(work.architecture, (0.0, 0))
        if not epochs:
            return None
        return max(0.0, work.left * known_s / epochs - (work.worked_s - work.reported_s))


@dataclass
class ProfiledAllocator(Allocator):
    """An `Allocator` that knows how each architecture scales; the fields are those of `Marble`.

    Raises
    ------
    SearchError
        If there is no profile at all, or something else in its place; or, when a trial is drawn, if
        its configuration names no architecture or one without a profile.
    """

    scaling: Mapping[str, ScalingModel] = field(default_factory=dict)
    by: str = field(default="architecture", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scaling:
            raise SearchError(
                f"{type(self).__name__} needs a scaling profile of each architecture; measure "
                "them with dagsel.profile or give them by hand, as Scaling({1: 1.0, 2: 1.8})"
            )
        for architecture, model in self.scaling.items():
            if not isinstance(model, ScalingModel):
                raise SearchError(
                    f"scaling[{architecture!r}] must be a scaling profile such as "
                    f"Scaling({{1: 1.0, 2: 1.8}}), got {model!r}"
                )

    @property
    def traits(self) -> Traits:
        """All that the search inside says of itself; and its configurations are read."""
        return replace(self.flow.traits, reads_configs="reads the architecture off configurations")

    def architecture(self, trial: int, config: Mapping[str, Any], source: str = "") -> str:
        """Read the architecture off the configuration."""
        if self.by not in config and source:
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

    def profile(self, architecture: str) -> ScalingModel:
        """Look up λ of an architecture."""
        return self.scaling[architecture]
