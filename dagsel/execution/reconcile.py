"""What is left of a trial, from what its record says and what the store holds: pure.

The record may lag behind the store: a unit was done, and the driver died before it heard of it. The
store may lag behind the record: a stored state is damaged, and the one before it is all there is.
The store's word counts for what was trained, the record's for what was scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dagsel.planning.rounds import Begun
from dagsel.trial_record import TrialRecord


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


def reconcile(trial: TrialRecord, n_shards: int, newest: Mapping[str, Any] | None) -> Plan | None:
    """Plan what is left of a live trial whose record follows the store (`TrialRecord.follow`).

    Parameters
    ----------
    trial
        Its record.
    n_shards
        Training shards of the data set.
    newest
        Epoch, position and visits of its newest readable state; None if there is none.

    Returns
    -------
    plan
        None if states that the trial needs are lost.

    Examples
    --------
    >>> trial = TrialRecord(0, {}, {}, n_decided=2)
    >>> state = {"epoch": 1, "position": 1, "shard": 0, "visits": [2, 0]}
    >>> trial.follow([state], n_shards=3)
    >>> reconcile(trial, 3, state).begun
    (Begun(visits=(2, 0), scored=frozenset(), partial=None),)
    """
    n_reported = len(trial.epochs)
    first, begun = n_reported + 1, list[Begun]()
    if newest is None:
        if n_reported:
            return None
    elif (newest["epoch"], newest["position"]) < (n_reported, n_shards - 1):
        # Epochs that were reported are trained once more, and not scored.
        first, everything = newest["epoch"], frozenset(range(n_shards))
        begun = [Begun((), everything) for _ in range(first, n_reported + 1)]
        begun[0] = Begun(tuple(newest["visits"]), everything)
    for epoch in range(n_reported + 1, trial.n_decided + 1):
        if epoch not in trial.tallies:
            break
        begun.append(trial.tallies[epoch].begun)
    return Plan(trial.number, range(first, trial.n_decided + 1), tuple(begun))
