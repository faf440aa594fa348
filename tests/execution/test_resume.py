"""A run whose driver dies or is interrupted goes on, and comes to what its replay comes to."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import interrupted
import optuna
import pytest
from churn import started_units
from distributed import Client, LocalCluster
from interrupted import FLOWS, interrupt, space, stopping_after, workload
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import dagsel
from dagsel.record import Record
from dagsel.storage import RunDir, ShardedDataset

N_WORKERS, N_SHARDS = 2, 4


def folded(run_dir: str) -> Record:
    """Give what the journal alone says of a run."""
    folder = RunDir(run_dir)
    record = Record(folder.about()["run"], N_SHARDS, folder.about()["direction"])
    for entry in folder.journal.read():
        record.add(entry)
    return record


def told(record: Record) -> dict[int, tuple[Any, ...]]:
    """List all of a record's trials that a journal can hold."""
    return {
        t.number: (t.params, t.state, t.reason, t.epochs, t.n_decided, t.adoptions, t.tallies)
        for t in record.trials.values()
    }


def check_record(run: dagsel.Run) -> None:
    """The journal says what the driver knew."""
    again = folded(run.run_dir.url)
    assert told(again) == told(run.record)
    for name in ("units", "rounds", "loads", "best", "notes", "finished", "n_epochs_decided"):
        assert getattr(again, name) == getattr(run.record, name), name


def check_study(run: dagsel.Run) -> None:
    """Each trial of the run stands once in the study; all else there has failed, none runs."""
    names = {"complete": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    stands: dict[int, list[str]] = {}
    for trial in run.study.trials:
        assert trial.state.is_finished()
        if trial.state == TrialState.FAIL:
            assert trial.user_attrs["dagsel:reason"]
        else:
            number = trial.user_attrs.get("dagsel:trial", trial.number)
            stands.setdefault(number, []).append(trial.state.name)
            recorded = run.record.trials[number]
            reports = {epoch.epoch: epoch.value for epoch in recorded.epochs}
            assert trial.params == recorded.params
            assert trial.intermediate_values == reports
    assert stands == {t.number: [names[t.state]] for t in run.record.trials.values()}


def started_sessions(client: Client, run: str) -> list[str]:
    """Name the sessions that have told of themselves to the scheduler."""

    def topics(dask_scheduler: Any) -> list[str]:
        return [topic for topic in dask_scheduler.get_events() if topic.endswith("-workers")]

    found = client.run_on_scheduler(topics)
    names = [topic.removeprefix("dagsel-").removesuffix("-workers") for topic in found]
    return [name for name in names if name.partition(".")[0] == run]


def check_units(client: Client, run: dagsel.Run) -> None:
    """No more was trained again than was in flight."""
    record = run.record
    names = started_sessions(client, record.run)
    n_started = sum(started_units(client, name) for name in names)
    n_needed = record.n_epochs * N_SHARDS
    assert 0 <= n_started - n_needed <= N_WORKERS * (record.n_sessions - 1)


def check_replay(client: Client, run: dagsel.Run) -> None:
    again = dagsel.replay(
        run.run_dir.url,
        client,
        workload=workload(),
        space=space,
        into=f"{run.run_dir.url}-again",
    )
    assert again.record.notes == []
    assert again.best == run.best
    assert again.best_model() == run.best_model()


def check(client: Client, run: dagsel.Run, flow: str) -> None:
    assert len(run.record.trials) == FLOWS[flow].n_trials
    assert run.record.finished
    check_record(run)
    check_study(run)
    check_units(client, run)
    check_replay(client, run)


def go_on(client: Client, run_dir: str, **changes: Any) -> dagsel.Run:
    return dagsel.resume(run_dir, client, **{"workload": workload(), "space": space, **changes})


@pytest.fixture
def begin(
    client: Client, digits: ShardedDataset, study: optuna.Study, run_dir: str
) -> Callable[..., dagsel.Run]:
    def call(flow: Any = "asha", **changes: Any) -> dagsel.Run:
        arguments = {
            "study": study,
            "workload": workload(),
            "data": digits,
            "space": space,
            "flow": FLOWS[flow] if isinstance(flow, str) else flow,
            "metric": "value",
            "client": client,
            "run_dir": run_dir,
        }
        return dagsel.optimize(**{**arguments, **changes})

    return call


@pytest.mark.parametrize(("flow", "seed"), [("random search", 0), ("asha", 1), ("pbt", 2)])
def test_a_driver_that_is_killed_costs_no_more_than_the_units_in_flight(
    flow: str,
    seed: int,
    client: Client,
    cluster: LocalCluster,
    digits: ShardedDataset,
    run_dir: str,
    tmp_path: Path,
) -> None:
    chance = random.Random(seed)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    command = [
        sys.executable, interrupted.__file__, flow, str(chance.randint(10, 60)), digits.url,
        cluster.scheduler_address, run_dir, storage,
    ]  # fmt: skip
    driver = subprocess.run(command, capture_output=True, text=True, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    with (
        contextlib.suppress(KeyboardInterrupt),
        stopping_after(chance.randint(5, 30), interrupt),
    ):
        go_on(client, run_dir)
    check(client, go_on(client, run_dir), flow)
