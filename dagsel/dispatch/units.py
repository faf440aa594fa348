"""What a round holds: chains of training units, one chain per trial.

A *unit* is one trial's pass over one shard. Nothing here says which shard a training unit visits
or on which worker: `dagsel.dispatch.dispatcher` decides that when the unit is ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

Kind: TypeAlias = Literal["train", "evaluate", "check"]


class Unit(NamedTuple):
    """One trial's pass over one shard; also the tail of its Dask key."""

    kind: Kind  # "evaluate" scores the state after an epoch, "check" that of a paused trial
    trial: int
    epoch: int  # from 1; of a check: its number
    position: int  # in the epoch's chain; else the validation shard that is scored


def units_after(unit: Unit, n_shards: int) -> Iterator[Unit]:
    """Yield the training units that follow one in its epoch.

    Examples
    --------
    >>> [unit.position for unit in units_after(Unit("train", 0, epoch=1, position=1), n_shards=4)]
    [2, 3]
    """
    return (unit._replace(position=at) for at in range(unit.position + 1, n_shards))


def visit_order(n_shards: int, *, seed: int, trial: int, epoch: int) -> tuple[int, ...]:
    """Return an order of a trial's visits in an epoch; it depends on these four numbers alone.

    Examples
    --------
    >>> visit_order(5, seed=0, trial=3, epoch=1)
    (0, 2, 4, 1, 3)
    """
    order = np.random.default_rng([seed, trial, epoch, n_shards]).permutation(n_shards)
    return tuple(int(shard) for shard in order)


@dataclass(frozen=True, slots=True)
class Begun:
    """The part of an epoch that an earlier session of the run has done."""

    visits: tuple[int, ...] = ()  # shards, in order
    scored: frozenset[int] = frozenset()  # validation shards
    partial: int | None = None  # shard of the next unit, if that was stopped in the middle


@dataclass(frozen=True, slots=True)
class Chain:
    """One trial's epochs in one round.

    Each epoch has ``n_shards`` training units, one after the other. Unless ``evaluate`` is false it
    also has ``n_shards`` evaluating units, which are ready when the last training unit is done.
    """

    trial: int
    epochs: range  # in order and without a gap
    n_shards: int
    # by epoch the shards in the order of the visits; None: the dispatcher chooses
    order: tuple[tuple[int, ...] | None, ...] | None = None
    evaluate: bool = True  # whether each epoch is followed by a validation
    begun: tuple[Begun, ...] = ()  # what is already done of the first epochs
    # by epoch the metric of the state that it begins with, if its training follows that
    values: tuple[float | None, ...] = ()
    is_clone: bool = False  # whether its first unit begins with a stored state, if it is epoch 1's
    # Units that have run out of memory; those of an evaluation as the one of shard 0.
    ran_out: tuple[Unit, ...] = ()
    memory_bytes: int | None = None  # that a unit takes beside its shard, if it is known

    def __post_init__(self) -> None:
        if not self.epochs or self.epochs.step != 1 or self.epochs.start < 1:
            raise ValueError(f"trial {self.trial}: epochs must be from 1 on, got {self.epochs}")
        if self.n_shards < 1:
            raise ValueError(f"trial {self.trial}: n_shards must be 1 or more, got {self.n_shards}")
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
        """Return what was done of an epoch before the chain is added."""
        index = epoch - self.epochs.start
        return self.begun[index] if index < len(self.begun) else Begun()

    def value(self, unit: Unit) -> float | None:
        """Return the metric that a training unit is told: the first one of its epoch."""
        index = unit.epoch - self.epochs.start
        return self.values[index] if unit.position == 0 and index < len(self.values) else None

    def n_halvings(self, unit: Unit) -> int:
        """Return how often the samples are halved that a unit computes at once.

        Examples
        --------
        >>> chain = Chain(0, range(1, 3), n_shards=2, ran_out=(Unit("train", 0, 1, 1),))
        >>> [chain.n_halvings(unit) for unit in chain.units]
        [0, 1, 1, 1]
        """
        return sum(it.kind == unit.kind and it[2:] <= unit[2:] for it in self.ran_out)

    @property
    def units(self) -> Iterator[Unit]:
        """The training units to do, in chain order."""
        for epoch in self.epochs:
            for position in range(len(self.done(epoch).visits), self.n_shards):
                yield Unit("train", self.trial, epoch, position)

    def evaluations(self, epoch: int) -> Iterator[Unit]:
        """Return an epoch's evaluating units to do; none if the chain does not evaluate."""
        if self.evaluate:
            scored = self.done(epoch).scored
            for shard in range(self.n_shards):
                if shard not in scored:
                    yield Unit("evaluate", self.trial, epoch, shard)

    def fixed_shard(self, unit: Unit) -> int | None:
        """Return the shard that the unit must visit, or None if the dispatcher may choose."""
        if unit.kind != "train":
            return unit.position
        if self.order is None:
            return None
        visits = self.order[unit.epoch - self.epochs.start]
        return None if visits is None else visits[unit.position]


@dataclass(frozen=True, slots=True)
class Round:
    """Chains that were decided together and become one graph."""

    number: int
    chains: tuple[Chain, ...]  # at most one per trial

    def __post_init__(self) -> None:
        trials = [chain.trial for chain in self.chains]
        if len(set(trials)) != len(trials):
            raise ValueError(f"round {self.number}: a trial has more than one chain")
