"""The study is told once: what ends a driver leaves its trials running until the run goes on.

The scheduler is a process of its own here and is killed, paused, and cut off.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import dask
import optuna
import pytest
from dask.utils import parse_timedelta
from distributed import Client
from lost_scheduler import Processes, processes, space, workload

import dagsel
from dagsel.errors import ClusterError, RunDirLockedError
from dagsel.execution.quiet_servers import silent
from dagsel.flows import RandomSearch
from dagsel.storage import RunDir
from tests.conftest import Optimize
from tests.waiting import wait_until

N_TRIALS = 4
#: Cannot have ended when its first trial has.
TWO_BY_TWO = RandomSearch(max_epochs=3, n_trials=N_TRIALS, n_concurrent=2)
PAUSE_S = float(os.environ.get("ATTACK_PAUSE_S", "2"))


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path) as started:
        yield started


@pytest.fixture
def home(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def begin(optimize: Optimize, home: str) -> Optimize:
    study = optuna.create_study(study_name="s", direction="maximize", storage=home)
    flow = RandomSearch(max_epochs=3, n_trials=N_TRIALS)
    return partial(optimize, flow=flow, study=study, workload=workload(), space=space)


def states(home: str) -> list[str]:
    study = optuna.load_study(study_name="s", storage=home)
    return [trial.state.name for trial in study.trials]


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def when_training(run_dir: str, act: Callable[[], None]) -> threading.Thread:
    """Do something once the run has journaled a few units."""

    def watch() -> None:
        journal = Path(run_dir, "journal.jsonl")
        wait_until(
            lambda: journal.exists() and journal.read_text().count('"unit"') >= N_TRIALS,
            "the run has journaled units",
        )
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_a_killed_scheduler_is_heard_of_at_once_and_no_trial_is_doubled(
    begin: Optimize, client: Client, tmp_path: Path, run_dir: str, home: str
) -> None:
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        lost.scheduler.kill()

    with processes(tmp_path) as lost, Client(lost.address, set_as_default=False) as theirs:
        when_training(run_dir, kill)
        with pytest.raises(ClusterError) as error:
            begin(client=theirs)
        patience = parse_timedelta(dask.config.get("distributed.comm.timeouts.connect"))
        assert time.monotonic() - killed_at < patience / 6
        assert theirs.status == "connecting"  # Dask has not given it up
        with silent("distributed.client"):
            theirs.close()
    assert str(error.value) == (
        f"the scheduler at {lost.address} is gone, or the connection to it broke; the run is kept: "
        f"go on with  dagsel.resume({run_dir!r}, workload=..., space=...)"
    )
    assert states(home) == ["RUNNING"] * N_TRIALS
    run = dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert [trial.state for trial in run.record.trials.values()] == ["complete"] * N_TRIALS
    assert states(home) == ["COMPLETE"] * N_TRIALS


def test_a_scheduler_that_pauses_ends_nothing(
    begin: Optimize, scheduler: Processes, run_dir: str, home: str
) -> None:
    def pause() -> None:
        scheduler.scheduler.send_signal(signal.SIGSTOP)
        time.sleep(PAUSE_S)
        scheduler.scheduler.send_signal(signal.SIGCONT)

    thread = when_training(run_dir, pause)
    run = begin(client=scheduler.address)
    thread.join()
    assert run.record.seconds > PAUSE_S
    assert states(home) == ["COMPLETE"] * N_TRIALS


def test_a_connection_that_breaks_ends_the_session_and_nothing_waits_for_ever(
    begin: Optimize, scheduler: Processes, run_dir: str, home: str
) -> None:
    with Client(scheduler.address, set_as_default=False) as client:
        comm: Any = client.scheduler_comm
        when_training(run_dir, lambda: client.loop.add_callback(comm.comm.abort))
        with pytest.raises(ClusterError, match="or the connection to it broke; the run is kept"):
            begin(client=client)
        # Dask leaves a socket open if it is closed while it connects anew.
        wait_until(lambda: client.status == "running", "the client connects anew")
    run = dagsel.resume(run_dir, scheduler.address, workload=workload(), space=space)
    assert len(run.record.sessions) == 2
    assert states(home) == ["COMPLETE"] * N_TRIALS


def test_after_ctrl_c_the_trials_run_until_the_run_goes_on(
    begin: Optimize, client: Client, run_dir: str, home: str
) -> None:
    with pytest.raises(KeyboardInterrupt) as error:
        begin(client=client, callbacks=[interrupt])
    assert error.value.__notes__ == [
        f"the run is kept: go on with  dagsel.resume({run_dir!r}, workload=..., space=...)"
    ]
    assert sorted(states(home)) == ["COMPLETE", *["RUNNING"] * (N_TRIALS - 1)]
    dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert states(home) == ["COMPLETE"] * N_TRIALS


def test_an_abandoned_run_has_failed_trials_and_is_only_read(
    begin: Optimize, client: Client, run_dir: str, home: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(client=client, callbacks=[interrupt], flow=TWO_BY_TWO)
    for _ in range(2):  # again changes nothing
        dagsel.abandon(run_dir, reason="found a mistake in the loss")
        assert set(states(home)) <= {"COMPLETE", "FAIL"}
    trials = optuna.load_study(study_name="s", storage=home).trials
    reasons = {t.user_attrs.get("dagsel:reason") for t in trials if t.state.name == "FAIL"}
    assert reasons <= {"found a mistake in the loss"}
    states_before = sorted(path.name for path in Path(run_dir, "states").rglob("*.json"))
    with caplog.at_level(logging.WARNING, "dagsel"):
        run = dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert f"run {run.record.run} is only read: found a mistake in the loss" in caplog.text
    assert len(run.failures) == states(home).count("FAIL")
    assert run.best_model() is not None
    assert len(run.study.trials) == len(trials)
    assert sorted(path.name for path in Path(run_dir, "states").rglob("*.json")) == states_before
    again = dagsel.replay(
        run_dir, client, workload=workload(), space=space, into=f"{run_dir}-again"
    )
    assert again.record.notes == []


def test_abandoning_tells_what_the_driver_could_not(
    begin: Optimize, client: Client, run_dir: str, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It dies after the journal has the end of a trial, and before the study has.
    monkeypatch.setattr("dagsel.study.driver.StudyDriver.complete", interrupt)
    with pytest.raises(KeyboardInterrupt):
        begin(client=client)
    assert states(home) == ["RUNNING"] * N_TRIALS
    dagsel.abandon(run_dir)
    trials = optuna.load_study(study_name="s", storage=home).trials
    ended = [trial for trial in trials if trial.state.name == "COMPLETE"]
    assert len(ended) >= 1
    for trial in ended:
        assert trial.value == trial.intermediate_values[2]
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "FAIL"}


def test_a_run_that_is_driven_cannot_be_abandoned(
    begin: Optimize, client: Client, run_dir: str, home: str
) -> None:
    refused: list[str] = []

    def give_up(*_: Any) -> None:
        with pytest.raises(RunDirLockedError) as error:
            dagsel.abandon(run_dir)
        refused.append(str(error.value))

    begin(client=client, callbacks=[give_up])
    assert len(refused) == N_TRIALS
    assert states(home) == ["COMPLETE"] * N_TRIALS
    before = Path(run_dir, "journal.jsonl").read_bytes()
    dagsel.abandon(run_dir)  # it has ended
    assert Path(run_dir, "journal.jsonl").read_bytes() == before


def test_a_run_whose_study_is_lost_is_abandoned_all_the_same(
    begin: Optimize,
    client: Client,
    run_dir: str,
    home: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(client=client, callbacks=[interrupt], flow=TWO_BY_TWO)
    aside = tmp_path / "aside.db"
    (tmp_path / "study.db").rename(aside)
    with caplog.at_level(logging.WARNING, "dagsel"):
        dagsel.abandon(run_dir)
    assert (
        "is abandoned, but its trials are still running in the study: study 's' at " in caplog.text
    )
    assert "there is no such file; give study=" in caplog.text
    assert not (tmp_path / "study.db").exists()
    assert RunDir(run_dir).journal.read()[-1]["is"] == "abandoned"
    dagsel.abandon(run_dir, study=f"sqlite:///{aside}")
    assert set(states(f"sqlite:///{aside}")) <= {"COMPLETE", "FAIL"}


def test_a_call_that_fails_before_anything_began_leaves_no_trial_and_no_advice(
    begin: Optimize, home: str
) -> None:
    with (
        dask.config.set({"distributed.comm.timeouts.connect": "1s"}),
        pytest.raises(ClusterError) as error,
    ):
        begin(client="tcp://127.0.0.1:1")
    assert "the run is kept" not in str(error.value)
    assert not hasattr(error.value, "__notes__")
    assert states(home) == []
