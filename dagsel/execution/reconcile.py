"""What is left of a trial, from what its record says and what the store holds: pure.

The record may lag behind the store: a unit was done, and the driver died before it heard of it. The
store may lag behind the record: a stored state is damaged, and the one before it is all there is.
The store's word counts for what was trained, the record's for what was scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dagsel.planning.rounds import Begun, Unit
from dagsel.record import TrialRecord
from dagsel.tally import EpochTally


@dataclass(frozen=True, slots=True)
class Plan:
    """Epochs that a trial has to train, and what is done of them.

    Parameters
    ----------
    trial
        Its number.
    epochs
        Which; none if nothing is left.
    begun
        What is done of the first ones.
    """

    trial: int
    epochs: range
    begun: tuple[Begun, ...] = ()

    def until(self, epoch: int) -> Plan:
        """Plan up to a later epoch."""
        return Plan(self.trial, range(self.epochs.start, epoch + 1), self.begun)


def reconcile(
    trial: TrialRecord,
    n_shards: int,
    place: tuple[int, int] | None,
    meta: Mapping[str, Any],
) -> Plan | None:
    """Plan what is left of a live trial, and bring its tallies in line with the store.

    Parameters
    ----------
    trial
        Its record; its tallies are changed.
    n_shards
        Training shards of the data set.
    place, meta
        Epoch and position of its newest readable state, and what was stored with it; None and
        nothing if there is none.

    Returns
    -------
    plan
        None if states that the trial needs are lost.

    Examples
    --------
    >>> trial = TrialRecord(0, {}, {}, n_decided=2)
    >>> reconcile(trial, 3, (1, 1), {"visits": [2, 0]})
    Plan(trial=0, epochs=range(1, 3), begun=(Begun(visits=(2, 0), scored=frozenset()),))
    >>> trial.tallies[1].trained
    {0: (2, 0, nan), 1: (0, 0, nan)}
    """
    n_reported = len(trial.epochs)
    if place is None:
        trial.tallies.clear()
        return None if n_reported else Plan(trial.number, range(1, trial.n_decided + 1))
    is_behind = place < (n_reported, n_shards - 1)
    first = place[0] if is_behind else n_reported + 1
    epochs = range(first, trial.n_decided + 1)
    begun = []
    for epoch in epochs:
        tally = trial.tallies.get(epoch, EpochTally(n_shards))
        _follow(tally, _visits(tally, epoch, n_shards, place, meta["visits"]))
        if epoch == place[0]:
            tally.update(Unit("train", trial.number, *place), meta)
        if epoch <= n_reported:
            begun.append(Begun(tally.begun.visits, frozenset(range(n_shards))))
        elif tally.trained or tally.scored:
            trial.tallies[epoch] = tally
            begun.append(tally.begun)
    return Plan(trial.number, epochs, tuple(begun))


def _visits(
    tally: EpochTally,
    epoch: int,
    n_shards: int,
    place: tuple[int, int],
    visits: Sequence[int],
) -> list[int]:
    """List the shards that a trial has visited in an epoch, as the store has it."""
    if epoch > place[0]:
        return []
    if epoch == place[0]:
        return list(visits)
    known = list(tally.begun.visits)  # the epoch is over; of what was not heard any order will do
    return known + [shard for shard in range(n_shards) if shard not in known]


def _follow(tally: EpochTally, visits: Sequence[int]) -> None:
    """Let a tally hold these visits and no others."""
    for position in [p for p in tally.trained if p >= len(visits)]:
        del tally.trained[position]
    for position, shard in enumerate(visits):
        if tally.trained.get(position, (None,))[0] != shard:
            tally.trained[position] = (shard, 0, float("nan"))
