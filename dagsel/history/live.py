"""Trials of a running search that take commands."""

from __future__ import annotations

from collections import deque
from typing import Any

from dagsel.errors import SearchError
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord


def live_trial(record: Record, number: int, what: str) -> TrialRecord:
    """Return a live trial; raise a `SearchError` if it is none, and so cannot be `what`.

    Examples
    --------
    >>> live_trial(Record("run"), 3, "stopped")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: trial 3 cannot be stopped: the search has no such trial; ...
    """
    trial = record.trials.get(number)
    if trial is None:
        live = [str(other.number) for other in record.trials.values() if other.is_live]
        raise SearchError(
            f"trial {number} cannot be {what}: the search has no such trial; those that have not "
            f"ended: {', '.join(live) or 'none'}"
        )
    if not trial.is_live:
        raise SearchError(f"trial {number} cannot be {what}: it is {trial.state} ({trial.reason})")
    return trial


def config_kept(record: Record, trial: TrialRecord) -> dict[str, Any]:
    """Return the configuration that the state of a trial was trained with that it is worth.

    Examples
    --------
    >>> record = Record("run", trials={0: TrialRecord(0, {}, {}, drawn={"lr": 0.1})})
    >>> config_kept(record, record.trials[0])
    {'lr': 0.1}
    """
    lineage = trial.kept_lineage
    return {**record.trials[lineage.root].drawn, **lineage.changes}


def epochs_behind(record: Record, number: int, epoch: int) -> tuple[int, tuple[float, ...]]:
    """Return how long the state of a trial's epoch was trained in all, and what each epoch scored.

    A trial may have gone on from the state of another one, as a clone does: the epochs of that one
    come first.

    Examples
    --------
    >>> from dagsel.history.trial import Adoption, EpochRecord
    >>> source, clone = TrialRecord(0, {}, {}), TrialRecord(1, {}, {})
    >>> source.epochs = [EpochRecord(n, 0.1 * n, {}, 0.5, 1.0) for n in (1, 2, 3)]
    >>> clone.epochs = [EpochRecord(1, 0.5, {}, 0.5, 1.0)]
    >>> clone.adoptions = [Adoption(0, 0, 2, 0, {}, 0.2)]
    >>> epochs_behind(Record("run", trials={0: source, 1: clone}), 1, 1)
    (3, (0.1, 0.2, 0.5))
    """
    n_epochs, values = 0, deque[float]()
    while True:
        trial = record.trials[number]
        taken = [it for it in trial.adoptions if it.after < epoch][-1:]  # the ones before are its
        after = taken[0].after if taken else 0
        n_epochs += epoch - after
        values.extendleft(done.value for done in reversed(trial.epochs[after:epoch]))
        if not taken:
            return n_epochs, tuple(values)
        number, epoch = taken[0].source, taken[0].source_epoch
