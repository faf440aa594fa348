"""Laws of shards and blocks, of the permutation of a data set, and of a folder and its lock."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import DatasetInputError, LinkError, RunDirError, RunDirLockedError
from dagsel.storage import RunDir, disk
from dagsel.storage.datasets import pair, plan
from dagsel.storage.datasets.inputs.arrays import as_array
from dagsel.storage.datasets.permutation import Shuffle, _hash
from dagsel.storage.datasets.plan import plan_write
from dagsel.storage.datasets.scratch import read_at, write_at
from dagsel.storage.datasets.sources import _block_bounds
from dagsel.storage.datasets.transaction import _free_bytes
from dagsel.storage.datasets.zarr_shard import ShardFormat
from dagsel.storage.files import Folder
from dagsel.storage.runs import lock
from dagsel.storage.runs.checkpoints import Extent


@given(st.integers(3, 60_000), st.integers(1, 200_000))
def test_a_pair_has_as_few_shards_as_its_size_allows_and_no_crowd_of_small_ones(
    n_samples: int, width: int
) -> None:
    x = np.broadcast_to(np.float32(0), (n_samples, width))
    y = np.broadcast_to(np.int64(0), (n_samples,))
    n_shards = pair.ArrayPair.read(x, y).manifest.n_shards
    nbytes = n_samples * (4 * width + 8)
    assert n_shards == 1 or n_samples >= n_shards * plan.SHARD_SAMPLES
    if n_samples >= (n_shards + 1) * plan.SHARD_SAMPLES:  # more would not be too small
        assert nbytes <= n_shards * plan.LARGE_SHARD_BYTES
        assert n_shards >= plan.MANY or nbytes <= n_shards * plan.SHARD_BYTES
    if n_shards > 1:  # fewer would be too large
        assert nbytes > (n_shards - 1) * plan.SHARD_BYTES
    if n_shards > plan.MANY:
        assert nbytes > (n_shards - 1) * plan.LARGE_SHARD_BYTES


@given(st.integers(1, 60_000), st.integers(1, 3000), st.integers(1, 200_000), st.booleans())
def test_without_a_number_each_part_has_a_sample_for_each_shard(
    n_train: int, n_validation: int, width: int, has_groups: bool
) -> None:
    x = np.broadcast_to(np.float32(0), (n_train + n_validation, width))
    arrays: dict[str, Any] = {"x": x[:n_train]}
    how: dict[str, Any] = {"validation": {"x": x[n_train:]}}
    if has_groups:
        words = ["train"] * n_train + ["valid"] * n_validation
        arrays, how = {"x": x}, {"validation": "auto", "split": words}
    found = plan_write(arrays, "data-00000000", n_shards="auto", seed=0, **how)
    n_shards = found.manifest.n_shards
    assert 1 <= n_shards <= min(n_train, n_validation)
    all_of_it = plan.shards_for(x.nbytes, len(x))
    assert n_shards == min(all_of_it, n_train, n_validation)
    shards = [shard for part in found.inputs for shard in part.shards]
    assert [split for split, _, _ in shards] == ["train"] * n_shards + ["validation"] * n_shards
    n_samples = {"train": n_train, "validation": n_validation}
    for split, n in n_samples.items():
        assert sum(size for of, _, size in shards if of == split) == n


@given(st.lists(st.text("ab", max_size=3), min_size=1, max_size=4))
def test_text_becomes_an_array_of_text_whatever_holds_it(words: list[str]) -> None:
    for value in (words, np.array(words, dtype=object), np.array(words)):
        found = as_array("y", value)
        assert found.dtype.kind == "U"
        assert found.tolist() == words


@given(st.integers(2, 40), st.integers(1, 39), st.integers(1, 8))
def test_each_shard_has_samples_to_train_and_to_validate_or_nothing_is_written(
    n_samples: int, n_validation: int, n_shards: int
) -> None:
    if n_validation >= n_samples:
        return
    part: dict[str, Any] = {"validation": n_validation / n_samples, "seed": 0}
    arrays = {"x": np.zeros((n_samples, 1))}
    if min(n_validation, n_samples - n_validation) >= n_shards:
        manifest = plan_write(arrays, "data-00000000", n_shards=n_shards, **part).manifest
        assert manifest.n_validation == n_validation
        assert manifest.n_train == n_samples - n_validation
    else:
        with pytest.raises(DatasetInputError, match="lower n_shards or change validation"):
            plan_write(arrays, "data-00000000", n_shards=n_shards, **part)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 20))
def test_blocks_are_whole_chunks_and_none_is_read_twice(
    length: int, chunk: int, block_rows: int
) -> None:
    array = SimpleNamespace(shape=(length,), chunks=(chunk,))
    bounds = list(_block_bounds(array, block_rows))
    assert (bounds[0][0], bounds[-1][1]) == (0, length)
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    assert all(start % chunk == 0 for start, _ in bounds)
    assert all(stop - start <= max(chunk, block_rows) for start, stop in bounds)


def test_the_hash_is_that_of_its_paper() -> None:
    # SplitMix64 from the seed 1234567, as published with its reference implementation.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    with np.errstate(over="ignore"):
        found = _hash(np.arange(1, 6, dtype=np.uint64), np.uint64(1234567))
    assert found.tolist() == published


@pytest.mark.parametrize("n_samples", [2**16 + 1, 2**17, 2**17 + 3])
def test_a_large_permutation_draws_no_number_from_outside_the_next_power_of_two(
    n_samples: int,
) -> None:
    bits = (n_samples - 1).bit_length()
    every = np.arange(2**bits, dtype=np.uint64)
    found = Shuffle(n_samples, 5)._network(every, range(1))
    assert np.array_equal(np.sort(found), every)


def test_while_one_looks_at_the_lock_no_other_process_of_the_machine_does(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with lock._alone(Folder(tmp_path)), pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)


def test_a_driver_that_this_user_may_not_look_at_is_alive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = psutil.Process

    def hidden(pid: int | None = None) -> psutil.Process:
        if pid is not None:
            raise psutil.AccessDenied(pid)
        return process()

    with RunDir(tmp_path).lock("one"):
        monkeypatch.setattr(psutil, "Process", hidden)
        with pytest.raises(RunDirLockedError):
            RunDir(tmp_path).lock("two")


@pytest.mark.parametrize("decides", [True, False])
def test_a_lock_waits_only_for_stores_that_may_let_two_win(
    decides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(lock, "_DECIDES", {"memory"} if decides else set())
    monkeypatch.setattr(time, "sleep", slept.append)
    with RunDir(f"memory://{uuid.uuid4().hex}").lock("one"):
        assert slept == ([] if decides else [lock._SETTLE_S])


def test_a_folder_is_free_until_a_run_has_begun_in_it(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.check_free()
    run_dir.claim("3f9a", {"n": 3})
    run_dir.check_free()
    run_dir.journal.append([{"is": "session"}])
    with pytest.raises(RunDirError, match="holds run 3f9a already; go on with it by dagsel.resume"):
        run_dir.check_free()


@pytest.mark.parametrize("place", ["a", "a/b", "a/b/c", "a/b/c/d"])
@pytest.mark.parametrize("child", ["", "a", "a/b", "a/b/c"])
def test_no_folder_on_the_way_is_a_link_unless_the_user_has_named_it(
    tmp_path: Path, place: str, child: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "named").symlink_to(tmp_path / "elsewhere")  # the whole folder may be a link
    folder = Folder(tmp_path / "named")
    there = folder.child(child) if child else folder
    key = "a/b/c/d".removeprefix(child).lstrip("/")
    assert there.own(key) == tmp_path / "named/a/b/c/d"
    link = tmp_path / "elsewhere" / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path)
    if place == "a/b/c/d":
        assert there.own(key) == tmp_path / "named/a/b/c/d"  # it is replaced as a whole
        with pytest.raises(LinkError):
            there.own(key, whole=False)
    else:
        with pytest.raises(LinkError, match=place):
            there.own(key)


def test_a_folder_belongs_to_the_run_that_has_claimed_it() -> None:
    folder = RunDir(f"memory://{uuid.uuid4().hex}")
    assert not folder.belongs_to("mine")
    folder.claim("mine", {})
    assert folder.belongs_to("mine")
    assert not folder.belongs_to("other")


@pytest.mark.parametrize("kind", ["frame", "array"])
def test_an_error_names_the_columns_that_are_neither_numbers_nor_text(kind: str) -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": [None, {}], "c": [True, False], "d": [(), "x"]})
    value = frame if kind == "frame" else frame.to_numpy()
    is_frame = kind == "frame"
    wanted = "not all columns of x .*: 'b', 'd' hold" if is_frame else "x holds neither numbers"
    with pytest.raises(DatasetInputError, match=f"^{wanted}"):
        as_array("x", value)


def test_what_is_no_number_is_told_with_what_makes_numbers_of_it() -> None:
    frame = pd.DataFrame(
        {
            "a": [1.0, 2.0],
            "day": pd.to_datetime(["2020-01-01", "2020-01-03"]),
            "took": pd.to_timedelta(["1D", "2D"]),
            "cost": ["1.5", "2"],
            "city": ["Ulm", "Bonn"],
        }
    )
    with pytest.raises(DatasetInputError) as caught:
        as_array("x", frame)
    x: Any = frame
    text = str(caught.value)
    cures = [part.partition(", write ")[2] for part in text.partition(": ")[2].split("; ")]
    assert len(cures) == 4
    for cure in cures:  # each does what it says
        names = {"x": x, "pandas": pd}
        exec(cure, names)
        x = names["x"]
    assert as_array("x", x).dtype.kind == "f"
    assert x["day"].tolist() == [0, 2]
    assert x["cost"].tolist() == [1.5, 2.0]


def test_free_space_is_that_of_the_disk_on_which_a_folder_will_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "a" / "b"):
        free, now = _free_bytes(str(path)), shutil.disk_usage(tmp_path).free
        assert free == pytest.approx(now, rel=0.1)


def test_a_lock_that_is_released_while_it_is_read_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    held, reads = RunDir(url).lock("first"), list[Any]()
    read = lock._read

    def release_first(folder: Folder) -> Any:
        if not reads:
            held.release()
        reads.append(folder)
        return read(folder)

    monkeypatch.setattr(lock, "_read", release_first)
    with RunDir(url).lock("second") as mine:
        assert mine.holder.run == "second"
    assert reads


@pytest.mark.parametrize("numbers", [(1,), (1, 2), (2, 9, 5)])
def test_the_extent_of_a_trial_is_its_last_epoch_and_its_last_check(
    numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier copies are there where a driver was killed before it removed them."""
    states = RunDir(f"memory://{uuid.uuid4().hex}").states
    monkeypatch.setattr(type(states), "drop_checks", lambda *args, **options: None)
    for epoch in (1, 2):
        states.save(0, epoch, 0, b"state", {})
    for number in numbers:
        states.keep_check(0, number, 1, 0, partial=False)
    assert states.extents() == {0: Extent(epoch=2, n_checks=max(numbers))}


@given(st.integers(0, 60))
def test_a_full_disk_is_tried_again_soon_then_every_five_seconds_until_patience_is_over(
    patience_s: int,
) -> None:
    pauses: list[float] = []

    def full() -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        disk.retry_while_full(full, "it", patience_s=patience_s, sleep=pauses.append)
    assert pauses == pytest.approx([min(0.1 * 2**n, 5.0) for n in range(len(pauses))])
    assert sum(pauses[:-1]) < patience_s <= sum(pauses) or not patience_s


@given(st.integers(1, 40), st.integers(0, 9), st.integers(1, 7))
def test_what_a_file_system_writes_and_reads_in_pieces_is_whole(
    n: int, offset: int, most: int
) -> None:
    rows, found = np.arange(n, dtype="i4"), np.zeros(n, dtype="i4")
    pwrite, preadv = os.pwrite, os.preadv

    def write(fd: int, data: Any, at: int) -> int:
        return pwrite(fd, data[:most], at)

    def read(fd: int, buffers: list[Any], at: int) -> int:
        return preadv(fd, [buffers[0][:most]], at)

    with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        patch.setattr(os, "preadv", read)
        write_at(file.fileno(), rows, offset)
        read_at(file.fileno(), found, offset)
        assert os.pread(file.fileno(), 999, 0) == bytes(offset) + rows.tobytes()
    assert np.array_equal(found, rows)


def test_an_array_that_zarr_refuses_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: object) -> bytes:
        raise ValueError("no codec for it")

    monkeypatch.setattr(ShardFormat, "metadata", refuse)
    with pytest.raises(DatasetInputError, match="'x' of dtype .* cannot be stored: no codec"):
        plan_write({"x": np.zeros((8, 2))}, "data-00000000", n_shards=2, validation=0.5, seed=0)
