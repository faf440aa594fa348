"""Runs that 163b1ee began go on, and repeat, with the code as it is now."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
import searches
from distributed import Client

import dagsel
from dagsel.driver.consistency import read_entries
from dagsel.history.record import Record
from dagsel.storage import RunDir
from tests.driver.hand_engine import read_into

HERE = Path(searches.__file__).parent
N_SHARDS = 3

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="run.json names functions by their bytecode, of 3.11"
)


NAMES = sorted(searches.SEARCHES)
KILLED = [name for name in NAMES if name.endswith("-killed")]


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    shutil.copytree(HERE / request.param, tmp_path / request.param)
    return str(tmp_path / request.param)


def parts(folder: str) -> dict[str, Any]:
    workload, _, _, _ = searches.SEARCHES[Path(folder).name]
    return {"workload": workload(), "space": searches.space, "data": str(HERE / "data")}


def read(folder: str) -> Record:
    about = RunDir(folder).about()
    entries = read_entries(RunDir(folder).journal.read(), folder, about["dagsel"])
    return read_into(Record(about["run"], N_SHARDS, about["direction"]), entries)


@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_a_journal_is_read_to_its_last_entry(folder: str) -> None:
    record = read(folder)
    is_killed = Path(folder).name in KILLED
    assert record.finished is not is_killed
    assert record.trials
    assert all(done.stop > done.start for done in record.units)
    if Path(folder).name == "gangs-ended":
        assert {done.gang for done in record.units} == {1, 2}
    if Path(folder).name == "hermes-killed":
        assert any(0 < piece.share < 1 for piece in record.pieces)


@pytest.mark.filterwarnings("ignore:a batch of trial")  # a busy machine's takes longer than a turn
@pytest.mark.parametrize("folder", NAMES, indirect=True)
def test_a_run_is_resumed_and_repeats(folder: str, client: Client, tmp_path: Path) -> None:
    before = read(folder)
    run = dagsel.resume(folder, client, **parts(folder))
    assert run.record.finished
    assert not run.failures
    for trial in before.trials.values():  # what was reported stays reported
        now = run.record.trials[trial.number]
        assert now.params == trial.params
        assert now.epochs[: len(trial.epochs)] == trial.epochs
    assert run.best_model() is not None
    states = {t.state for t in run.study.trials}
    assert optuna.trial.TrialState.RUNNING not in states
    again = dagsel.replay(folder, client, **parts(folder), into=str(tmp_path / "again"))
    if Path(folder).name != "torch-ended":  # which adds floats, on another kind of CPU
        assert again.record.notes == []
    for trial in before.trials.values():
        then = trial.epochs
        newly = again.record.trials[trial.number].epochs[: len(then)]
        assert [epoch.epoch for epoch in newly] == [epoch.epoch for epoch in then]
        for one, other in zip(then, newly, strict=True):
            assert other.metrics == pytest.approx(one.metrics, rel=1e-5)
    assert again.best_value == pytest.approx(run.best_value, rel=1e-5)


@pytest.mark.parametrize("folder", KILLED, indirect=True)
def test_a_run_that_is_abandoned_keeps_its_best_model(folder: str) -> None:
    before = read(folder)
    scored = [t.value for t in before.trials.values() if t.value is not None]
    dagsel.abandon(folder, reason="old")
    run = dagsel.resume(folder, **parts(folder))
    live = [trial.number for trial in before.trials.values() if trial.is_live]
    assert [failed.number for failed in run.failures] == live
    assert {failed.reason for failed in run.failures} == {"old"}
    assert run.record.abandoned == "old"
    if scored:
        sign = 1 if run.record.direction == "maximize" else -1
        assert run.best.is_complete or run.best_value == sign * max(sign * v for v in scored)
        assert run.best_model() is not None
