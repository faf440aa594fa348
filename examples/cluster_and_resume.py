"""A cluster that is started by hand, and a search that outlives the death of its own process.

    python examples/cluster_and_resume.py

It starts ``dask scheduler`` and ``dask worker`` as you would on several machines, begins a search
in another process, kills that process midway, and goes on here with ``dagsel.resume``. Nothing that
was trained is lost but what was under way. It takes about half a minute on two cores.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import joblib
import optuna
from distributed import Client
from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset


def workload() -> dagsel.SklearnWorkload:
    return dagsel.SklearnWorkload(
        MLPClassifier(hidden_layer_sizes=(64,), random_state=0), classes=range(10), batch_size=32
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "learning_rate_init": trial.suggest_float("learning_rate_init", 1e-4, 1e-1, log=True),
        "alpha": trial.suggest_float("alpha", 1e-6, 1e-1, log=True),
    }


@contextmanager
def cluster(n_workers: int, folder: Path) -> Iterator[str]:
    """Start a scheduler and workers as processes of their own, and end them afterwards.

    On several machines you type these commands, and workers name the scheduler's address in place
    of a file.
    """
    file = str(folder / "scheduler.json")
    dask = [sys.executable, "-m", "dask"]
    scheduler = [*dask, "scheduler", "--port", "0", "--scheduler-file", file]
    worker = [*dask, "worker", "--scheduler-file", file, "--nthreads", "2"]
    worker += ["--no-dashboard", "--no-nanny", "--local-directory", str(folder)]
    commands = [
        [*scheduler, "--host", "127.0.0.1", "--dashboard-address", ":0"],
        *[worker] * n_workers,
    ]
    with (folder / "cluster.log").open("w") as log:
        started = [subprocess.Popen(command, stdout=log, stderr=log) for command in commands]
        try:
            with Client(scheduler_file=file, set_as_default=False) as client:
                client.wait_for_workers(n_workers)
                address = client.scheduler.address
            yield address
        finally:
            for process in reversed(started):  # the scheduler last
                process.terminate()
                process.wait()


def search(address: str, folder: Path, trials: int, epochs: int) -> None:
    """Do what your script does: connect to the cluster and search."""
    digits = load_digits()
    arrays = {"x": digits.data / 16, "y": digits.target}
    data = ShardedDataset.write(folder / "digits.zarr", arrays, n_shards=4)
    dagsel.optimize(
        optuna.create_study(
            study_name="digits", direction="maximize", storage=f"sqlite:///{folder}/study.db"
        ),
        workload(),
        data,
        space=space,
        metric="accuracy",
        flow=RandomSearch(max_epochs=epochs, n_trials=trials),
        client=address,
        run_dir=folder / "run",
    )


def epochs_done(folder: Path) -> int:
    """Count the epochs that stand in the journal, as anybody can who reaches the run's folder."""
    if not (folder / "run" / "journal.jsonl").exists():
        return 0
    metrics = dagsel.load(folder / "run").metrics
    return int(((metrics["split"] == "validation") & (metrics["name"] == "accuracy")).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="a search is killed, and goes on")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--search", nargs=2, metavar=("SCHEDULER", "FOLDER"), help="only search")
    args = parser.parse_args()
    if args.search:
        search(args.search[0], Path(args.search[1]), args.trials, args.epochs)
        return

    folder = Path(tempfile.mkdtemp(prefix="dagsel-cluster-"))
    with cluster(args.workers, folder) as address:
        print(f"{args.workers} workers at {address}")
        sizes = ["--trials", str(args.trials), "--epochs", str(args.epochs)]
        command = [sys.executable, __file__, *sizes, "--search", address, str(folder)]
        driver = subprocess.Popen(command)
        while driver.poll() is None and epochs_done(folder) < args.trials * args.epochs / 3:
            time.sleep(0.2)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        before = epochs_done(folder)
        print(f"the search was killed after {before} of {args.trials * args.epochs} epochs")

        run = dagsel.resume(folder / "run", address, workload=workload(), space=space)
    print(f"the other {epochs_done(folder) - before} epochs were trained after that")
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))
    joblib.dump(run.best_model(), folder / "best.joblib")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.joblib'}")


if __name__ == "__main__":
    main()
