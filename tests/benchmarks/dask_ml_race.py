"""Hyperband over scikit-learn's networks, with dask-ml and with dagsel: time, CPU, memory.

    python tests/benchmarks/dask_ml_race.py [--data PATH] [--rounds 3] [--python PYTHON]

What is assumed, and was written down before it ran:

- Data: the images of the IDX files in PATH, or scikit-learn's digits made larger, as two NumPy
  files of float32 and int64 with which both begin. A fifth of them validates.
- Model: ``MLPClassifier`` with two hidden layers of 64, batches of 200; ``alpha`` and
  ``learning_rate_init`` are drawn at random, which changes no epoch's time. dask-ml searches over
  nothing else that trains a network without a wrapper.
- Search: Hyperband of 27 epochs and a reduction of 3, of which both make the same brackets.
  dask-ml's unit is a call of ``partial_fit`` with a chunk, dagsel's an epoch of all shards. So the
  data is one chunk there, and a call is an epoch. dagsel chooses its shards itself.
- Two workers of one thread each; all else as it comes.

Both train the same number of epochs, give or take what dask-ml's ``HyperbandSearchCV`` says of
itself; they are printed. Each is a process of its own, timed from its start to its exit with all
that it starts. They take turns; medians count. dask-ml's newest release does not run with today's
Dask, so it has an environment of its own: the one of PYTHON, or a new one, which takes a minute to
install. It ends with 3 if dagsel takes longer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

import numpy as np

BAR = 1.0
MAX_EPOCHS, FACTOR, N_WORKERS, VALIDATION = 27, 3, 2, 0.2
#: What an environment of dask-ml is made of: the newest versions that go together.
NEEDED = (
    "dask-ml==2025.1.0", "dask[array,dataframe,distributed]==2025.1.0", "scikit-learn==1.6.1",
    "numpy<2.3",
)  # fmt: skip
NAMES = {"dagsel": "dagsel, `Hyperband`", "dask_ml": "dask-ml, `HyperbandSearchCV`"}


def network() -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier((64, 64), batch_size=200, random_state=0)


def run_dask_ml(x: Any, y: Any, folder: str) -> dict[str, Any]:
    import dask.array as da
    from dask_ml.model_selection import HyperbandSearchCV
    from distributed import Client
    from scipy.stats import loguniform

    parameters = {"alpha": loguniform(1e-6, 1e-2), "learning_rate_init": loguniform(1e-4, 1e-2)}
    with Client(n_workers=N_WORKERS, threads_per_worker=1, dashboard_address=":0"):
        search = HyperbandSearchCV(
            network(), parameters, max_iter=MAX_EPOCHS, aggressiveness=FACTOR,
            test_size=VALIDATION, random_state=0,
        )  # fmt: skip
        search.fit(
            da.from_array(x, chunks=x.shape), da.from_array(y, chunks=y.shape), classes=range(10)
        )
        calls = [each[-1]["partial_fit_calls"] for each in search.model_history_.values()]
        return {"best": search.best_score_, "trials": len(calls), "epochs": sum(calls)}


def run_dagsel(x: Any, y: Any, folder: str) -> dict[str, Any]:
    import optuna

    import dagsel
    from dagsel.flows import Hyperband

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {
            "alpha": trial.suggest_float("alpha", 1e-6, 1e-2, log=True),
            "learning_rate_init": trial.suggest_float("learning_rate_init", 1e-4, 1e-2, log=True),
        }

    run = dagsel.optimize(
        optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0)),
        dagsel.SklearnWorkload(network(), classes=range(10)),
        (x, y),
        space=space,
        metric="accuracy",
        flow=Hyperband(max_epochs=MAX_EPOCHS, reduction_factor=FACTOR),
        run_dir=tempfile.mkdtemp(dir=folder),
    )
    record = run.record
    return {"best": run.best_value, "trials": len(record.trials), "epochs": record.n_epochs}


WAYS = {"dagsel": run_dagsel, "dask_ml": run_dask_ml}


def python_of_dask_ml(folder: str) -> str:
    """Make an environment with dask-ml; return its Python."""
    venv.create(folder, with_pip=True)
    python = str(Path(folder) / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", *NEEDED], check=True, stdout=sys.stderr)
    return python


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        "| way | wall | CPU | memory of all processes | trials | epochs | best accuracy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for way, rounds in results.items():
        names = ("cpu", "peak", "trials", "epochs", "best")
        cpu, peak, trials, epochs, best = (
            statistics.median(each[name] for each in rounds) for name in names
        )
        walls = [each["wall"] for each in rounds]
        lines.append(
            f"| {NAMES[way]} | {statistics.median(walls):.1f} s ({min(walls):.1f} to "
            f"{max(walls):.1f}) | {cpu:.1f} s | {peak / 1e6:.0f} MB | {trials:.0f} | {epochs:.0f} "
            f"| {best:.4f} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Hyperband with dagsel and with dask-ml")
    parser.add_argument("--data", help="folder with the IDX files")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", help="that of an environment with dask-ml")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        x, y = (np.load(f"{args.folder}/{name}.npy") for name in ("x", "y"))
        print(json.dumps(WAYS[args.way](x, y, args.folder)))
        return 0
    # What the environment of dask-ml lacks.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.benchmarks import peers

    from mnist_cnn import arrays, read_mnist  # isort: skip  peers has said where it is

    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        made = arrays(*(read_mnist(args.data) if args.data else peers.digits()))
        np.save(f"{folder}/x.npy", made["images"].reshape(len(made["images"]), -1))
        np.save(f"{folder}/y.npy", made["labels"])
        python = {"dagsel": sys.executable}
        python["dask_ml"] = args.python or python_of_dask_ml(f"{folder}/dask-ml")
        for number in range(args.rounds):
            for way in WAYS:
                run = peers.watched(python[way], __file__, "--way", way, "--folder", folder)
                results[way].append({**run.taken, **run.told})
                print(f"round {number + 1}, {way}: {results[way][-1]}", file=sys.stderr, flush=True)
    pairs = [*zip(results["dagsel"], results["dask_ml"], strict=True)]
    ratios = {
        kind: [ours[kind] / theirs[kind] for ours, theirs in pairs] for kind in ("wall", "cpu")
    }
    is_held = statistics.median(ratios["wall"]) <= BAR
    print(f"{args.rounds} rounds:\n\n{table(results)}\n")
    print("| dagsel over dask-ml | ratio | bar | |\n| --- | --- | --- | --- |")
    print(
        f"| wall | {peers.spread(ratios['wall'])} | {BAR} | {'held' if is_held else '**missed**'} |"
    )
    print(f"| CPU | {peers.spread(ratios['cpu'])} | | |")
    return 0 if is_held else 3  # a crash ends with 1


if __name__ == "__main__":
    raise SystemExit(main())
