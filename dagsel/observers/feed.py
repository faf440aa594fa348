"""What is new in a record since it was last looked at, as observers are told of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from dagsel.history.record import Record
from dagsel.history.trial import EpochRecord, TrialRecord
from dagsel.observers.events import EpochEnded, SearchEnded, Told, TrialBegan, TrialEnded


@dataclass(slots=True)
class Feed:
    """Reads a record again and again, and yields what has come since.

    Examples
    --------
    >>> record = Record("run", trials={0: TrialRecord(0, {}, {"lr": 0.1})})
    >>> feed = Feed()
    >>> [*feed.news(record)]
    [TrialBegan(trial=0, params={'lr': 0.1}, is_past=False)]
    >>> [*feed.news(record)]
    []
    """

    is_past: bool = False  # whether what is there now was before this process began
    _n_epochs: dict[int, int] = field(default_factory=dict)  # told of each trial
    _live: set[int] = field(default_factory=set)  # trials whose end is not told

    def news(self, record: Record) -> Iterator[Told]:
        """Yield what is new: of each trial that it is there, its epochs, its end."""
        for number, trial in record.trials.items():
            if number not in self._n_epochs:
                self._n_epochs[number] = 0
                self._live.add(number)
                yield TrialBegan(number, dict(trial.params), self.is_past)
            known = self._n_epochs[number]
            if len(trial.epochs) > known:
                self._n_epochs[number] = len(trial.epochs)
                for epoch in trial.epochs[known:]:
                    yield self._epoch(record, trial, epoch)
            if trial.is_live:
                self._live.add(number)
            elif number in self._live:
                self._live.discard(number)
                about = (trial.state, trial.value, len(trial.epochs), trial.reason)
                yield TrialEnded(number, *about, self.is_past)

    def _epoch(self, record: Record, trial: TrialRecord, epoch: EpochRecord) -> EpochEnded:
        about = (epoch.value, dict(epoch.metrics), epoch.train_loss, epoch.seconds)
        at = wall_time(record, epoch.seconds)
        params = trial.params_at(epoch.epoch)
        return EpochEnded(trial.number, epoch.epoch, *about, at, self.is_past, params)


def wall_time(record: Record, seconds: float) -> float:
    """Return the time since 1970 of a moment of the run.

    Examples
    --------
    >>> record = Record("run", sessions=[(1000.0, 1000.0), (5000.0, 4990.0)])
    >>> wall_time(record, 3.0), wall_time(record, 12.0)
    (1003.0, 5002.0)
    """
    begins = [at - zero for at, zero in record.sessions]
    session = max(0, bisect_right(begins, seconds) - 1)
    return seconds + (record.sessions[session][1] if record.sessions else 0.0)


def ending(record: Record, error: BaseException | None) -> SearchEnded:
    """Return what is told at the end."""
    best = record.leading
    about = (len(record.trials), record.n_epochs, record.seconds, record.worker_seconds)
    value = None if best is None else best.value
    text = "" if error is None else f"{type(error).__name__}: {error}"
    return SearchEnded(None if best is None else best.number, value, *about, text)
