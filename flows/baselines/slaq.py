"""SLAQ: a worker's next turn goes to the trial with the largest loss."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

from dagsel.flow import Decision, Event
from dagsel.flows.drawing import check_counts
from dagsel.flows.hermes import SharedByLoss
from dagsel.flows.time_sharing import TimeSharing


@dataclass
class SLAQ(TimeSharing):
    """The trial with the largest loss runs next, as it has the most to gain.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(**({} if self.aging is None else {"aging": self.aging}))

    def handle(self, event: Event) -> list[Decision]:
        """End the turn that is over, and begin the turn of the trial with the largest loss."""
        if not self.state.finished:
            self.state.learn(event, "SLAQ")
        return super().handle(event)

    def next_trial(self, trials: list[int]) -> int:
        """Choose the trial with the largest loss; one that has waited for too long goes first."""
        overdue = self.state.overdue(trials, self.aging)
        return max(trials, key=self._loss) if overdue is None else overdue

    def _loss(self, trial: int) -> float:
        if trial not in self.state.losses:
            return math.inf
        loss = self.state.losses[trial].latest
        return loss if math.isfinite(loss) else -math.inf
