"""The same search with dagsel, with plain processes and with what people use: time, CPU, memory.

::

    python tests/benchmarks/peers.py --data PATH [--trials 16] [--rounds 5] [--only dagsel,plain]

PATH is a folder with the IDX files of MNIST; without it there are scikit-learn's digits, each pixel
made 3 × 3. Small CNNs (two numbers of channels, two widths, two batch sizes, and as many rates as
make the number of trials; Adam) train for 5 epochs on 2 workers, one thread each, and are evaluated
after each epoch. All ways begin with the same two NumPy files, as a user would: dagsel is given the
arrays and nothing but its defaults; the others train each trial by the same loop over a
``TensorDataset`` in memory. Each way is a process of its own, timed from its start to its exit,
with all that it starts: imports, worker processes, writing and reading. The ways take turns;
medians count. CPU time and memory are those of its processes, asked every quarter of a second and
every fourth second: to ask for the memory of one takes 5 to 8 ms of a core that it could use. What
is told of dagsel's units is read from its record when its process has ended.

dagsel's start and end are measured in two ways: from the call of ``dagsel.optimize`` to the start
of the first unit, and from the end of the last unit to the call's return, over the seconds that
``python -c "import torch"`` takes in the same round; and from the begin and to the end of the
process, without a bar.

Each way steps Adam as it comes: PyTorch's default kernels, and dagsel's fused ones.

A way whose packages are not there is left out, with the line that installs them. It ends with 3 if
a bar is missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

EXAMPLES = str(Path(__file__).parents[2] / "examples")
sys.path.insert(0, EXAMPLES)

N_WORKERS, EPOCHS, VALIDATION = 2, 5, 0.2
# Each look asks for processor time, one in so many for memory, first after two seconds.
LOOK_S, PER_MEMORY = 0.25, 16
#: What a way needs besides dagsel.
NEEDS = {"optuna": "optuna_integration", "ray": "ray"}
NAMES = {
    "dagsel": "dagsel",
    "plain": "plain PyTorch in a pool of processes",
    "submit": "`Client.submit` of whole trials",
    "optuna": "Optuna with `DaskStorage`",
    "ray": "Ray Tune",
}
#: Wall time over that of each way, by the number of trials; then CPU time.
WALL_BARS = {16: {"plain": 1.0, "submit": 0.4, "optuna": 0.4, "ray": 0.33}, 64: {"plain": 0.95}}
CPU_BARS = {16: {"plain": 1.05}}
#: Until the first unit and after the last one, over an import of PyTorch.
IMPORT_BARS = {"until": 1.0, "after": 0.2}


def grid(n_trials: int) -> dict[str, list[Any]]:
    rates = np.geomspace(5e-3, 1e-2, n_trials // 8).round(6).tolist()
    return {"channels": [2, 4], "width": [32, 64], "batch_size": [256, 512], "lr": rates}


def configs(n_trials: int) -> list[dict[str, Any]]:
    space = grid(n_trials)
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*space.values())]


def train(config: dict[str, Any], folder: str) -> Iterator[float]:
    """Train one configuration as a script does; yield the accuracy after each epoch."""
    import torch
    from mnist_cnn import model, optimizer
    from torch.utils.data import DataLoader, TensorDataset, random_split

    torch.set_num_threads(1)
    arrays = [torch.from_numpy(np.load(f"{folder}/{name}.npy")) for name in ("images", "labels")]
    whole = TensorDataset(*arrays)
    n_validation = int(len(whole) * VALIDATION)
    torch.manual_seed(0)
    trained, kept = random_split(whole, [len(whole) - n_validation, n_validation])
    network = model(config)
    steps = optimizer(network.parameters(), config)
    for _ in range(EPOCHS):
        network.train()
        for x, y in DataLoader(trained, batch_size=config["batch_size"], shuffle=True):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            steps.step()
        network.eval()
        with torch.inference_mode():
            batches = DataLoader(kept, batch_size=512)
            yield sum((network(x).argmax(1) == y).sum().item() for x, y in batches) / n_validation


def trained(config: dict[str, Any], folder: str) -> float:
    return list(train(config, folder))[-1]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits as images of 28 × 28 bytes, and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    large = np.kron(found.images * (255 / 16), np.ones((1, 3, 3)))
    return np.pad(large, ((0, 0), (2, 2), (2, 2))).astype(np.uint8), found.target


def nbytes(folder: str) -> int:
    return sum(np.load(f"{folder}/{name}.npy", "r").nbytes for name in ("images", "labels"))


def run_dagsel(folder: str, n_trials: int, *, cluster: Any = None) -> dict[str, Any]:
    import optuna
    from mnist_cnn import workload

    import dagsel
    from dagsel.flows import Grid

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, v) for name, v in grid(n_trials).items()}

    images, labels = (np.load(f"{folder}/{name}.npy") for name in ("images", "labels"))
    place = tempfile.mkdtemp(dir=folder)
    called = time.time()
    run = dagsel.optimize(
        optuna.create_study(direction="maximize"),
        workload(),
        (images, labels),
        space=space,
        metric="accuracy",
        flow=Grid(max_epochs=EPOCHS),
        cluster=cluster,
        run_dir=f"{place}/run",
    )
    return {"best": run.best_value, "place": place, "called": called, "returned": time.time()}


def recorded(place: str, called: float, returned: float, folder: str) -> dict[str, Any]:
    """Return what the record of dagsel's search says of its units, and remove it."""
    import dagsel

    timeline = dagsel.load(f"{place}/run").timeline()
    shutil.rmtree(place)
    trained = timeline[timeline.kind == "train"]
    held = trained.groupby("worker").shard.nunique().max() / trained.shard.nunique()
    begin, end = timeline.start.min(), timeline.stop.max()
    busy = (timeline.stop - timeline.start).sum() / (end - begin) / timeline.worker.nunique()
    return {
        "held": float(held * nbytes(folder)),
        "units": len(timeline),
        "hops": int(timeline.hop.sum()),
        "busy": float(busy),
        "first": float(begin),
        "last": float(end),
        "until": float(begin - called),
        "after": float(returned - end),
    }


def run_plain(folder: str, n_trials: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(N_WORKERS) as pool:
        tasks = [(config, folder) for config in configs(n_trials)]
        return {"best": max(pool.starmap(trained, tasks, chunksize=1))}


def run_submit(folder: str, n_trials: int) -> dict[str, Any]:
    with dask_client() as client:
        futures = [client.submit(trained, config, folder) for config in configs(n_trials)]
        return {"best": max(client.gather(futures))}


def run_optuna(folder: str, n_trials: int) -> dict[str, Any]:
    import optuna
    from optuna_integration import DaskStorage

    def objective(trial: optuna.Trial) -> float:
        config = {name: trial.suggest_categorical(name, v) for name, v in grid(n_trials).items()}
        for epoch, accuracy in enumerate(train(config, folder)):
            trial.report(accuracy, epoch)
        return accuracy

    with dask_client() as client:
        study = optuna.create_study(storage=DaskStorage(client=client), direction="maximize")
        for config in configs(n_trials):
            study.enqueue_trial(config)
        tasks = [
            client.submit(study.optimize, objective, n_trials=1, pure=False)
            for _ in range(n_trials)
        ]
        client.gather(tasks)
        return {"best": study.best_value}


def dask_client() -> Any:
    from distributed import Client

    return Client(
        n_workers=N_WORKERS, threads_per_worker=1, host="127.0.0.1", dashboard_address="127.0.0.1:0"
    )


def run_ray(folder: str, n_trials: int) -> dict[str, Any]:
    import ray
    from ray import tune

    def objective(config: dict[str, Any]) -> None:
        sys.path.insert(0, EXAMPLES)  # this function alone is sent to Ray's workers
        for accuracy in train(config["each"], folder):
            tune.report({"accuracy": accuracy})

    ray.init(num_cpus=N_WORKERS, include_dashboard=False, log_to_driver=False)
    tuner = tune.Tuner(
        tune.with_resources(objective, {"cpu": 1}),
        param_space={"each": tune.grid_search(configs(n_trials))},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max"),
        run_config=tune.RunConfig(storage_path=f"{folder}/ray", verbose=0),
    )
    best = (tuner.fit().get_best_result(scope="last").metrics or {})["accuracy"]
    ray.shutdown()
    return {"best": best}


WAYS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "dagsel": run_dagsel,
    "plain": run_plain,
    "submit": run_submit,
    "optuna": run_optuna,
    "ray": run_ray,
}


def import_s() -> float:
    """Return how long a process takes that imports PyTorch."""
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - begin


class Watched(NamedTuple):
    """What a program has printed last, and what it has taken with all that it started."""

    told: dict[str, Any]
    begin: float  # seconds since 1970
    end: float
    cpu_s: float
    peak: int  # bytes of memory

    @property
    def taken(self) -> dict[str, float]:
        return {"wall": self.end - self.begin, "cpu": self.cpu_s, "peak": self.peak}


def watched(*command: str) -> Watched:
    """Run a program whose last line is JSON."""
    with tempfile.TemporaryFile() as said:
        begin = time.time()
        child = subprocess.Popen(command, stdout=said, stderr=said)
        cpu_s, peak, looks = dict[tuple[int, float], float](), 0, itertools.count()
        while child.poll() is None:
            family = [psutil.Process(child.pid)]
            with suppress(psutil.NoSuchProcess):
                family += family[0].children(recursive=True)
            memory, measures = 0, next(looks) % PER_MEMORY == PER_MEMORY // 2
            for process in family:
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    times = process.cpu_times()
                    cpu_s[process.pid, process.create_time()] = times.user + times.system
                    memory += process.memory_full_info().pss if measures else 0
            peak = max(peak, memory)
            time.sleep(LOOK_S)
        end = time.time()
        said.seek(0)
        text = said.read().decode()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{text}")
    told = json.loads(text.strip().splitlines()[-1])
    return Watched(told, begin, end, sum(cpu_s.values()), peak)


def raced(way: str, folder: str, n_trials: int) -> dict[str, Any]:
    """Run a way in a process of its own; return what it says, and what it has taken."""
    about = ["--way", way, "--folder", folder, "--trials", str(n_trials)]
    run = watched(sys.executable, __file__, *about)
    told = run.told
    if "place" in told:
        place, called, returned = (told.pop(name) for name in ("place", "called", "returned"))
        told |= recorded(place, called, returned, folder)
        told |= {"first": told["first"] - run.begin, "last": run.end - told["last"]}
    return {**run.taken, "held": nbytes(folder), **told}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    """Return what came of the rounds: medians, and the least and the most seconds."""
    lines = [
        "| way | wall | CPU | memory of all processes | data a worker holds | best accuracy |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for way, rounds in results.items():
        wall, cpu, peak, held, best = (
            statistics.median(each[name] for each in rounds)
            for name in ("wall", "cpu", "peak", "held", "best")
        )
        walls = [each["wall"] for each in rounds]
        lines.append(
            f"| {NAMES[way]} | {wall:.1f} s ({min(walls):.1f} to {max(walls):.1f}) | {cpu:.1f} s "
            f"| {peak / 1e6:.0f} MB | {held / 1e6:.1f} MB | {best:.4f} |"
        )
    return "\n".join(lines)


def spread(values: list[float], unit: str = "") -> str:
    return f"{statistics.median(values):.2f}{unit} ({min(values):.2f} to {max(values):.2f})"


def judged(results: dict[str, list[dict[str, Any]]], n_trials: int) -> tuple[str, bool]:
    """Return dagsel's ratios beside their bars as a table, and whether all are held."""
    ours = results.get("dagsel", [])
    found: list[tuple[str, list[float], float]] = []
    for kind, bars in (("wall", WALL_BARS), ("cpu", CPU_BARS)):
        for way, bar in bars.get(n_trials, {}).items():
            pairs = zip(ours, results.get(way, []), strict=False)
            ratios = [own[kind] / theirs[kind] for own, theirs in pairs]
            found.append((f"{NAMES[way]}, {kind.replace('cpu', 'CPU')}", ratios, bar))
    for kind, bar in IMPORT_BARS.items():
        what = "until the first unit" if kind == "until" else "after the last unit"
        ratios = [own[kind] / own["import"] for own in ours]
        found.append((f"an import of PyTorch, {what}", ratios, bar))
    lines, is_held = ["| dagsel over | ratio | bar | |", "| --- | --- | --- | --- |"], True
    for name, ratios, bar in found:
        if ratios:
            held = statistics.median(ratios) <= bar
            is_held &= held
            verdict = "held" if held else "**missed**"
            lines.append(f"| {name} | {spread(ratios)} | {bar} | {verdict} |")
    return "\n".join(lines), is_held


def times(rounds: list[dict[str, Any]]) -> str:
    """Return dagsel's seconds until the first unit and after the last one, in words."""
    until, first, after, last, imported = (
        spread([each[name] for each in rounds], " s")
        for name in ("until", "first", "after", "last", "import")
    )
    busy = statistics.median(each["busy"] for each in rounds)
    return (
        f"Until the first unit: {until} from the call of `dagsel.optimize`, {first} from the begin "
        f"of the process. After the last one: {after} until the call returns, {last} until the "
        f"process has ended. An import of PyTorch: {imported}. In between the workers spend "
        f"{busy:.0%} of their time in units."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="the same search with dagsel and with others")
    parser.add_argument("--data", help="folder with the IDX files")
    parser.add_argument("--trials", type=int, default=16, help="a multiple of 8")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(WAYS[args.way](args.folder, args.trials)))
        return 0
    from mnist_cnn import arrays, read_mnist

    ways = args.only.split(",")
    for way, package in NEEDS.items():
        if way in ways and importlib.util.find_spec(package) is None:
            ways.remove(way)
            print(f'{NAMES[way]} is left out: pip install -c constraints.txt -e ".[peers]"\n')
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for name, array in arrays(*(read_mnist(args.data) if args.data else digits())).items():
            np.save(f"{folder}/{name}.npy", array)
        for number, way in itertools.product(range(args.rounds), ways):
            told = raced(way, folder, args.trials)
            if way == "dagsel":
                told["import"] = import_s()
            results[way].append(told)
            print(f"round {number + 1}, {way}: {told}", file=sys.stderr, flush=True)
    bars, is_held = judged(results, args.trials)
    said = [f"{args.trials} trials, {args.rounds} rounds:", table(results)]
    said += [bars, times(results["dagsel"])] if "dagsel" in results else []
    print("\n\n".join(said))
    return 0 if is_held else 3  # a crash ends with 1


if __name__ == "__main__":
    raise SystemExit(main())
