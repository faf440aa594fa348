"""Lines of a log, by Python's logging."""

from __future__ import annotations

import logging

from dagsel.observers.base import Observer
from dagsel.observers.events import EpochEnded, SearchBegan, SearchEnded, TrialBegan, TrialEnded


class Logging(Observer):
    """Logs each trial and each epoch; what was before this process began is not logged again.

    Parameters
    ----------
    logger
        Name of the logger. Those below ``"dagsel"`` follow `dagsel.set_verbosity`.
    level
        Level of the lines.

    Examples
    --------
    >>> observer = Logging("myproject.search", logging.DEBUG)
    >>> observer.epoch_ended(EpochEnded(0, 1, 0.5, {"accuracy": 0.5}, 2.25, 1.5, 1.7e9))
    """

    _is_of_one_search = False

    def __init__(self, logger: str = "dagsel.trials", level: int = logging.INFO) -> None:
        self._logger, self._level = logging.getLogger(logger), level

    def search_began(self, search: SearchBegan) -> None:
        """Log which search it is."""
        how = "goes on" if search.goes_on else "begins"
        about = (search.run, search.study, how, search.metric, search.direction)
        self._logger.log(self._level, "run %s of study %s %s: %s, %s", *about)

    def trial_began(self, trial: TrialBegan) -> None:
        """Log its parameters."""
        if not trial.is_past:
            self._logger.log(self._level, "trial %d begins: %s", trial.trial, dict(trial.params))

    def epoch_ended(self, epoch: EpochEnded) -> None:
        """Log its metrics."""
        if not epoch.is_past:
            about = (epoch.trial, epoch.epoch, epoch.train_loss, dict(epoch.metrics))
            self._logger.log(self._level, "trial %d, epoch %d: train loss %.6g, %s", *about)

    def trial_ended(self, trial: TrialEnded) -> None:
        """Log how it has ended."""
        if not trial.is_past:
            value = "not scored" if trial.value is None else f"{trial.value:.6g}"
            about = (trial.trial, trial.state, trial.epochs, value, trial.reason)
            self._logger.log(self._level, "trial %d %s after %d epochs, %s: %s", *about)

    def search_ended(self, search: SearchEnded) -> None:
        """Log what came out."""
        about = (search.n_trials, search.n_epochs, search.seconds, search.error or "in order")
        self._logger.log(
            self._level, "the search has ended: %d trials, %d epochs, %.1f s, %s", *about
        )
