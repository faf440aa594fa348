"""How long the state of a trial was trained in all, if it has gone on from others' states."""

from __future__ import annotations

from itertools import count

from dagsel.history.live import epochs_behind
from dagsel.history.record import Record
from dagsel.history.trial import Adoption, EpochRecord, TrialRecord

MANY = 2_000  # generations; Python allows a thousand calls within each other


class Watched(dict[int, TrialRecord]):
    """Trials of a record, which may be looked up so often."""

    def __init__(self, trials: dict[int, TrialRecord], most: int) -> None:
        super().__init__(trials)
        self._looks, self._most = count(1), most

    def __getitem__(self, number: int) -> TrialRecord:
        assert next(self._looks) <= self._most
        return super().__getitem__(number)


def trained(number: int, adoptions: list[Adoption]) -> TrialRecord:
    epochs = [EpochRecord(n, number + n / MANY, {}, 0.5, 1.0) for n in range(1, MANY + 1)]
    return TrialRecord(number, {}, {}, epochs=epochs, adoptions=adoptions)


def test_each_state_that_a_trial_went_on_from_is_looked_at_once() -> None:
    """As after `PBT`, where one trial goes on from the other's state after each epoch."""
    swaps = [
        trained(number, [Adoption(n, 1 - number, n, 0, {}, 0.5) for n in range(1, MANY)])
        for number in (0, 1)
    ]
    record = Record("run", trials=Watched(dict(enumerate(swaps)), most=MANY))
    n_epochs, values = epochs_behind(record, 0, MANY)
    assert n_epochs == MANY
    assert values[-3:] == (1 - 2 / MANY, 2 - 1 / MANY, 1.0)
    assert len(values) == MANY
