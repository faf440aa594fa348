"""The search of `peers.py` on one GPU: dagsel beside a plain loop, one trial after the other.

::

    python tests/benchmarks/gpu_race.py --data PATH [--trials 16] [--rounds 3]

PATH is a folder with the IDX files of MNIST; without it there are scikit-learn's digits, each pixel
made 3 × 3. Configurations, epochs and files are those of `peers.py`. There are three ways, each a
process of its own, timed from its start to its exit: dagsel with ``cluster="cuda"`` and its
defaults; a script's loop over a ``DataLoader`` whose batches go to the GPU; and a loop over tensors
that lie on the GPU and are shuffled there. The ways take turns; medians count. There is no bar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.benchmarks import peers
from tests.benchmarks.peers import EPOCHS, VALIDATION, configs, digits, recorded, spread

NAMES = {
    "dagsel": 'dagsel, `cluster="cuda"`',
    "loader": "a plain loop over a `DataLoader`",
    "resident": "a plain loop over tensors on the GPU",
}


def run_dagsel(args: argparse.Namespace) -> dict[str, Any]:
    return peers.run_dagsel(args.folder, args.trials, cluster="cuda")


def run_plain(args: argparse.Namespace) -> dict[str, Any]:
    return {"best": max([*accuracies(config, args)][-1] for config in configs(args.trials))}


def accuracies(config: dict[str, Any], args: argparse.Namespace) -> Iterator[float]:
    """Train one configuration on the GPU; yield the accuracy after each epoch."""
    import torch
    from mnist_cnn import model, optimizer
    from torch.utils.data import DataLoader, TensorDataset, random_split

    size = config["batch_size"]
    x, y = (torch.from_numpy(np.load(f"{args.folder}/{n}.npy")) for n in ("images", "labels"))
    whole = TensorDataset(x, y)
    n_validation = int(len(whole) * VALIDATION)
    torch.manual_seed(0)
    kept: Any
    trained, kept = random_split(whole, [len(whole) - n_validation, n_validation])
    if args.way == "resident":
        x, y = x.cuda(), y.cuda()
        own, other = (torch.tensor(part.indices, device="cuda") for part in (trained, kept))

    def batches(train: bool) -> Iterator[Any]:
        if args.way == "resident":
            rows = own[torch.randperm(len(own), device="cuda")] if train else other
            return ((x[part], y[part]) for part in rows.split(size if train else 512))
        part, n = (trained, size) if train else (kept, 512)
        loader = DataLoader(part, batch_size=n, shuffle=train, pin_memory=True)
        return ((a.cuda(non_blocking=True), b.cuda(non_blocking=True)) for a, b in loader)

    network = model(config).cuda()
    steps = optimizer(network.parameters(), config)
    for _ in range(EPOCHS):
        network.train()
        for inputs, targets in batches(True):
            steps.zero_grad()
            torch.nn.functional.cross_entropy(network(inputs), targets).backward()
            steps.step()
        network.eval()
        with torch.inference_mode():
            right = [(network(a).argmax(1) == b).sum() for a, b in batches(False)]
            yield sum(each.item() for each in right) / n_validation


WAYS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "dagsel": run_dagsel,
    "loader": run_plain,
    "resident": run_plain,
}


def timed(way: str, folder: str) -> dict[str, Any]:
    """Run a way in a process of its own, from its start to its exit."""
    begin = time.time()
    command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--folder", folder]
    child = subprocess.run(command, capture_output=True, text=True)
    end = time.time()
    if child.returncode:
        raise SystemExit(f"{way} failed:\n{child.stdout}{child.stderr}")
    told = json.loads(child.stdout.strip().splitlines()[-1])
    if "place" in told:
        place, called, returned = (told.pop(name) for name in ("place", "called", "returned"))
        told |= recorded(place, called, returned, folder)
        told |= {"first": told["first"] - begin, "last": end - told["last"]}
    return {"wall": end - begin, **told}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description="a search on one GPU, and plain loops")
    parser.add_argument("--data", help="folder with the IDX files")
    parser.add_argument("--trials", type=int, default=16, help="a multiple of 8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(WAYS[args.way](args)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no GPU here: there is nothing to race on")
    from mnist_cnn import arrays, read_mnist

    ways = args.only.split(",")
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:
        for name, array in arrays(*(read_mnist(args.data) if args.data else digits())).items():
            np.save(f"{folder}/{name}.npy", array)
        for number, way in itertools.product(range(args.rounds), ways):
            results[way].append(timed(way, folder))
            print(f"round {number + 1}, {way}: {results[way][-1]}", file=sys.stderr, flush=True)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {args.trials} trials")
    print("| way | wall | dagsel over it | best accuracy |\n| --- | --- | --- | --- |")
    for way, rounds in results.items():
        pairs = zip(results.get("dagsel", []), rounds, strict=False)
        ratios = [own["wall"] / theirs["wall"] for own, theirs in pairs]
        wall, best = spread([each["wall"] for each in rounds], " s"), rounds[-1]["best"]
        print(f"| {NAMES[way]} | {wall} | {spread(ratios) if ratios else ''} | {best:.4f} |")
    for each in results.get("dagsel", [])[-1:]:
        print({name: round(value, 3) for name, value in each.items()})


if __name__ == "__main__":
    main()
