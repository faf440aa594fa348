"""Reads the recorded curves that SEER is compared on, and names a file that is not in order."""

from __future__ import annotations

import itertools
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import SearchError
from dagsel.planning.scaling import Scaling
from dagsel.simulation import Traces

HERE = Path(__file__).parent
N_EPOCHS, N_BATCHES = 210, 31
Space = Mapping[str, Sequence[Any]]
#: Table 1 of Dunlap et al. 2021.
TABLE_1: Space = {
    "lr": (1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0),
    "weight_decay": (0.0001, 0.0005, 0.001, 0.005),
    "momentum": (0.9, 0.95, 0.99, 0.997),
}
#: Table 1 of Son et al. 2021.
HERMES: Space = {
    "optimizer": ("sgd", "momentum", "rmsprop", "adam"),
    "batch": (16, 24, 32, 50),
    "lr": (1e-3, 5e-4, 1e-4, 1e-5),
    "weight_decay": (0.1, 0.01, 0.001),
}


@dataclass(frozen=True, eq=False)
class GridTraces(Traces):
    """Traces of a grid whose trials all speed up alike."""

    scaling: Scaling = field(kw_only=True)

    def speedup(self, config: Mapping[str, Any], gang: int) -> float:
        """Return λ."""
        return self.scaling.speedup(gang)


def read(path: Path, grid: Space, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[Any]]:
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
    points = list(itertools.product(*grid.values()))
    for place, key in enumerate(grid):
        wanted = [point[place] for point in points]
        if arrays[key].tolist() != wanted:
            raise SearchError(
                f"{path} is of another experiment: its {key} is not that of the {len(points)} "
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


def curves(name: str, epoch_s: float, scaling: Scaling, path: Path | None = None) -> GridTraces:
    """Return curves of 210 epochs: of ``"table 1"``, or of Hermes' ``"cnn"`` or ``"mlp"``."""
    grid = TABLE_1 if name == "table 1" else HERMES
    n = int(np.prod([len(values) for values in grid.values()]))
    if name == "table 1":
        path = path or HERE / "mlp.npz"
        shapes: dict[str, tuple[int, ...]] = {"n_right": (n, N_EPOCHS + 1), "n_held_out": ()}
        arrays = read(path, grid, shapes)
        accuracy = arrays["n_right"] / float(arrays["n_held_out"])
    else:
        path = path or HERE.parent / "hermes_traces" / f"{name}.npz"
        recorded = read(path, grid, {"test_accuracy": (n, 21)})["test_accuracy"]
        at = np.linspace(0.0, 20.0, N_EPOCHS + 1)
        accuracy = np.stack([np.interp(at, range(21), row) for row in recorded])
    if not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise SearchError(f"{path} is damaged: an accuracy is not between 0 and 1; record it again")
    return GridTraces(
        [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())],
        np.broadcast_to(0.0, (n, N_EPOCHS * N_BATCHES)),  # a search of these asks for no losses
        accuracy[:, 1:],
        np.full(n, epoch_s / N_BATCHES),
        initial=accuracy[:, 0],
        scaling=scaling,
    )
