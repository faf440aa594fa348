"""First in, first out: a trial keeps its worker to the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.flows.time_sharing import TimeSharing


@dataclass
class FIFO(TimeSharing):
    """First in, first out: a trial keeps its worker to the end.

    The authors of `Hermes` compare with it (Son et al., Electronics 2021, Section 4.1.3).

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
    >>> flow = FIFO(max_epochs=5, n_trials=3)
    >>> flow.start(Context(n_workers=1)) + flow.handle(Asked((0,)))
    [Ask(n=1, sampling='study'), Train(trial=0, epochs=5)]
    """

    quantum: float | str = field(default="10 s", init=False, repr=False)  # unused
    max_trials_per_worker: int = field(default=1, init=False, repr=False)
    migrate: bool = field(default=False, init=False, repr=False)

    def quantum_s(self, trial: int) -> None:
        """Return None: a turn lasts to the trial's end."""
