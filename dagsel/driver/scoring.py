"""What trials are scored with: means of shards, and metrics of the whole validation set.

Of the latter each shard has kept something in the store (`dagsel.workloads.base.PoolsScores`). It
is put together here once all shards are scored, and then dropped.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from dagsel.driver.protocols import States
from dagsel.errors import CheckpointError
from dagsel.history.tally import EpochTally
from dagsel.history.trial import TrialRecord
from dagsel.storage.runs.checkpoints import Scoring
from dagsel.workloads.raised import Raised, raised

logger = logging.getLogger("dagsel")

#: Makes metrics of the whole validation set of what each shard has kept.
Pool: TypeAlias = Callable[[list[bytes]], dict[str, float]]


class Score(NamedTuple):
    """What an epoch, or a state of a paused trial, is worth."""

    value: float  # the metric that the search is about, of several the first one
    metrics: dict[str, float]
    why_not: str = ""  # why the trial fails by it; empty if it does not
    raised: Raised | None = None  # what a metric has raised, if it is that


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of a run's trials."""

    states: States  # where shards keep what the metrics of the whole set need
    metrics: tuple[str, ...]  # names of those that the search is about
    pool: Pool | None = None  # None if there are no metrics of the whole set
    validates: bool = True  # whether there is a validation set; if not, the training loss counts

    def of(
        self, tally: EpochTally, where: str, trial: int, number: int, kind: Scoring = "epoch"
    ) -> Score:
        """Return the score of what all shards have scored.

        Parameters
        ----------
        tally
            Their results.
        where
            What was scored, for the reason why a trial fails.
        trial, number, kind
            Number of the trial, and that of its epoch or check.
        """
        if not self.validates:
            return Score(tally.train_loss, {})
        metrics = tally.metrics
        if self.pool is not None:
            shards = range(tally.n_shards)
            try:
                kept = [self.states.load_scores(trial, kind, number, shard) for shard in shards]
                metrics |= self.pool(kept)
            except Exception as error:  # noqa: BLE001 - a metric of the user's may raise anything
                reason = f"{type(error).__name__}: {error} (in a metric of {where})"
                return Score(math.nan, metrics, reason, raised(error))
        for name in self.metrics:
            if name not in metrics:
                known = ", ".join(metrics)
                reason = f"WorkloadError: {name} is no single number, it is {known}"
                return Score(math.nan, metrics, reason)
        diverged = [name for name in self.metrics if math.isnan(metrics[name])]
        reason = f"DivergedError: {diverged[0]} is NaN after {where}" if diverged else ""
        return Score(metrics[self.metrics[0]], metrics, reason)

    def drop(self, trial: int, number: int, kind: Scoring = "epoch") -> None:
        """Drop what shards have kept of scores that are known."""
        if self.pool is not None:
            self.states.drop_scores(trial, kind, number)

    def forget_lost(self, trial: TrialRecord) -> None:
        """Have those shards scored anew of which nothing can be read."""
        for epoch, tally in trial.tallies.items() if self.pool is not None else ():
            for shard in list(tally.scored):
                try:
                    self.states.load_scores(trial.number, "epoch", epoch, shard)
                except CheckpointError as error:
                    logger.warning("trial %d is scored again: %s", trial.number, error)
                    del tally.scored[shard]
