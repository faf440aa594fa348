"""Training with large activations in a script, in a Dask task and in dagsel: seconds an epoch.

    python tests/benchmarks/large_tensors.py [--rounds 3]

How fast a process trains is also a matter of the C library's allocator: what it gives back after
a batch is faulted in again, page by page, for the next. What is assumed:

- Data: 512 random images of 3 × 64 × 64 (float32), 10 classes; PyTorch, seed 0.
- Model: convolutions of 3 to 32 and 32 to 32 channels (3 × 3, same size), a batch normalization
  between them, pooling by 2 and by 4, a linear layer; Adam as it comes. The first activation takes
  half a megabyte an image: 16, 64 and 128 MB in batches of 32, 128 and 256.
- One process that trains, with one thread, four epochs; the median of the last three counts. Each
  way is a process of its own, and the ways take turns.
- ``script``: a loop over slices of the tensors in the main thread, and nothing else.
- ``Client.submit``: the same loop in a task of a ``LocalCluster`` of one worker with one thread.
- ``dagsel``: ``dagsel.optimize`` with one trial on one worker, and its defaults. What its record
  says of the training units counts: the pass over the shards, and to store the state. It permutes
  the samples in each epoch, which the loops do not.

It ends with 3 if dagsel is slower than another way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

BATCH_SIZES, EPOCHS, N_IMAGES = (32, 128, 256), 4, 512
NAMES = {"script": "script", "submit": "`Client.submit`", "dagsel": "dagsel"}
BAR = 1.0


def arrays() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.randn(N_IMAGES, 3, 64, 64), torch.randint(0, 10, (N_IMAGES,))


def model(config: dict[str, Any]) -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(2048, 10),
    )


def loop(batch_size: int) -> list[float]:
    """Train as a script does; return the seconds of each epoch."""
    import torch

    torch.set_num_threads(1)
    x, y = arrays()
    network = model({})
    optimizer = torch.optim.Adam(network.parameters())
    took = []
    for _ in range(EPOCHS):
        began = time.perf_counter()
        for at in range(0, N_IMAGES, batch_size):
            batch = slice(at, at + batch_size)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(network(x[batch]), y[batch]).backward()
            optimizer.step()
        took.append(time.perf_counter() - began)
    return took


def in_task(batch_size: int) -> list[float]:
    from distributed import Client, LocalCluster

    with (
        LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        return client.submit(loop, batch_size).result()


def in_search(batch_size: int) -> list[float]:
    import optuna
    import torch

    import dagsel
    from dagsel.flows import RandomSearch
    from dagsel.storage import ShardedDataset

    names = dict(zip("xy", (array.numpy() for array in arrays()), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        data = ShardedDataset.write(f"{folder}/data", names, n_shards=1, validation=names)
        run = dagsel.optimize(
            optuna.create_study(),
            dagsel.TorchWorkload(
                model, torch.nn.functional.cross_entropy, torch.optim.Adam, batch_size=batch_size
            ),
            data,
            space=lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e-3)},
            metric="loss",
            flow=RandomSearch(max_epochs=EPOCHS, n_trials=1),
            max_cluster_workers=1,
            run_dir=f"{folder}/run",
        )
        units = run.timeline()
    trained = units[units.kind == "train"].sort_values("epoch")
    return (trained.stop - trained.start).tolist()


WAYS = {"script": loop, "submit": in_task, "dagsel": in_search}


def measured(way: str, batch_size: int) -> float:
    """Run a way in a process of its own; return its seconds an epoch."""
    done = subprocess.run(
        [sys.executable, __file__, "--way", way, "--batch-size", str(batch_size)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr}")
    seconds = statistics.median(json.loads(done.stdout.splitlines()[-1])[1:])
    print(f"{way}, batches of {batch_size}: {seconds:.2f} s", file=sys.stderr, flush=True)
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--batch-size", type=int, default=32, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(WAYS[args.way](args.batch_size)))
        return 0
    others, is_held = [way for way in WAYS if way != "dagsel"], True
    heads = [*(f"{NAMES[way]}, an epoch" for way in WAYS), *(f"over {NAMES[o]}" for o in others)]
    print(f"| batches of | {' | '.join(heads)} | bar | |")
    print("| --- " * (len(heads) + 3) + "|")
    for size in BATCH_SIZES:
        rounds = [{way: measured(way, size) for way in WAYS} for _ in range(args.rounds)]
        cells = [f"{statistics.median(told[way] for told in rounds):.2f} s" for way in WAYS]
        ratios = [[told["dagsel"] / told[other] for told in rounds] for other in others]
        cells += [
            f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios
        ]
        held = all(statistics.median(each) <= BAR for each in ratios)
        is_held = is_held and held
        print(f"| {size} | {' | '.join(cells)} | {BAR} | {'held' if held else '**missed**'} |")
    return 0 if is_held else 3  # a crash ends with 1


if __name__ == "__main__":
    sys.exit(main())
