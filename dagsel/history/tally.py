"""What is known of an epoch that is under way."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagsel.dispatch.units import Begun
from dagsel.messages import StoredState, UnitRecord


@dataclass(slots=True)
class EpochTally:
    """The results of an epoch's units, each counted once.

    Sums are taken in the order of positions and shards, not in that in which results came in: the
    same results give the same bits.

    Examples
    --------
    >>> from dagsel.dispatch.units import Unit
    >>> tally = EpochTally(n_shards=1)
    >>> about = {"worker": "w", "shard": 0, "start": 0.0, "stop": 1.0, "hop": False}
    >>> tally.add(UnitRecord(Unit("train", 0, 1, 0), **about, n_samples=4, loss=0.5))
    >>> scores = {"accuracy": 1.0}
    >>> tally.add(UnitRecord(Unit("evaluate", 0, 1, 0), **about, n_samples=2, metrics=scores))
    >>> tally.is_complete, tally.train_loss, tally.metrics
    (True, 0.5, {'accuracy': 1.0})
    """

    n_shards: int  # training shards, and validation shards
    # Of each position the shard, the number of samples and their mean loss; None if there is none.
    trained: dict[int, tuple[int, int, float | None]] = field(default_factory=dict)
    # Of each validation shard the number of samples and the mean of each metric.
    scored: dict[int, tuple[int, Mapping[str, Any]]] = field(default_factory=dict)
    digest: str = ""  # checksum of the state after the last position

    def add(self, done: UnitRecord) -> None:
        """Take in a unit's result; one that is known already changes nothing."""
        position = done.unit.position
        if done.unit.kind != "train":
            self.scored.setdefault(position, (done.n_samples or 0, done.metrics or {}))
        elif position not in self.trained:
            self.update(position, done)

    def update(self, position: int, done: UnitRecord | StoredState) -> None:
        """Take in a training unit's result in place of what is known of it."""
        if done.n_samples is not None:
            self.trained[position] = (done.shard, done.n_samples, done.loss)
        if position == self.n_shards - 1:
            self.digest = done.digest
        if isinstance(done, StoredState):
            for before, (n, loss) in enumerate(done.losses, position - len(done.losses)):
                if n is not None:
                    self.trained[before] = (done.visits[before], n, loss)

    def follow(self, visits: Sequence[int]) -> None:
        """Keep these visits and no others; samples and loss of new ones are not known.

        Examples
        --------
        >>> tally = EpochTally(n_shards=3, trained={0: (2, 4, 0.5)})
        >>> tally.follow([2, 0])
        >>> tally.trained
        {0: (2, 4, 0.5), 1: (0, 0, nan)}
        """
        for position in [p for p in self.trained if p >= len(visits)]:
            del self.trained[position]
        for position, shard in enumerate(visits):
            if self.trained.get(position, (None,))[0] != shard:
                self.trained[position] = (shard, 0, math.nan)

    @property
    def is_trained(self) -> bool:
        """Whether all training units of the epoch are in."""
        return len(self.trained) == self.n_shards

    @property
    def is_complete(self) -> bool:
        """Whether all units of the epoch are in."""
        return len(self.trained) == len(self.scored) == self.n_shards

    @property
    def begun(self) -> Begun:
        """What of the epoch need not be done again."""
        visits = tuple(self.trained[position][0] for position in sorted(self.trained))
        return Begun(visits, frozenset(self.scored))

    @property
    def metrics(self) -> dict[str, float]:
        """Mean of each validation metric over all validation samples."""
        sums: dict[str, float] = {}
        n_samples = 0
        for shard in sorted(self.scored):
            n, means = self.scored[shard]
            n_samples += n
            for name, mean in means.items():
                sums[name] = sums.get(name, 0.0) + n * mean
        return {name: total / max(n_samples, 1) for name, total in sums.items()}

    @property
    def train_loss(self) -> float:
        """Mean training loss over the samples whose loss is known; NaN without any."""
        known = self._losses
        n_samples = sum(n for n, _ in known)
        return sum(n * loss for n, loss in known) / n_samples if n_samples else math.nan

    @property
    def lacks_loss(self) -> bool:
        """Whether the workload has a loss, and it is NaN though samples were trained on."""
        return any(math.isnan(loss) for _, loss in self._losses)

    @property
    def _losses(self) -> list[tuple[int, float]]:
        trained = [self.trained[position] for position in sorted(self.trained)]
        return [(n, loss) for _, n, loss in trained if n and loss is not None]
