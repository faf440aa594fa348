"""Hermes: the worker's next turn goes to the trial that converges fastest. And SLAQ beside it."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise

from dagsel.errors import SearchError
from dagsel.flow import Losses, Paused, Reported
from dagsel.flows.drawing import check_counts
from dagsel.flows.time_sharing import Job, RoundRobin


def loss_of(losses: Losses) -> float:
    """Give the loss of a quantum: the middle of its range; infinite if it is no number.

    Examples
    --------
    >>> loss_of(Losses(n=3, low=0.4, high=0.8))
    0.6000000000000001
    """
    middle = (losses.high + losses.low) / 2
    return middle if math.isfinite(middle) else math.inf


def convergence(losses: Losses, before: float | None = None) -> float:
    """Give C of a quantum, by the losses of its batches.

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


@dataclass
class ByLoss(RoundRobin):
    """Share time by the training losses that a trial tells."""

    _: KW_ONLY
    aging: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.aging is not None:
            check_counts(aging=self.aging)

    def _next(self, trials: list[int]) -> int:
        jobs = self.state.jobs
        if self.aging is not None:
            longest = max(trials, key=lambda trial: jobs[trial].n_waited)
            if jobs[longest].n_waited >= self.aging:
                return longest
        # Of equals the first has waited longest.
        return max(trials, key=lambda trial: self._urgency(jobs[trial]))

    def _urgency(self, job: Job) -> float:
        """Say how soon a trial is to run; what is greatest runs next."""
        raise NotImplementedError

    def _scale(self, job: Job) -> float:
        """Say what a trial's losses are divided by."""
        return 1.0

    def _learn(self, paused: Paused) -> None:
        super()._learn(paused)
        job, losses = self.state.jobs[paused.trial], paused.losses
        if not losses.n and not paused.trained_s:
            return  # it was stopped before its first batch
        if not losses.n and not self.state.has_losses:
            raise SearchError(self._no_loss(paused.trial))
        loss = loss_of(losses)
        self.state.has_losses |= math.isfinite(loss)
        if job.first_loss is None and math.isfinite(loss):
            job.first_loss = loss
        job.convergence = convergence(losses, job.loss) / self._scale(job)
        job.loss = loss

    def _check_losses(self, report: Reported) -> None:
        job = self.state.jobs[report.trial]
        is_mute = job.loss is not None and not self.state.has_losses
        if is_mute and math.isfinite(report.value):
            raise SearchError(self._no_loss(report.trial))

    def _no_loss(self, trial: int) -> str:
        return (
            f"{type(self).__name__} shares time by training losses, and the workload reports none "
            f"for trial {trial}; report them (batches.log in a loop of your own, Trained.losses in "
            "a workload of your own), or use RoundRobin"
        )


@dataclass
class Slaq(ByLoss):
    """The trial with the largest loss runs next, as it has the most to gain: SLAQ.

    Zhang et al., SLAQ: Quality-Driven Scheduling for Distributed Machine Learning, SoCC 2017, as
    Hermes' authors compare with it. Trials that have not run yet come first, those whose loss is no
    number last.

    Parameters
    ----------
    max_epochs, n_trials, quantum, max_trials_per_worker, migrate
        Epochs, numbers of trials, and seconds of a turn; see `RoundRobin`.
    aging
        A trial that has waited for so many turns of others runs next; None for never. See `Hermes`.

    Raises
    ------
    SearchError
        If the quantum is no time, or a number is below 1; during the search, if the workload
        reports no loss.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Losses, Paused
    >>> flow = Slaq(max_epochs=5, n_trials=2, quantum="10 s")
    >>> flow.start(Context(n_workers=1)) + flow.handle(Asked((0, 1)))
    [Ask(n=2, sampling='study'), Train(trial=0, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(0, 0.5, 10.0, 10.0, Losses(n=100, low=1.0, high=3.0)))
    [Train(trial=1, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(1, 0.5, 20.0, 10.0, Losses(n=100, low=0.5, high=1.5)))
    [Train(trial=0, epochs=0, seconds=10.0)]
    >>> flow.handle(Paused(0, 1.0, 30.0, 10.0, Losses(n=100, low=1.5, high=2.5)))
    [Train(trial=0, epochs=0, seconds=10.0)]
    """

    def _urgency(self, job: Job) -> float:
        if job.loss is None:
            return math.inf
        return job.loss if math.isfinite(job.loss) else -math.inf


@dataclass
class Hermes(ByLoss):
    """The trial that converges fastest runs next.

    Trials are spread evenly over the workers, `max_trials_per_worker` at most on each (Algorithm
    1); further ones are drawn when there is room. A turn lasts for a quantum; then `convergence` of
    the trial that ran is computed, and of the worker's trials the one with the largest runs next
    (Algorithm 2). Trials that have not run yet come first, in their order; a trial whose loss is no
    number comes last.

    A trial's quantum grows when its loss has decreased by a milestone (Algorithm 3). The paper
    leaves open how far and from where; here the decrease is relative to the loss of the trial's
    first quantum, and each milestone multiplies the quantum by `growth`, for good.

    Son et al., A GPU Scheduling Framework to Accelerate Hyper-Parameter Optimization in Deep
    Learning Clusters, Electronics 2021.

    Parameters
    ----------
    max_epochs, n_trials, max_trials_per_worker, migrate
        Epochs and numbers of trials; see `RoundRobin`.
    quantum
        Seconds of training that a turn lasts at first, or a text; see `RoundRobin`.
    milestones
        Decreases of the loss, as shares of the first one: 0.5 when it has halved.
    growth
        By how much a milestone lengthens the quantum.
    aging
        A trial that has waited for so many turns of others runs next, whatever it gained. So on
        workers that stay, none waits for more than ``aging + max_trials_per_worker - 2`` turns.
        None, as in the paper, lets a trial starve until the faster ones are done.
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
    milestones: tuple[float, ...] = (0.5, 0.75, 0.9)
    growth: float = 2.0
    normalize: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = (0.0, *self.milestones)
        if not shares[-1] <= 1 or not all(one < later for one, later in pairwise(shares)):
            raise SearchError(
                f"milestones must be decreases of the loss above 0 and at most 1, in ascending "
                f"order, such as (0.5, 0.75, 0.9), got {self.milestones!r}"
            )
        if not 1 <= self.growth < math.inf:
            raise SearchError(f"growth must be 1 or more, got {self.growth!r}")

    def _quantum_s(self, job: Job) -> float:
        return super()._quantum_s(job) * self.growth**job.n_milestones

    def _urgency(self, job: Job) -> float:
        return math.inf if job.convergence is None else job.convergence

    def _scale(self, job: Job) -> float:
        return abs(job.first_loss or 1.0) if self.normalize else 1.0

    def _learn(self, paused: Paused) -> None:
        super()._learn(paused)
        job = self.state.jobs[paused.trial]
        if job.first_loss and job.loss is not None:
            decrease = (job.first_loss - job.loss) / abs(job.first_loss)
            passed = sum(decrease >= milestone for milestone in self.milestones)
            job.n_milestones = max(job.n_milestones, passed)
