"""Tables, Parquet files, samples and images become data sets, and are read back whole."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import dask.array
import fsspec
import numpy as np
import pandas as pd
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dagsel.errors import DatasetError, DatasetInputError
from dagsel.storage import Batches, ImageFolder, ShardedDataset
from dagsel.storage.datasets.inputs import read as reads

polars = pytest.importorskip("polars")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

N = 60
KINDS = ["ant", "bee", "cat"]


def table(n: int = N) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "age": np.arange(n),
            "height": rng.normal(size=n),
            "kind": [KINDS[at % 3] for at in range(n)],
        }
    )


def everything(data: ShardedDataset) -> dict[str, np.ndarray[Any, Any]]:
    """All samples, in the order of the first array."""
    shards = [read(k) for read in (data.shard, data.validation_shard) for k in range(data.n_shards)]
    whole = {name: np.concatenate([shard[name] for shard in shards]) for name in data.schema}
    first = next(iter(whole.values())).reshape(len(data), -1)[:, 0]
    return {name: array[np.argsort(first, kind="stable")] for name, array in whole.items()}


def as_pandas(frame: pd.DataFrame, folder: Path) -> Any:
    return frame


def as_categories(frame: pd.DataFrame, folder: Path) -> Any:
    return frame.astype({"kind": "category"})


def as_polars(frame: pd.DataFrame, folder: Path) -> Any:
    return polars.DataFrame({name: frame[name].to_list() for name in frame})


def as_arrow(frame: pd.DataFrame, folder: Path) -> Any:
    return arrow.Table.from_pandas(frame)


def as_file(frame: pd.DataFrame, folder: Path) -> Any:
    parquet.write_table(arrow.Table.from_pandas(frame), folder / "t.parquet", row_group_size=7)
    return folder / "t.parquet"


def as_files(frame: pd.DataFrame, folder: Path) -> Any:
    (folder / "parts").mkdir()
    for number in range(4):
        part = arrow.Table.from_pandas(frame.iloc[15 * number : 15 * (number + 1)])
        parquet.write_table(part, folder / "parts" / f"part-{number}.parquet", row_group_size=4)
    return str(folder / "parts")


def as_dictionary(frame: pd.DataFrame, folder: Path) -> Any:
    return as_file(frame.astype({"kind": "category"}), folder)


TABLES = [as_pandas, as_categories, as_polars, as_arrow, as_file, as_files, as_dictionary]


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_a_table_is_read_back_row_by_row(make: Any, tmp_path: Path) -> None:
    frame = table()
    columns = {"x": ["age", "height"], "y": "kind"}
    source = make(frame, tmp_path)
    data = ShardedDataset.write(tmp_path / "data", source, n_shards=3, columns=columns)
    assert data.classes == {"y": tuple(KINDS)}
    found = everything(data)
    assert found["x"].dtype == np.float32
    assert np.array_equal(found["x"], frame[["age", "height"]].to_numpy(np.float32))
    assert [KINDS[number] for number in found["y"]] == list(frame["kind"])
    assert ShardedDataset.open(data.url) == data
    assert ShardedDataset.open(data.url).classes == data.classes


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_without_columns_each_column_is_an_array(make: Any, tmp_path: Path) -> None:
    frame = table()
    data = ShardedDataset.write(tmp_path / "data", make(frame, tmp_path), n_shards=2)
    found = everything(data)
    assert list(found) == ["age", "height", "kind"]
    assert np.array_equal(found["age"], frame["age"])
    assert np.array_equal(found["height"], frame["height"])
    data = ShardedDataset.write(
        tmp_path / "some", frame, n_shards=2, columns=["kind", "age"], seed=3
    )
    assert list(data.schema) == ["kind", "age"]


@pytest.mark.parametrize("make", TABLES, ids=lambda make: make.__name__)
def test_validation_data_of_their_own_have_the_classes_of_the_training_data(
    make: Any, tmp_path: Path
) -> None:
    other = table(12).assign(kind="cat")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    data = ShardedDataset.write(
        tmp_path / "data",
        make(table(), tmp_path / "a"),
        n_shards=2,
        validation=as_pandas(other, tmp_path / "b"),
    )
    assert set(np.concatenate([data.validation_shard(k)["kind"] for k in (0, 1)])) == {2}
    with pytest.raises(DatasetInputError, match="validation: 'kind' has the class 'dog' in row 4"):
        ShardedDataset.write(
            tmp_path / "wrong",
            table(),
            n_shards=2,
            validation=other.assign(kind=["cat"] * 4 + ["dog"] * 8),
        )
    assert not (tmp_path / "wrong").exists()


class Pairs(torch.utils.data.Dataset[Any]):
    def __init__(self, n: int = N) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, at: int) -> Any:
        return torch.full((2, 3), float(at)), at % 3


class Records(Pairs):
    def __getitem__(self, at: int) -> Any:
        return {"image": np.full((2, 3), at, np.uint8), "label": KINDS[at % 3], "id": at}


def test_samples_one_by_one_are_read_back(tmp_path: Path) -> None:
    found = everything(ShardedDataset.write(tmp_path / "pairs", Pairs(), n_shards=2))
    assert found["x"].shape == (N, 2, 3)
    assert found["y"].tolist() == [at % 3 for at in range(N)]
    assert [int(x[0, 0]) for x in found["x"]] == list(range(N))
    data = ShardedDataset.write(
        tmp_path / "records", Records(), n_shards=2, columns={"x": "image", "y": "label"}
    )
    found = everything(data)
    assert [KINDS[number] for number in found["y"]] == [KINDS[at % 3] for at in range(N)]
    assert list(data.schema) == ["x", "y"]
    single = ShardedDataset.write(tmp_path / "single", list(range(N)), n_shards=2)
    assert everything(single)["x"].tolist() == list(range(N))
    triples = [(at, [at, at], 0.5) for at in range(N)]  # a list of numbers is one array
    data = ShardedDataset.write(tmp_path / "triples", triples, n_shards=2)
    assert {name: spec.shape for name, spec in data.schema.items()} == {
        "x0": (),
        "x1": (2,),
        "x2": (),
    }
    samples = [(np.float32(at), KINDS[at % 3]) for at in range(N)]
    data = ShardedDataset.write(tmp_path / "list", samples, n_shards=2)
    assert everything(data)["y"].tolist() == [at % 3 for at in range(N)]


def test_a_data_set_of_hugging_face_has_samples(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    images = [Image.fromarray(np.full((4, 5, 3), at, np.uint8)) for at in range(N)]
    kinds = [KINDS[at % 3] for at in range(N)]
    numbers = [at % 3 for at in range(N)]
    theirs = datasets.Dataset.from_dict(
        {"image": images, "kind": kinds, "v": [[at, 0.5] for at in range(N)], "label": numbers},
        features=datasets.Features(
            {
                "image": datasets.Image(),
                "kind": datasets.Value("string"),
                "v": datasets.Sequence(datasets.Value("float32"), length=2),
                "label": datasets.ClassLabel(names=KINDS),
            }
        ),
    )
    data = ShardedDataset.write(tmp_path / "data", theirs, n_shards=2)
    assert {name: spec.shape for name, spec in data.schema.items()} == {
        "image": (4, 5, 3),
        "kind": (),
        "v": (2,),
        "label": (),
    }
    assert data.classes == {"kind": tuple(KINDS), "label": tuple(KINDS)}
    found = everything(data)
    assert found["label"].tolist() == found["kind"].tolist() == numbers
    assert [int(image[0, 0, 0]) for image in found["image"]] == list(range(N))
    stream = theirs.to_iterable_dataset()
    data = ShardedDataset.write(tmp_path / "stream", stream, n_shards=2)
    assert data.classes == {"kind": tuple(KINDS), "label": tuple(KINDS)}
    streamed = everything(data)
    assert all(np.array_equal(streamed[name], found[name]) for name in found)


@given(st.integers(8, 600), st.integers(1, 4))
@settings(max_examples=8, deadline=None)
def test_blocks_of_samples_join_without_a_gap(n: int, n_shards: int) -> None:
    data = ShardedDataset.write("memory://pairs.zarr", Pairs(n), n_shards=2, overwrite=True)
    assert [int(x[0, 0]) for x in everything(data)["x"]] == list(range(n))


def images(folder: Path, size: tuple[int, int] = (6, 4)) -> Path:
    for at in range(N):
        place = folder / KINDS[at % 3] / "sub"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((size[1], size[0], 3), at, np.uint8)).save(place / f"{at:03}.png")
    return folder


def test_images_in_folders_are_decoded_once(tmp_path: Path) -> None:
    root = images(tmp_path / "images")
    for source in (root, str(root), ImageFolder(root)):
        data = ShardedDataset.write(tmp_path / "data", source, n_shards=2, overwrite=True)
        found = everything(data)
        assert (found["x"].dtype, found["x"].shape) == (np.uint8, (N, 4, 6, 3))
        assert data.classes == {"y": tuple(KINDS)}
        assert found["y"].tolist() == [at % 3 for at in range(N)]
    grey = ImageFolder(root, size=(3, 2), mode="L")
    data = ShardedDataset.write(tmp_path / "grey", grey, n_shards=2)
    assert data.schema["x"].shape == (2, 3)


def test_images_of_more_than_8_bits_are_not_clipped(tmp_path: Path) -> None:
    values = np.arange(N * 24, dtype=np.uint16).reshape(N, 4, 6) * 40
    for at in range(N):
        place = tmp_path / "xray" / KINDS[at % 3]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values[at]).save(place / f"{at:02}.png")
    grey, colour, deep = (ImageFolder(tmp_path / "xray", mode=mode) for mode in ("L", "RGB", "F"))
    for source in (grey, colour):
        with pytest.raises(DatasetInputError, match=r"00.png .* 0 to 920, .*give mode=\"F\""):
            ShardedDataset.write(tmp_path / "a", source, n_shards=1)
    data = ShardedDataset.write(tmp_path / "a", deep, n_shards=1)
    assert data.schema["x"].dtype == "<f4"
    assert np.array_equal(np.sort(everything(data)["x"].ravel()), values.ravel())


def test_values_of_16_bits_that_8_hold_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "masks" / "a").mkdir(parents=True)
    for at in range(4):
        image = Image.fromarray(np.full((2, 2), 60 * at, np.uint16))
        image.save(tmp_path / "masks" / "a" / f"{at}.png")
    data = ShardedDataset.write(
        tmp_path / "a", ImageFolder(tmp_path / "masks", mode="L"), n_shards=1
    )
    assert everything(data)["x"][:, 0, 0].tolist() == [0, 60, 120, 180]


def test_files_beside_images_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = images(tmp_path / "images")
    ShardedDataset.write(tmp_path / "a", root, n_shards=2)
    assert not caplog.records
    one = root / "ant" / "sub" / "000.png"
    for copy in (".ipynb_checkpoints/0.png", "ant/.hidden/0.png", "bee/.1.png", "ant/.notes"):
        (root / copy).parent.mkdir(exist_ok=True)
        (root / copy).write_bytes(one.read_bytes())
    assert len(ShardedDataset.write(tmp_path / "b", root, n_shards=2)) == N
    assert not caplog.records
    (root / "dog").mkdir()
    for name in ("ant/a.heic", "bee/b.HEIC", "cat/labels.csv"):
        (root / name).write_bytes(b"?")
    Image.open(one).save(root / "cat" / "0.jfif", "JPEG")
    data = ShardedDataset.write(tmp_path / "c", root, n_shards=2)
    assert (len(data), data.classes) == (N + 1, {"y": tuple(KINDS)})
    first, second = (record.getMessage() for record in caplog.records)
    assert first.endswith(
        "files that are no images by their suffixes are left out: 2 .heic, 1 .csv"
    )
    assert second.endswith("folders without images become no classes: 'dog'")


def test_a_data_set_is_divided_anew(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "data", table(), n_shards=3)
    again = ShardedDataset.write(tmp_path / "again", data, n_shards=5, validation=0.5, seed=1)
    assert (again.n_shards, again.n_validation) == (5, 30)
    assert again.classes == data.classes
    found, wanted = everything(again), everything(data)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    some = ShardedDataset.write(tmp_path / "some", data, n_shards=2, columns={"y": "kind"})
    assert some.classes == {"y": tuple(KINDS)}


def test_what_was_written_can_be_looked_at(tmp_path: Path) -> None:
    frame = table().assign(height=[float("nan"), *range(1, N)])
    data = ShardedDataset.write(tmp_path / "data", frame, n_shards=3)
    samples = list(data)
    assert len(samples) == len(data) == N
    assert sorted(int(sample["age"]) for sample in samples) == list(range(N))
    for at in (0, 7, 16, 47, 48, 59, -1, -60):
        assert {k: v.item() for k, v in data[at].items() if k != "height"} == {
            k: v.item() for k, v in samples[at].items() if k != "height"
        }
    for wrong in (60, -61):
        with pytest.raises(IndexError):
            data[wrong]
    with pytest.raises(TypeError, match="whole number, got 'x'"):
        data["x"]  # type: ignore[index]
    assert {name: len(array) for name, array in data.head(3).items()} == dict.fromkeys(frame, 3)
    told = data.describe().set_index("array")
    trained = np.concatenate([data.shard(k)["age"] for k in range(3)])
    row = told.loc["age"]
    assert (row["min"], row["max"], row["classes"]) == (trained.min(), trained.max(), 48)
    assert row["mean"] == pytest.approx(trained.mean())
    assert row["std"] == pytest.approx(trained.std())
    heights = np.concatenate([data.shard(k)["height"] for k in range(3)])
    assert told.loc["height"]["missing"] == np.isnan(heights).sum()
    assert told.loc["kind"]["classes"] == 3
    tensors = data.to_torch()
    assert len(tensors) == 48
    loaded: Any = tensors  # what PyTorch asks of a data set, without being a class of PyTorch's
    (batch,) = torch.utils.data.DataLoader(loaded, batch_size=48)
    assert batch[0].tolist() == trained.tolist()
    assert len(batch) == 3
    assert len(data.to_torch("validation")) == 12
    with pytest.raises(DatasetInputError, match="split must be one of 'train', 'validation'"):
        data.to_torch("test")  # type: ignore[arg-type]


def test_lists_become_arrays(tmp_path: Path) -> None:
    data = ShardedDataset.write(
        tmp_path / "data", {"x": [[1.0, 2.0]] * N, "y": list(range(N))}, n_shards=2
    )
    assert data.schema["x"].shape == (2,)
    tensors = {"x": torch.arange(N).reshape(N, 1), "y": torch.arange(N)}
    data = ShardedDataset.write(tmp_path / "tensors", tensors, n_shards=2)
    assert everything(data)["y"].tolist() == list(range(N))
    rows = [[at, at + 0.5] for at in range(N)]  # two numbers are no pair of input and target
    data = ShardedDataset.write(tmp_path / "rows", rows, n_shards=2)
    assert {name: spec.shape for name, spec in data.schema.items()} == {"x": (2,)}


RAW = [np.array([at, at + 1], "<i4").tobytes() for at in range(N)]
BYTES: dict[str, Any] = {
    "a file": lambda p: as_file(pd.DataFrame({"raw": RAW}), p),
    "a table": lambda p: pd.DataFrame({"raw": RAW}),
    "a list": lambda p: {"raw": RAW},
    "lists": lambda p: {"raw": [[b"a", value] for value in RAW]},
    "a stream": lambda p: ({"raw": value} for value in RAW),
}


@pytest.mark.parametrize("how", BYTES)
def test_bytes_that_end_in_zeros_are_refused(how: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetInputError, match="row 0 of .*raw.* is bytes that end in a zero"):
        ShardedDataset.write(tmp_path / "data", BYTES[how](tmp_path), n_shards=2)
    numbers = {"raw": [np.frombuffer(value, "uint8") for value in RAW]}
    data = ShardedDataset.write(tmp_path / "data", numbers, n_shards=2)
    assert sorted(bytes(sample["raw"]) for sample in data) == sorted(RAW)


def test_what_has_many_values_has_no_classes(tmp_path: Path) -> None:
    arrays = {"n": np.arange(3000), "t": np.array([["a", "b"]] * 3000)}
    data = ShardedDataset.write(tmp_path / "data", arrays, n_shards=2)
    told = data.describe().set_index("array")
    assert told["classes"].isna().tolist() == [True, False]
    assert told.loc["t"]["classes"] == 2
    assert np.isnan(told.loc["t"]["mean"])


def test_the_spread_is_told_of_numbers_far_from_zero_and_is_none_with_an_infinite_one(
    tmp_path: Path,
) -> None:
    x = np.random.default_rng(0).normal(size=1000)
    arrays = {"time": 1.7e9 + x, "id": 10**12 + np.arange(1000), "wide": x * 1e6}
    arrays |= {"infinite": np.where(np.arange(1000) < 900, x, np.inf)}
    data = ShardedDataset.write(tmp_path / "data", arrays, n_shards=3)
    told = data.describe().set_index("array")
    for name in ("time", "id", "wide"):
        trained = np.concatenate([data.shard(k)[name] for k in range(3)])
        assert told.loc[name]["std"] == pytest.approx(trained.std())
    assert told.loc["infinite"]["mean"] == np.inf
    assert np.isnan(told.loc["infinite"]["std"])


class Broken(Pairs):
    def __getitem__(self, at: int) -> Any:
        return (np.zeros((3, 1) if at == 5 else 2), at)


class Objects(Pairs):
    def __getitem__(self, at: int) -> Any:
        return {"x": object()}


def wrong_image(folder: Path) -> Path:
    root = images(folder / "images")
    (root / "bee" / "zz.png").write_bytes(b"no image")
    return root


def other_size(folder: Path) -> Path:
    root = images(folder / "images")
    Image.fromarray(np.zeros((9, 8, 3), np.uint8)).save(root / "bee" / "zz.png")
    return root


def other_schema(folder: Path) -> Path:
    as_files(table(), folder)
    part = arrow.Table.from_pandas(table().assign(age=0.5))
    parquet.write_table(part, folder / "parts" / "part-9.parquet")
    return folder / "parts"


def written_files(folder: Path, frames: list[pd.DataFrame], names: Any = None) -> Path:
    for at, frame in enumerate(frames):
        path = folder / "files" / (names[at] if names else f"{at}.parquet")
        path.parent.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(path)
    return folder / "files"


def torn(folder: Path) -> Path:
    as_file(table(), folder)
    path = folder / "t.parquet"
    path.write_bytes(path.read_bytes()[:100])
    return path


def text_file(folder: Path) -> Path:
    (folder / "t.csv").write_text("a,b")
    return folder / "t.csv"


THIRDS: list[Any] = [Fraction(n, 3) for n in range(N)]
DATES = pd.Series(pd.date_range("2024-02-01", periods=60))
GAPS_IN_NUMBERS = pd.Series(np.where(np.arange(N) == 3, np.nan, np.arange(N)))
GAPS = pd.Series(["ant", None] * 30)
WRONG: dict[str, tuple[Any, Any, str]] = {
    "no such column": (
        lambda p: table(), {"x": "weight"}, "there is no column 'weight', but 'age', 'height', 'k"),
    "no such column of a file": (
        lambda p: as_file(table(), p), ["weight"], "t.parquet: there is no column 'weight'"),
    "a column's name alone": (lambda p: table(), "kind", "columns= is 'kind'; write {"),
    "text among features": (
        lambda p: table(), {"x": ["age", "kind"]}, "column 'kind' is text; give it an array of it"),
    "a class is missing": (
        lambda p: table().assign(kind=GAPS), None, "row 1 of 'kind' is (nan|None)"),
    "a class is missing in a file": (
        lambda p: as_file(table().assign(kind=GAPS), p), None,
        "t.parquet, rows from 0 on: row 1 of 'kind' is (nan|None)"),
    "mixed types": (
        lambda p: table().assign(age=pd.Series([1, [2]] * 30, dtype=object)), None,
        "column 'age' mixes int in row 0 with list in row 1"),
    "unequal lengths": (
        lambda p: table().assign(age=pd.Series([[1]] * 30 + [[[1, 2]]] * 30)), None,
        "column 'age' is neither an array nor a ragged one: sample 30 is int64 with 2 axes"),
    "unequal lists": (
        lambda p: {"x": [[1]] * 30 + [["a", "b"]] * 30}, None,
        "x is neither an array nor a ragged one: sample 30 is <U1 with 1 axes, and sample 0 int64"),
    "unequal samples": (
        lambda p: Broken(), None, r"'x' of sample 5 is float64\[3, 1\], and of sample 0 float64"),
    "samples of objects": (lambda p: Objects(), None, "'x' of sample 0 is .*; make it numbers"),
    "a sample that is nothing": (lambda p: [(1, 2), *[None] * 9], None, "arrays: sample 1 is None"),
    "parts of samples together": (lambda p: Pairs(), {"z": ["x", "y"]}, "one part of a sample"),
    "arrays together": (
        lambda p: table().assign(age=pd.Series([[1, 2]] * N)), {"x": ["height", "age"]},
        "column 'age' holds arrays; make it one of its own"),
    "dates among numbers": (
        lambda p: table().assign(age=DATES), {"x": ["height", "age"]},
        r"'age' holds dates, and .*frame\['age'\] = \(frame\['age'\] - .*min\(\)\).dt.days, or le"),
    "dates of a zone among numbers": (
        lambda p: table().assign(age=DATES.dt.tz_localize("UTC")), {"x": ["height", "age"]},
        r"'age' holds values of type Timestamp, .*\.dt\.days"),
    "durations among numbers": (
        lambda p: table().assign(age=DATES - DATES[0]), {"x": ["height", "age"]},
        r"'age' holds durations, .*frame\['age'\].dt.total_seconds\(\)"),
    "other objects among numbers": (
        lambda p: table().assign(age=pd.Series(THIRDS, dtype=object)), {"x": ["height", "age"]},
        "'age' holds values of type Fraction, .*: make them numbers, or leave it out"),
    "columns of arrays": (
        lambda p: {"a": np.zeros(N)}, {"x": ["a"]}, "and arrays has arrays by name"),
    "lists of other things": (
        lambda p: table().assign(age=pd.Series([{1}, {2}] * 30, dtype=object)), None, "'age'"),
    "a label that is missing": (
        lambda p: table().assign(age=GAPS_IN_NUMBERS), {"y": "age"},
        "arrays, column 'age': row 3 of 'y' has no value; fill it in, leave the row out"),
    "a label that is missing in a file": (
        lambda p: as_file(table().assign(age=GAPS_IN_NUMBERS), p), {"y": "age"},
        "t.parquet, rows from 0 on, column 'age': row 3 of 'y' has no value"),
    "a label that is missing in an array": (
        lambda p: {"x": np.zeros(N), "y": GAPS_IN_NUMBERS.to_numpy()}, None, "row 3 of 'y' has no"),
    "a label that is missing in a stream": (
        lambda p: iter([(np.zeros(2), at if at != 3 else np.nan) for at in np.arange(60.0)]), None,
        "batch 0: row 3 of 'y' has no value"),
    "arrays of unequal length": (
        lambda p: {"x": np.zeros(N), "y": np.zeros(N - 1)}, None,
        "differ in length: 'x' has 60, 'y' has 59 samples"),
    "batches of unequal length": (
        lambda p: Batches([{"x": np.zeros(N), "y": np.zeros(N - 1)}]), None,
        "the arrays of batch 0 differ in length"),
    "an array of mixed types": (
        lambda p: {"x": np.array([1, "a", None] * 20, dtype=object)}, None, "row 2 of x has no"),
    "another dtype in a later batch": (
        lambda p: Batches([{"x": np.zeros(N)}, {"x": np.zeros(N, "f4")}]), None,
        "array 'x', batch 1: samples are <f4.*, but the array began or was declared as <f8"),
    "text and numbers in a later file": (
        lambda p: as_file(table().assign(kind=pd.Series(["a"] * 30 + [None] * 30)), p), None,
        "rows from 0 on: row 30 of 'kind' is (nan|None)"),
    "a file that is no table": (text_file, None, "is a file of a kind that is not read; give what"),
    "names of files": (
        lambda p: [str(text_file(p)), str(text_file(p))], None,
        "t.csv is the first of 2 paths of a kind that is not read together; give what reads them"),
    "paths of files": (lambda p: [text_file(p)] * 3, None, "t.csv is the first of 3 paths"),
    "a list of one path": (lambda p: [text_file(p)], None, "t.csv is a file of a kind that is not"),
    "an empty data set": (lambda p: [], None, "arrays is empty"),
    "nothing there": (lambda p: p / "nowhere", None, "nothing is at .*nowhere"),
    "an empty folder": (lambda p: p, None, "has no folders with images, no Parquet"),
    "a file that is no image": (wrong_image, None, "bee/zz.png cannot be decoded"),
    "an image of another size": (
        other_size, None, r"bee/zz.png is 8 × 9, and .*000.png 6 × 4; give ImageFolder\(.*size="),
    "columns of images": (lambda p: images(p / "i"), ["x"], "leave columns= out"),
    "columns of batches": (
        lambda p: Batches([{"x": np.zeros(N)}], N), ["x"], "of files, and arrays has arrays by"),
    "a schema of its own": (
        other_schema, None, "part-9.parquet has a schema of its own: 'age' is double, and in .*i"),
    "a column that a later file has": (
        lambda p: written_files(p, [table(), table().assign(more=1)]), None,
        "1.parquet has a schema of its own: 'more' is int64, and in .*0.parquet missing"),
    "a folder's name that a later file lacks": (
        lambda p: written_files(p, [table(), table()], ["kind2=a/0.parquet", "x/1.parquet"]), None,
        "'kind2' is missing, and in .*0.parquet a folder's name"),
    "lists of text in a file": (
        lambda p: as_file(table().assign(tags=pd.Series([["a", "b"]] * N)), p), None,
        "t.parquet, rows from 0 on: column 'tags' holds lists of str, which"),
    "dates of a zone in a file": (
        lambda p: as_file(table().assign(age=DATES.dt.tz_localize("UTC")), p), None,
        r"'age' holds values of type Timestamp, which .*frame\['age'\] = \(frame.*\.dt\.days"),
    "days": (
        lambda p: table().assign(age=DATES.dt.date), None,
        r"'age' holds values of type date, which .*frame\['age'\] = pandas.to_datetime\(frame"),
    "decimals": (
        lambda p: table().assign(age=pd.Series([Decimal(at) for at in range(N)], dtype=object)),
        None, r"'age' holds values of type Decimal, .*= frame\['age'\].astype\(float\)"),
    "a torn file": (torn, None, "t.parquet cannot be read"),
    "one array": (lambda p: np.zeros((N, 2)), None, 'is a ndarray; pass a mapping .*{"x": arrays}'),
    "a number": (lambda p: 7, None, "arrays is a int, 7; pass a mapping"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_named_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    make, columns, message = WRONG[what]
    (tmp_path / "in").mkdir()
    with pytest.raises(DatasetError, match=message):
        ShardedDataset.write(tmp_path / "data", make(tmp_path / "in"), n_shards=2, columns=columns)
    assert not (tmp_path / "data").exists()


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    frame = table().assign(year=[2023, 2024] * 30)
    frame.to_parquet(tmp_path / "hive", partition_cols=["year", "kind"])
    for source in (tmp_path / "hive", f"{tmp_path}/hive/*/*/*.parquet"):
        data = ShardedDataset.write(tmp_path / "data", source, n_shards=2, overwrite=True)
        assert data.classes == {"kind": tuple(KINDS)}
        found = everything(data)
        assert all(np.array_equal(found[name], frame[name]) for name in ("age", "height", "year"))
        assert [KINDS[kind] for kind in found["kind"]] == frame["kind"].tolist()
    columns = {"x": ["height", "year"], "y": "kind"}
    data = ShardedDataset.write(
        tmp_path / "some", tmp_path / "hive", n_shards=2, columns=columns, stratify="kind"
    )
    in_validation = np.concatenate([data.validation_shard(k)["y"] for k in (0, 1)])
    assert np.bincount(in_validation).tolist() == [4, 4, 4]
    assert set(everything(data)["x"][:, 1]) == {2023, 2024}
    inside = ShardedDataset.write(tmp_path / "in", tmp_path / "hive" / "year=2023", n_shards=2)
    assert list(inside.schema) == ["age", "height", "kind"]


def test_a_folder_whose_name_says_that_there_is_no_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = table().assign(year=pd.Series([2023, None] * 30))
    numbers.to_parquet(tmp_path / "numbers", partition_cols=["year"])
    texts = table().assign(part=pd.Series(["a", None] * 30))
    texts.to_parquet(tmp_path / "texts", partition_cols=["part"])
    data = ShardedDataset.write(tmp_path / "data", tmp_path / "numbers", n_shards=2)
    assert np.isnan(everything(data)["year"]).sum() == 30
    assert "column 'year' lacks 30 of its values" in caplog.text
    with pytest.raises(DatasetInputError, match="row 0 of 'part' is None, and others are text"):
        ShardedDataset.write(tmp_path / "no", tmp_path / "texts", n_shards=2)


def test_what_is_marked_as_no_data_is_left_out(tmp_path: Path) -> None:
    names = ["a.parquet", "_temporary/0/a.parquet", ".a.parquet", ".hidden/a.parquet"]
    folder = written_files(tmp_path, [table()] * 4, names)
    assert len(ShardedDataset.write(tmp_path / "data", folder, n_shards=2)) == N


def test_columns_of_files_may_stand_in_another_order(tmp_path: Path) -> None:
    frame = table()
    folder = written_files(tmp_path, [frame[:30], frame[30:][["kind", "height", "age"]]])
    data = ShardedDataset.write(tmp_path / "data", folder, n_shards=2)
    found = everything(data)
    assert all(np.array_equal(found[name], frame[name]) for name in ("age", "height"))


PEAK = """
import sys
from dagsel.storage import ShardedDataset
path, out = sys.argv[1:]
import pyarrow.parquet
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024
before = peak()
data = ShardedDataset.write(out, path, n_shards=4, columns={"x": [f"c{k}" for k in range(64)]})
print(len(data), peak() - before)
"""


def test_parquet_on_s3_is_read(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", s3_options)  # as users configure it
    as_files(table(), tmp_path)
    fsspec.filesystem("s3").put(str(tmp_path / "parts"), "bucket/parquet", recursive=True)
    for name in ("s3://bucket/parquet", "s3://bucket/parquet/part-0.parquet"):
        data = ShardedDataset.write(tmp_path / "data", name, n_shards=2, overwrite=True)
        assert data.classes == {"kind": tuple(KINDS)}
    assert everything(data)["age"].tolist() == list(range(15))
    with pytest.raises(DatasetInputError, match="nothing is at s3://bucket/nowhere"):
        ShardedDataset.write(tmp_path / "none", "s3://bucket/nowhere", n_shards=2)


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "most_mb"), [(12, 300), (1, 350)])
def test_a_parquet_file_is_streamed(groups: int, most_mb: int, tmp_path: Path) -> None:
    """Row groups of 32 MB, and one of 400 MB, as pandas writes them unless told otherwise."""
    rng, n = np.random.default_rng(0), 12 * 65_536
    path = tmp_path / "large.parquet"
    columns = {f"c{k}": rng.random(n) for k in range(64)}
    parquet.write_table(arrow.table(columns), path, row_group_size=n // groups)
    command = [sys.executable, "-c", PEAK, str(path), str(tmp_path / "out")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=200)
    n_read, more_mb = map(int, told.stdout.split())
    assert n_read == n
    assert 0 < more_mb < most_mb, f"{path.stat().st_size >> 20} MB of Parquet took {more_mb} MB"


@pytest.mark.parametrize(
    ("how", "order"),
    [
        ({}, ("S", "M", "L", "XL")),
        ({"row_group_size": 2}, ("S", "M", "L", "XL")),
        ({"use_dictionary": False}, ("L", "M", "S")),  # such a file does not have it
    ],
)
def test_an_ordered_category_of_a_parquet_file_keeps_its_order(
    how: dict[str, Any], order: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = pd.Categorical(["L", "S", "M"] * 4, categories=["S", "M", "L", "XL"], ordered=True)
    pd.DataFrame({"size": sizes}).to_parquet(tmp_path / "a.parquet", **how)
    data = ShardedDataset.write(tmp_path / "d.zarr", tmp_path / "a.parquet", n_shards=1)
    assert data.classes == {"size": order}


def test_a_class_that_comes_late_in_a_file_is_known_from_the_start(tmp_path: Path) -> None:
    frame = table().sort_values("kind", ignore_index=True).assign(age=range(N))
    data = ShardedDataset.write(tmp_path / "data", as_file(frame, tmp_path), n_shards=2)
    assert data.classes == {"kind": tuple(KINDS)}
    assert [KINDS[number] for number in everything(data)["kind"]] == list(frame["kind"])


def test_values_that_are_missing_elsewhere_are_kept(tmp_path: Path) -> None:
    arrays = {"x": GAPS_IN_NUMBERS.to_numpy(), "y": np.full((N, 2), np.nan)}
    data = ShardedDataset.write(tmp_path / "d", arrays, n_shards=2)
    assert sum(np.isnan(sample["x"]) for sample in data) == 1
    assert all(np.isnan(sample["y"]).all() for sample in data)


@pytest.mark.parametrize(
    "make",
    [pd.Series, lambda of: pd.Series(of, dtype="category"), lambda of: np.array(of, object),
     polars.Series, arrow.array, lambda of: pd.Series(of, dtype="string"), np.array, list],
)  # fmt: skip
def test_labels_beside_arrays_become_numbers(make: Any, tmp_path: Path) -> None:
    words = [KINDS[at % 3] for at in range(N)]
    arrays = {"x": np.arange(N), "y": make(words)}
    data = ShardedDataset.write(tmp_path / "d", arrays, n_shards=2, stratify="y")
    assert repr(data.classes) == repr({"y": tuple(KINDS)}), "they are Python's texts"
    assert everything(data)["y"].tolist() == [at % 3 for at in range(N)]
    few = {"x": np.arange(9), "y": make(["cat"] * 9)}
    data = ShardedDataset.write(
        tmp_path / "e", {"x": np.arange(N), "y": make(words)}, n_shards=2, validation=few
    )
    assert set(data.validation_shard(0)["y"].tolist()) == {2}
    numbers = {"x": np.arange(N), "y": np.arange(N)}
    with pytest.raises(DatasetInputError, match="validation: 'y' is text, and something else"):
        ShardedDataset.write(tmp_path / "f", numbers, n_shards=2, validation=few)


def of_h5py(texts: list[str], folder: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    file = h5py.File(folder / "y.h5", "w")
    return file.create_dataset("y", data=texts, dtype=h5py.string_dtype())


ELSEWHERE: dict[str, Any] = {
    "Dask": lambda texts, p: dask.array.from_array(np.array(texts), chunks=7),
    "Dask, objects": lambda texts, p: dask.array.from_array(np.array(texts, object), chunks=7),
    "Dask, of what is not known": lambda texts, p: dask.array.from_array(
        np.array(texts, object), chunks=7
    ).astype("U"),
    "Zarr": lambda texts, p: zarr.create_array(p / "y.zarr", data=np.array(texts)),
    "h5py": of_h5py,
}


@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("how", ELSEWHERE)
def test_texts_of_arrays_elsewhere_become_numbers(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "_ROWS", 8)
    kinds = table()["kind"].tolist()
    for part in ("train", "validation"):
        (tmp_path / part).mkdir()
    arrays = {"x": np.arange(N), "y": ELSEWHERE[how](kinds, tmp_path / "train")}
    some = {"x": np.arange(9), "y": ELSEWHERE[how](["cat"] * 9, tmp_path / "validation")}
    data = ShardedDataset.write(tmp_path / "data", arrays, n_shards=2, stratify="y")
    assert data.classes == {"y": tuple(KINDS)}
    assert [KINDS[number] for number in everything(data)["y"]] == kinds
    data = ShardedDataset.write(tmp_path / "two", arrays, n_shards=2, validation=some)
    assert {int(y) for k in (0, 1) for y in data.validation_shard(k)["y"]} == {2}


def test_bytes_in_an_array_of_objects_are_named(tmp_path: Path) -> None:
    kinds = np.array([kind.encode() for kind in table()["kind"]], object)
    with pytest.raises(
        DatasetInputError, match=r"y holds bytes; .*\[each.decode\(\) for each in y"
    ):
        ShardedDataset.write(tmp_path / "no", {"y": kinds}, n_shards=2)
    texts = [each.decode() for each in kinds]
    data = ShardedDataset.write(tmp_path / "data", {"y": texts}, n_shards=2)
    assert data.classes == {"y": tuple(KINDS)}
    assert ShardedDataset.write(tmp_path / "b", {"y": kinds.astype("S")}, n_shards=2).classes == {}


def test_texts_of_a_stream_of_arrays_become_numbers(tmp_path: Path) -> None:
    """Also where a later batch has longer words, and the length is known."""
    batches = [{"y": np.array([word] * 10)} for word in ("ox", "heron", "ant")]
    data = ShardedDataset.write(tmp_path / "d", Batches(batches, length=30), n_shards=2)
    assert data.classes == {"y": ("ant", "heron", "ox")}
    assert sorted(everything(data)["y"].tolist()) == [0] * 10 + [1] * 10 + [2] * 10


def test_paths_of_two_kinds_are_refused(tmp_path: Path) -> None:
    """Those of the second kind were left out without a word."""
    pd.DataFrame({"x": np.arange(8.0)}).to_parquet(tmp_path / "a.parquet")
    with tarfile.open(tmp_path / "b.tar", "w"):
        pass
    paths = [tmp_path / "a.parquet", tmp_path / "b.tar"]
    with pytest.raises(DatasetInputError, match=r"b\.tar has no \.parquet file, and other paths"):
        ShardedDataset.write(tmp_path / "data.zarr", paths, n_shards=1)
