"""Early stopping by a pruner of Optuna's."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dagsel.checks import shown
from dagsel.errors import SearchError
from dagsel.flow import Decision, Event, Reported, Stop, Traits
from dagsel.flows.full_training import FullTraining


@dataclass
class OptunaPruner(FullTraining):
    """Ask an Optuna pruner after each epoch whether a trial trains on.

    It does what ``trial.report`` and ``trial.should_prune`` do in an Optuna objective, with the
    study's own sampler and pruner. Each epoch is a step, counted from 0; or from 1 if the trials
    that the study had before count from 1.

    Akiba et al., Optuna: A Next-generation Hyperparameter Optimization Framework, KDD 2019.

    Parameters
    ----------
    max_epochs
        Epochs of each trial that is not pruned.
    n_trials
        How many trials to draw.
    pruner
        Any pruner of Optuna's; None for the study's own.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If a number is below 1, or `pruner` is no pruner.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> flow = OptunaPruner(max_epochs=9, n_trials=1)
    >>> flow.start(Context(n_workers=1)) + flow.handle(Asked((0,)))
    [Ask(n=1, sampling='study'), Train(trial=0, epochs=9)]
    >>> flow.handle(Reported(0, 3, 0.5, {}, 1.0, prune=True))[0]
    Stop(trial=0, reason='the pruner ended it after epoch 3', outcome='pruned')
    """

    n_trials: int = field()
    pruner: Any = None
    n_concurrent: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        prunes = callable(getattr(self.pruner, "prune", None)) and not isinstance(self.pruner, type)
        if self.pruner is not None and not prunes:
            raise SearchError(
                f"pruner must be one of Optuna's, such as optuna.pruners.MedianPruner(), got "
                f"{shown(self.pruner)}"
            )

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        return replace(super().traits, uses_pruner=True, pruner=self.pruner, takes_several=False)

    def handle(self, event: Event) -> list[Decision]:
        """Stop a trial where the pruner says so; draw another one for each that ended."""
        if isinstance(event, Reported) and event.prune and self._may_end(event.epoch):
            reason = f"the pruner ended it after epoch {event.epoch}"
            return self.state.end(Stop(event.trial, reason))
        return super().handle(event)

    def _may_end(self, epoch: int) -> bool:
        return epoch < (self.state.max_epochs or 0) or self.state.drawing.context.prunes_last
