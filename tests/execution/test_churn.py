"""Workers are killed, added and drained while a search runs: nothing is lost, nothing doubled.

``make churn`` runs 20 seeds, with the oldest and the newest supported Dask.
"""

from __future__ import annotations

import os
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

from dagsel.execution import slices
from dagsel.storage import ShardedDataset

from . import churn

cloudpickle.register_pickle_by_value(churn)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("CHURN_SEEDS", "3"))))
def test_churn(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # the second epoch is sent as the first one is trained
        monkeypatch.setattr(slices, "_LEAST", 1)
        monkeypatch.setattr(slices, "_MOST", 1)
    arrays = {"x": np.zeros((240, 4), np.float32)}
    data = ShardedDataset.write(str(tmp_path / "data.zarr"), arrays, n_shards=churn.N_SHARDS)
    outcome = churn.churn(str(tmp_path), data, seed)
    assert churn.broken_laws(outcome) == []
    assert outcome.n_kills > 0
