"""Grids of configurations whose learning curves were recorded: what is in them, and their files."""

from __future__ import annotations

import gzip
import itertools
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import SearchError

HERE = Path(__file__).parent
Grid: TypeAlias = Mapping[str, Sequence[Any]]
#: Table 1 of Dunlap et al. 2021.
SEER: Grid = {
    "lr": (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0),
    "weight_decay": (0.0001, 0.0005, 0.001, 0.005),
    "momentum": (0.9, 0.95, 0.99, 0.997),
}
#: Table 1 of Son et al. 2021.
HERMES: Grid = {
    "optimizer": ("sgd", "momentum", "rmsprop", "adam"),
    "batch": (16, 24, 32, 50),
    "lr": (1e-3, 5e-4, 1e-4, 1e-5),
    "weight_decay": (0.1, 0.01, 0.001),
}


def points(grid: Grid) -> list[dict[str, Any]]:
    """Give a grid's configurations in their order, the last hyper-parameter fastest."""
    return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]


# ---- what was recorded


def read(path: Path, grid: Grid, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
    """Read arrays of a recording of a grid.

    Raises
    ------
    SearchError
        If the file is damaged, or of another experiment.
    """
    try:
        with path.open("rb") as file, np.load(file) as kept:
            arrays = {key: kept[key] for key in kept.files}
    except FileNotFoundError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise SearchError(f"{path} is damaged: {error}; record it again") from None
    missing = sorted({*grid, *shapes} - arrays.keys())
    if missing:
        raise SearchError(f"{path} is of another experiment: it has no {', '.join(missing)}")
    wanted = points(grid)
    for key in grid:
        if arrays[key].tolist() != [point[key] for point in wanted]:
            raise SearchError(
                f"{path} is of another experiment: its {key} is not that of the {len(wanted)} "
                f"points of {' × '.join(grid)}"
            )
    for key, shape in shapes.items():
        found = arrays[key]
        if found.shape != shape:
            raise SearchError(
                f"{path} is of another experiment: its {key} has the shape {found.shape}, "
                f"not {shape}"
            )
    return arrays


# ---- recording


def one_thread() -> None:
    """Have PyTorch compute in one thread, and the same each time."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)


def images(folder: Path) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Give MNIST images, shape ``(n, 1, 28, 28)``, and labels, shuffled.

    The file's second half is harder than its first.
    """
    x = _read_idx(folder / "mnist-10k-images-idx3-ubyte.gz").astype(np.float32) / 255
    y = _read_idx(folder / "mnist-10k-labels-idx1-ubyte.gz").astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    return ((x[order, None] - 0.1307) / 0.3081).astype(np.float32), y[order]


def _read_idx(path: Path) -> NDArray[np.uint8]:
    with gzip.open(path) as file:
        raw = file.read()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def record_all(
    out: Path,
    grid: Grid,
    kind: np.dtype[Any],
    record: Callable[[int, dict[str, Any]], NDArray[Any]],
    show: Callable[[Any], str],
    keep: Callable[[NDArray[Any]], dict[str, Any]],
) -> None:
    """Record a grid's points, one after the other; a call that was killed is gone on with.

    Parameters
    ----------
    out
        File that is written when all are recorded; until then there is one with the suffix
        ``.part`` beside it.
    grid
        Its columns are in the file, too.
    kind
        What is recorded of a point.
    record
        Records one: by its number and its configuration.
    show
        Says in a few words what was recorded.
    keep
        Returns the arrays of the file.
    """
    part = out.with_suffix(".part")
    done = part.stat().st_size // kind.itemsize if part.exists() else 0
    with part.open("ab") as file:
        file.truncate(done * kind.itemsize)  # what was written when it was killed
        for number, config in list(enumerate(points(grid)))[done:]:
            trace = record(number, config)
            file.write(trace.tobytes())
            file.flush()
            print(f"{out.stem} {number}: {config} {show(trace)}", flush=True)
    columns: dict[str, Any] = {
        key: np.array([point[key] for point in points(grid)]) for key in grid
    }
    np.savez_compressed(out, **keep(np.fromfile(part, kind)), **columns)
    part.unlink()
