"""The MNIST search of 16 CNNs × 5 epochs on 2 workers, three ways, as ratios of one run.

(a) dagsel; (b) plain PyTorch processes, each trial reading the whole set by its own ``DataLoader``
(sample by sample, with what torchvision's transforms would do); (c) the same whole-trial function
as ``Client.submit`` tasks on a ``LocalCluster``. Every way starts in a process of its own and is
timed from its start to its exit: interpreter, imports, worker processes and reading included. The
ways take turns; medians count.

    python tests/benchmarks/vs_plain_torch.py --data PATH [--repeats 5] [--only a,b]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

N_WORKERS = 2
N_SHARDS = 2  # one a worker: the workers are equal, and fewer units cost less
EPOCHS = 5
BARS = {"b": 0.9, "c": 0.45}
NAMES = {"a": "dagsel", "b": "plain PyTorch processes", "c": "Client.submit of whole trials"}
GRID: dict[str, list[Any]] = {
    "channels": [2, 4],
    "width": [32, 64],
    "batch_size": [256, 512],
    "lr": [5e-3, 1e-2],
}
CONFIGS = [dict(zip(GRID, values, strict=True)) for values in itertools.product(*GRID.values())]


def way_a(folder: str, data: str) -> dict[str, Any]:
    import optuna
    from mnist_cnn import workload

    import dagsel
    from dagsel.execution.cluster import local_cluster
    from dagsel.flows import Grid

    def space(trial: optuna.Trial) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, values) for name, values in GRID.items()}

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with local_cluster(N_WORKERS) as cluster:
        run = dagsel.optimize(
            optuna.create_study(study_name="mnist", direction="maximize"),
            workload(),
            folder + "/mnist.zarr",
            space=space,
            metric="accuracy",
            flow=Grid(max_epochs=EPOCHS),
            cluster=cluster,
            run_dir=tempfile.mkdtemp(dir=folder) + "/run",
        )
    timeline = run.timeline()
    held = timeline[timeline.kind == "train"].groupby("worker").shard.nunique() / N_SHARDS
    return {
        "best": run.best_value,
        "share of the data on each worker": held.round(2).tolist(),
        "hops": int(timeline.hop.sum()),
        "train seconds": float((timeline.stop - timeline.start).sum()),
    }


def train_trial(config: dict[str, Any], data: str) -> float:
    """Train one configuration as a script would: the whole set by a DataLoader of its own."""
    import numpy as np
    import torch
    from mnist_cnn import model, optimizer, read_mnist
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset, random_split

    class Mnist(Dataset[Any]):
        """What torchvision's MNIST does with ToTensor and Normalize, without torchvision."""

        def __init__(self) -> None:
            self.images, self.labels = read_mnist(data)

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            image = torch.from_numpy(np.array(Image.fromarray(self.images[index])))
            scaled = image.view(28, 28, 1).permute(2, 0, 1).contiguous().float().div(255)
            return scaled.sub_(0.1307).div_(0.3081), int(self.labels[index])

    torch.set_num_threads(1)
    whole = Mnist()
    n_validation = len(whole) // 5
    torch.manual_seed(0)
    train, validation = random_split(whole, [len(whole) - n_validation, n_validation])
    network = model(config)
    steps = optimizer(network.parameters(), config)
    accuracy = 0.0
    for _ in range(EPOCHS):
        network.train()
        for x, y in DataLoader(train, batch_size=config["batch_size"], shuffle=True):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(network(x), y).backward()
            steps.step()
        network.eval()
        with torch.inference_mode():
            hits = sum(
                (network(x).argmax(1) == y).sum().item()
                for x, y in DataLoader(validation, batch_size=512)
            )
        accuracy = hits / n_validation
    return accuracy


def way_b(folder: str, data: str) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(N_WORKERS) as pool:
        scores = pool.starmap(train_trial, [(config, data) for config in CONFIGS], chunksize=1)
    return {"best": max(scores)}


def way_c(folder: str, data: str) -> dict[str, Any]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(
            n_workers=N_WORKERS,
            threads_per_worker=1,
            dashboard_address="127.0.0.1:0",
            host="127.0.0.1",
        ) as cluster,
        Client(cluster) as client,
    ):
        futures = [client.submit(train_trial, config, data) for config in CONFIGS]
        return {"best": max(client.gather(futures))}


def watch(arguments: list[str]) -> dict[str, Any]:
    """Run a way in a process of its own; give its seconds and its processes' peak memory."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, __file__, *arguments], stdout=subprocess.PIPE)
    peaks: dict[int, int] = {}
    while child.poll() is None:
        try:
            family = [
                psutil.Process(child.pid),
                *psutil.Process(child.pid).children(recursive=True),
            ]
            for process in family:
                peaks[process.pid] = max(peaks.get(process.pid, 0), process.memory_info().rss)
        except psutil.NoSuchProcess:
            pass
        time.sleep(0.1)
    seconds = time.perf_counter() - start
    assert child.stdout is not None
    lines = child.stdout.read().decode().strip().splitlines()
    if child.returncode:
        raise SystemExit(f"{arguments} failed")
    largest = sorted(peaks.values(), reverse=True)[: N_WORKERS + 1]
    return {
        "seconds": seconds,
        "peak MB of the largest processes": [round(p / 1e6) for p in largest],
        **json.loads(lines[-1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="a,b,c")
    parser.add_argument("--way")
    parser.add_argument("--folder")
    args = parser.parse_args()
    if args.way:
        print(json.dumps(globals()[f"way_{args.way}"](args.folder, args.data)))
        return
    from mnist_cnn import arrays, read_mnist

    from dagsel.storage import ShardedDataset

    ways = args.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        prepared = arrays(*read_mnist(args.data))
        ShardedDataset.write(folder + "/mnist.zarr", prepared, n_shards=N_SHARDS)
        results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for turn in range(args.repeats):
            for way in ways:
                result = watch(["--way", way, "--folder", folder, "--data", args.data])
                results[way].append(result)
                print(f"turn {turn + 1}, {NAMES[way]}: {result}", flush=True)
    medians = {w: statistics.median(r["seconds"] for r in rs) for w, rs in results.items()}
    failed = False
    for way, median in medians.items():
        print(f"({way}) {NAMES[way]}: median {median:.2f} s")
    for way, bar in BARS.items():
        if way in medians and "a" in medians:
            ratio = medians["a"] / medians[way]
            failed |= ratio > bar
            print(f"a / {way} = {ratio:.3f}, bar {bar}: {'ok' if ratio <= bar else 'MISSED'}")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
