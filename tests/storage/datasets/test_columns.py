"""A data set of a table knows which columns its arrays are made of, and in which order."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest

from dagsel.errors import DatasetFormatError
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.files import Folder

N = 24
FRAME = pd.DataFrame(
    {"age": np.arange(N), "height": np.arange(N) / 10, "ill": np.arange(N) % 2, "id": np.arange(N)}
)
PARTS: dict[str, Any] = {"x": ["height", "age"], "ill": "ill"}


def parquet(folder: Path) -> Path:
    FRAME.to_parquet(folder / "table.parquet")
    return folder / "table.parquet"


TABLES: dict[str, Callable[[Path], Any]] = {
    "pandas": lambda folder: FRAME,
    "polars": lambda folder: polars.from_pandas(FRAME),
    "arrow": lambda folder: pyarrow.Table.from_pandas(FRAME),
    "parquet": parquet,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_an_array_of_several_columns_has_their_names(
    table: Callable[[Path], Any], tmp_path: Path
) -> None:
    data = ShardedDataset.write(tmp_path / "a", table(tmp_path), columns=PARTS, n_shards=2)
    assert data.columns == {"x": ("height", "age")}
    opened = ShardedDataset.open(data.url)
    assert opened == data
    assert json.loads((tmp_path / "a" / "dagsel.json").read_text())["version"] == 4
    again = ShardedDataset.write(tmp_path / "b", opened, columns={"z": "x"}, n_shards=1)
    assert again.columns == {"z": ("height", "age")}


def test_a_pair_has_their_names(tmp_path: Path) -> None:
    pair = ArrayPair.read(FRAME[["height", "age"]], FRAME["ill"])
    assert pair.write(Folder(tmp_path / "pair")).columns == {"x": ("height", "age")}
    unnamed = ArrayPair.read(pd.DataFrame(np.zeros((N, 3))), FRAME["ill"])
    assert unnamed.write(Folder(tmp_path / "unnamed")).columns == {}  # numbers are no names


@pytest.mark.parametrize(
    "arrays",
    [
        {"x": np.zeros((N, 3)), "y": FRAME["ill"]},
        FRAME,
    ],
)
def test_what_has_no_names_is_as_before(arrays: Any, tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a", arrays, n_shards=2)
    assert data.columns == {}
    told = json.loads((tmp_path / "a" / "dagsel.json").read_text())
    assert told["version"] == 2
    assert "columns" not in told


def test_validation_samples_are_taken_by_name(tmp_path: Path) -> None:
    turned = FRAME[["ill", "height", "id", "age"]]
    how: dict[str, Any] = {"columns": PARTS, "validation": turned, "n_shards": 1}
    data = ShardedDataset.write(tmp_path / "a", FRAME, **how)
    parts = (data.validation_shard(0)["x"], data.shard(0)["x"])
    first, second = (part[part[:, 1].argsort()] for part in parts)
    assert (first == second).all()
    assert data.columns == {"x": ("height", "age")}


@pytest.mark.parametrize("columns", [{"x": ["age"]}, {"x": ["age", 1]}, {"z": ["a", "b"]}])
def test_columns_that_do_not_fit_are_refused(columns: Any, tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a", FRAME, columns=PARTS, n_shards=2)
    told = json.loads(data.manifest.to_json())
    del told["crc32c"]
    changed = json.dumps({**told, "columns": columns}).encode()
    with pytest.raises(DatasetFormatError, match="damaged"):
        type(data.manifest).from_json(changed, "here")
