"""MO-ASHA: ASHA for several metrics at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dagsel.flow import Context, Decision, Reported, Stop, Traits
from dagsel.flows.asynchronous_halving import AshaState, AsynchronousHalving, Result
from dagsel.flows.drawing import check_counts
from dagsel.flows.rungs import check_rungs
from dagsel.planning.pareto import ranking


@dataclass(slots=True)
class MoAshaState(AshaState):
    """The state of MO-ASHA: the place of a trial at a rung stands for a loss."""

    losses: list[dict[int, tuple[float, ...]]] = field(default_factory=list)  # by rung and trial


@dataclass
class MOASHA(AsynchronousHalving):
    """Search for several metrics: a trial goes on if no other one beats it in all of them.

    It is `ASHA` in promotion mode with another ranking in a rung. One trial dominates another if it
    is at least as good in all metrics, and better in one. Trials that no other dominates come
    first, then those that only these dominate, and so on (non-dominated sorting). Within such a
    layer, trials that lie far apart come first (an epsilon net). So what goes on covers the whole
    front. The result is `Run.pareto`. With one metric it decides as `ASHA` does.

    Schmucker, Donini, Zafar, Salinas and Archambeau, Multi-objective Asynchronous Successive
    Halving, 2021: non-dominated sorting and the epsilon net are theirs. These details are ours:
    distances in the net are Euclidean, between losses that are scaled to the range of each metric
    in the rung. The net begins with the layer's best trial by the first metric. A trial with a
    value that is not finite comes after all others. Ties go to the lower number. At the end the
    first paused trial of the highest rung goes on if nothing has reached `max_epochs`.

    Parameters
    ----------
    max_epochs, n_trials, min_epochs, reduction_factor, n_concurrent
        As for `ASHA`.

    Raises
    ------
    SearchError
        If a number is not whole, or too small, or `min_epochs` is above `max_epochs`.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Goal, Reported
    >>> goals = (Goal("error", "minimize"), Goal("ms", "minimize"))
    >>> flow = MOASHA(max_epochs=9, n_trials=3, n_concurrent=3)
    >>> decisions = flow.start(Context(n_workers=1, goals=goals))
    >>> decisions += flow.handle(Asked(trials=(0, 1, 2)))
    >>> for trial, (error, ms) in enumerate([(0.3, 9.0), (0.2, 5.0), (0.4, 8.0)]):
    ...     decisions += flow.handle(Reported(trial, 1, error, {"error": error, "ms": ms}, 1.0))
    >>> decisions[-1]
    Train(trial=1, epochs=2)
    """

    max_epochs: int
    n_trials: int
    min_epochs: int = 1
    reduction_factor: int = 3
    n_concurrent: int | None = None
    state: MoAshaState = field(default_factory=MoAshaState, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rungs(self.min_epochs, self.max_epochs, self.reduction_factor)
        check_counts(n_trials=self.n_trials, n_concurrent=self.n_concurrent)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return replace(super().traits, takes_several=True)

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.losses = [{} for _ in self.rungs[:-1]]
        return super().start(context)

    def judge(self, report: Reported, epochs: int) -> list[Decision]:
        """Pause a trial at a rung, and rank the rung anew."""
        rung = self.rungs.index(epochs)
        losses, record = self.state.losses[rung], self.state.rungs[rung]
        losses[report.trial] = self.state.drawing.context.losses(report)
        paused = {trial for _, trial in record.paused} | {report.trial}
        trials = sorted(losses)
        places = enumerate(ranking([losses[trial] for trial in trials]))
        record.results = [(float(place), trials[i]) for place, i in places]
        record.paused = [result for result in record.results if result[1] in paused]
        return []

    def why_pruned(self, rung: int, result: Result) -> Stop:
        """Stop a trial that was not promoted from a rung, with its place there."""
        place, trial = result
        n = len(self.state.rungs[rung].results)
        best = f"the best {max(1, n // self.reduction_factor)} of {n}"
        return Stop(trial, f"rung {rung + 1}: place {place + 1:.0f} is not among {best}")
