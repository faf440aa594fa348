"""A search in one process is looked at and steered from another one."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from distributed import Client
from optuna.trial import TrialState

import dagsel
from dagsel.driver.inbox import Inbox
from dagsel.errors import RunDirError, SearchError
from dagsel.listening import Listener
from dagsel.messages import ENTRIES, Turn
from dagsel.steering import Commanded, StopTrial
from dagsel.storage import RunDir
from dagsel.storage.runs.control import Control
from tests.execution import steered_driver
from tests.execution.test_search import driver, wait_for

RUNS = Path(__file__).parents[1] / "data" / "runs_of_163b1ee"
GIVEN: dict[str, Any] = {"workload": steered_driver.WORKLOAD, "space": steered_driver.space}


def test_another_process_looks_and_steers(tmp_path: Path) -> None:
    with driver(tmp_path, "hold") as process:
        wait_for(process, "paused")
        search = dagsel.attach(tmp_path / "run")
        assert "goes on" in repr(search)
        control = tmp_path / "run" / "control.json"
        assert stat.S_IMODE(control.stat().st_mode) == 0o600
        with pytest.raises(SearchError, match="trial 2 is paused already"):
            search.pause(2)
        with pytest.raises(SearchError, match="99"):
            search.stop(99)
        with pytest.raises(SearchError, match="colour"):
            search.clone(1, colour="red")
        with pytest.raises(SearchError, match="cannot be written as JSON"):
            search.add({"x": object()})
        with pytest.raises(SearchError, match="the command's token is not that of"):
            dagsel.attach(tmp_path / "run", token="0" * 64).stop(1)
        token = json.loads(control.read_text())["token"]
        dagsel.attach(tmp_path / "run", token=token).stop(2)
        clone, added = search.clone(1, x=0.25), search.add({"x": 0.75})
        with pytest.raises(TimeoutError, match=r"goes on after 0\.01 s; wait longer"):
            search.wait("0.01 s")
        search.resume(1)
        so_far = search.wait(timeout="2 min", until=lambda run: run.record.trials[added].epochs)
        assert so_far.record.trials[added].epochs
        run = search.wait(timeout="2 min")
        assert wait_for(process, "run") == f"run {steered_driver.N_TRIALS + 2}\n"
    trials = run.record.trials
    assert run.record.finished
    assert trials[2].reason == "stopped by the user"
    assert [trials[n].params["x"] for n in (clone, added)] == [0.25, 0.75]
    assert {trials[n].state for n in (0, 1, 3, clone, added)} == {"complete"}
    assert not control.exists()
    assert not (tmp_path / "run" / "commands").exists()
    with pytest.raises(SearchError, match="the search has ended"):
        search.finish()
    storage = f"sqlite:///{tmp_path}/study.db"
    there = dagsel.attach(tmp_path / "run", **GIVEN, study=storage).result
    assert there.best_value == run.best_value


def stop_when_two_are_left(study: optuna.Study, trial: Any) -> None:
    """End the search when only the paused trials live."""
    if len(study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))) == 2:
        study.stop()


@pytest.mark.parametrize("moment", ["answer", "take"])
def test_a_command_is_performed_once_though_the_driver_is_killed_at_it(
    tmp_path: Path, client: Client, moment: str
) -> None:
    """Before the command is taken, or when the journal has it and the answer is not written."""
    with driver(tmp_path, moment) as process:
        wait_for(process, "paused")
        search = dagsel.attach(tmp_path / "run")
        with pytest.raises(SearchError, match="was gone before it answered; the command is kept"):
            search.add({"x": 0.75})
        process.wait(60)
    assert "nobody drives it" in repr(search)
    with pytest.raises(SearchError, match="nobody drives the search in"):
        search.stop(1)
    (command,) = (tmp_path / "run" / "commands").iterdir()
    held = dagsel.resume(tmp_path / "run", client, **GIVEN, callbacks=[stop_when_two_are_left])
    trials = held.record.trials
    (added,) = [n for n, trial in trials.items() if trial.params["x"] == 0.75]
    assert len(trials) == steered_driver.N_TRIALS + 1
    assert trials[added].state == "complete"
    answer = command.with_suffix(".answer.json")
    assert json.loads(answer.read_text()) == {"trial": added}


@pytest.fixture
def killed(tmp_path: Path) -> RunDir:
    """A run whose driver was killed, and whose study was in memory."""
    shutil.copytree(RUNS / "asha-killed", tmp_path / "run")
    return RunDir(tmp_path / "run")


def end_at_a_command(
    killed: RunDir, patch: pytest.MonkeyPatch, before: Callable[[str], object] = lambda id_: None
) -> None:
    """Have a driver that ends once a command is laid down, after what it still does with that."""
    lock, post = killed.lock(killed.about()["run"]), Control.post

    def posting(control: Control, command: Any, token: str) -> str:
        id_ = post(control, command, token)
        before(id_)
        lock.__exit__(None, None, None)
        return id_

    patch.setattr(Control, "post", posting)


def test_a_command_that_comes_when_the_driver_looks_no_more_is_taken_back(
    killed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_at_a_command(killed, monkeypatch)
    with Listener(killed.control, Inbox()):
        token = killed.control.token()
    with pytest.raises(SearchError, match="ended before it took the command, so nothing was done"):
        dagsel.attach(killed.url, token=token).stop(0)
    assert not [*Path(killed.url, "commands").iterdir()]


def test_a_command_that_was_performed_and_could_not_be_answered_is_done(
    killed: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def perform(id_: str) -> None:
        turn = Turn(Commanded(StopTrial(0), id_, 1.0), ())
        killed.journal.append([ENTRIES.encode(turn)])

    end_at_a_command(killed, monkeypatch, perform)
    dagsel.attach(killed.url, token="0" * 64).stop(0)


def test_one_that_looks_again_and_again_is_told_once_that_a_study_is_out_of_reach(
    killed: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Path(killed.url, "run.json")
    home = f"sqlite:///{killed.url}/gone.db"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"home": home}))
    search = dagsel.attach(killed.url)
    assert search.result.record.n_epochs == search.result.record.n_epochs > 0
    assert caplog.text.count("opened without its study") == 1
    with pytest.raises(SearchError, match="nobody drives the search"):
        search.finish()
    assert caplog.text.count("opened without its study") == 1


def test_what_is_no_run_is_not_attached_to(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"run\.json is missing"):
        dagsel.attach(tmp_path)
    with pytest.raises(SearchError, match="token must be the text"):
        dagsel.attach(tmp_path, token=3)  # type: ignore[arg-type]
