"""What a round holds: chains of training units, one chain a trial.

A *unit* is one trial's pass over one shard. Which shard a training unit visits, and where, is not
written here: the dispatcher binds it when the unit is ready (`dagsel.dispatch.dispatcher`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

Kind: TypeAlias = Literal["train", "evaluate", "check"]


class Unit(NamedTuple):
    """One trial's pass over one shard; also the tail of its Dask key.

    Parameters
    ----------
    kind
        ``"train"``; ``"evaluate"`` scores the state after an epoch, ``"check"`` that of a trial
        that was paused.
    trial
        Number of the trial.
    epoch
        From 1; of a check, its number.
    position
        Of a training unit, its place in the epoch's chain; of others, the index of the validation
        shard that is scored.

    Examples
    --------
    >>> Unit("train", trial=3, epoch=1, position=0)
    Unit(kind='train', trial=3, epoch=1, position=0)
    """

    kind: Kind
    trial: int
    epoch: int
    position: int


def visit_order(n_shards: int, *, seed: int, trial: int, epoch: int) -> tuple[int, ...]:
    """Order of a trial's visits in an epoch that depends on nothing but these four numbers.

    Examples
    --------
    >>> visit_order(5, seed=0, trial=3, epoch=1)
    (0, 2, 4, 1, 3)
    """
    order = np.random.default_rng([seed, trial, epoch, n_shards]).permutation(n_shards)
    return tuple(int(shard) for shard in order)


@dataclass(frozen=True, slots=True)
class Begun:
    """What of an epoch was done before its chain is added: by an earlier session of the run.

    Parameters
    ----------
    visits
        The shards visited, in order.
    scored
        The validation shards that are scored.
    partial
        The shard in whose middle the unit after these visits was stopped; None if it was not.
    """

    visits: tuple[int, ...] = ()
    scored: frozenset[int] = frozenset()
    partial: int | None = None


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
        For each epoch the shards in the order of their visits; None, for one or for all, binds
        them late.
    evaluate
        Whether each epoch is followed by a validation.
    begun
        What is done of its first epochs.

    Raises
    ------
    ValueError
        When the epochs are none, not consecutive or below 1, or an order is no permutation.

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
    order: tuple[tuple[int, ...] | None, ...] | None = None
    evaluate: bool = True
    begun: tuple[Begun, ...] = ()

    def __post_init__(self) -> None:
        if not self.epochs or self.epochs.step != 1 or self.epochs.start < 1:
            raise ValueError(f"trial {self.trial}: epochs must be from 1 on, got {self.epochs}")
        if self.n_shards < 1:
            raise ValueError(f"trial {self.trial}: n_shards must be 1 or more, got {self.n_shards}")
        if not 0.0 < self.cost < float("inf"):
            raise ValueError(f"trial {self.trial}: cost must be positive, got {self.cost}")
        for begun in self.begun:
            if not {*begun.visits, begun.partial or 0} <= set(range(self.n_shards)):
                raise ValueError(f"trial {self.trial}: {begun} has shards beyond {self.n_shards}")
        if self.order is None:
            return
        if len(self.order) != len(self.epochs):
            raise ValueError(
                f"trial {self.trial}: {len(self.order)} orders for {len(self.epochs)} epochs"
            )
        for visits in self.order:
            if visits is not None and sorted(visits) != list(range(self.n_shards)):
                raise ValueError(
                    f"trial {self.trial}: {visits} is not an order of {self.n_shards} shards"
                )

    def done(self, epoch: int) -> Begun:
        """Give what was done of an epoch before the chain is added."""
        index = epoch - self.epochs.start
        return self.begun[index] if index < len(self.begun) else Begun()

    @property
    def units(self) -> Iterator[Unit]:
        """The training units that are to do, in chain order."""
        for epoch in self.epochs:
            for position in range(len(self.done(epoch).visits), self.n_shards):
                yield Unit("train", self.trial, epoch, position)

    def evaluations(self, epoch: int) -> Iterator[Unit]:
        """List an epoch's evaluating units to do; none when the chain does not evaluate."""
        if self.evaluate:
            scored = self.done(epoch).scored
            for shard in range(self.n_shards):
                if shard not in scored:
                    yield Unit("evaluate", self.trial, epoch, shard)

    def fixed_shard(self, unit: Unit) -> int | None:
        """Shard that the unit must visit, or None when it is bound late.

        Examples
        --------
        >>> Chain(0, range(1, 2), 2, order=((1, 0),)).fixed_shard(Unit("train", 0, 1, 0))
        1
        """
        if unit.kind != "train":
            return unit.position
        if self.order is None:
            return None
        visits = self.order[unit.epoch - self.epochs.start]
        return None if visits is None else visits[unit.position]


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
