"""A data set is what was written, or refused; and there is none where there was no room."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attacked
import numpy as np
import pytest
import searches

from dagsel.errors import DatasetError, DatasetFormatError, ShardCorruptError
from dagsel.storage import Batches, ShardedDataset

OLD = Path(searches.__file__).parent / "data"


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    return attacked.write_data(tmp_path / "data.zarr")


def change(data: ShardedDataset, **changes: Any) -> None:
    path = Path(data.url) / "dagsel.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_train": 24},
        {"n_train": 13},
        {"n_validation": 5},
        {"n_shards": 2},
        {"seed": 1},
        {"folder": "data-0123456789abcdef"},
        {"version": 1},
        {"crc32c": None},
    ],
)
def test_a_manifest_that_was_changed_is_refused(data: ShardedDataset, changes: Any) -> None:
    change(data, **changes)
    with pytest.raises(DatasetFormatError, match="damaged"):
        ShardedDataset.open(data.url)


def test_a_shard_in_another_ones_place_is_refused_by_whoever_reads_it(
    data: ShardedDataset, tmp_path: Path
) -> None:
    other = attacked.write_data(tmp_path / "other.zarr")
    # All are of one size, so the lengths do not tell.
    objects = [path for path in sorted(Path(data.url).rglob("c/**/*")) if path.is_file()]
    strangers = [path for path in sorted(Path(other.url).rglob("c/**/*")) if path.is_file()]
    n_copied = 0
    for goal in objects:
        whole = goal.read_bytes()
        for source in [*objects, *strangers]:
            if source == goal or source.stat().st_size != len(whole):
                continue
            goal.write_bytes(source.read_bytes())
            n_copied += 1
            with pytest.raises(ShardCorruptError, match="written for another place"):
                ShardedDataset.open(data.url).verify()
            with pytest.raises(ShardCorruptError, match="written for another place"):
                attacked.read_data(Path(data.url))
        goal.write_bytes(whole)
    assert n_copied > 10
    data.verify()


def test_a_search_of_damaged_data_says_so_and_goes_on_with_a_copy(
    data: ShardedDataset, tmp_path: Path, client: Any
) -> None:
    damaged = next(Path(data.url).rglob("train/00001/x/c/0/0"))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1])
    with pytest.raises(DatasetError, match=r"shard 1 can be loaded nowhere: .*from a copy.*resume"):
        attacked.begin("sklearn", data, tmp_path / "run", client)
    damaged.write_bytes(whole)
    assert attacked.go_on("sklearn", data, tmp_path / "run", client).trials


@pytest.fixture
def old(tmp_path: Path) -> ShardedDataset:
    """A data set of version 1, which has neither checksum nor seals."""
    shutil.copytree(OLD, tmp_path / "old.zarr")
    return ShardedDataset.open(tmp_path / "old.zarr")


def test_a_data_set_of_version_1_is_read_as_before(old: ShardedDataset) -> None:
    assert old.manifest.version == 1
    old.verify()
    # The run directories beside it know it by this.
    about = json.loads((OLD.parent / "asha-ended/run.json").read_text())
    assert old.digest == about["data_digest"]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_no_other_number_of_samples_fits_a_data_set_of_version_1(
    old: ShardedDataset, split: str
) -> None:
    name, n_shards = f"n_{split}", old.n_shards
    true = getattr(old, name)
    for n in range(n_shards, 2 * true):
        change(old, **{name: n})
        if n == true:
            ShardedDataset.open(old.url)
            continue
        with pytest.raises(DatasetFormatError, match=rf"{split} shard .* which was changed"):
            ShardedDataset.open(old.url)


def test_no_fewer_shards_fit_a_data_set_of_version_1(old: ShardedDataset) -> None:
    n_train, n_validation = (sum(old.manifest.sizes(s)[:2]) for s in ("train", "validation"))
    change(old, n_shards=2, n_train=n_train, n_validation=n_validation)
    with pytest.raises(DatasetFormatError, match="shard 2 has .* samples and 0"):
        ShardedDataset.open(old.url)


# ---- no room


@contextlib.contextmanager
def small_disk(place: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB, if that may be done here."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


SOURCES: dict[str, Callable[[], Any]] = {
    "in memory": lambda: {"x": np.zeros((4000, 80), "float32")},
    "a stream": lambda: Batches(({"x": np.zeros((400, 80), "float32")} for _ in range(10)), 4000),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_full_disk_leaves_no_data_set_and_is_named(source: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        url = disk / "data.zarr"
        with pytest.raises(DatasetError) as error:
            ShardedDataset.write(url, SOURCES[source](), n_shards=4)
        text = str(error.value)
        assert str(url) in text
        assert "No space left on device" in text
        assert "it takes 1.3 MB" in text
        assert ("as much again" in text) == (source == "a stream")
        assert "make room there, or choose another URL" in text
        assert list(disk.iterdir()) == []
        # The old one stays.
        few = {"x": np.arange(40)}
        ShardedDataset.write(url, few, n_shards=4)
        with pytest.raises(DatasetError, match="No space left"):
            ShardedDataset.write(url, SOURCES[source](), n_shards=4, overwrite=True)
        kept = ShardedDataset.open(url)
        assert len(kept) == 40
        kept.verify()
        assert len(list(url.glob("data-*"))) == 1


@pytest.mark.parametrize("source", SOURCES)
def test_a_limit_of_file_sizes_is_named(source: str, tmp_path: Path) -> None:
    script = f"""
        import resource, signal
        import test_data_sets as here
        from dagsel.storage import ShardedDataset

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        url, arrays = {str(tmp_path / "data.zarr")!r}, here.SOURCES[{source!r}]()
        ShardedDataset.write(url, arrays, n_shards=4)
    """
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(
        command, env={"PYTHONPATH": ":".join(paths)}, capture_output=True, text=True, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("dagsel.errors.DatasetError: ")
    assert str(tmp_path / "data.zarr") in last
    assert "File too large" in last
    assert "ulimit -f" in last
    assert list(tmp_path.iterdir()) == []
