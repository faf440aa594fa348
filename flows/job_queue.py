"""A plain queue of jobs, each with its own length: what a batch system is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dagsel.errors import SearchError
from dagsel.flow import Asked, Context, Decision, Event, Flow, Traits
from dagsel.flows.drawing import check_counts
from dagsel.flows.full_training import Trainings


@dataclass
class JobQueue(Flow):
    """Train every point of a finite space for as many epochs as its configuration says.

    The jobs come in the order of the grid. To list them, let the space choose among them:
    ``lambda trial: jobs[trial.suggest_int("job", 0, len(jobs) - 1)]``. The job sets that MARBLE is
    measured on (Han et al., CCGRID 2020, Tables II to IV) are such queues.

    Parameters
    ----------
    epochs_by
        Name of the entry of a configuration that says how many epochs to train.
    n_trials
        How many jobs to train; None for all of them.
    n_concurrent
        How many of them are in the queue or train at once; None for four a worker.

    Raises
    ------
    SearchError
        If a number is below 1; or, when a job is drawn, if its configuration says no epochs.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context
    >>> flow = JobQueue(n_concurrent=2)
    >>> flow.start(Context(n_workers=6))
    [Ask(n=2, sampling='grid')]
    >>> flow.handle(Asked((0, 1), configs=({"epochs": 90}, {"epochs": 30})))
    [Train(trial=0, epochs=90), Train(trial=1, epochs=30)]
    """

    n_trials: int | None = None
    n_concurrent: int | None = None
    epochs_by: str = field(default="epochs", kw_only=True)
    state: Trainings = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        counts = {} if self.n_trials is None else {"n_trials": self.n_trials}
        check_counts(n_concurrent=self.n_concurrent, **counts)
        self.state = Trainings(self.n_trials, self.n_concurrent, "grid")

    @property
    def traits(self) -> Traits:
        """What the queue says of itself."""
        return Traits(
            sampling="grid", reads_configs="reads the number of epochs off configurations"
        )

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first jobs."""
        return self.state.start(context)

    def handle(self, event: Event) -> list[Decision]:
        """Train what was drawn; draw another job for each that ended."""
        if not isinstance(event, Asked):
            return self.state.handle(event)
        jobs = zip(event.trials, event.configs, strict=True)
        return self.state.train(event, {job: self._read_epochs(job, it) for job, it in jobs})

    def _read_epochs(self, trial: int, config: Mapping[str, Any]) -> int:
        n = config.get(self.epochs_by)
        if not isinstance(n, int) or isinstance(n, bool) or n < 1:
            raise SearchError(
                f"job {trial} must say its epochs, 1 or more, under {self.epochs_by!r}, got "
                f"{n!r}; add them to its configuration or name another key with epochs_by="
            )
        return n
