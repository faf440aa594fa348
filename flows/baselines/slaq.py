"""SLAQ: a worker's next turn goes to the trial with the largest loss."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

from dagsel.flow import Event
from dagsel.flows.hermes import SharedByLoss
from dagsel.flows.time_sharing import TimeSharing


@dataclass
class SLAQ(TimeSharing):
    """The trial with the largest loss runs next, as it has the most to gain.

    Zhang et al., SLAQ: Quality-Driven Scheduling for Distributed Machine Learning, SoCC 2017, as
    the paper of `Hermes` describes it (Section 4.1.3). SLAQ itself divides a cluster's cores by how
    much each job's loss is predicted to fall. Trials that have not run yet come first, those whose
    loss is no number last.

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
    >>> flow = SLAQ(max_epochs=5, n_trials=2, quantum="10 s")
    >>> flow.start(Context(n_workers=1)) + flow.handle(Asked((0, 1)))
    [Ask(n=2, sampling='study'), Train(trial=0, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(0, 0.5, 10.0, 10.0, Losses(n=100, low=1.0, high=3.0)))
    [Train(trial=1, epochs=5, seconds=10.0)]
    >>> flow.handle(Paused(1, 0.5, 20.0, 10.0, Losses(n=100, low=0.5, high=1.5)))
    [Train(trial=0, epochs=0, seconds=10.0)]
    >>> flow.handle(Paused(0, 1.0, 30.0, 10.0, Losses(n=100, low=1.5, high=2.5)))
    [Train(trial=0, epochs=0, seconds=10.0)]
    """

    _: KW_ONLY
    aging: int | None = None
    state: SharedByLoss = field(default_factory=SharedByLoss, init=False, repr=False, compare=False)

    def learn(self, event: Event) -> None:
        """Note the losses of a turn."""
        self.state.learn(event, "SLAQ")

    def urgency(self, trial: int) -> float:
        """Return the loss of the trial's latest turn."""
        if trial not in self.state.losses:
            return math.inf
        loss = self.state.losses[trial].latest
        return loss if math.isfinite(loss) else -math.inf
