"""Bayesian optimization of whole trainings, with as many trials in flight as there are workers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dagsel.flows.full_training import FullTraining


@dataclass
class SamplerSearch(FullTraining):
    """Draw each trial with the study's sampler when another one has ended; train it to the end.

    The study brings the sampler: ``optuna.create_study(sampler=TPESampler(seed=0))``, or any other.
    It learns from trials that have ended: few trials in flight make better draws, many keep the
    workers busy.

    Bergstra et al., Algorithms for Hyper-Parameter Optimization, NeurIPS 2011 (TPE). One trial a
    worker is how Nakandala et al., Cerebro, VLDB 2020, section 6.3, run Hyperopt.

    Parameters
    ----------
    max_epochs
        Epochs of each trial.
    n_trials
        How many trials to draw.
    n_concurrent
        How many of them train at once; None for one a worker.

    Raises
    ------
    SearchError
        If one of them is below 1.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> flow = SamplerSearch(max_epochs=5, n_trials=30)
    >>> flow.start(Context(n_workers=2))
    [Ask(n=2, sampling='study')]
    >>> flow.handle(Asked(trials=(0, 1)))
    [Train(trial=0, epochs=5), Train(trial=1, epochs=5)]
    >>> flow.handle(Reported(1, 5, 0.3, {}, seconds=9.0))
    [Stop(trial=1, reason='trained to the end', outcome='complete'), Ask(n=1, sampling='study')]
    """

    n_trials: int = field()

    trials_per_worker: ClassVar[int] = 1
