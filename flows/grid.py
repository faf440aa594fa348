"""Grid search: every point of a finite space, each trained to the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dagsel.flow import Sampling
from dagsel.flows.full_training import FullTraining


@dataclass
class Grid(FullTraining):
    """Train every point of a finite search space to the end.

    The space may branch: a parameter that is suggested only under one choice adds points under
    that choice alone. Grid search has no paper of its own; Bergstra and Bengio, JMLR 2012, say when
    `RandomSearch` is the better choice.

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many points to train; None for all of them.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If one of them is below 1; by `dagsel.optimize`, if a parameter of the space is continuous.

    Examples
    --------
    >>> from dagsel.flow import Context
    >>> Grid(max_epochs=5).start(Context(n_workers=2))
    [Ask(n=8, sampling='grid')]
    """

    sampling: ClassVar[Sampling] = "grid"
