"""Data sets that are written again: what their numbers stand for, and who validates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dagsel.errors import DatasetInputError
from dagsel.storage import ShardedDataset

N = 60


def written(where: Path, arrays: Any, **options: Any) -> ShardedDataset:
    return ShardedDataset.write(where, arrays, **{"n_shards": 2, **options})


def kinds(names: list[str], n: int = N) -> dict[str, Any]:
    """Texts, and beside each the place of its first letter."""
    y = np.resize(names, n)
    return {"x": np.array([ord(name[0]) for name in y]), "y": y}


def names_of(data: ShardedDataset, split: str) -> list[tuple[int, str]]:
    read = data.shard if split == "train" else data.validation_shard
    shards = map(read, range(data.n_shards))
    pairs = (pair for s in shards for pair in zip(s["x"].tolist(), s["y"].tolist(), strict=True))
    return sorted((x, data.classes["y"][y]) for x, y in pairs)


def test_classes_of_two_data_sets_get_the_numbers_of_the_first(tmp_path: Path) -> None:
    to_train = written(tmp_path / "a", kinds(["cat", "dog", "owl"]))
    to_validate = written(tmp_path / "b", kinds(["cat", "owl"]))
    data = written(tmp_path / "c", to_train, validation=to_validate)
    assert data.classes == {"y": ("cat", "dog", "owl")}
    assert set(names_of(data, "train")) == {(99, "cat"), (100, "dog"), (111, "owl")}
    assert set(names_of(data, "validation")) == {(99, "cat"), (111, "owl")}
    table = written(tmp_path / "d", pd.DataFrame(kinds(["owl"])), validation=written(
        tmp_path / "e", kinds(["owl"])))  # fmt: skip
    assert set(names_of(table, "validation")) == {(111, "owl")}


def test_two_data_sets_that_do_not_match_are_refused(tmp_path: Path) -> None:
    animals = written(tmp_path / "a", kinds(["cat", "dog"]))
    with pytest.raises(DatasetInputError, match="validation: 'y' has the class 'owl' in row"):
        written(tmp_path / "no", animals, validation=written(tmp_path / "b", kinds(["cat", "owl"])))
    numbers = {"x": np.arange(N), "y": np.arange(N) % 3}
    with pytest.raises(DatasetInputError, match="'y' is text, and something else in the training"):
        written(tmp_path / "no", numbers, validation=animals)
    frame = pd.DataFrame({"a": np.arange(60.0), "b": -np.arange(60.0)})
    one = written(tmp_path / "ab", frame, columns={"x": ["a", "b"]})
    other = written(tmp_path / "ba", frame, columns={"x": ["b", "a"]})
    with pytest.raises(DatasetInputError, match="column 0 of 'x' is 'b' in the validation data, "):
        written(tmp_path / "no", one, validation=other)
    assert not (tmp_path / "no").exists()


def test_numbers_beside_classes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    numbers = written(tmp_path / "a", {"x": np.arange(N), "y": np.arange(N) % 2})
    animals = written(tmp_path / "c", kinds(["cat", "dog"]))
    of_arrays = {"x": np.arange(N), "y": np.arange(N) % 2}
    for place, validation in (("b", numbers), ("d", of_arrays)):
        caplog.clear()
        written(tmp_path / place, animals, validation=validation)
        assert "validation: 'y' is numbers, and text in the training data" in caplog.text
        assert "make sure that 0 stands for 'cat'" in caplog.text


IDS = np.arange(600)
ARRAYS = {"x": IDS, "patient": IDS // 10, "y": IDS % 2}
DIVIDED: dict[str, dict[str, Any]] = {
    "a share": {"validation": 0.3},
    "groups": {"groups": "patient"},
    "words": {"split": ["train"] * 500 + ["validation"] * 100},
    "classes": {"stratify": "y"},
    "data": {"validation": {**ARRAYS, "x": IDS + 1000}},
}


def ids(data: ShardedDataset) -> tuple[list[int], list[int]]:
    """The samples of each part, and that rows stayed together."""
    parts = []
    for read in (data.shard, data.validation_shard):
        shards = [read(index) for index in range(data.n_shards)]
        assert all((shard["patient"] % 100 == shard["x"] % 1000 // 10).all() for shard in shards)
        parts.append(sorted(int(x) for shard in shards for x in shard["x"]))
    return parts[0], parts[1]


@pytest.mark.parametrize("how", DIVIDED)
def test_a_data_set_that_is_written_again_keeps_its_parts(how: str, tmp_path: Path) -> None:
    data = written(tmp_path / "a", ARRAYS, **DIVIDED[how])
    again = written(tmp_path / "b", data, n_shards=8, seed=3)
    assert again.n_shards == 8
    assert ids(again) == ids(data)


def test_samples_of_unequal_length_keep_their_parts(tmp_path: Path) -> None:
    texts = {"x": [list(range(at % 5)) for at in range(N)], "y": ["no", "yes"] * 30}
    data = written(tmp_path / "a", texts, stratify="y")
    again = written(tmp_path / "b", data, n_shards=3)
    assert again.classes == data.classes

    def samples(of: ShardedDataset, split: str) -> list[Any]:
        read = of.shard if split == "train" else of.validation_shard
        rows = [row for k in range(of.n_shards) for row in zip(*read(k).values(), strict=True)]
        return sorted((x.tolist(), int(y)) for x, y in rows)

    for split in ("train", "validation"):
        assert samples(again, split) == samples(data, split)


@pytest.mark.parametrize("said", [{"validation": 0.2}, {"stratify": "y"}, {"groups": "patient"}])
def test_a_data_set_is_divided_anew_if_the_call_says_how(
    said: dict[str, Any], tmp_path: Path
) -> None:
    data = written(tmp_path / "a", ARRAYS, validation=0.5)
    again = written(tmp_path / "b", data, **said)
    assert (again.n_train, again.n_validation) == (480, 120)
