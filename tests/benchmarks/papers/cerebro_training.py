"""Cerebro's learning curves (Figure 7B) at our scale, in real training: its page in docs/measured.

    python tests/benchmarks/papers/cerebro_training.py [--out FOLDER] [--seeds 3]

CNNs that hop over the shards on two worker processes, and the same ones trained by plain PyTorch:
in the same order, with the whole data shuffled, and by averaging models. The page says what is
assumed. ``--quick`` is a test of the script. It takes 4 minutes.
"""

from __future__ import annotations

import copy
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import optuna
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from tests.benchmarks import grids
from tests.benchmarks.papers import cerebro_cluster as cluster
from tests.benchmarks.papers import mnist, pages
from tests.fused import fused

NAMES = pages.SCRIPTS["cerebro"]["cerebro_training"]
N_SHARDS, N_WORKERS = 8, 2
WAYS = {
    "hopping": "hopping over 8 shards, dagsel",
    "same order": "the same order, plain PyTorch",
    "shuffled": "the whole data shuffled, plain PyTorch",
    "averaged": "8 models averaged after each epoch",
}
Tensors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Curve:
    """What training has come to: the accuracy after each epoch, and a checksum of the weights."""

    accuracy: tuple[float, ...]
    digest: str


@dataclass(frozen=True, slots=True)
class Job:
    """A configuration that is trained in some way."""

    way: str
    url: str  # of the data
    config: Mapping[str, Any]
    seed: int
    trial: int
    orders: tuple[tuple[int, ...], ...]  # in which the shards are visited, by epoch


def digest_of(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.numpy().tobytes())
    return found.hexdigest()


# ---- plain PyTorch


def read(url: str) -> tuple[list[Tensors], Tensors]:
    """Read the shards of a data set, and all held-out samples."""
    data = ShardedDataset.open(url)

    def tensors(shard: Mapping[str, Any]) -> Tensors:
        return torch.from_numpy(shard["x"]), torch.from_numpy(shard["y"])

    shards = [tensors(data.shard(index)) for index in range(data.n_shards)]
    held_out = [tensors(data.validation_shard(index)) for index in range(data.n_shards)]
    x, y = (torch.cat(parts) for parts in zip(*held_out, strict=True))
    return shards, (x, y)


def step_all(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, of: Tensors, order: NDArray[np.int64]
) -> None:
    """Take a step on each batch of the samples, in an order."""
    x, y = of
    for batch in torch.from_numpy(order).split(cluster.BATCH):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()


def in_same_order(job: Job, shards: Sequence[Tensors]) -> Iterator[torch.nn.Module]:
    """Visit the shards in the recorded order; yield the model after each epoch."""
    model, optimizer = begun(job)
    for epoch, shards_visited in enumerate(job.orders, start=1):
        for index in shards_visited:
            rng = np.random.default_rng([job.seed, job.trial, epoch, index])
            step_all(model, optimizer, shards[index], rng.permutation(len(shards[index][1])))
        yield model


def shuffled(job: Job, shards: Sequence[Tensors]) -> Iterator[torch.nn.Module]:
    """Draw a new order of all samples in each epoch."""
    model, optimizer = begun(job)
    x, y = (torch.cat(parts) for parts in zip(*shards, strict=True))
    rng = np.random.default_rng([job.seed, job.trial])
    for _ in job.orders:
        step_all(model, optimizer, (x, y), rng.permutation(len(y)))
        yield model


def averaged(job: Job, shards: Sequence[Tensors]) -> Iterator[torch.nn.Module]:
    """Train a copy on each shard for an epoch; go on with the mean of their weights."""
    model, _ = begun(job)
    for epoch, _ in enumerate(job.orders, start=1):
        copies = [copy.deepcopy(model) for _ in shards]
        for index, (one, shard) in enumerate(zip(copies, shards, strict=True)):
            rng = np.random.default_rng([job.seed, job.trial, epoch, index])
            optimizer = fused(mnist.sgd(one.parameters(), job.config))
            step_all(one, optimizer, shard, rng.permutation(len(shard[1])))
        states = [one.state_dict() for one in copies]
        model.load_state_dict(
            {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
        )
        yield model


def begun(job: Job) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Begin a trial with the weights that it has in dagsel."""
    torch.manual_seed(int(np.random.SeedSequence([job.seed, job.trial]).generate_state(1)[0]))
    model = mnist.model(job.config)
    return model, fused(mnist.sgd(model.parameters(), job.config))


PLAIN: Mapping[str, Callable[[Job, Sequence[Tensors]], Iterator[torch.nn.Module]]] = {
    "same order": in_same_order, "shuffled": shuffled, "averaged": averaged,
}  # fmt: skip


def train(job: Job) -> Curve:
    """Train in a way of plain PyTorch's, in one thread."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        shards, (x, y) = read(job.url)
        accuracy = []
        for model in PLAIN[job.way](job, shards):
            with torch.inference_mode():
                accuracy.append(float((model(x).argmax(1) == y).float().mean()))
        return Curve(tuple(accuracy), digest_of(model))
    finally:
        torch.set_num_threads(n_threads)


# ---- dagsel


def hopped(
    data: ShardedDataset, folder: str, size: cluster.Size, seed: int
) -> tuple[list[Curve], list[Job]]:
    """Train all configurations on two workers; return curves, and jobs that train the same."""
    workload, weights = mnist.workload(cluster.BATCH), dict[int, str]()

    def keep(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        states = RunDir(f"{folder}/run").states
        blob, _ = states.load(trial.number, size.n_epochs, data.n_shards - 1)
        weights[trial.number] = digest_of(workload.restore(State(blob), {}))

    with cluster.client_of(N_WORKERS) as client:
        run = cluster.search(client, data, workload, folder, size, seed=seed, callbacks=[keep])
    scores = run.metrics.query("split == 'validation' and name == 'accuracy'")
    curves, jobs = list[Curve](), list[Job]()
    for number, trial in sorted(run.record.trials.items()):
        accuracy = scores[scores.trial == number].sort_values("epoch").value
        curves.append(Curve(tuple(accuracy), weights[number]))
        visits = run.record.visits()
        orders = tuple(visits[number, epoch] for epoch in range(1, size.n_epochs + 1))
        jobs.append(Job("same order", data.url, trial.config, seed, number, orders))
    return curves, jobs


def compare(
    images: mnist.Images, size: cluster.Size, seeds: int, n_processes: int
) -> tuple[dict[str, list[list[Curve]]], list[Mapping[str, Any]]]:
    """Train in all ways; return the curves of each by seed and configuration, and the latter."""
    found: dict[str, list[list[Curve]]] = {way: [] for way in WAYS}
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            data = cluster.write_images(folder, images, N_SHARDS, size)
            curves, same = hopped(data, folder, size, seed)
            order = sorted(range(len(same)), key=lambda n: [*same[n].config.values()])
            same = [same[n] for n in order]
            found["hopping"].append([curves[n] for n in order])
            print(f"seed {seed}: hopped", file=sys.stderr, flush=True)
            jobs = [_other(job, way) for way, job in product(PLAIN, same)]
            made = _all(jobs, n_processes)
            for way in PLAIN:
                pairs = zip(jobs, made, strict=True)
                found[way].append([curve for job, curve in pairs if job.way == way])
            print(f"seed {seed}: trained by plain PyTorch", file=sys.stderr, flush=True)
    return found, [job.config for job in same]


def _other(job: Job, way: str) -> Job:
    return Job(way, job.url, job.config, job.seed, job.trial, job.orders)


def _all(jobs: Sequence[Job], n_processes: int) -> list[Curve]:
    if n_processes == 1:
        return [*map(train, jobs)]
    with ProcessPoolExecutor(n_processes, mp_context=get_context("spawn")) as pool:
        return [*pool.map(train, jobs)]


# ---- the page


def n_equal(found: Mapping[str, Sequence[Sequence[Curve]]]) -> tuple[int, int]:
    """Return how many trials have the bits and accuracies of plain PyTorch, and of how many."""
    pairs = [
        (ours, theirs)
        for both in zip(found["hopping"], found["same order"], strict=True)
        for ours, theirs in zip(*both, strict=True)
    ]
    is_equal = [
        ours.digest == theirs.digest and np.allclose(ours.accuracy, theirs.accuracy, atol=1e-6)
        for ours, theirs in pairs
    ]
    return sum(is_equal), len(pairs)


def curves_part(
    folder: Path, images: mnist.Images, size: cluster.Size, seeds: int, n_processes: int = 2
) -> str:
    found, configs = compare(images, size, seeds, n_processes)
    accuracy = {
        way: 100 * np.array([[curve.accuracy for curve in row] for row in rows])
        for way, rows in found.items()
    }
    best = int(accuracy["shuffled"][:, :, -1].mean(0).argmax())
    rows = [
        [WAYS[way], *(f"{at:.2f}" for at in values[:, best].mean(0)),
         pages.interval(values[:, best, -1]), pages.interval(values[:, :, -1].mean(1))]
        for way, values in accuracy.items()
    ]  # fmt: skip
    epochs = range(1, size.n_epochs + 1)
    figure, axis = plt.subplots(figsize=(4.8, 2.8))
    for (way, values), line in zip(accuracy.items(), ("-", "--", "-.", ":"), strict=True):
        axis.plot(epochs, values[:, best].mean(0), line, marker="o", label=way)
    axis.set(xlabel="epoch", ylabel="held-out accuracy (%)")
    axis.legend(fontsize=7)
    alt = "Learning curves of the best configuration: hopping, plain PyTorch, model averaging"
    shown = pages.picture(figure, folder / "cerebro-real-curves.svg", alt)
    plt.close(figure)
    told = ", ".join(f"{name} {value:g}" for name, value in configs[best].items())
    equal, n = n_equal(found)
    pairs = accuracy["hopping"][:, :, -1] - accuracy["shuffled"][:, :, -1]
    head = ["accuracy (%), after epoch", *map(str, epochs), "at the end", "mean of all"]
    return (
        f"### Figure 7B at our scale: learning curves of {grids_told(size)}\n\n"
        f"**{equal} of {n} trials that hopped have the weights of plain PyTorch in the same order, "
        "bit for bit**, and the same accuracies. The configuration that is best when the whole "
        f"data is shuffled ({told}), means of {seeds} seeds; its last accuracy, and that of all "
        f"{len(configs)} configurations, ± 95% interval over the seeds.\n\n"
        f"{pages.table(head, rows)}\n\n"
        "How far hopping is ahead of the shuffled whole at the end, in points, mean of the "
        f"configurations: {pages.interval(pairs.mean(1))}.\n\n{shown}"
    )


def grids_told(size: cluster.Size) -> str:
    return f"{len(grids.points(size.grid))} CNNs, {size.n_epochs} epochs"


def main() -> None:
    parser = pages.parser_of(__doc__ or "", NAMES)
    mnist.add_data(parser)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    size = cluster.QUICK if args.quick else cluster.Size()
    seeds, images = 1 if args.quick else args.seeds, mnist.images(args.data)
    makers: dict[str, pages.Part] = {
        NAMES[0]: lambda folder: curves_part(folder, images, size, seeds)
    }
    options = " --quick" * args.quick
    pages.write("cerebro", makers, args.out, args.only, script="cerebro_training", options=options)


if __name__ == "__main__":
    main()
