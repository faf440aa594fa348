"""`dagsel shard`, `inspect` and `verify` do what `ShardedDataset` does, for whatever files there
are; what is wrong ends them with 1 and a line that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from dagsel.cli import main
from dagsel.storage import ShardedDataset


def call(*words: object, code: int = 0) -> Result:
    done = CliRunner().invoke(main, [*map(str, words)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


def asked(*words: object, code: int = 0) -> Any:
    return json.loads(call(*words, "--json", code=code).stdout)


@pytest.fixture
def table() -> pd.DataFrame:
    n = 60
    kinds = np.array(["ant", "bee", "cat"])[np.arange(n) % 3]
    return pd.DataFrame({"a": np.arange(n) / 7, "b": np.arange(n) ** 2 / 9, "kind": kinds})


def test_arrays_of_numpy(tmp_path: Path) -> None:
    x, y = np.arange(200, dtype="float32").reshape(100, 2), np.arange(100)
    np.savez(tmp_path / "arrays.npz", x=x, y=y)
    told = asked("shard", tmp_path / "arrays.npz", tmp_path / "out", "--n-shards", 4, "--seed", 3)
    written = ShardedDataset.write(tmp_path / "twin", {"x": x, "y": y}, n_shards=4, seed=3)
    ours = ShardedDataset.open(tmp_path / "out")
    for k in range(4):
        assert {name: part.tolist() for name, part in ours.shard(k).items()} == {
            name: part.tolist() for name, part in written.shard(k).items()
        }
    assert (told["n_shards"], told["n_train"], told["n_validation"]) == (4, 80, 20)
    assert told["arrays"] == {
        "x": {"dtype": "float32", "shape": "[2]"},
        "y": {"dtype": "int64", "shape": "[]"},
    }
    assert asked("inspect", tmp_path / "out") == told
    assert (
        call("inspect", tmp_path / "out").stdout
        == repr(written).strip("<>").replace("twin", "out") + "\n"
    )


def test_the_number_of_shards_may_be_left_out(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", x=np.zeros((2000, 5000), np.uint16))
    assert asked("shard", tmp_path / "arrays.npz", tmp_path / "out")["n_shards"] == 2
    told = call("shard", tmp_path / "arrays.npz", tmp_path / "none", "--n-shards", 0, code=1)
    assert "n_shards must be a whole number of 1 or more, got 0" in told.stderr


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables(tmp_path: Path, table: pd.DataFrame, kind: str) -> None:
    path = tmp_path / f"table.{kind}"
    table.to_csv(path, index=False) if kind == "csv" else table.to_parquet(path)
    choose = ("--column", "x=a,b", "--column", "y=kind", "--stratify", "kind")
    told = asked("shard", path, tmp_path / "out", "--n-shards", 2, "--validation", 0.25, *choose)
    assert told["classes"] == {"y": ["ant", "bee", "cat"]}
    assert told["arrays"]["x"] == {"dtype": "float32", "shape": "[2]"}
    validation = np.concatenate(
        [ShardedDataset.open(tmp_path / "out").validation_shard(k)["y"] for k in range(2)]
    )
    assert np.bincount(validation).tolist() == [5, 5, 5]


def test_images_in_folders_and_those_that_are_damaged(tmp_path: Path) -> None:
    for kind in ("cat", "dog"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for k in range(5):
            pixels = np.full((4, 4, 3), 10 * k, "uint8")
            Image.fromarray(pixels).save(tmp_path / "images" / kind / f"{k}.png")
    (tmp_path / "images" / "cat" / "broken.png").write_bytes(b"no image")
    words = ("shard", tmp_path / "images", tmp_path / "out", "--n-shards", 2)
    assert "broken.png" in asked(*words, code=1)["text"]
    told = asked(*words, "--skip-damaged")
    assert told["n_train"] + told["n_validation"] == 10
    assert told["classes"]["y"] == ["cat", "dog"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_several_files(tmp_path: Path, table: pd.DataFrame, kind: str) -> None:
    parts = [tmp_path / f"part-{k}.{kind}" for k in range(3)]
    for k, part in enumerate(parts):
        some = table.iloc[20 * k : 20 * k + 20]
        some.to_csv(part, index=False) if kind == "csv" else some.to_parquet(part)
    told = asked("shard", *parts, tmp_path / "out", "--n-shards", 2)
    assert told["n_train"] + told["n_validation"] == len(table)
    assert told["classes"] == {"kind": ["ant", "bee", "cat"]}


def test_several_files_that_are_no_one_table_are_refused(
    tmp_path: Path, table: pd.DataFrame
) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    table.to_csv(a, index=False)
    table.drop(columns="b").to_csv(b, index=False)
    told = asked("shard", a, b, tmp_path / "out", "--n-shards", 2, code=1)
    assert "has the column 'b'; give all files the same columns" in told["text"]
    told = asked("shard", a, tmp_path / "b.npz", tmp_path / "out", "--n-shards", 2, code=1)
    assert "is one of 2 sources that are not read together" in told["text"]
    assert not (tmp_path / "out").exists()


def test_values(tmp_path: Path) -> None:
    ShardedDataset.write(tmp_path / "out", {"y": np.arange(50) % 5}, n_shards=2)
    (row,) = asked("inspect", tmp_path / "out", "--values")["values"]
    assert (row["array"], row["min"], row["max"], row["classes"]) == ("y", 0, 4, 5)
    assert "classes" in call("inspect", tmp_path / "out", "--values").stdout


def test_damage_is_found(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "out", {"y": np.arange(1000)}, n_shards=2)
    assert "all 2 shards are whole" in call("verify", tmp_path / "out").stdout
    assert asked("verify", tmp_path / "out")["digest"] == data.digest
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    largest.write_bytes(damaged)
    told = asked("verify", tmp_path / "out", code=1)
    assert told["error"] == "ShardCorruptError"
    assert 'in "y"' in told["text"] or "'y'" in told["text"]
    done = call("verify", tmp_path / "out", code=1)
    assert done.stdout == ""
    assert done.stderr.startswith("ShardCorruptError: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("inspect", "nothing-here"), 1, "DatasetNotFoundError"),
        (("shard", "nothing.npz", "out", "--n-shards", "2"), 1, "nothing.npz cannot be read"),
        (("shard", "nothing.csv", "out", "--n-shards", "2"), 1, "nothing.csv cannot be read"),
        (("shard", "nothing", "out", "--n-shards", "2"), 1, "DatasetInputError"),
        (("shard", "out"), 2, "Missing argument"),
        (("shard", "a.npz", "out", "--n-shards", "two"), 2, "is not a valid integer"),
        (("shard", "nothing.npz", "out", "--n-shards", "2", "--column", "x"), 2, "ARRAY=COLUMN"),
        (("shared",), 2, "No such command"),
    ],
)
def test_wrong_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in call(*words, code=code).stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "npy"])
def test_a_damaged_archive_is_named(tmp_path: Path, save: Any, damage: str) -> None:
    file = tmp_path / "damaged.npz"
    save(file, x=np.arange(1000.0) ** 2, y=np.arange(1000))
    data = bytearray(file.read_bytes())
    data[2000:2100] = bytes(100)
    with file.open("wb") as one:
        np.save(one, np.arange(3))
    if damage != "npy":
        contents = {"cut": bytes(data[:3000]), "changed": bytes(data), "empty": b""}
        file.write_bytes(contents[damage])
    told = asked("shard", file, tmp_path / "out", "--n-shards", 1, code=1)
    assert told["error"] == "DatasetInputError"
    assert f"{file} is no whole .npz file (" in told["text"]


def test_an_archive_of_objects_is_refused(tmp_path: Path) -> None:
    """It could hold a pickle, which runs code."""
    np.savez(tmp_path / "objects.npz", x=np.array([{}, {}], dtype=object))
    told = asked("shard", tmp_path / "objects.npz", tmp_path / "out", "--n-shards", 1, code=1)
    assert "cannot be read" in told["text"]
