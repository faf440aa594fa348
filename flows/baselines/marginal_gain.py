"""Marginal gain: each further worker goes to the job whose time it shortens most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from dagsel.checks import number
from dagsel.errors import SearchError
from dagsel.flow import Context, Decision, Event, Finish, Tick, Wake, WorkersChanged
from dagsel.flows.allocation import Allocator, Job, WorkBook, keep
from dagsel.planning.scaling import Scaling


def marginal_gain(jobs: Sequence[Job], n_workers: int, *, first: int = 1) -> dict[int, int]:
    """Return how many workers each job gets by marginal gain.

    Each job begins with `first` workers, those that run before those that wait, as long as so many
    are left. Then each further worker goes to the job whose remaining time it shortens most, as
    long as it shortens any. A job of which nothing is known is taken for an average one.

    Examples
    --------
    >>> from dagsel.planning.scaling import Scaling
    >>> flat, steep = Scaling({2: 1.2}), Scaling({6: 6.0})
    >>> jobs = [Job(0, most=6, scaling=flat, left_s=9.0), Job(1, most=6, scaling=steep)]
    >>> marginal_gain(jobs, 6), marginal_gain(jobs, 3, first=2)
    ({0: 2, 1: 4}, {0: 2, 1: 0})
    """
    known = [job.left_s for job in jobs if job.left_s is not None]
    usual_s = sum(known) / len(known) if known else 1.0
    jobs = [replace(job, left_s=usual_s if job.left_s is None else job.left_s) for job in jobs]
    gangs = {job.trial: job.least for job in jobs}
    free = n_workers - sum(gangs.values())
    for job in sorted(jobs, key=lambda job: not job.gang):
        more = min(first, n_workers, job.most) - gangs[job.trial]
        if 0 < more <= free:
            gangs[job.trial] += more
            free -= more
    while free > 0:
        now = [(job, gangs[job.trial]) for job in jobs if 0 < gangs[job.trial] < job.most]
        won = {job.trial: job.won_s(gang, gang + 1) for job, gang in now}
        trial = max(won, key=won.__getitem__, default=None)  # of equal ones the first
        if trial is None or won[trial] <= 0:
            break
        gangs[trial] += 1
        free -= 1
    return gangs


@dataclass(slots=True)
class Intervals(WorkBook):
    """The state of `MarginalGain`: when the workers are divided next."""

    is_due: bool = True
    n_over: int = 0  # intervals that are over
    inner_s: float | None = None  # when the search inside wants to wake


@dataclass
class MarginalGain(Allocator):
    """Divide the workers anew at fixed intervals, each to the trial that gains most by it.

    Within an interval no trial begins and none changes its size, so workers that come free are
    idle. But when no trial trains, or workers have come or gone, they are divided at once.

    This is the rule of `Optimus` for workers alone, with two advantages that Optimus does not have:
    it divides single workers (GPUs) and not whole nodes, and it is told λ of each architecture.
    It is a system of ours, which no paper has measured.

    Parameters
    ----------
    flow, scaling, by
        The search inside, λ by architecture, and the architecture's key; see `Marble`.
    interval_s
        Seconds from one division to the next.

    Raises
    ------
    SearchError
        If the search, the profiles or `interval_s` are wrong, or a table of λ stops
        rising and rises again; or, when a trial is drawn, if its configuration names no
        architecture or one without a profile.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.planning.scaling import Scaling
    >>> search = RandomSearch(max_epochs=5, n_trials=2)
    >>> flow = MarginalGain(search, {"resnet": Scaling({2: 1.7, 3: 2.2})})
    >>> flow.start(Context(n_workers=4))
    [Ask(n=2, sampling='random'), Wake(seconds=600.0)]
    >>> flow.handle(Asked((0, 1), configs=2 * ({"architecture": "resnet"},)))
    [Train(trial=0, epochs=5, gang=2), Train(trial=1, epochs=5, gang=2)]
    """

    own: Intervals = field(default_factory=Intervals, init=False, repr=False, compare=False)
    interval_s: float = field(default=600.0, kw_only=True)

    #: With how many workers a trial begins.
    first: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        number("interval_s", self.interval_s, "above 0 seconds", lambda s: 0 < s < math.inf)
        for architecture, model in self.scaling.items():
            if isinstance(model, Scaling):
                _check_gains(architecture, model, self.first)

    def start(self, context: Context) -> list[Decision]:
        """Begin the search inside, and the first interval."""
        return self._with_wake(super().start(context), is_due=True)

    def handle(self, event: Event) -> list[Decision]:
        """Pass the event to the search inside; divide the workers when it is time."""
        own, is_inner = self.own, True
        own.is_due |= isinstance(event, WorkersChanged)
        if isinstance(event, Tick):
            if event.seconds >= self._next_s:
                own.is_due = True
                own.n_over = max(own.n_over + 1, int(event.seconds / self.interval_s))
            is_inner = own.inner_s is not None and event.seconds >= own.inner_s
            own.inner_s = None if is_inner else own.inner_s
        self.note(event)
        decided = self.pass_on(self.flow.handle(event) if is_inner else [])
        return self._with_wake(decided, is_due=isinstance(event, Tick))

    def divide(self, jobs: Sequence[Job], n_workers: int) -> dict[int, int]:
        """Return how `marginal_gain` divides the workers, if it is time."""
        if not jobs or not (self.own.is_due or all(not job.gang for job in jobs)):
            return keep(jobs, n_workers)
        self.own.is_due = False
        return marginal_gain(jobs, n_workers, first=self.first)

    @property
    def _next_s(self) -> float:
        return (self.own.n_over + 1) * self.interval_s

    def _with_wake(self, decided: Iterable[Decision], *, is_due: bool) -> list[Decision]:
        # The next wake is the end of the interval, or what the search inside wants if it is sooner.
        passed: list[Decision] = []
        for decision in decided:
            if isinstance(decision, Wake):
                self.own.inner_s, is_due = decision.seconds, True
            else:
                passed.append(decision)
        if not is_due or Finish() in passed:
            return passed
        inner_s = math.inf if self.own.inner_s is None else self.own.inner_s
        return [*passed, Wake(min(self._next_s, inner_s))]


def _check_gains(architecture: str, model: Scaling, first: int) -> None:
    # One worker at a time is given: what comes after a worker that gains nothing is never found.
    speeds = {n: model.speedup(n) for n in range(first, max(model.speedups) + 1)}
    found = next((n for n, after in itertools.pairwise(speeds) if speeds[after] <= speeds[n]), None)
    later = max(speeds, key=speeds.__getitem__, default=first)
    if found is not None and speeds[later] > speeds[found]:
        raise SearchError(
            f"scaling[{architecture!r}] does not rise from {found} to {found + 1} workers and is "
            f"higher on {later}, which is never reached one worker at a time; measure these "
            "numbers again, or give a law fitted by dagsel.planning.scaling.fit"
        )
