"""Random search: the space's own distributions, every trial trained to the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dagsel.flow import Sampling
from dagsel.flows.full_training import FullTraining


@dataclass
class RandomSearch(FullTraining):
    """Draw trials at random and train each to the end.

    The study's own sampler is not asked; it stays as it is.

    Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 2012.

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many trials to draw.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If one of them is below 1.

    Examples
    --------
    A search in virtual time:

    >>> import dagsel
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     RandomSearch(max_epochs=3, n_trials=8),
    ...     PowerLaw(),
    ...     SimulatedCluster(n_workers=4),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)},
    ... )
    >>> list(run.trials()["state"]).count("complete")
    8

    Step by step:

    >>> from dagsel.flow import Asked, Context
    >>> flow = RandomSearch(max_epochs=5, n_trials=8)
    >>> flow.start(Context(n_workers=1))
    [Ask(n=4, sampling='random')]
    >>> flow.handle(Asked(trials=(0,)))
    [Train(trial=0, epochs=5)]
    """

    n_trials: int = 10

    sampling: ClassVar[Sampling] = "random"
