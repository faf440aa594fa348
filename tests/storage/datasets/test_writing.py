"""A write ends whole or leaves nothing, and never touches what is not ours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from dagsel.errors import (
    DatasetError,
    DatasetExistsError,
    DatasetInputError,
    DatasetNotFoundError,
)
from dagsel.storage import Batches, ShardedDataset

X, Y = np.zeros((20, 3), "f4"), np.arange(20)


def batches(*sizes: int) -> Iterator[dict[str, np.ndarray]]:
    for size in sizes:
        yield {"x": np.zeros((size, 3), "f4"), "y": np.zeros(size, "i8")}


class Unknown:
    shape, dtype = (float("nan"), 3), np.dtype("f4")

    def __getitem__(self, key: slice) -> Any:
        raise NotImplementedError


class Liar:
    """Declares one thing and gives another."""

    def __init__(self, gives: np.ndarray) -> None:
        self.shape, self.dtype, self._gives = (20, 3), np.dtype("f4"), gives

    def __getitem__(self, key: slice) -> Any:
        return self._gives


def torch_like() -> Any:
    class Array:
        shape, dtype = (20, 3), "torch.bfloat16"

        def __getitem__(self, key: slice) -> Any:
            raise NotImplementedError

    return Array()


ARGUMENTS = {"arrays": {"x": X, "y": Y}, "n_shards": 2}
BAD = {
    "unequal lengths": ({"arrays": {"x": X, "y": Y[:7]}}, "'x' has 20, 'y' has 7 samples"),
    "fewer samples than shards": ({"n_shards": 21}, "leave 16 to train and 4 to validate"),
    "too few to validate": ({"n_shards": 5}, "4 to validate: fewer than n_shards=5"),
    "object dtype": (
        {"arrays": {"x": X, "o": np.array([{}] * 20)}},
        "o holds neither numbers nor text",
    ),
    "structured": ({"arrays": {"s": np.zeros(20, "i4,f4")}}, "'s' has dtype .*one array a field"),
    "longdouble": ({"arrays": {"x": np.zeros(20, "longdouble")}}, "'x' has dtype float128"),
    "structured object": ({"arrays": {"s": np.zeros(20, "i4,O")}}, "'s' has an object dtype"),
    "no samples": ({"arrays": {"x": X[:0]}}, "0 samples"),
    "nothing in a sample": ({"arrays": {"x": X[:, :0]}}, "nothing in them"),
    "empty strings": ({"arrays": {"x": np.zeros(20, "U0")[:, None][:, :0]}}, "nothing in them"),
    "scalar": ({"arrays": {"x": np.float32(3)}}, "'x' is a scalar"),
    "list": (
        {"arrays": {"x": [[1], "ab"]}},
        r"x is neither an array nor a ragged one: sample 1 is",
    ),
    "unknown length": ({"arrays": {"x": Unknown()}}, "compute_chunk_sizes"),
    "unknown dtype": ({"arrays": {"x": torch_like()}}, "torch.bfloat16.*NumPy does not know"),
    "dateless date": ({"arrays": {"x": np.zeros(20, "M8")}}, "'x'.*cannot be stored"),
    "empty mapping": ({"arrays": {}}, "no arrays were given"),
    "no mapping": ({"arrays": X}, "arrays is a ndarray; pass a mapping"),
    "name": ({"arrays": {"../x": X}}, "'../x' cannot be an array's name"),
    "number as name": ({"arrays": {1: X}}, "1 cannot be an array's name"),
    "n_shards 0": ({"n_shards": 0}, "n_shards must be .*, got 0"),
    "n_shards -1": ({"n_shards": -1}, "n_shards must be .*, got -1"),
    "n_shards 2.0": ({"n_shards": 2.0}, "n_shards must be .*, got 2.0"),
    "n_shards True": ({"n_shards": True}, "n_shards must be .*, got True"),
    "seed": ({"seed": -1}, "seed must be .*, got -1"),
    "validation 0": ({"validation": 0}, "validation is 0"),
    "validation 1": ({"validation": 1.0}, "validation is 1"),
    "validation nan": ({"validation": float("nan")}, "validation is nan"),
    "validation None": ({"validation": None}, "validation is a NoneType"),
    "validation True": ({"validation": True}, "validation is a bool"),
    "validation names": ({"validation": {"x": X}}, r"validation has arrays \['x'\]"),
    "validation dtype": ({"validation": {"x": X, "y": Y.astype("f4")}}, "'y' holds <f4.*<i8"),
    "validation shape": ({"validation": {"x": X[:, :2], "y": Y}}, r"'x' holds <f4\[2\]"),
    "validation lengths": ({"validation": {"x": X, "y": Y[:3]}}, "validation differ in length"),
    "validation few": ({"validation": {"x": X[:1], "y": Y[:1]}}, "1 validation samples are fewer"),
    "empty stream": ({"arrays": Batches([], 20)}, "empty or already used"),
    "no mappings": ({"arrays": Batches([X], 20)}, "a batch is a ndarray"),
}
LATE = {
    "too few": (Batches(batches(5, 5), 20), "ended after 10 samples, .*length is 20"),
    "too many": (Batches(batches(15, 15), 20), "gave 30 samples by batch 1, .*length is 20"),
    "other names": (Batches([{"x": X, "y": Y}, {"x": X}], 40), r"batch 1 has \['x'\]"),
    "other dtype": (Batches([{"x": X}, {"x": X.astype("f8")}], 40), "'x', batch 1: .*<f8"),
    "other shape": (Batches([{"x": X}, {"x": X[:, :2]}], 40), "'x', batch 1: samples are"),
    "uneven": (Batches([{"x": X, "y": Y}, {"x": X, "y": Y[:3]}], 40), "batch 1 differ in length"),
    "lying shape": ({"y": Y, "x": Liar(X[:, :2])}, "declared as <f4"),
    "lying length": ({"y": Y, "x": Liar(X[:3])}, "gave 3 samples for 0:20"),
    "lying dtype": ({"y": Y, "x": Liar(X.astype("i4"))}, "declared as <f4"),
}


@pytest.mark.parametrize(("changes", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_anything_is_written(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetInputError, match=says):
        ShardedDataset.write(tmp_path / "a.zarr", **{**ARGUMENTS, **changes})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arrays", "says"), LATE.values(), ids=LATE)
def test_bad_input_that_shows_late_leaves_nothing(arrays: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetInputError, match=says):
        ShardedDataset.write(tmp_path / "a.zarr", arrays, n_shards=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, -1, 2.5, True])
def test_a_length_of_batches_is_a_count(length: Any) -> None:
    with pytest.raises(DatasetInputError, match="length"):
        Batches([], length)


def test_a_stream_is_read_once_only(tmp_path: Path) -> None:
    stream = Batches(batches(10, 10), 20)
    ShardedDataset.write(tmp_path / "a.zarr", stream, n_shards=2)
    with pytest.raises(DatasetInputError, match="already used"):
        ShardedDataset.write(tmp_path / "b.zarr", stream, n_shards=2)


def write(place: Any, value: int, **options: Any) -> ShardedDataset:
    arrays = {"x": np.full((20, 3), value, "f4"), "id": np.arange(20)}
    options = {"n_shards": 2, "storage_options": place.options, **options}
    return ShardedDataset.write(place.url, arrays, **options)


def value_of(place: Any) -> int:
    data = ShardedDataset.open(place.url, place.options)
    data.verify()
    values = {int(x) for i in range(data.n_shards) for x in data.shard(i)["x"].ravel()}
    assert len(values) == 1
    return values.pop()


def test_what_exists_is_replaced_only_when_asked(place: Any) -> None:
    write(place, 1)
    with pytest.raises(DatasetExistsError, match="overwrite=True"):
        write(place, 2)
    assert value_of(place) == 1
    n_files = len(place.files())
    write(place, 2, overwrite=True)
    assert value_of(place) == 2
    assert len(place.files()) == n_files, "nothing of the old one is left"


@pytest.mark.parametrize("name", ["notes.txt", "zarr.json", "deep/er/notes.txt"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_ours_is_never_touched(place: Any, name: str, overwrite: bool) -> None:
    path = f"{place.root}/{name}"
    if place.url.startswith("file"):
        Path(path).parent.mkdir(parents=True)
    place.fs.pipe_file(path, b"mine")
    with pytest.raises(DatasetExistsError, match="never overwritten"):
        write(place, 1, overwrite=overwrite)
    assert place.files() == [name]
    assert place.fs.cat_file(path) == b"mine"


@pytest.mark.parametrize("text", [b"{}", b'{"format": "dagsel.dataset", "version": 9}', b"\0"])
def test_a_manifest_that_is_not_understood_is_not_overwritten(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "dagsel.json").write_bytes(text)
    with pytest.raises(DatasetExistsError, match="cannot be told whose it is"):
        ShardedDataset.write(tmp_path, {"x": X}, n_shards=2, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["dagsel.json"]


def test_what_a_user_has_put_beside_the_data_survives_an_overwrite(tmp_path: Path) -> None:
    ShardedDataset.write(tmp_path, {"x": X}, n_shards=2)
    (tmp_path / "README.md").write_text("mine")
    ShardedDataset.write(tmp_path, {"x": X}, n_shards=2, overwrite=True)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.zarr").write_bytes(b"mine")
    with pytest.raises(DatasetExistsError, match="is a file"):
        ShardedDataset.write(tmp_path / "a.zarr", {"x": X}, n_shards=2, overwrite=True)


def test_an_empty_folder_may_be_used(tmp_path: Path) -> None:
    assert len(ShardedDataset.write(tmp_path, {"x": X}, n_shards=2)) == 20


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_takes_itself_back(place: Any, error: type[BaseException]) -> None:
    def failing() -> Iterator[dict[str, np.ndarray]]:
        yield {"x": X}
        raise error("the input broke")

    options: Any = {"n_shards": 2, "storage_options": place.options}
    with pytest.raises(error, match="the input broke"):
        ShardedDataset.write(place.url, Batches(failing(), 40), **options)
    assert place.files() == []
    write(place, 1)
    with pytest.raises(error, match="the input broke"):
        ShardedDataset.write(place.url, Batches(failing(), 40), overwrite=True, **options)
    assert value_of(place) == 1
    assert not any("unfinished" in name for name in place.files())


FAULTY = "faulty://set.zarr"


class Faulty:
    url, root = FAULTY, "/set.zarr"
    options: ClassVar[dict[str, Any]] = {}


def n_operations(faults: Any, **options: Any) -> int:
    faults.after(10**9, crash=False)
    write(Faulty, 9, **options)
    faults.off()
    return int(faults.n_seen)


@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize("crash", [False, True])
def test_whatever_operation_fails_the_set_is_whole_or_not_there(
    faults: Any, is_overwrite: bool, crash: bool
) -> None:
    from dagsel.storage.files import Folder

    folder = Folder(FAULTY)
    outcomes = set()
    write(Faulty, 0)
    for n in range(n_operations(faults, overwrite=True) + 1):
        faults.off()
        if folder.names():
            folder.fs.rm(folder.path(), recursive=True)
        if is_overwrite:
            write(Faulty, 1)
        faults.after(n, crash=crash)
        failed = True
        try:
            write(Faulty, 2, overwrite=is_overwrite)
            failed = False
        except (OSError, faults.Crash):
            pass
        faults.off()
        try:
            found = value_of(Faulty)
        except DatasetNotFoundError:
            found = None
        outcomes.add(found)
        if is_overwrite:
            assert found in (1, 2), f"neither the old nor the new set after operation {n}"
        if not failed:
            assert found == 2
        if not crash and failed:
            assert found == (1 if is_overwrite else None)
        write(Faulty, 3, overwrite=True)
        assert value_of(Faulty) == 3
        folders = [name for name in folder.names() if name.startswith("data-")]
        assert len(folders) == 1, f"something is left behind after operation {n}"
        assert folder.names() == sorted(["dagsel.json", "zarr.json", *folders])
    assert outcomes == ({1, 2} if is_overwrite else {None, 2})


def test_a_write_that_fails_over_an_unfinished_one_still_says_so(tmp_path: Path) -> None:
    url = tmp_path / "a.zarr"
    kill_a_write(url)
    with pytest.raises(DatasetInputError, match="ended after 10"):
        ShardedDataset.write(url, Batches(batches(10), 20), n_shards=2, overwrite=True)
    with pytest.raises(DatasetNotFoundError, match="did not end"):
        ShardedDataset.open(url)
    ShardedDataset.write(url, {"x": X}, n_shards=2, overwrite=True)
    assert len(list(url.iterdir())) == 3, "the folder of the killed write is gone too"


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_last_step_that_raises_although_it_got_through_leaves_the_new_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    from dagsel.storage.files import Folder

    replace = Folder.replace

    def late(folder: Folder, key: str, data: bytes) -> None:
        replace(folder, key, data)
        if key == "dagsel.json":
            raise error

    url = tmp_path / "a.zarr"
    old = ShardedDataset.write(url, {"x": X}, n_shards=2)
    monkeypatch.setattr(Folder, "replace", late)
    with pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
        ShardedDataset.write(url, {"x": X + 1}, n_shards=2, overwrite=True)
    data = ShardedDataset.open(url)
    data.verify()
    assert data != old
    assert (data.shard(0)["x"] == 1).all()


CHILD = """
import sys, time
import numpy as np
from dagsel.storage import ShardedDataset

class Slow:
    shape, dtype = (1000, 3), np.dtype("f4")
    def __getitem__(self, key):
        print("reading", flush=True)
        time.sleep(60)

arrays = {"id": np.arange(1000), "x": Slow()}
ShardedDataset.write(sys.argv[1], arrays, n_shards=2, overwrite=True)
"""


def kill_a_write(url: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(url)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"reading\n"
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL


def test_a_killed_write_leaves_nothing_that_opens_and_says_so(tmp_path: Path) -> None:
    url = tmp_path / "a.zarr"
    kill_a_write(url)
    assert any(path.name == "0" for path in url.rglob("*")), "shards were written"
    with pytest.raises(DatasetNotFoundError, match=r"did not end.*overwrite=True"):
        ShardedDataset.open(url)
    with pytest.raises(DatasetExistsError, match=r"did not end.*overwrite=True"):
        ShardedDataset.write(url, {"x": X}, n_shards=2)
    ShardedDataset.write(url, {"x": X}, n_shards=2, overwrite=True).verify()
    assert len(list(url.iterdir())) == 3


def test_a_killed_overwrite_leaves_the_old_set(tmp_path: Path) -> None:
    url = tmp_path / "a.zarr"
    old = ShardedDataset.write(url, {"x": X}, n_shards=2)
    kill_a_write(url)
    assert ShardedDataset.open(url) == old
    old.verify()
    ShardedDataset.write(url, {"x": X}, n_shards=2, overwrite=True).verify()
    assert len(list(url.iterdir())) == 3


def test_of_two_writers_at_once_the_later_wins(tmp_path: Path) -> None:
    url = tmp_path / "a.zarr"

    def interrupted() -> Iterator[dict[str, np.ndarray]]:
        yield {"x": X}
        ShardedDataset.write(url, {"x": X + 7}, n_shards=2, overwrite=True)
        yield {"x": X}

    with pytest.raises((DatasetExistsError, OSError)):
        ShardedDataset.write(url, Batches(interrupted(), 40), n_shards=2)
    data = ShardedDataset.open(url)
    data.verify()
    assert (data.shard(0)["x"] == 7).all()


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_another_writes_while_a_stream_is_read_is_kept_or_replaced_as_a_whole(
    overwrite: bool, tmp_path: Path
) -> None:
    url = tmp_path / "a.zarr"

    def stream() -> Iterator[dict[str, np.ndarray]]:
        yield {"x": X}
        ShardedDataset.write(url, {"x": X + 7}, n_shards=2)
        yield {"x": X}

    def write() -> None:
        ShardedDataset.write(url, Batches(stream()), n_shards=2, overwrite=overwrite)

    if overwrite:
        write()
    else:
        with pytest.raises(DatasetExistsError, match="holds a data set; pass overwrite=True"):
            write()
    data = ShardedDataset.open(url)
    data.verify()
    assert data.n_train + data.n_validation == (2 if overwrite else 1) * len(X)
    assert [path.name for path in url.glob("data-*")] == [data.manifest.folder]


@pytest.mark.parametrize("stale", [["../precious"], ["/precious"], ["data-../precious"], [7], "x"])
def test_a_mark_cannot_make_us_remove_what_is_not_ours(tmp_path: Path, stale: Any) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    url = tmp_path / "a.zarr"
    ShardedDataset.write(url, {"x": X}, n_shards=2)
    body = {"format": "dagsel.dataset", "version": 1, "unfinished": stale}
    (url / "dagsel.unfinished.json").write_text(json.dumps(body))
    ShardedDataset.write(url, {"x": X}, n_shards=2, overwrite=True)
    assert precious.is_dir()


def test_every_error_is_a_dataset_error() -> None:
    with pytest.raises(DatasetError):
        ShardedDataset.write("memory://x", {}, n_shards=1)
