"""Every public error comes out of a public call, with the name of what is at fault in it."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask
import numpy as np
import optuna
import pytest
import searches
import torch
from distributed import LocalCluster

import dagsel
from dagsel import errors
from dagsel.flows import RandomSearch
from dagsel.simulation import SimulatedCluster
from dagsel.storage import CheckpointStore, RunDir, ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

TESTS = Path(__file__).parents[1]
RUNS = TESTS / "data" / "runs_of_163b1ee"
LOCK: Any = threading.Lock()  # cannot be sent

Call = Callable[[Path], object]


def optimize(folder: Path, **changes: Any) -> dagsel.Run:
    """Search with what would do, but for the changes."""
    arguments: dict[str, Any] = {
        "study": optuna.create_study(direction="maximize"),
        "workload": SyntheticWorkload(),
        "data": str(RUNS / "data"),
        "space": searches.space,
        "flow": RandomSearch(max_epochs=1, n_trials=1),
        "metric": "value",
        "client": "tcp://127.0.0.1:9",  # nobody is there
        "run_dir": str(folder / "run"),
    }
    return dagsel.optimize(**{**arguments, **changes})


def search_nowhere(folder: Path) -> dagsel.Run:
    """Search where no scheduler listens; Dask tries on for 30 s by default."""
    with dask.config.set({"distributed.comm.timeouts.connect": "0.2 s"}):
        return optimize(folder)


def search_here(folder: Path, *, cluster: dict[str, Any], **changes: Any) -> dagsel.Run:
    """Search on a cluster of threads."""
    here = {
        "processes": False,
        "dashboard_address": "127.0.0.1:0",
        "threads_per_worker": 1,
        **cluster,
    }
    with LocalCluster(**here) as made:
        return optimize(folder, client=made.scheduler_address, **changes)


def data_set(folder: Path) -> ShardedDataset:
    copy = folder / "data"
    shutil.copytree(RUNS / "data", copy)
    return ShardedDataset.open(str(copy))


def damaged_shard(folder: Path) -> None:
    data = data_set(folder)
    chunk = next(path for path in (folder / "data").rglob("c/*/*") if path.is_file())
    flipped = bytearray(chunk.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    chunk.write_bytes(flipped)
    data.verify()


def damaged_manifest(folder: Path) -> None:
    data_set(folder)
    manifest = folder / "data" / "dagsel.json"
    manifest.write_text(manifest.read_text()[:-40])
    ShardedDataset.open(str(folder / "data"))


def ended_run(folder: Path) -> Path:
    shutil.copytree(RUNS / "torch-ended", folder / "run")
    return folder / "run"


def resume(run: Path, **changes: Any) -> dagsel.Run:
    arguments: dict[str, Any] = {"workload": searches.trained(), "space": searches.space}
    return dagsel.resume(str(run), **arguments, data=str(RUNS / "data"), **changes)


def damaged_journal(folder: Path) -> None:
    journal = ended_run(folder) / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b"0", b"7", 1)
    journal.write_bytes(b"".join(lines))
    resume(journal.parent)


def lost_state(folder: Path) -> None:
    run = ended_run(folder)
    ended = resume(run)
    shutil.rmtree(run / "states")
    ended.best_model()


def lost_study(folder: Path) -> None:
    resume(ended_run(folder), study=f"sqlite:///{folder}/study.db")


def linked_states(folder: Path) -> None:
    run = ended_run(folder)
    (run / "states").rename(folder / "states")
    (run / "states").symlink_to(folder / "states")
    resume(run)


def damaged_state(folder: Path) -> None:
    run = ended_run(folder)
    ended = resume(run)
    for state in run.rglob("*.safetensors"):
        state.write_bytes(state.read_bytes()[:-8])
    ended.best_model()


def locked(folder: Path) -> None:
    run = ended_run(folder)
    with RunDir(str(run)).lock("ours"):
        resume(run)


class Failing:
    """Curves of trials that all fail."""

    evaluation_share = 0.0

    def value(self, config: Any, epoch: float, *, trial: int) -> float:
        raise errors.TrainingError("it burnt down")

    def seconds(self, config: Any, *, trial: int) -> float:
        return 1.0


def no_trial(folder: Path) -> None:
    flow = RandomSearch(max_epochs=1, n_trials=1)
    run = dagsel.simulate(flow, Failing(), SimulatedCluster(n_workers=1), space=searches.space)
    _ = run.best_value


def cancelled(folder: Path) -> None:
    """Cancel a search that would train for ever."""
    with LocalCluster(
        n_workers=1, processes=False, dashboard_address="127.0.0.1:0", threads_per_worker=1
    ) as made:
        search = dagsel.start(
            study=optuna.create_study(direction="maximize"),
            workload=SyntheticWorkload(seconds=0.05),
            data=str(RUNS / "data"),
            space=searches.space,
            flow=RandomSearch(max_epochs=1000, n_trials=4),
            metric="value",
            client=made.scheduler_address,
            run_dir=str(folder / "run"),
        )
        search.cancel()
        search.wait()


def unsendable() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        lambda config: LOCK and torch.nn.Linear(4, 2),
        searches.loss,
        searches.optimizer,
        batch_size=8,
        metrics={"value": searches.accuracy},
    )


def vector_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")


def searched(**parts: Any) -> dagsel.TorchWorkload:
    """What would do, but for some parts."""
    made = {"model": searches.model, "loss": searches.loss, "optimizer": searches.optimizer}
    metrics = {"accuracy": searches.accuracy}
    return dagsel.TorchWorkload(**made | parts, batch_size=8, metrics=metrics)


def ragged(folder: Path) -> None:
    ShardedDataset.write(str(folder / "data"), {"x": np.zeros(3), "y": np.zeros(4)}, n_shards=1)


#: What raises each error, and what its message names.
RAISES: dict[type[errors.DagselError], tuple[Call, str]] = {
    errors.DatasetInputError: (ragged, "4"),
    errors.DatasetExistsError: (
        lambda folder: ShardedDataset.write(data_set(folder).url, {"x": np.zeros(3)}, n_shards=1),
        "data",
    ),
    errors.DatasetNotFoundError: (lambda folder: optimize(folder, data="nowhere"), "nowhere"),
    errors.DatasetFormatError: (damaged_manifest, "data"),
    errors.ShardCorruptError: (damaged_shard, "shard"),
    errors.RunDirError: (lambda folder: dagsel.resume(str(folder)), "holds no run"),
    errors.RunDirLockedError: (locked, "in use by the driver"),
    errors.JournalCorruptError: (damaged_journal, "journal"),
    errors.LinkError: (linked_states, "states is a symbolic link"),
    errors.CheckpointNotFoundError: (lost_state, "trial"),
    errors.CheckpointCorruptError: (damaged_state, "trial"),
    errors.CheckpointError: (
        lambda folder: CheckpointStore(str(folder)).save(-1, 1, 0, b"state", {}),
        "trial",
    ),
    errors.SearchError: (lambda folder: optimize(folder, metric="f1"), "'f1'"),
    errors.StudyStorageError: (lost_study, "study.db: there is no such file; give study="),
    errors.TooLittleTimeError: (
        lambda folder: search_here(folder, cluster={"n_workers": 1}, deadline=1e-3),
        "give it more time, or more budget",
    ),
    errors.WorkloadError: (
        lambda folder: optimize(
            folder,
            metric="accuracy",
            workload=dagsel.TorchWorkload(
                searches.model,
                searches.loss,
                searches.optimizer,
                batch_size=0,
                metrics={"accuracy": searches.accuracy},
            ),
        ),
        "batch_size must be",
    ),
    errors.WorkloadTransportError: (
        lambda folder: optimize(folder, workload=unsendable()),
        "'model' of the TorchWorkload",
    ),
    errors.AllTrialsFailedError: (
        lambda folder: search_here(
            folder,
            cluster={"n_workers": 1},
            workload=searched(loss=vector_loss),
            metric="accuracy",
        ),
        "vector_loss",
    ),
    errors.ClusterError: (search_nowhere, "no scheduler at"),
    errors.NoWorkersError: (
        lambda folder: search_here(folder, cluster={"n_workers": 0}, worker_timeout=0.3),
        "no worker came",
    ),
    errors.WorkerMemoryError: (
        lambda folder: search_here(
            folder, hold="memory", cluster={"n_workers": 1, "memory_limit": "1 kB"}
        ),
        "1,000 bytes",
    ),
    errors.NoCompletedTrialError: (no_trial, "it burnt down"),
    errors.SearchCancelledError: (cancelled, "go on with  dagsel.resume"),
}

#: Errors that end a trial or a unit, not a call; a version of one's own needs a process of its own.
ELSEWHERE = {
    errors.DivergedError: "attack/test_every_error.py",
    errors.NothingTrainedError: "attack/test_trains_nothing.py",
    errors.GangBrokenError: "workloads/test_traps.py",
    errors.NothingTrainedError: "attack/test_trains_nothing.py",
    errors.OutOfMemoryError: "execution/test_out_of_memory.py",
    errors.TrainingError: "workloads/test_gang.py",
    errors.VersionMismatchError: "execution/test_optimize.py",
}


@pytest.mark.parametrize("kind", RAISES, ids=lambda kind: kind.__name__)
def test_the_error_comes_out_of_a_call(kind: type[errors.DagselError], tmp_path: Path) -> None:
    call, named = RAISES[kind]
    with pytest.raises(kind) as caught:
        call(tmp_path)
    assert type(caught.value) is kind
    assert named in str(caught.value)


def nan_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets) * float("nan")


def test_a_diverged_trial_says_so(tmp_path: Path) -> None:
    workload = dagsel.TorchWorkload(
        searches.model,
        nan_loss,
        searches.optimizer,
        batch_size=8,
        metrics={"accuracy": searches.accuracy},
    )
    run = search_here(tmp_path, cluster={"n_workers": 1}, workload=workload, metric="accuracy")
    (failed,) = run.failures
    assert failed.reason.startswith(errors.DivergedError.__name__)


def test_a_scheduler_that_does_not_answer_is_named_while_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dagsel.execution.answers.TELL_AFTER_S", 0.0)
    with pytest.raises(errors.ClusterError):
        search_nowhere(tmp_path)
    assert "no answer from tcp://127.0.0.1:9 yet" in caplog.text


def test_no_error_is_left_out() -> None:
    public = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.DagselError)
    }
    roots = {errors.DagselError, errors.DatasetError}  # only their kinds are raised
    assert public - roots == RAISES.keys() | ELSEWHERE.keys()
    for kind, file in ELSEWHERE.items():
        assert re.search(rf"\b{kind.__name__}\b", (TESTS / file).read_text())
