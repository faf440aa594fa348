"""Observers hear all, once and in order; one that raises or hangs costs the search nothing."""

from __future__ import annotations

import contextlib
import csv
import logging
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchCancelledError, SearchError
from dagsel.flows import ASHA, PBT, Range
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import ENTRIES, Entry
from dagsel.observers import (
    CSV,
    EpochEnded,
    Logging,
    Observer,
    SearchBegan,
    SearchEnded,
    TrialBegan,
    TrialEnded,
)
from dagsel.observers import observing as module
from dagsel.observers.base import check_observers, hold_observers, tell
from dagsel.observers.events import Told
from dagsel.observers.feed import Feed, ending
from dagsel.observers.observing import Observing
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate

BEGAN = SearchBegan("r", "study", "value", "minimize", "runs/r")


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1.0, log=True)}


RUN = simulate(
    ASHA(max_epochs=9, n_trials=12), PowerLaw(), SimulatedCluster(n_workers=3), space=space
)
ENTRIES_OF_RUN: list[Entry] = [ENTRIES.decode(entry) for entry in RUN.journal]


def of_run(record: Record) -> Record:
    record.n_shards = RUN.record.n_shards
    return record


@given(st.sets(st.integers(0, len(ENTRIES_OF_RUN)), max_size=20))
def test_whenever_a_record_is_read_all_is_told_once_and_in_order(looks: set[int]) -> None:
    record, feed, told = of_run(Record("r")), Feed(), list[Told]()
    for number, entry in enumerate(ENTRIES_OF_RUN):
        record.add(entry)
        if number in looks:
            told += feed.news(record)
    told += feed.news(record)
    epochs = [(t.trial, t.epoch) for t in told if isinstance(t, EpochEnded)]
    assert len(epochs) == len({*epochs}) == RUN.record.n_epochs
    for trial in RUN.record.trials.values():
        mine = [t for t in told if getattr(t, "trial", None) == trial.number]
        assert isinstance(mine[0], TrialBegan)
        assert isinstance(mine[-1], TrialEnded)
        assert [t.value for t in mine if isinstance(t, EpochEnded)] == [
            epoch.value for epoch in trial.epochs
        ]
        assert len(mine) == len(trial.epochs) + 2
    assert ending(record, None).best_trial == RUN.best.trial


def test_an_epoch_has_the_parameters_that_it_was_trained_with(tmp_path: Path) -> None:
    flow = PBT(max_epochs=8, n_trials=6, mutations={"lr": Range(1e-4, 1.0, log=True)})
    run = simulate(flow, PowerLaw(), SimulatedCluster(n_workers=2), space=space)
    table, n_changed = CSV(tmp_path / "epochs.csv"), 0
    for told in [BEGAN, *Feed().news(run.record)]:
        tell(table, told)
    with (tmp_path / "epochs.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            trial = run.record.trials[int(row["trial"])]
            assert float(row["param_lr"]) == trial.params_at(int(row["epoch"]))["lr"]
            n_changed += float(row["param_lr"]) != trial.params["lr"]
    assert n_changed > 0


def test_an_observer_that_changes_what_it_hears_does_not_change_the_record() -> None:
    record = Record("r", trials={0: TrialRecord(0, {}, {"lr": 0.1})})
    (began,) = Feed().news(record)
    assert isinstance(began, TrialBegan)
    assert isinstance(began.params, dict)
    began.params["lr"] = 0.5
    assert record.trials[0].params == {"lr": 0.1}


class Kept(Observer):
    def __init__(self) -> None:
        self.told: list[Told] = []

    def search_began(self, search: SearchBegan) -> None:
        self.told.append(search)

    def trial_began(self, trial: TrialBegan) -> None:
        self.told.append(trial)

    def epoch_ended(self, epoch: EpochEnded) -> None:
        self.told.append(epoch)

    def trial_ended(self, trial: TrialEnded) -> None:
        self.told.append(trial)

    def search_ended(self, search: SearchEnded) -> None:
        self.told.append(search)


def test_what_was_before_is_told_first_and_as_past() -> None:
    kept, record = Kept(), of_run(Record("r"))
    half = len(ENTRIES_OF_RUN) // 2
    for entry in ENTRIES_OF_RUN[:half]:
        record.add(entry)
    n_before = record.n_epochs
    assert 0 < n_before < RUN.record.n_epochs
    with Observing([kept], BEGAN, record) as observing:
        for entry in ENTRIES_OF_RUN[half:]:
            record.add(entry)
            observing.update(record)
    first, *rest, last = kept.told
    assert isinstance(first, SearchBegan)
    assert isinstance(last, SearchEnded)
    epochs = [told for told in rest if isinstance(told, EpochEnded)]
    assert [epoch.is_past for epoch in epochs].count(True) == n_before
    assert len(epochs) == RUN.record.n_epochs


class Raises(Observer):
    def epoch_ended(self, epoch: EpochEnded) -> None:
        raise OSError(28, "No space left on device")


class Exits(Observer):
    def epoch_ended(self, epoch: EpochEnded) -> None:
        raise SystemExit("enough")


class Hangs(Observer):
    def __init__(self) -> None:
        self.until = threading.Event()

    def trial_began(self, trial: TrialBegan) -> None:
        self.until.wait()


def test_one_that_raises_or_hangs_is_let_go_and_the_others_hear_all(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SAY_S", 0.1)
    monkeypatch.setattr(module, "STUCK_S", 0.3)
    kept, hangs = Kept(), Hangs()
    began = time.monotonic()
    with Observing([Raises(), Exits(), hangs, kept], BEGAN, RUN.record):
        pass
    took = time.monotonic() - began
    hangs.until.set()
    assert took < 5
    assert len([t for t in kept.told if isinstance(t, EpochEnded)]) == RUN.record.n_epochs
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert "the observer Exits is told no more: SystemExit: enough" in said
    assert any("Raises is told no more: OSError: [Errno 28]" in text for text in said)
    assert "the search has ended, and waits for the observer Hangs" in said
    assert any("Hangs is told no more: it has not taken in all" in text for text in said)


class Slow(Kept):
    """Is at each epoch until the search has looked at the clock, which then goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.looks, self.now = threading.Semaphore(0), 0.0

    def monotonic(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.looks.release()
        return self.now

    def epoch_ended(self, epoch: EpochEnded) -> None:
        self.looks.acquire()
        self.now += 0.003
        super().epoch_ended(epoch)


def test_one_that_is_slow_hears_all_as_long_as_it_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow()
    monkeypatch.setattr(module, "time", slow)
    monkeypatch.setattr(module, "SAY_S", 0.0)
    monkeypatch.setattr(module, "STUCK_S", 0.005)
    monkeypatch.setattr(module, "LEAVE_S", 0.005)
    with Observing([slow], BEGAN, RUN.record):
        pass
    assert slow.now == pytest.approx(0.003 * RUN.record.n_epochs)
    assert isinstance(slow.told[-1], SearchEnded)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SearchCancelledError])
def test_who_leaves_at_once_waits_for_none_that_hangs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(module, "LEAVE_S", 0.1)
    hangs = Hangs()
    with pytest.raises(error), Observing([hangs], BEGAN, RUN.record):
        raise error
    hangs.until.set()
    assert "Hangs is told no more: it has not taken in all" in caplog.text


def test_a_tracker_of_a_search_that_runs_is_refused_until_that_has_ended(tmp_path: Path) -> None:
    """It would write what one search tells as the other's."""
    table = CSV(tmp_path / "epochs.csv")
    why = r"observers has the CSV of another search .* each search, as in CSV\(\.\.\.\)"
    for error in (None, ZeroDivisionError, KeyboardInterrupt):
        with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt), hold_observers([table]):
            with pytest.raises(SearchError, match=why):
                check_observers([Logging(), table])
            with pytest.raises(SearchError, match=why), hold_observers([table]):
                pytest.fail("both were checked before either began, and both have begun")
            check_observers([CSV(tmp_path / "epochs.csv")])
            if error is not None:
                raise error
        assert check_observers([table, table]) == (table,), "two threads would write its file"


def test_one_of_the_users_that_hears_two_searches_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept, lines = Kept(), Logging()
    for _ in range(2):
        with hold_observers([kept, lines]):
            pass
    assert not caplog.records
    with hold_observers([kept, lines]):
        check_observers([kept, lines])
        with hold_observers([kept, lines]):
            pass
    assert "the observer Kept hears two searches at once" in caplog.text
    assert len(caplog.records) == 1


def test_one_that_is_far_behind_is_let_go(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    hangs = Hangs()
    with Observing([hangs], BEGAN, Record("r")) as observing:
        observing.update(RUN.record)
    hangs.until.set()
    assert "Hangs is told no more: it is more than 10 messages behind" in caplog.text


class Late(Kept):
    """Begins to listen when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()

    def search_began(self, search: SearchBegan) -> None:
        self.may.wait()
        super().search_began(search)


def test_the_past_of_a_large_search_does_not_count_as_being_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, n_before = of_run(Record("r")), len(ENTRIES_OF_RUN) * 3 // 4
    for entry in ENTRIES_OF_RUN[:n_before]:
        record.add(entry)
    n_past = len([*Feed().news(record)])
    n_new = len([*Feed().news(RUN.record)]) + 2 - n_past
    monkeypatch.setattr(module, "MOST_WAITING", n_new)
    assert n_past > n_new
    late = Late()
    with Observing([late], BEGAN, record) as observing:
        for entry in ENTRIES_OF_RUN[n_before:]:
            record.add(entry)
        observing.update(record)
        late.may.set()
    assert isinstance(late.told[-1], SearchEnded)
    assert len([told for told in late.told if isinstance(told, EpochEnded)]) == RUN.record.n_epochs
    assert not caplog.records


@pytest.mark.parametrize(
    ("observers", "why"),
    [
        ("tb", "must be a list"),
        (CSV("epochs.csv"), "must be a list"),
        ([CSV], "observers has the class CSV: make an object of it, as in CSV"),
        ([print], "let its class inherit dagsel.observers.Observer"),
    ],
)
def test_what_is_no_observer_is_refused(observers: Any, why: str) -> None:
    with pytest.raises(SearchError, match=why):
        check_observers(observers)


def test_a_log_has_what_is_new_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "my.search")
    observer = Logging(logger="my.search", level=logging.INFO)
    for is_past in (True, False):
        tell(observer, TrialBegan(3, {"lr": 0.1}, is_past))
        tell(observer, EpochEnded(3, 1, 0.5, {"f1": 0.5}, 2.5, 1.0, 2.0, is_past))
        tell(observer, TrialEnded(3, "complete", 0.5, 1, "trained", is_past))
    tell(observer, BEGAN)
    tell(observer, ending(RUN.record, None))
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "trial 3 begins",
        "trial 3, epoch 1",
        "trial 3 complete after 1 epochs, 0.5",
        "run r of study study begins",
        "the search has ended",
    ]
