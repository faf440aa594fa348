"""Arrays whose samples differ in shape come back sample by sample, whatever they are read from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dagsel.errors import DatasetFormatError, DatasetInputError, ShardCorruptError
from dagsel.storage import Batches, RaggedArray, ShardedDataset

polars = pytest.importorskip("polars")
arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

N = 101
DTYPES = st.sampled_from(["i8", "u1", "f4", "c8", "?", "U3"])


@st.composite
def samples(draw: st.DrawFn, least: int = 0) -> list[np.ndarray[Any, Any]]:
    n_axes, dtype = draw(st.integers(1, 3)), np.dtype(draw(DTYPES))
    shapes = st.lists(st.integers(0, 4), min_size=n_axes, max_size=n_axes).map(tuple)
    return draw(st.lists(shapes.flatmap(lambda s: hnp.arrays(dtype, s)), min_size=least))


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and a.dtype == b.dtype and np.array_equal(a, b, equal_nan=False)
        for a, b in zip(one, other, strict=True)
    )


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


@given(samples(least=1), st.data())
def test_a_ragged_array_is_a_list_of_arrays(given: list[Any], data: st.DataObject) -> None:
    ragged = RaggedArray.of(given)
    # Samples without values have no dtype to keep.
    assert [a.shape for a in ragged] == [a.shape for a in given]
    assert list(map(bits, ragged)) == [bits(a.astype(ragged.dtype)) for a in given]
    assert len(ragged) == len(given)
    assert ragged.nbytes == sum(a.size * ragged.dtype.itemsize + 8 * a.ndim for a in given)
    picked = data.draw(st.lists(st.integers(-len(given), len(given) - 1)))
    assert list(map(bits, ragged[picked])) == [bits(ragged[k]) for k in picked]
    start, stop = (data.draw(st.integers(-9, 9)) for _ in range(2))
    assert list(map(bits, ragged[start:stop])) == list(map(bits, list(ragged)[start:stop]))
    assert list(map(bits, ragged[::-2])) == list(map(bits, list(ragged)[::-2]))
    cut = data.draw(st.integers(0, len(given)))
    joined = RaggedArray.join([ragged[:cut], ragged[cut:]])
    assert list(map(bits, joined)) == list(map(bits, ragged))
    with pytest.raises(IndexError):
        ragged[len(given)]


def test_values_that_do_not_fit_the_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="hold 3 values"):
        RaggedArray(np.zeros(4), np.array([[1], [2]]))


def all_of(data: ShardedDataset) -> dict[int, dict[str, Any]]:
    """Samples by their number."""
    return {int(sample["id"]): sample for sample in data}


def tokens(n: int = N) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 9, size=k % 7).tolist() for k in range(n)]


@pytest.fixture(params=["as they are", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "small blocks":
        monkeypatch.setattr("dagsel.storage.datasets.sources.BLOCK_BYTES", 400)
        monkeypatch.setattr("dagsel.storage.datasets.ragged_write.RUN_BYTES", 150)
        monkeypatch.setattr("dagsel.storage.datasets.shuffled_write.RUN_BYTES", 150)
        monkeypatch.setattr("dagsel.storage.datasets.manifest.CHUNK_BYTES", 60)
        monkeypatch.setattr("dagsel.storage.datasets.plan.CHUNK_BYTES", 60)


class Pairs:
    def __init__(self, ids: list[list[int]]) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return {"id": at, "ids": self.ids[at], "y": at % 3}


def of_kind(kind: str, ids: list[list[int]], folder: Path) -> Any:
    numbers, y = np.arange(len(ids)), np.arange(len(ids)) % 3
    frame = pd.DataFrame({"id": numbers, "ids": ids, "y": y})
    named: dict[str, Any] = {"id": numbers, "ids": ids, "y": y}
    cut = [{n: a[i : i + 7] for n, a in named.items()} for i in range(0, len(ids), 7)]
    match kind:
        case "list":
            return named
        case "ragged":
            return {**named, "ids": RaggedArray.of(np.array(row, "i8") for row in ids)}
        case "objects":
            return {**named, "ids": frame["ids"].to_numpy()}
        case "batches":
            return Batches(iter(cut), len(ids))
        case "one of many":
            return {**named, "ids": Batches((part["ids"] for part in cut), len(ids))}
        case "samples":
            return Pairs(ids)
        case "pandas":
            return frame
        case "polars":
            return polars.DataFrame({"id": numbers, "ids": ids, "y": y})
        case "arrow":
            return arrow.table({"id": numbers, "ids": ids, "y": y})
        case "parquet":
            table = arrow.table({"id": numbers, "ids": ids, "y": y})
            parquet.write_table(table, folder / "t.parquet", row_group_size=11)
            return folder / "t.parquet"
        case "hugging face":
            return pytest.importorskip("datasets").Dataset.from_dict(named)
        case _:
            return ShardedDataset.write(folder / "first.zarr", named, n_shards=2)


KINDS = ["list", "ragged", "objects", "batches", "one of many", "samples", "pandas", "polars"]
KINDS += ["arrow", "parquet", "hugging face", "again"]


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("kind", KINDS)
def test_token_lists_come_back_whatever_they_are_read_from(kind: str, tmp_path: Path) -> None:
    ids = tokens()
    given = of_kind(kind, ids, tmp_path)
    data = ShardedDataset.write(tmp_path / "a.zarr", given, n_shards=3)
    found = all_of(ShardedDataset.open(tmp_path / "a.zarr"))
    assert sorted(found) == list(range(N))
    for at, sample in found.items():
        assert sample["ids"].dtype == np.int64
        assert (sample["ids"].tolist(), int(sample["y"])) == (ids[at], at % 3)
    data.verify()
    assert data.schema["ids"].shape_text == "[*]"
    assert "ids: int64 [*]" in repr(data)
    assert data.nbytes == N * (8 + 8 + 8) + 8 * sum(map(len, ids))
    assert sum(size.nbytes for size in data.shard_sizes) == data.nbytes


@pytest.mark.usefixtures("blocks")
@settings(max_examples=30)
@given(rows=samples(least=8), n_shards=st.integers(1, 3), seed=st.integers(0, 9))
def test_samples_of_any_shape_are_where_the_shuffle_puts_them(
    rows: list[Any], n_shards: int, seed: int
) -> None:
    ragged = RaggedArray.of(rows)
    numbers = np.arange(len(rows))
    options: dict[str, Any] = {"n_shards": n_shards, "seed": seed, "validation": 0.5}
    url = "memory://ragged.zarr"
    found = []
    parts = [{"id": numbers[k : k + 3], "r": ragged[k : k + 3]} for k in range(0, len(rows), 3)]
    for source in ({"id": numbers, "r": ragged}, Batches(parts, len(rows))):
        data = ShardedDataset.write(url, source, overwrite=True, ragged=["r"], **options)
        shards = [data.shard(k) for k in range(n_shards)]
        shards += [data.validation_shard(k) for k in range(n_shards)]
        found.append([(int(i), r.shape, bits(r)) for s in shards for i, r in zip(s["id"], s["r"])])  # noqa: B905
    assert found[0] == found[1]
    assert sorted(found[0]) == [(k, r.shape, bits(r)) for k, r in enumerate(ragged)]
    plain = ShardedDataset.write(url, {"id": numbers}, overwrite=True, **options)
    assert [i for i, *_ in found[0]] == [int(sample["id"]) for sample in plain]


def test_zarr_reads_shapes_and_values(tmp_path: Path) -> None:
    ids = tokens()
    data = ShardedDataset.write(
        tmp_path / "a.zarr", {"id": np.arange(N), "ids": ids}, n_shards=2, validation=0.1
    )
    group = zarr.open_group(tmp_path / "a.zarr", mode="r")
    for split, read in (("train", data.shard), ("validation", data.validation_shard)):
        for k in range(2):
            stored: Any = group[f"{data.manifest.folder}/{split}/{k:05d}/ids"]
            shard = read(k)["ids"]
            assert np.array_equal(stored["shapes"][:], shard.shapes)
            assert np.array_equal(stored["values"][:], shard.values)


def test_a_shard_of_empty_samples_is_stored(tmp_path: Path) -> None:
    ids = RaggedArray(np.empty(0, "i8"), np.zeros((20, 1), "i8"))
    data = ShardedDataset.write(tmp_path / "a.zarr", {"ids": ids}, n_shards=2)
    data.verify()
    assert [sample["ids"].tolist() for sample in data] == [[]] * 20
    stored: Any = zarr.open_group(tmp_path / "a.zarr", mode="r")
    assert stored[f"{data.manifest.folder}/train/00000/ids/values"][:].tolist() == []


def test_images_of_unequal_size_and_clouds_of_points(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 255, (4 + k % 3, 5 + k % 4, 3), "u1") for k in range(40)]
    clouds = [rng.normal(size=(k % 5, 3)).astype("f4") for k in range(40)]
    arrays = {"id": np.arange(40), "image": images, "cloud": clouds}
    data = ShardedDataset.write(tmp_path / "a.zarr", arrays, n_shards=2)
    assert all(
        np.array_equal(s["image"], images[k]) and np.array_equal(s["cloud"], clouds[k])
        for k, s in all_of(data).items()
    )
    shown = data.describe().set_index("array")
    assert shown.loc["image", "shape"] == ("4 to 6", "5 to 8", "3 to 3")
    rows = data.to_torch()
    assert len(rows) == data.n_train
    assert rows[3][1].ndim == 3
    assert len(data.head(3)["image"]) == 3
    assert data[5]["image"].ndim == 3


@pytest.mark.parametrize("kind", ["batches", "samples", "parquet"])
def test_lengths_that_differ_later_on_need_the_word(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagsel.storage.datasets.inputs.parquet._BATCH_BYTES", 1000)
    ids = [[1, 2]] * 600 + [[3]] * 10
    given = of_kind(kind, ids, tmp_path)
    with pytest.raises(DatasetInputError, match=r"'ids'.*write ragged=\['ids'\]"):
        ShardedDataset.write(tmp_path / "a.zarr", given, n_shards=2)
    assert not (tmp_path / "a.zarr").exists()
    given = of_kind(kind, ids, tmp_path)
    data = ShardedDataset.write(tmp_path / "a.zarr", given, n_shards=2, ragged=["ids"])
    assert sorted(len(sample["ids"]) for sample in data) == [1] * 10 + [2] * 600


@pytest.mark.parametrize(
    ("arrays", "options", "says"),
    [
        ({"x": [[1]] * 20}, {"ragged": ["y"]}, "ragged= names 'y', and there is x"),
        ({"x": [[1]] * 20}, {"ragged": "x"}, r"ragged is 'x'; give a list of names, such as"),
        ({"x": np.zeros(20)}, {"ragged": ["x"]}, "x is no ragged array: samples .* are arrays or"),
        ({"x": [[1], [[2]]] * 10}, {}, "sample 1 is int64 with 2 axes, and sample 0 int64 with 1"),
        (
            {"x": [[1], [2, 3]] * 10},
            {"validation": {"x": np.zeros((9, 2))}},
            r"validation array 'x' holds <f8\[\*\], training <i8\[\*\]",
        ),
    ],
)
def test_what_is_no_ragged_array_is_refused(
    arrays: Any, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetInputError, match=says):
        ShardedDataset.write(tmp_path / "a.zarr", arrays, n_shards=2, **options)
    assert not (tmp_path / "a.zarr").exists()


def test_validation_data_of_one_length_is_ragged_as_the_training_data_is(tmp_path: Path) -> None:
    own = {"ids": np.full((9, 2), 5)}
    data = ShardedDataset.write(tmp_path / "a.zarr", {"ids": tokens()}, n_shards=2, validation=own)
    assert [row.tolist() for row in data.validation_shard(0)["ids"]] == [[5, 5]] * 5


def test_each_flipped_byte_is_found(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", {"ids": tokens(20)}, n_shards=1)
    for path in (tmp_path / "a.zarr" / data.manifest.folder / "train/00000/ids").rglob("0"):
        if not path.is_file():
            continue
        whole = path.read_bytes()
        for at in range(len(whole)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(ShardCorruptError, match="'ids'"):
                data.shard(0)
        path.write_bytes(whole)
    data.verify()
    (tmp_path / "a.zarr" / data.manifest.folder / "train/00000/ids/zarr.json").write_text("{}")
    with pytest.raises(ShardCorruptError, match=r"damaged zarr.json in 'ids'"):
        data.verify()


@pytest.mark.parametrize(
    "n_values",
    [{}, {"ids": {}}, {"ids": {"train": [1]}}, [], {"ids": []}, {"x": {}}, {"ids": None}]
    + [{"ids": {"train": n, "validation": [1, 1]}} for n in ([1], [1, -1], [1, "2"], "ab", None)],
)
def test_a_manifest_with_other_numbers_of_values_is_refused(n_values: Any, tmp_path: Path) -> None:
    import google_crc32c

    ShardedDataset.write(tmp_path / "a.zarr", {"ids": tokens()}, n_shards=2)
    path = tmp_path / "a.zarr" / "dagsel.json"
    body = json.loads(path.read_text())
    del body["crc32c"]
    body["n_values"] = n_values
    body["crc32c"] = f"{google_crc32c.value(json.dumps(body, indent=1).encode()):08x}"
    path.write_text(json.dumps(body))
    with pytest.raises(DatasetFormatError, match="damaged"):
        ShardedDataset.open(tmp_path / "a.zarr")


MEASURE = """
import resource, sys
import numpy as np
from dagsel.storage import Batches, ShardedDataset

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) // 1024

def batches():
    rng = np.random.default_rng(0)
    for start in range(0, 40_000, 100):
        lengths = rng.integers(0, 4000, size=100)
        yield {"ids": [np.zeros(n, "i8") for n in lengths], "y": np.arange(start, start + 100)}

before = peak()
data = ShardedDataset.write(sys.argv[1], Batches(batches(), 40_000), n_shards=8)
print(data.nbytes >> 20, peak() - before)
"""


def test_a_stream_of_token_lists_is_written_in_bounded_memory(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "a.zarr")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    megabytes, grown = map(int, run.stdout.split())
    assert megabytes > 550
    assert grown < 300


def test_a_data_set_that_is_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    url = tmp_path / "a.zarr"
    old = ShardedDataset.write(url, {"ids": tokens()}, n_shards=2)
    new = ShardedDataset.write(url, {"ids": tokens(60)}, n_shards=2, overwrite=True)
    assert not (url / old.manifest.folder).exists()
    assert len(ShardedDataset.open(url)) == len(new) == 60


def test_sizes_of_a_shard_are_in_the_manifest(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", {"ids": tokens(), "y": np.ones(N)}, n_shards=3)
    for index, size in enumerate(data.shard_sizes):
        parts = (data.shard(index), data.validation_shard(index))
        assert size.nbytes == sum(rows.nbytes for part in parts for rows in part.values())
