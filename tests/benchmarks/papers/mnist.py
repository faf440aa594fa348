"""What the papers' experiments on real workers share: processes, and small networks on MNIST."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import optuna
import torch
from distributed import LocalCluster
from numpy.typing import NDArray

import dagsel
from dagsel.execution.cluster import close, local_cluster
from dagsel.storage import ShardedDataset
from tests.benchmarks import grids

ROOT = Path(__file__).resolve().parents[3]
#: Where the files of MNIST are looked for.
FOLDER = ROOT.parent / "shared/data"
#: Of the network of examples/mnist_cnn.py, unless a configuration says otherwise.
CHANNELS, WIDTH = 4, 32

Images = tuple[NDArray[np.float32], NDArray[np.int64]]


def add_data(parser: ArgumentParser) -> None:
    """Give a parser the option that says where MNIST is."""
    parser.add_argument("--data", type=Path, default=FOLDER, help="folder of MNIST's files")


def images(folder: Path) -> Images:
    """Give the 10,000 images of MNIST's test file and their labels, shuffled.

    Where there is no such file, those of scikit-learn's digits, each pixel made 3 × 3.
    """
    if (folder / "mnist-10k-images-idx3-ubyte.gz").exists():
        return grids.images(folder)
    from tests.benchmarks.peers import digits

    x, y = digits()
    order = np.random.default_rng(0).permutation(len(x))
    scaled = (x[order, None].astype(np.float32) / 255 - 0.1307) / 0.3081
    return scaled.astype(np.float32), y[order].astype(np.int64)


def write(url: str, of: Images, *, n_shards: int, n_images: int, n_held_out: int) -> ShardedDataset:
    """Write images as a data set: the first ones to be trained on, the next ones held out."""
    x, y = of
    n_images = min(n_images, len(x) - n_held_out)
    kept = slice(n_images, n_images + n_held_out)
    held_out = {"x": x[kept], "y": y[kept]}
    arrays = {"x": x[:n_images], "y": y[:n_images]}
    return ShardedDataset.write(url, arrays, n_shards=n_shards, validation=held_out)


def model(config: Mapping[str, Any]) -> torch.nn.Module:
    """Make the network of examples/mnist_cnn.py."""
    sys.path.insert(0, str(ROOT / "examples"))
    from mnist_cnn import model as cnn

    made: torch.nn.Module = cnn({"channels": CHANNELS, "width": WIDTH, **config})
    return made


def sgd(parameters: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Make SGD with the learning rate, momentum and weight decay of a configuration."""
    return torch.optim.SGD(
        parameters,
        lr=config["lr"],
        momentum=config["momentum"],
        weight_decay=config["weight_decay"],
    )


def workload(batch_size: int, lr_scheduler: Any = None) -> dagsel.TorchWorkload:
    """Return what trains the network."""
    return dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=sgd,
        batch_size=batch_size,
        lr_scheduler=lr_scheduler,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )


def space_of(grid: grids.Grid) -> Callable[[optuna.Trial], dict[str, Any]]:
    """Return a space that suggests the points of a grid."""
    return lambda trial: {
        name: trial.suggest_categorical(name, list(values)) for name, values in grid.items()
    }


@contextmanager
def cluster_of(n_workers: int) -> Iterator[LocalCluster]:
    """Give a cluster of worker processes on this machine; each trains in one thread."""
    cluster = local_cluster(n_workers)
    try:
        yield cluster
    finally:
        close(cluster)  # a `with` fails if a process takes long to end


# Workers of another folder have no module of this name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
