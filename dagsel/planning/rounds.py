"""What a round holds: chains of training units, one chain a trial.

A *unit* is one trial's pass over one shard. Which shard a training unit visits, and where, is not
written here: the dispatcher binds it when the unit is ready (`dagsel.planning.dispatch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Unit(NamedTuple):
    """One trial's pass over one shard; also the tail of its Dask key.

    Parameters
    ----------
    kind
        ``"train"`` or ``"evaluate"``.
    trial
        Number of the trial.
    epoch
        From 1.
    position
        Of a training unit, its place in the epoch's chain; of an evaluating one, the index of the
        validation shard that it scores.

    Examples
    --------
    >>> Unit("train", trial=3, epoch=1, position=0)
    Unit(kind='train', trial=3, epoch=1, position=0)
    """

    kind: Literal["train", "evaluate"]
    trial: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class Chain:
    """One trial's epochs in one round.

    In each epoch the trial has ``n_shards`` training units, each after the one before, and (unless
    ``evaluate`` is false) ``n_shards`` evaluating units, ready when the epoch's last training unit
    is done.

    Parameters
    ----------
    trial
        Number of the trial.
    epochs
        Which epochs, in order and without a gap.
    n_shards
        Number of training shards, and of validation shards.
    cost
        Prior of the work of one of its training units, relative to other trials'.
    order
        For each epoch the shards in the order of their visits; None binds them late.
    evaluate
        Whether each epoch is followed by a validation.

    Raises
    ------
    ValueError
        When the epochs are none, not consecutive or below 1, or the order is no permutation.

    Examples
    --------
    >>> chain = Chain(trial=0, epochs=range(1, 2), n_shards=2)
    >>> [unit.position for unit in chain.units]
    [0, 1]
    >>> [unit.position for unit in chain.evaluations(1)]
    [0, 1]
    """

    trial: int
    epochs: range
    n_shards: int
    cost: float = 1.0
    order: tuple[tuple[int, ...], ...] | None = None
    evaluate: bool = True

    def __post_init__(self) -> None:
        if not self.epochs or self.epochs.step != 1 or self.epochs.start < 1:
            raise ValueError(f"trial {self.trial}: epochs must be from 1 on, got {self.epochs}")
        if self.n_shards < 1:
            raise ValueError(f"trial {self.trial}: n_shards must be 1 or more, got {self.n_shards}")
        if not 0.0 < self.cost < float("inf"):
            raise ValueError(f"trial {self.trial}: cost must be positive, got {self.cost}")
        if self.order is None:
            return
        if len(self.order) != len(self.epochs):
            raise ValueError(
                f"trial {self.trial}: {len(self.order)} orders for {len(self.epochs)} epochs"
            )
        for visits in self.order:
            if sorted(visits) != list(range(self.n_shards)):
                raise ValueError(
                    f"trial {self.trial}: {visits} is not an order of {self.n_shards} shards"
                )

    @property
    def units(self) -> Iterator[Unit]:
        """The training units, in chain order."""
        for epoch in self.epochs:
            for position in range(self.n_shards):
                yield Unit("train", self.trial, epoch, position)

    def evaluations(self, epoch: int) -> Iterator[Unit]:
        """List the evaluating units of an epoch; none when the chain does not evaluate."""
        if self.evaluate:
            for shard in range(self.n_shards):
                yield Unit("evaluate", self.trial, epoch, shard)

    def fixed_shard(self, unit: Unit) -> int | None:
        """Shard that the unit must visit, or None when it is bound late.

        Examples
        --------
        >>> Chain(0, range(1, 2), 2, order=((1, 0),)).fixed_shard(Unit("train", 0, 1, 0))
        1
        """
        if unit.kind == "evaluate":
            return unit.position
        if self.order is None:
            return None
        return self.order[unit.epoch - self.epochs.start][unit.position]


@dataclass(frozen=True, slots=True)
class Round:
    """Chains that were decided together and become one graph.

    Parameters
    ----------
    number
        Number of the round in its run.
    chains
        At most one chain a trial.
    """

    number: int
    chains: tuple[Chain, ...]

    def __post_init__(self) -> None:
        trials = [chain.trial for chain in self.chains]
        if len(set(trials)) != len(trials):
            raise ValueError(f"round {self.number}: a trial has more than one chain")

    @property
    def n_units(self) -> int:
        """Number of training and evaluating units."""
        return sum(len(c.epochs) * c.n_shards * (2 if c.evaluate else 1) for c in self.chains)
