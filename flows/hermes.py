"""Hermes: a worker's next turn goes to the trial that converges fastest."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from itertools import pairwise

from dagsel.checks import flag, number
from dagsel.errors import SearchError
from dagsel.flow import Event, Losses, Paused, Reported
from dagsel.flows.time_sharing import SharedWorkers, TimeSharing
from dagsel.planning.budget import to_seconds


def loss_of(losses: Losses) -> float:
    """Return the loss of a quantum: the middle of its range; infinite if it is no number.

    Examples
    --------
    >>> loss_of(Losses(n=3, low=0.4, high=0.8))
    0.6000000000000001
    """
    middle = (losses.high + losses.low) / 2
    return middle if math.isfinite(middle) else math.inf


def convergence(losses: Losses, before: float | None = None) -> float:
    """Return C of a quantum, by the losses of its batches.

    C = (loss(i-1) - loss(i)) / |L(i)|, where |L(i)| is the number of losses; in the first quantum
    (max L - min L) / |L|.

    Parameters
    ----------
    losses
        Of the batches of the quantum.
    before
        `loss_of` the quantum before; None in the first one.

    Examples
    --------
    >>> convergence(Losses(n=4, low=1.0, high=3.0)), convergence(Losses(4, 0.5, 1.5), before=2.0)
    (0.5, 0.25)
    """
    loss = loss_of(losses)
    if not math.isfinite(loss) or not losses.n:
        return -math.inf
    if before is None or not math.isfinite(before):
        return (losses.high - losses.low) / losses.n
    return (before - loss) / losses.n


@dataclass(slots=True)
class TurnLosses:
    """The training losses of a trial's turns."""

    latest: float = math.inf  # infinite if it is no number
    convergence: float = -math.inf  # C of the latest turn
    first: float | None = None  # of the first turn whose loss is a number
    lowest: float = math.inf


@dataclass(slots=True)
class SharedByLoss(SharedWorkers):
    """The state of a scheduler that chooses by training losses."""

    losses: dict[int, TurnLosses] = field(default_factory=dict)  # of trials that have had a turn
    has_losses: bool = False  # whether any trial has reported a loss that is a number

    def learn(self, event: Event, scheduler: str) -> None:
        """Note the losses of a turn.

        Raises
        ------
        SearchError
            If the workload reports no loss.
        """
        self.losses = {trial: x for trial, x in self.losses.items() if trial in self.trials}
        match event:
            case Paused(trial, losses=losses) if losses.n or event.trained_s:
                if not losses.n and not self.has_losses:
                    raise _no_loss(scheduler, trial)
                known, loss = self.losses.setdefault(trial, TurnLosses()), loss_of(losses)
                known.convergence = convergence(losses, known.latest)
                known.latest, known.lowest = loss, min(known.lowest, loss)
                if math.isfinite(loss):
                    self.has_losses = True
                    known.first = loss if known.first is None else known.first
            case Reported(trial, _, value) if trial in self.losses and not self.has_losses:
                if math.isfinite(value):
                    raise _no_loss(scheduler, trial)


def _no_loss(scheduler: str, trial: int) -> SearchError:
    return SearchError(
        f"{scheduler} shares time by training losses, and the workload reports none "
        f"for trial {trial}; report them (batches.log in a loop of your own, Trained.losses in "
        "a workload of your own), or use RoundRobin"
    )


@dataclass
class Hermes(TimeSharing):
    """Let trials take turns on a worker; the trial that converges fastest runs next.

    Trials are spread evenly over the workers, at most `max_trials_per_worker` on each (Algorithms 1
    and 2). More are drawn when there is room. A turn lasts for a quantum, a span of time. Then
    `convergence` of the trial that ran is computed. Of the worker's trials the one with the largest
    runs next. (Algorithm 3 takes the largest of those that wait; here the one that ran may go on.)
    Trials that have not run yet come first, in their order; the paper leaves that open. A trial
    whose loss is not a number comes last.

    A trial's quantum grows when its loss has decreased by a milestone (Section 3.3; by Section
    4.1.2 it grew with the number of preemptions). The paper does not say how far, and from where.
    Here the decrease is relative to the loss of the trial's first quantum, and each milestone
    multiplies the quantum by `growth`, for good.

    Son et al., A GPU Scheduling Framework to Accelerate Hyper-Parameter Optimization in Deep
    Learning Clusters, Electronics 2021.

    Parameters
    ----------
    max_epochs, n_trials, max_trials_per_worker, migrate
        Epochs and numbers of trials; see `RoundRobin`.
    quantum
        Seconds of training that a turn lasts at first, or a text; see `RoundRobin`.
    first_quantum
        Seconds of a trial's first turn, or a text; None for `quantum`. With a short one all trials
        of a worker show sooner how fast they converge. It is not in the paper.
    milestones
        Decreases of the loss, as shares of the first one: 0.5 when it has halved.
    growth
        By how much a milestone lengthens the quantum.
    aging
        How many turns of others a trial may wait; then it runs next, whatever it gained. So on
        workers that stay, none waits for more than ``aging + max_trials_per_worker - 2`` turns.
        With None, as in the paper, a trial may wait until the faster ones are done.
    normalize
        Divide C by the loss of the trial's first quantum, so that losses of different scale
        compare.

    Raises
    ------
    SearchError
        If the quantum is no time, a number is below 1, or the milestones are not shares in
        ascending order; during the search, if the workload reports no loss.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Losses, Paused
    >>> flow = Hermes(max_epochs=5, n_trials=2, quantum="10 s")
    >>> flow.start(Context(n_workers=1)) + flow.handle(Asked((0, 1)))
    [Ask(n=2, sampling='study'), Train(trial=0, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(0, 0.5, 10.0, 10.0, Losses(n=100, low=1.0, high=2.0)))
    [Train(trial=1, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(1, 0.5, 20.0, 10.0, Losses(n=100, low=1.9, high=2.1)))
    [Train(trial=0, epochs=0, seconds=10.0)]
    >>> flow.handle(Paused(0, 1.0, 30.0, 10.0, Losses(n=100, low=0.5, high=0.9)))
    [Train(trial=0, epochs=0, seconds=20.0)]
    """

    _: KW_ONLY
    aging: int | None = None
    milestones: tuple[float, ...] = (0.5, 0.75, 0.9)
    growth: float = 2.0
    normalize: bool = False
    first_quantum: float | str | None = None
    state: SharedByLoss = field(default_factory=SharedByLoss, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            shares = (0.0, *self.milestones)
            fit = shares[-1] <= 1 and all(one < later for one, later in pairwise(shares))
        except TypeError:
            fit = False
        if not fit:
            raise SearchError(
                f"milestones must be decreases of the loss above 0 and at most 1, in ascending "
                f"order, such as (0.5, 0.75, 0.9), got {self.milestones!r}"
            )
        number("growth", self.growth, "1 or more", lambda growth: 1 <= growth < math.inf)
        flag("normalize", self.normalize)
        if self.first_quantum is not None:
            to_seconds("first_quantum", self.first_quantum)

    def learn(self, event: Event) -> None:
        """Note the losses of a turn."""
        self.state.learn(event, "Hermes")

    def urgency(self, trial: int) -> float:
        """Return C of the trial's latest turn."""
        losses = self.state.losses.get(trial)
        if losses is None:
            return math.inf
        return losses.convergence / (abs(losses.first or 1.0) if self.normalize else 1.0)

    def quantum_s(self, trial: int) -> float:
        """Return how long the next turn of a trial lasts: longer with each milestone passed."""
        quantum_s, losses = to_seconds("quantum", self.quantum), self.state.losses.get(trial)
        if losses is None and self.first_quantum is not None:
            return to_seconds("first_quantum", self.first_quantum)
        if losses is None or not losses.first:
            return quantum_s
        decrease = (losses.first - losses.lowest) / abs(losses.first)
        return quantum_s * self.growth ** sum(decrease >= share for share in self.milestones)
