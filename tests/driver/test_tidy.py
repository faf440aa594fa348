"""When a run is over, the state of the best trial stays in its store, and no other state."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from dagsel.driver.recovery import StoredStates
from dagsel.driver.scoring import Scores
from dagsel.history.record import Best, Record
from dagsel.history.trial import TrialRecord
from dagsel.storage import CheckpointStore, RunDir
from dagsel.storage.files import Folder
from dagsel.tidying import tidy


def stored(states: CheckpointStore) -> list[tuple[int, ...]]:
    """Trial, epoch, position and whether it is partial, of each state."""
    return [
        (trial, *place, partial)
        for trial in states.trials()
        for partial in (False, True)
        for place in states.list(trial, partial=partial)
    ]


def a_run(folder: Path, best: Best | None) -> tuple[Record, RunDir]:
    """Two trials; each has ends of epochs, a partial state of the newest unit, and a check."""
    run = RunDir(folder)
    record = Record("run", n_shards=2)
    for trial in (0, 1):
        record.trials[trial] = TrialRecord(trial, {"x": trial}, {"x": trial}, drawn={"x": trial})
        for place in ((1, 1), (2, 0), (2, 1)):
            run.states.save(trial, *place, b"of %d" % trial, {})
        run.states.keep_check(trial, 3, 2, 0, partial=False)
        for place in ((2, 1), (3, 0)):
            run.states.save(trial, *place, b"half of %d" % trial, {}, partial=True)
    record.top = [] if best is None else [best]
    return record, run


@pytest.mark.parametrize(
    ("best", "kept"),
    [
        (Best(1, 2, 1, 0.5), [(1, 2, 1, False)]),
        (Best(1, 1, 1, 0.5), [(1, 1, 1, False)]),
        (Best(1, 3, 0, 0.5, is_partial=True), [(1, 3, 0, True)]),
        (Best(1, 2, 1, 0.5, is_partial=True), [(1, 2, 1, True)]),
        (Best(1, 2, 0, 0.5, check=3), []),
        (Best(1, 2, 0, 0.5, check=4), []),  # it was to train on, and was not copied before
        (None, []),
    ],
)
def test_the_best_state_alone_stays(
    tmp_path: Path, best: Best | None, kept: list[tuple[int, ...]]
) -> None:
    record, run = a_run(tmp_path, best)
    tidy(record, run)
    assert stored(run.states) == kept
    n_checks = 1 if best is not None and best.check else 0
    files = [path for path in (tmp_path / "states").rglob("*") if path.is_file()]
    assert len(files) == 2 * (len(kept) + n_checks)
    if best is None:
        assert not run.has_best()
        return
    if best.check:
        assert run.states.load_check(1, best.check)[0] == b"of 1"
    assert json.loads((tmp_path / "best.json").read_text())["config"] == {"x": 1}


@pytest.mark.parametrize("is_feasible", [True, False])
def test_it_is_said_if_the_best_trial_breaks_a_constraint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, is_feasible: bool
) -> None:
    record, run = a_run(tmp_path, Best(1, 2, 1, 0.5))
    record.trials[1].is_feasible = is_feasible
    with caplog.at_level(logging.WARNING, "dagsel"):
        tidy(record, run)
    assert any("trial, 1, breaks a constraint" in it for it in caplog.messages) != is_feasible


def test_few_of_many_trials_that_failed_alike_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record, run = a_run(tmp_path, None)
    failed = {n: TrialRecord(n, {}, {}, state="failed", reason="no") for n in range(2, 102)}
    record.trials |= failed
    with caplog.at_level(logging.WARNING, "dagsel"):
        tidy(record, run)
    numbers = ", ".join(map(str, range(2, 14)))
    assert caplog.messages == [
        "100 of 102 trials failed",
        f"trial {numbers} and 88 more failed: no",
    ]


@pytest.mark.parametrize("what", ["tidy", "go on"])
def test_trials_of_which_nothing_is_stored_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """There may be thousands, and each look is a request to an object store."""
    record, run = a_run(tmp_path, None)
    ended = {n: TrialRecord(n, {}, {}, state="pruned") for n in range(102)}
    record.trials |= ended
    n_looks, kinds = 0, Folder.kinds

    def counted(folder: Folder, key: str = "") -> dict[str, str]:
        nonlocal n_looks
        n_looks += 1
        return kinds(folder, key)

    monkeypatch.setattr(Folder, "kinds", counted)
    if what == "tidy":
        tidy(record, run)
    else:
        scores = Scores(run.states, ("loss",))
        StoredStates(run.states, record, lambda blob, *_: blob, scores).drop_ended()
    assert n_looks < 10
    assert not stored(run.states)


def test_to_tidy_twice_is_to_tidy_once(tmp_path: Path) -> None:
    record, run = a_run(tmp_path, Best(1, 3, 0, 0.5, is_partial=True))
    tidy(record, run)
    tidy(record, run)
    assert stored(run.states) == [(1, 3, 0, True)]
