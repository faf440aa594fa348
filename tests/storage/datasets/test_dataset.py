"""A data set comes back as it went in, from any place and input; damage is found and named."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.errors import (
    DatasetFormatError,
    DatasetInputError,
    DatasetNotFoundError,
    ShardCorruptError,
)
from dagsel.storage import Batches, ShardedDataset, ShardSize
from dagsel.storage.urls import without_credentials

Named = dict[str, np.ndarray]


def everything(data: ShardedDataset) -> list[Named]:
    shards = range(data.n_shards)
    return [data.shard(i) for i in shards] + [data.validation_shard(i) for i in shards]


def holds(data: ShardedDataset, arrays: Named) -> bool:
    """Whether each sample is there once, its arrays still together."""
    shards = everything(data)
    ids = np.concatenate([shard["id"] for shard in shards])
    return sorted(ids) == list(range(len(arrays["id"]))) and all(
        shard[name].dtype == array.dtype.newbyteorder("<")
        and np.array_equal(shard[name], array[shard["id"]])
        for shard in shards
        for name, array in arrays.items()
    )


def test_a_round_trip_keeps_every_sample_whole(place: Any, arrays: Named) -> None:
    written = ShardedDataset.write(place.url, arrays, n_shards=4, storage_options=place.options)
    data = ShardedDataset.open(place.url, place.options)
    assert data == written
    assert (len(data), data.n_shards, data.n_train, data.n_validation) == (103, 4, 82, 21)
    assert [len(shard["id"]) for shard in everything(data)] == [21, 21, 20, 20, 6, 5, 5, 5]
    assert holds(data, arrays)
    data.verify()


def test_a_large_object_goes_up_in_parts(
    s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagsel.storage.files._PART_BYTES", 5 << 20)
    arrays = {"x": np.random.default_rng(0).random((150, 10_000)), "id": np.arange(150)}
    data = ShardedDataset.write(
        "s3://bucket/parts.zarr", arrays, n_shards=1, storage_options=s3_options
    )
    key = data.folder.path(f"{data.manifest.folder}/train/00000/x/c/0/0")
    assert data.folder.fs.info(key)["ETag"].strip('"').endswith("-2"), "two parts"
    assert holds(data, arrays)


def test_zarr_alone_reads_it(place: Any, arrays: Named) -> None:
    data = ShardedDataset.write(place.url, arrays, n_shards=3, storage_options=place.options)
    options = {"storage_options": place.options} if place.options else {}
    root = zarr.open_group(place.url, mode="r", **options)
    for split in ("train", "validation"):
        there: Any = root[f"{data.manifest.folder}/{split}"]
        assert sorted(there.group_keys()) == [f"{index:05d}" for index in range(3)]
        assert {name for _, shard in there.groups() for name in shard.array_keys()} == {*arrays}
    for index in range(3):
        for name, rows in data.shard(index).items():
            stored: Any = root[f"{data.manifest.folder}/train/{index:05d}/{name}"]
            assert stored.shape == rows.shape
            assert stored.shards[0] >= len(rows), "one shard object"
            assert np.array_equal(stored[:], rows)
    chunks = [name for name in place.files() if "/c/" in name]
    assert len(chunks) == 2 * 3 * len(arrays), "one object for each array of each shard"


def test_a_copy_at_another_url_is_as_good(tmp_path: Path, arrays: Named) -> None:
    ShardedDataset.write(tmp_path / "a.zarr", arrays, n_shards=2)
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    assert holds(ShardedDataset.open(tmp_path / "b.zarr"), arrays)


@settings(max_examples=40, deadline=None)
@given(
    n_samples=st.integers(2, 60),
    n_shards=st.integers(1, 6),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 2**40),
    batch=st.integers(1, 30),
)
def test_every_input_gives_the_same_shards(
    n_samples: int, n_shards: int, fraction: float, seed: int, batch: int
) -> None:
    arrays = {"x": np.arange(n_samples * 3, dtype="f4").reshape(-1, 3), "id": np.arange(n_samples)}
    starts = range(0, n_samples, batch)
    pieces = ({name: a[i : i + batch] for name, a in arrays.items()} for i in starts)
    mixed = {"x": Batches((arrays["x"][i : i + batch] for i in starts), n_samples)}
    inputs: list[Any] = [
        arrays,
        Batches(pieces, n_samples),
        {**mixed, "id": Sliceable(arrays["id"])},
    ]
    options: Any = {"n_shards": n_shards, "validation": fraction, "seed": seed, "overwrite": True}
    MemoryFileSystem.store.clear()
    try:
        sets = [ShardedDataset.write("memory://same.zarr", one, **options) for one in inputs[:1]]
    except DatasetInputError:
        return
    first = everything(sets[0])
    assert holds(sets[0], arrays)
    for one in inputs[1:]:
        shards = everything(ShardedDataset.write("memory://same.zarr", one, **options))
        for shard, expected in zip(shards, first, strict=True):
            assert all(np.array_equal(shard[name], expected[name]) for name in arrays)


class Sliceable:
    """The least that an input has to be; its own chunks are uneven."""

    def __init__(self, array: np.ndarray, chunks: Any = None) -> None:
        self._array, self.shape, self.dtype, self.chunks = array, array.shape, array.dtype, chunks
        self.asked: list[tuple[int, int]] = []

    def __getitem__(self, key: slice) -> np.ndarray:
        self.asked.append((key.start, key.stop))
        return self._array[key]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks, runs and chunks so small that a small input has many."""
    monkeypatch.setattr("dagsel.storage.datasets.sources.BLOCK_BYTES", 400)
    monkeypatch.setattr("dagsel.storage.datasets.shuffled_write.RUN_BYTES", 150)
    monkeypatch.setattr("dagsel.storage.datasets.plan.CHUNK_BYTES", 60)


def inputs(arrays: Named, tmp_path: Path) -> dict[str, Any]:
    import dask.array as da

    mapped = {}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        mapped[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    store = zarr.group()
    for name, array in arrays.items():
        store.create_array(name, data=array, chunks=(10, *array.shape[1:]))
    cut = [{name: a[i : i + 7] for name, a in arrays.items()} for i in range(0, 103, 7)]
    return {
        "memory": arrays,
        "memmap": mapped,
        "view of memmap": {name: np.asarray(array)[:] for name, array in mapped.items()},
        "dask": {name: da.from_array(array, chunks=17) for name, array in arrays.items()},
        "zarr": {name: store[name] for name in arrays},
        "batches": Batches(iter(cut), 103),
        "one batch": Batches([arrays], 103),
        "big-endian": {n: a.astype(a.dtype.newbyteorder(">")) for n, a in arrays.items()},
        "Fortran order": {name: np.asfortranarray(array) for name, array in arrays.items()},
        "mixed": {**arrays, "x": mapped["x"], "id": Batches((c["id"] for c in cut), 103)},
    }


KINDS = ["memmap", "view of memmap", "dask", "zarr", "batches", "one batch", "big-endian"]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [*KINDS, "Fortran order", "mixed"])
def test_in_many_small_blocks_any_kind_of_input_gives_what_memory_gives(
    kind: str, arrays: Named, tmp_path: Path
) -> None:
    given = inputs(arrays, tmp_path)
    one, other = (
        ShardedDataset.write(tmp_path / f"{i}.zarr", given[name], n_shards=3, seed=5)
        for i, name in enumerate(("memory", kind))
    )
    assert one.schema["x"].train_chunk == 2
    assert holds(other, arrays)
    for mine, theirs in zip(everything(one), everything(other), strict=True):
        assert all(np.array_equal(mine[name], theirs[name]) for name in arrays)
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert set(files) <= {"zarr.json", "dagsel.json", "0", "x.npy", "id.npy", "flag.npy"}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("chunks", [None, (10, 3), ((30, 1, 1, 1, 50, 20), (3,)), (1000, 3)])
def test_an_input_is_read_once_in_order_by_whole_chunks_of_its_own(chunks: Any) -> None:
    x = Sliceable(np.zeros((103, 3), "f4"), chunks)
    ShardedDataset.write("memory://once.zarr", {"x": x}, n_shards=2, overwrite=True)
    flat = [number for start, stop in x.asked for number in range(start, stop)]
    assert flat == list(range(103))
    assert len(x.asked) == 1 if chunks == (1000, 3) else len(x.asked) > 2
    if chunks is not None:
        own = chunks[0] if isinstance(chunks[0], tuple) else (chunks[0],) * 11
        assert {start for start, _ in x.asked} <= {0, *np.cumsum(own).tolist()}


def test_validation_arrays_of_its_own_stay_apart(arrays: Named) -> None:
    own = {name: array[:31][::-1].copy() for name, array in arrays.items()}
    data = ShardedDataset.write(
        "memory://own.zarr", arrays, n_shards=4, validation=own, overwrite=True
    )
    assert (data.n_train, data.n_validation) == (103, 31)
    train = np.concatenate([data.shard(i)["id"] for i in range(4)])
    validation = np.concatenate([data.validation_shard(i)["id"] for i in range(4)])
    assert sorted(train) == list(range(103))
    assert sorted(validation) == list(range(31))
    assert list(validation) not in (list(range(31)), list(range(30, -1, -1))), "shuffled too"


def test_both_parts_are_shuffled_each_in_its_own_way(arrays: Named) -> None:
    data = ShardedDataset.write(
        "memory://own.zarr", arrays, n_shards=1, validation=arrays, overwrite=True
    )
    assert list(data.shard(0)["id"]) != list(data.validation_shard(0)["id"])


def test_the_shuffle_depends_on_the_seed_alone(arrays: Named) -> None:
    def order(seed: int, name: str = "memory://seed.zarr") -> list[int]:
        data = ShardedDataset.write(name, arrays, n_shards=4, seed=seed, overwrite=True)
        return [int(i) for shard in everything(data) for i in shard["id"]]

    assert order(1) == order(1) != order(2)
    assert order(1) != list(range(103))


def test_bytes_texts_in_rows_and_dates_are_kept(place: Any) -> None:
    arrays = {
        "word": np.array([[f"word {i}", "b"] for i in range(20)]),
        "raw": np.array([b"%d" % i for i in range(20)]),
        "day": np.arange(20).astype("M8[D]"),
        "id": np.arange(20),
    }
    data = ShardedDataset.write(place.url, arrays, n_shards=2, storage_options=place.options)
    assert holds(data, arrays)
    data.verify()


def test_it_pickles_small_and_opens_elsewhere(place: Any, arrays: Named) -> None:
    data = ShardedDataset.write(place.url, arrays, n_shards=4, storage_options=place.options)
    data.shard(0)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1500
    again = pickle.loads(pickled)
    assert again == data
    assert np.array_equal(again.shard(3)["x"], data.shard(3)["x"])


def test_a_relative_path_means_the_same_from_another_directory(
    tmp_path: Path, arrays: Named, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ShardedDataset.write("set.zarr", arrays, n_shards=2)
    pickled = pickle.dumps(data)
    monkeypatch.chdir("/")
    assert holds(pickle.loads(pickled), arrays)
    assert data.url == str(tmp_path / "set.zarr")


def test_shard_sizes_say_what_placement_needs(arrays: Named) -> None:
    data = ShardedDataset.write("memory://size.zarr", arrays, n_shards=4, overwrite=True)
    assert data.shard_sizes[0] == ShardSize(n_train=21, n_validation=6, nbytes=27 * 57)
    for index, size in enumerate(data.shard_sizes):
        train, validation = data.shard(index), data.validation_shard(index)
        n_bytes = sum(array.nbytes for array in [*train.values(), *validation.values()])
        assert (len(train["id"]), len(validation["id"]), n_bytes) == (
            size.n_train,
            size.n_validation,
            size.nbytes,
        )
    assert data.nbytes == sum(size.nbytes for size in data.shard_sizes)


@pytest.mark.parametrize("index", [-1, 4, 100])
def test_there_is_no_shard_outside(index: int, arrays: Named) -> None:
    data = ShardedDataset.write("memory://index.zarr", arrays, n_shards=4, overwrite=True)
    for read in (data.shard, data.validation_shard):
        with pytest.raises(IndexError, match=f"shard {index} of 4"):
            read(index)


def test_both_reprs_show_what_it_is_and_escape_it(tmp_path: Path, arrays: Named) -> None:
    data = ShardedDataset.write(tmp_path / "<b>&.zarr", arrays, n_shards=4)
    text, html = repr(data), data._repr_html_()
    for part in ("103 samples", "4 shards", "82 train", "21 validation", "5.9 kB"):
        assert part in text
        assert part in html
    for part in ("x", "float32", "[4, 3]", "id", "int64", "flag", "bool"):
        assert part in text
        assert f"<td>{part}</td>" in html
    assert "&lt;b&gt;&amp;.zarr" in html
    assert "<b>" not in html
    assert "<b>&.zarr" in text


def test_credentials_show_nowhere(s3_options: dict[str, Any], arrays: Named) -> None:
    server = {"client_kwargs": s3_options["client_kwargs"]}
    url = "s3://THEKEY:the/SECRET@bucket/credentials.zarr"
    data = ShardedDataset.write(url, arrays, n_shards=2, storage_options=server)
    opened = ShardedDataset.open(url, server)
    assert data.url == "s3://bucket/credentials.zarr"
    assert pickle.loads(pickle.dumps(opened)).shard(0).keys() == arrays.keys()
    shown = [
        repr(data),
        data._repr_html_(),
        repr(data.folder),
        str(opened.folder.read("dagsel.json")),
    ]
    with pytest.raises(DatasetNotFoundError) as missing:
        ShardedDataset.open(url + "x", server)
    data.folder.fs.rm(data.folder.path(f"{data.manifest.folder}/train/00000/x"), recursive=True)
    with pytest.raises(ShardCorruptError) as corrupt:
        data.shard(0)
    shown += [str(missing.value), str(corrupt.value)]
    assert not any("THEKEY" in text or "SECRET" in text for text in shown)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a@b.zarr", "s3://bucket/a@b.zarr"),
        ("ftp://user:p@ss/word@host/a.zarr", "ftp://host/a.zarr"),
        ("ssh://user@host/a", "ssh://host/a"),
        ("simplecache::s3://k:s@bucket/a", "simplecache::s3://bucket/a"),
        ("/a/b@c:d.zarr", "/a/b@c:d.zarr"),
        ("abfs://c/a?sig=secret", "abfs://c/a"),
    ],
)
def test_a_url_is_shown_without_its_credentials(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def flip(fs: Any, path: str, place: int) -> None:
    data = bytearray(fs.cat_file(path))
    data[place] ^= 0x10
    fs.pipe_file(path, bytes(data))


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_a_flipped_byte_is_found_and_named(
    place: Any, arrays: Named, split: str, where: float
) -> None:
    data = ShardedDataset.write(place.url, arrays, n_shards=2, storage_options=place.options)
    path = f"{place.root}/{data.manifest.folder}/{split}/00001/x/c/0/0/0"
    size = place.fs.info(path)["size"]
    flip(place.fs, path, int(where * size) if where >= 0 else -1)
    read = data.shard if split == "train" else data.validation_shard
    read(0)
    for fails in (lambda: read(1), data.verify):
        with pytest.raises(ShardCorruptError) as caught:
            fails()
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.shard, error.array, error.split) == (1, "x", split)
        assert error.url == data.url
        assert ("index" if where == -1 else "checksum") in error.reason


def test_any_byte_that_is_flipped_anywhere_in_a_shard_is_found(arrays: Named) -> None:
    data = ShardedDataset.write("memory://flip.zarr", arrays, n_shards=8, overwrite=True)
    fs, key = data.folder.fs, data.folder.path(f"{data.manifest.folder}/validation/00000/id/c/0")
    for byte in range(fs.info(key)["size"]):
        flip(fs, key, byte)
        with pytest.raises(ShardCorruptError):
            data.validation_shard(0)
        flip(fs, key, byte)
    data.verify()


@pytest.mark.parametrize(("n_bytes", "says"), [(None, "missing"), (0, "0 bytes"), (50, "50 bytes")])
def test_a_missing_or_short_object_is_named(
    place: Any, arrays: Named, n_bytes: int | None, says: str
) -> None:
    data = ShardedDataset.write(place.url, arrays, n_shards=2, storage_options=place.options)
    path = f"{place.root}/{data.manifest.folder}/train/00000/id/c/0"
    whole = place.fs.cat_file(path)
    place.fs.rm_file(path)
    if n_bytes is not None:
        place.fs.pipe_file(path, whole[:n_bytes])
    with pytest.raises(ShardCorruptError, match=says) as caught:
        data.shard(0)
    assert (caught.value.shard, caught.value.array) == (0, "id")


def test_verify_checks_what_other_readers_go_by(tmp_path: Path, arrays: Named) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", arrays, n_shards=2)
    metadata = tmp_path / "a.zarr" / data.manifest.folder / "train/00001/flag/zarr.json"
    metadata.write_bytes(metadata.read_bytes().replace(b"bool", b"int8"))
    with pytest.raises(ShardCorruptError, match=r"shard 1 .* damaged zarr.json in 'flag'"):
        data.verify()


def test_a_declared_size_that_is_not_there_costs_no_memory(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", {"x": np.zeros(100)}, n_shards=2)
    huge = replace(data.manifest, n_train=2**50)
    (tmp_path / "a.zarr" / "dagsel.json").write_bytes(huge.to_json())
    with pytest.raises(ShardCorruptError, match="bytes instead of"):
        ShardedDataset.open(data.url).shard(0)


def test_open_says_that_nothing_is_there(place: Any) -> None:
    with pytest.raises(DatasetNotFoundError, match="nothing is at"):
        ShardedDataset.open(place.url, place.options)


@pytest.mark.parametrize(
    ("file", "write"),
    [
        (
            "cat/0.png",
            r"ImageFolder\('.*data'\), n_shards=8\), for images in a folder",
        ),
        ("0.jpg", r"ImageFolder\('.*data'\), n_shards=8\), for images in a folder"),
        ("0.parquet", r"'.*data', columns=\{.x.: \[...\], .y.: .....\}, n_shards=8\)$"),
        ("0.tar", r"'.*data', n_shards=8\)$"),
        ("notes.txt", r'\{"x": ..., "y": ...\}, n_shards=8\)$'),
    ],
)
def test_a_folder_of_something_else_says_how_it_becomes_a_data_set(
    tmp_path: Path, file: str, write: str
) -> None:
    path = tmp_path / "data" / file
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(
        DatasetFormatError, match=r'with ShardedDataset.write\("data.zarr", ' + write
    ):
        ShardedDataset.open(tmp_path / "data")


def test_open_refuses_what_is_not_ours(place: Any) -> None:
    place.fs.makedirs(place.root, exist_ok=True) if place.url.startswith("file") else None
    place.fs.pipe_file(f"{place.root}/notes.txt", b"mine")
    with pytest.raises(DatasetFormatError, match="not a data set of dagsel"):
        ShardedDataset.open(place.url, place.options)


def test_open_refuses_a_newer_version(tmp_path: Path) -> None:
    data = ShardedDataset.write(tmp_path / "a.zarr", {"x": np.zeros(100)}, n_shards=2)
    manifest = tmp_path / "a.zarr" / "dagsel.json"
    manifest.write_text(manifest.read_text().replace('"version": 2', '"version": 5'))
    with pytest.raises(DatasetFormatError, match="newer dagsel"):
        ShardedDataset.open(data.url)


@pytest.mark.parametrize("url", ["", "  ", "nowhere://a/b", 7])
def test_what_is_no_url_is_refused(url: Any) -> None:
    with pytest.raises(DatasetInputError, match=r"URL|no file system"):
        ShardedDataset.open(url)


def test_importing_it_loads_neither_torch_nor_dask_nor_zarr() -> None:
    code = (
        "import sys, dagsel.storage; "
        "print([m for m in ('torch', 'dask', 'distributed', 'zarr', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_warning_reaches_the_user(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrays = {"s": np.array(["a", "b"] * 10), "x": np.zeros((20, 2))}
        ShardedDataset.write(tmp_path / "a.zarr", arrays, n_shards=2).verify()
