"""Threads that a worker trains with: as many as cores allow, and the same ones after a resume."""

from __future__ import annotations

import builtins
import importlib
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import dask.system
import optuna
import pytest
import torch
from distributed import Client

import dagsel
from dagsel.execution.cluster import threads_here
from dagsel.execution.process import torch_threads
from dagsel.flows import RandomSearch
from dagsel.history.result import Run
from dagsel.storage import ShardedDataset

HERE = int(dask.system.CPU_COUNT)


@pytest.mark.parametrize(
    ("n_cores", "most_workers", "n"), [(8, None, 1), (8, 8, 1), (8, 2, 4), (8, 3, 2), (2, 9, 1)]
)
def test_the_cores_are_shared_out_among_the_workers(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, most_workers: int | None, n: int
) -> None:
    monkeypatch.setattr(dask.system, "CPU_COUNT", n_cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_here(most_workers) == n
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_here(most_workers) == 1, "the environment says how many"


def n_threads(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(torch.get_num_threads()))


def workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(64, 10),
        torch.nn.functional.cross_entropy,
        torch.optim.SGD,
        batch_size=64,
        metrics={"n_threads": n_threads},
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)}


def search(data: ShardedDataset, run_dir: str, **how: Any) -> Run:
    study, flow = optuna.create_study(direction="minimize"), RandomSearch(max_epochs=1, n_trials=2)
    about: dict[str, Any] = {
        "space": space,
        "metric": "n_threads",
        "flow": flow,
        "run_dir": run_dir,
    }
    return dagsel.optimize(study, workload(), data, **about, **how)


def test_a_single_worker_trains_on_all_cores_and_so_does_a_replay_on_more(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    digits: ShardedDataset,
    run_dir: str,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with caplog.at_level(logging.WARNING, "dagsel"):
        run = search(digits, run_dir, max_cluster_workers=1)
    assert run.best_value == HERE
    assert (f"trains with {HERE} threads" in caplog.text) == (HERE > 1)
    again = dagsel.replay(run_dir, workload=workload(), space=space, into=f"{run_dir}-again")
    assert again.best_value == HERE


def bits(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return torch.tensor(float(logits.element_size() * 8))


def test_the_default_dtype_of_the_caller_is_that_of_the_workers(
    digits: ShardedDataset, tmp_path: Path, client: Client
) -> None:
    """On workers that are no copy of the caller's process, and for this search alone."""

    def search_in(dtype: torch.dtype) -> float:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            run = dagsel.optimize(
                optuna.create_study(),
                dagsel.TorchWorkload(
                    lambda config: torch.nn.Linear(64, 10),
                    torch.nn.functional.cross_entropy,
                    torch.optim.SGD,
                    batch_size=64,
                    metrics={"bits": bits},
                    input_fn=lambda batch, config: (batch["x"].to(dtype), batch["y"]),
                ),
                digits,
                space=space,
                metric="bits",
                flow=RandomSearch(max_epochs=1, n_trials=2),
                run_dir=tmp_path / str(dtype),
                client=client,
            )
            assert run.best_model().weight.dtype == dtype
            return run.best_value
        finally:
            torch.set_default_dtype(before)

    assert [search_in(dtype) for dtype in (torch.float64, torch.float32)] == [64.0, 32.0]


SCRIPT = """\
import dagsel, optuna, torch
from dagsel.flows import RandomSearch
from sklearn.datasets import load_digits

def n_threads(logits, target):
    return torch.tensor(float(torch.get_num_threads()))

if __name__ == "__main__":
    x, y = load_digits(return_X_y=True)
    workload = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(64, 10), torch.nn.functional.cross_entropy,
        torch.optim.SGD, batch_size=64, metrics={"n_threads": n_threads})
    for _ in range(2):
        run = dagsel.optimize(
            optuna.create_study(), workload, (x.astype("float32"), y), metric="n_threads",
            space=lambda trial: {"lr": trial.suggest_float("lr", 0.001, 0.1)},
            flow=RandomSearch(max_epochs=1, n_trials=1), max_cluster_workers=1)
        print("told", run.best_value)
"""


@pytest.mark.parametrize("said", ["", "1"])
def test_in_a_script_a_worker_trains_on_all_cores_unless_the_environment_says_how_many(
    tmp_path: Path, said: str
) -> None:
    """Also in its second search: the first one has set the environment for its workers."""
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)
    known = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=known | ({"OMP_NUM_THREADS": said} if said else {}),
        capture_output=True,
        text=True,
        check=True,
    )
    n = 1 if said else HERE
    assert done.stdout.count(f"told {float(n)}") == 2, done.stdout + done.stderr
    assert done.stderr.count("each worker trains with") == (2 if n > 1 else 0)


def test_a_deterministic_search_trains_with_one_thread(
    monkeypatch: pytest.MonkeyPatch, digits: ShardedDataset, run_dir: str
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert search(digits, run_dir, max_cluster_workers=1, deterministic=True).best_value == 1.0


def test_an_import_of_pytorch_in_another_thread_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another search's, on a worker that has not had it: it is there, and lacks its names."""
    begun, goes_on = threading.Event(), threading.Event()
    (tmp_path / "torch.py").write_text(
        "import builtins\n"
        "begun, goes_on = builtins.events\n"
        "begun.set()\n"
        "goes_on.wait(0.3)\n"
        "get_num_threads = lambda: 7\n"
    )
    monkeypatch.setattr(builtins, "events", (begun, goes_on), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch")
    importing = threading.Thread(target=importlib.import_module, args=("torch",))
    importing.start()
    try:
        assert begun.wait(60)
        assert torch_threads() == 7
    finally:
        goes_on.set()
        importing.join()
