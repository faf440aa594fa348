"""A search over small networks on a table: processor time against a plain loop, and the driver's.

    python tests/benchmarks/tabular.py [--rounds 3] [--trials 24] [--many 130] [--profile FILE]

A search of ten seconds, where what dagsel adds to training counts most. What is assumed:

- Data: 20,000 samples of 16 normal numbers (float32) in 4 classes, those of a fixed random network
  with one hidden layer; NumPy, seed 0. It is given as ``data=(x, y)``, and so a fifth validates.
- Models: one or two hidden layers of 16, 32 or 64, Adam, rate 1e-4 to 1e-1; batches of 128.
- Search: ``ASHA(max_epochs=9, n_trials=24, reduction_factor=3)`` on 2 workers, Optuna's default
  sampler with a seed, and the defaults of ``dagsel.optimize``.
- Plain loop: one process, one thread. The configurations of that search, each for the epochs that
  the search gave it, one after the other, evaluated after each. Both parts are a ``TensorDataset``
  in memory; an epoch draws one permutation, and a batch is one indexing by a part of it.
- Adam as it comes: the loop has PyTorch's default kernels, the search dagsel's fused ones.

Search and loop take turns, each in a process of its own. Start-up does not count: of the search,
processor time of the driver and all processes below it counts from the end of the first unit (a
pass over a shard, in training or in evaluation) to the end of the last; of the loop, from the end
of its first training epoch to its end. The processes' times are asked 20 times a second from
outside, and what lies between two answers is taken as linear. The system counts in hundredths of a
second. The plain loop never shares the machine with a second worker, the search does: where two
cores are threads of one, that is in the ratio.

The driver's time a unit is that of its own process, in which Dask's scheduler runs too, in two
searches of some 640 units: 16 trials of 5 epochs on 4 shards without ASHA, and this search with so
many trials. In both an epoch of a trial is one task, which trains and evaluates on all shards: 8
units, and 2. Beside them stands what Dask alone takes for half as many tasks that sleep
20 ms, sent at once to two workers of the same kind, and nothing else. With ``--profile`` that
search is run once, and what its process spent, all threads together, is written to FILE; what a
thread waits in when the search ends gets time there that it did not take. It ends with 3 if a bar
is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

N_SAMPLES, N_FEATURES, N_CLASSES, BATCH_SIZE, EVAL_BATCH_SIZE = 20_000, 16, 4, 128, 512
N_WORKERS, VALIDATION, LOOK_S = 2, 0.2, 0.05
# A search that always has 640 units: 16 trials × 5 epochs × 4 shards, to train and to evaluate.
TRIALS, EPOCHS, SHARDS = 16, 5, 4
CPU_BAR, DRIVER_BAR_US = 1.25, 300.0


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N_SAMPLES, N_FEATURES), np.float32)
    first = rng.standard_normal((N_FEATURES, 32)) / N_FEATURES**0.5
    second = rng.standard_normal((32, N_CLASSES))
    return x, (np.tanh(2 * x @ first) @ second).argmax(1)


def model(config: dict[str, Any]) -> Any:
    from torch import nn

    layers: list[nn.Module] = []
    width = N_FEATURES
    for _ in range(config["layers"]):
        layers += [nn.Linear(width, config["width"]), nn.ReLU()]
        width = config["width"]
    return nn.Sequential(*layers, nn.Linear(width, N_CLASSES))


def space(trial: Any) -> dict[str, Any]:
    return {
        "layers": trial.suggest_int("layers", 1, 2),
        "width": trial.suggest_categorical("width", [16, 32, 64]),
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    }


def search(folder: str, n_trials: int, seed: int, n_shards: int = 0) -> dict[str, Any]:
    """Run a search; tell what was trained, and when the first unit and the last one ended.

    With so many shards it is no ASHA: each trial trains 5 epochs.
    """
    import optuna
    import torch

    import dagsel
    from dagsel.flows import ASHA, RandomSearch
    from dagsel.storage import ShardedDataset

    workload = dagsel.TorchWorkload(
        model,
        torch.nn.functional.cross_entropy,
        torch.optim.Adam,
        batch_size=BATCH_SIZE,
        metrics=["accuracy"],
    )
    sampler = optuna.samplers.TPESampler(seed=seed)
    data: Any = arrays()
    flow: Any = ASHA(max_epochs=9, n_trials=n_trials, reduction_factor=3)
    if n_shards:
        named = dict(zip("xy", data, strict=True))
        data = ShardedDataset.write(f"{folder}/data", named, n_shards=n_shards)
        flow = RandomSearch(max_epochs=EPOCHS, n_trials=n_trials)
    run = dagsel.optimize(
        optuna.create_study(direction="maximize", sampler=sampler),
        workload,
        data,
        space=space,
        metric="accuracy",
        flow=flow,
        max_cluster_workers=N_WORKERS,
        run_dir=f"{folder}/run",
    )
    units = run.timeline()
    first, last = float(units.stop.min()), float(units.stop.max())
    busy_s = (units.stop - units.start.clip(lower=first)).sum()
    n_epochs = units[units.kind == "train"].groupby("trial").epoch.nunique()
    trials = run.study.trials  # a copy of all
    return {
        "best": run.best_value,
        "first": first,
        "last": last,
        "units": len(units),
        "busy": float(busy_s / (last - first) / N_WORKERS),
        "trials": [
            [trials[i].params, int(n)] for i, n in zip(n_epochs.index, n_epochs, strict=True)
        ],
    }


def bare(n_tasks: int) -> dict[str, Any]:
    """Have Dask alone run tasks that sleep; tell this process's time for one."""
    from distributed import Client

    from dagsel.execution.cluster import close, local_cluster

    cluster = local_cluster(N_WORKERS)
    with Client(cluster, set_as_default=False) as client:
        client.gather(client.map(time.sleep, N_WORKERS * [0.02], pure=False))
        began = time.process_time()
        client.gather(client.map(time.sleep, n_tasks * [0.02], pure=False))
        told = {"dask": (time.process_time() - began) / n_tasks}
    close(cluster)
    return told


def plain(trials: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Train the same in a loop; tell its processor time after its first training epoch."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import TensorDataset

    torch.set_num_threads(1)
    x, y = (torch.from_numpy(array) for array in arrays())
    order, n_kept = torch.randperm(len(x)), int(len(x) * VALIDATION)
    kept, trained = (TensorDataset(x[part], y[part]) for part in (order[:n_kept], order[n_kept:]))
    began: float | None = None
    best = 0.0
    for number, (config, n_epochs) in enumerate(trials):
        torch.manual_seed(number)
        network = model(config)
        optimizer = torch.optim.Adam(network.parameters(), lr=config["lr"])
        for _ in range(n_epochs):
            network.train()
            order = torch.randperm(len(trained))
            for begin in range(0, len(trained), BATCH_SIZE):
                inputs, targets = trained[order[begin : begin + BATCH_SIZE]]
                optimizer.zero_grad()
                F.cross_entropy(network(inputs), targets).backward()
                optimizer.step()
            began = began or time.process_time()
            network.eval()
            n_right = 0
            with torch.inference_mode():
                for begin in range(0, n_kept, EVAL_BATCH_SIZE):
                    inputs, targets = kept[begin : begin + EVAL_BATCH_SIZE]
                    n_right += int((network(inputs).argmax(1) == targets).sum())
            best = max(best, n_right / n_kept)
    return {"best": best, "cpu": time.process_time() - (began or 0.0)}


def profiled(file: str, folder: str, n_trials: int, seed: int) -> dict[str, Any]:
    """Search, and write what each function of the process took, in all of its threads."""
    import cProfile
    import pstats
    import threading

    profiles: list[cProfile.Profile] = []

    def begin(*_: Any) -> None:
        own = cProfile.Profile(time.thread_time)
        profiles.append(own)
        own.enable()

    import torch  # imports are no part of a search

    import dagsel  # noqa: F401

    del torch
    threading.setprofile(begin)
    begin()
    told = search(folder, n_trials, seed)
    threading.setprofile(None)
    profiles[0].disable()
    pstats.Stats(*profiles).dump_stats(file)
    return told


def watched(*options: str) -> tuple[dict[str, Any], list[tuple[float, dict[Any, float]]], int]:
    """Run this file in a process; return what it tells, and its processes' times as they grew."""
    looks: list[tuple[float, dict[Any, float]]] = []
    cpu_s: dict[Any, float] = {}
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen([sys.executable, __file__, *options], stdout=said, stderr=said)
        while child.poll() is None:
            with suppress(psutil.NoSuchProcess):
                own = psutil.Process(child.pid)
                for process in (own, *own.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                        times = process.cpu_times()
                        cpu_s[process.pid, process.create_time()] = times.user + times.system
            looks.append((time.time(), dict(cpu_s)))
            time.sleep(LOOK_S)
        said.seek(0)
        text = said.read().decode()
    if child.returncode:
        raise SystemExit(f"{' '.join(options)} failed:\n{text}")
    return json.loads(text.strip().splitlines()[-1]), looks, child.pid


def run_search(folder: str, n_trials: int, seed: int, n_shards: int = 0) -> dict[str, Any]:
    """Add to what a search tells the processor time after start-up, of all and of the driver."""
    numbers = {"--trials": n_trials, "--seed": seed, "--shards": n_shards}
    options = [text for name, number in numbers.items() for text in (name, str(number))]
    with tempfile.TemporaryDirectory(dir=folder) as own:
        told, looks, pid = watched("--way", "search", "--folder", own, *options)
    at = [moment for moment, _ in looks]
    sums = {
        "cpu": [sum(cpu_s.values()) for _, cpu_s in looks],
        "driver": [sum(s for (p, _), s in cpu_s.items() if p == pid) for _, cpu_s in looks],
    }
    for name, taken in sums.items():
        begin, end = np.interp([told["first"], told["last"]], at, taken)
        told[name] = float(end - begin)
    return told


def run_plain(folder: str, trials: list[Any]) -> dict[str, Any]:
    Path(folder, "trials.json").write_text(json.dumps(trials))
    return watched("--way", "plain", "--folder", folder)[0]


def spread(values: list[float], digits: int, unit: str = "") -> str:
    median, *ends = (
        f"{v:,.{digits}f}" for v in (statistics.median(values), min(values), max(values))
    )
    return f"{median}{unit} ({' to '.join(ends)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=24)
    parser.add_argument("--many", type=int, default=130, help="trials of some 640 units; or 0")
    parser.add_argument("--profile", help="file for what the driver spends")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--shards", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way == "plain":
        print(json.dumps(plain(json.loads(Path(args.folder, "trials.json").read_text()))))
        return 0
    if args.way == "dask":
        print(json.dumps(bare(args.trials)))
        return 0
    if args.way:
        print(json.dumps(search(args.folder, args.trials, args.seed, args.shards)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        if args.profile:
            told = profiled(args.profile, folder, args.many, args.seed)
            print(f"{told['units']} units, {told['last'] - told['first']:.1f} s", file=sys.stderr)
            return 0
        return measure(folder, args.rounds, args.trials, args.many)


def measure(folder: str, n_rounds: int, n_trials: int, n_many: int) -> int:
    rounds: list[tuple[dict[str, Any], ...]] = []
    for number in range(n_rounds):
        ours = run_search(folder, n_trials, number)
        theirs = run_plain(folder, ours["trials"])
        many = run_search(folder, n_many, number) if n_many else ours
        many |= watched("--way", "dask", "--trials", str(many["units"] // 2))[0]
        four = run_search(folder, TRIALS, number, SHARDS)
        rounds.append((ours, theirs, many, four))
        for name, told in (("search", ours), ("loop", theirs), ("many", many), ("four", four)):
            shown = {key: value for key, value in told.items() if key != "trials"}
            print(f"round {number + 1}, {name}: {shown}", file=sys.stderr, flush=True)
    return report(rounds)


def report(rounds: list[Any]) -> int:
    ratios = [told[0]["cpu"] / told[1]["cpu"] for told in rounds]
    few_us, many_us, four_us = (
        [1e6 * told[i]["driver"] / told[i]["units"] for told in rounds] for i in (0, 2, 3)
    )
    is_held = [
        statistics.median(ratios) <= CPU_BAR,
        *(statistics.median(each) <= DRIVER_BAR_US for each in (many_us, four_us)),
    ]
    said = ["held" if held else "**missed**" for held in is_held]
    few, many = (statistics.median(told[i]["units"] for told in rounds) for i in (0, 2))
    bar = f"{DRIVER_BAR_US:.0f} µs at 640"
    driver = (
        (f"driver, a unit of {TRIALS * EPOCHS * SHARDS * 2}, 4 shards", four_us, bar, said[2]),
        (f"driver, a unit of {many:.0f}, 1 shard", many_us, bar, said[1]),
        (f"driver, a unit of {few:.0f}, 1 shard", few_us, "", ""),
    )
    ours_s, theirs_s = ([told[i]["cpu"] for told in rounds] for i in (0, 1))
    print("| what | measured | bar | |\n| --- | --- | --- | --- |")
    print(f"| processor time, dagsel over the loop | {spread(ratios, 2)} | {CPU_BAR} | {said[0]} |")
    print(f"| dagsel, {few:.0f} units | {spread(ours_s, 2, ' s')} | | |")
    print(f"| the loop | {spread(theirs_s, 2, ' s')} | | |")
    for name, each, bar, verdict in driver:
        print(f"| {name} | {spread(each, 0, ' µs')} | {bar} | {verdict} |")
    dask = spread([1e6 * many["dask"] for _, _, many, _ in rounds], 0, " µs")
    print(f"| Dask alone, a task | {dask} | | |")
    busy = [100 * ours["busy"] for ours, *_ in rounds]
    print(f"| share of the workers' time in units | {spread(busy, 0, '%')} | | |")
    best = [statistics.median(told[i]["best"] for told in rounds) for i in (0, 1)]
    print(f"| best accuracy, dagsel and the loop | {best[0]:.4f}, {best[1]:.4f} | | |")
    return 0 if all(is_held) else 3  # a crash ends with 1


if __name__ == "__main__":
    sys.exit(main())
