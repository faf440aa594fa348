"""The recorded curves that SEER is compared on: one value an epoch, for 210 epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dagsel.errors import SearchError
from dagsel.planning.scaling import Scaling
from dagsel.simulation import Traces
from tests.benchmarks import grids

HERE = Path(__file__).parent
N_EPOCHS, N_BATCHES = 210, 31


@dataclass(frozen=True, eq=False)
class GridTraces(Traces):
    """Traces of a grid whose trials all speed up alike."""

    scaling: Scaling = field(kw_only=True)

    def speedup(self, config: Mapping[str, Any], gang: int) -> float:
        """Return λ."""
        return self.scaling.speedup(gang)


def curves(name: str, epoch_s: float, scaling: Scaling, path: Path | None = None) -> GridTraces:
    """Return curves of 210 epochs: of ``"table 1"``, or of Hermes' ``"cnn"`` or ``"mlp"``."""
    grid = grids.SEER if name == "table 1" else grids.HERMES
    n = len(grids.points(grid))
    if name == "table 1":
        path = path or HERE / "mlp.npz"
        shapes: dict[str, tuple[int, ...]] = {"n_right": (n, N_EPOCHS + 1), "n_held_out": ()}
        arrays = grids.read(path, grid, shapes)
        accuracy = arrays["n_right"] / float(arrays["n_held_out"])
    else:
        path = path or HERE.parent / "hermes_traces" / f"{name}.npz"
        recorded = grids.read(path, grid, {"test_accuracy": (n, 21)})["test_accuracy"]
        at = np.linspace(0.0, 20.0, N_EPOCHS + 1)
        accuracy = np.stack([np.interp(at, range(21), row) for row in recorded])
    if not ((accuracy >= 0) & (accuracy <= 1)).all():
        raise SearchError(f"{path} is damaged: an accuracy is not between 0 and 1; record it again")
    return GridTraces(
        grids.points(grid),
        np.broadcast_to(0.0, (n, N_EPOCHS * N_BATCHES)),  # a search of these asks for no losses
        accuracy[:, 1:],
        np.full(n, epoch_s / N_BATCHES),
        initial=accuracy[:, 0],
        scaling=scaling,
    )
