"""Shards on a machine's disk: those of the store, fetched once, whole or not there, then gone."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dagsel.errors import LinkError, ShardCorruptError
from dagsel.storage import RaggedArray, ShardedDataset
from dagsel.storage.datasets.manifest import SPLITS
from dagsel.storage.mapped_shard import _READ_BYTES, MappedShard, _missing
from dagsel.storage.shard_cache import ShardCache
from dagsel.storage.shared_folder import NoRoomError, locked, unlock
from tests.storage.os_calls import os_calls
from tests.waiting import wait_until

FORK = multiprocessing.get_context("fork")
N_SHARDS = 3


@pytest.fixture
def data(tmp_path: Path) -> ShardedDataset:
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(103, 4, 3)),
        "words": np.array([f"w{i}" for i in range(103)]),
        "flag": rng.random(103) < 0.5,
    }
    return ShardedDataset.write(tmp_path / "data.zarr", arrays, n_shards=N_SHARDS)


@contextmanager
def opened(folder: Path, data: ShardedDataset, **dtypes: Any) -> Iterator[ShardCache]:
    cache = ShardCache(folder, data, dtypes)
    cache.open()
    try:
        yield cache
    finally:
        cache.close()


def check(mapped: MappedShard, data: ShardedDataset, shard: int) -> None:
    stored = {"train": data.shard(shard), "validation": data.validation_shard(shard)}
    for split in SPLITS:
        assert list(mapped.arrays[split]) == list(stored[split])
        for name, array in stored[split].items():
            found = mapped.arrays[split][name]
            if isinstance(array, RaggedArray):
                np.testing.assert_array_equal(found.shapes, array.shapes)
                array, found = array.values, found.values
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() or p.is_symlink())


def only_shard(cache: ShardCache) -> Path:
    (path,) = cache.folder.glob("*.shard")
    return path


@given(
    n=st.integers(16, 40),
    n_shards=st.integers(1, 4),
    dtype=st.sampled_from(["<f8", "<f4", "|u1", "<i8", "|b1", "<U3", "<c16"]),
    shape=st.lists(st.integers(1, 5), max_size=2),
    lengths=st.integers(0, 3),
)
def test_its_arrays_are_those_of_the_store(
    tmp_path_factory: pytest.TempPathFactory,
    n: int,
    n_shards: int,
    dtype: str,
    shape: list[int],
    lengths: int,
) -> None:
    rng = np.random.default_rng(n)
    values = rng.integers(0, 100, (n, *shape)).astype(dtype)
    ids = RaggedArray.of([rng.integers(0, 9, rng.integers(0, 1 + lengths)) for _ in range(n)])
    folder = tmp_path_factory.mktemp("cache")
    arrays = {"a": values, "ids": ids}
    url = folder / "data.zarr"
    data = ShardedDataset.write(url, arrays, n_shards=n_shards, validation=0.3, ragged=["ids"])
    with opened(folder / "cache", data) as cache:
        for shard in range(n_shards):
            check(cache.load(shard), data, shard)
    assert not files(folder / "cache")


def test_an_array_is_cast_as_numpy_casts_it(tmp_path: Path, data: ShardedDataset) -> None:
    with opened(tmp_path / "cache", data, x="float32") as cache:
        found = cache.load(1).arrays["train"]["x"]
        assert found.tobytes() == np.asarray(data.shard(1)["x"], np.float32).tobytes()
        with opened(tmp_path / "cache", data) as other:  # another run, which does not cast
            check(other.load(1), data, 1)


def test_it_cannot_be_written_to(tmp_path: Path, data: ShardedDataset) -> None:
    with opened(tmp_path / "cache", data) as cache:
        with pytest.raises(ValueError, match="read-only"):
            cache.load(0).arrays["train"]["x"][0] = 1.0


def test_it_is_fetched_once_and_readable_without_the_store(
    tmp_path: Path, data: ShardedDataset
) -> None:
    expected = data.shard(0)["x"]
    with opened(tmp_path / "cache", data) as cache, opened(tmp_path / "cache", data) as other:
        assert cache.load(0).fetched_bytes == data.shard_sizes[0].nbytes
        shutil.rmtree(data.url)
        assert other.load(0).fetched_bytes == cache.load(0).fetched_bytes == 0
        found = other.load(0).arrays["train"]["x"]
    np.testing.assert_array_equal(found, expected)  # though the file is gone
    assert not files(tmp_path / "cache")


# ---- several processes


def in_a_child(work: Callable[[], Any]) -> int:
    """Run something in a copy of this process; return its exit code."""
    child = FORK.Process(target=work)
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def test_processes_share_one_copy(tmp_path: Path, data: ShardedDataset) -> None:
    n_workers, fetched = 4, FORK.SimpleQueue()
    everybody = FORK.Barrier(n_workers)

    def work(k: int) -> None:
        with opened(tmp_path / "cache", data) as cache:
            everybody.wait()
            for shard in (np.arange(N_SHARDS) + k) % N_SHARDS:
                mapped = cache.load(int(shard))
                check(mapped, data, int(shard))
                fetched.put(mapped.fetched_bytes)

    children = [FORK.Process(target=work, args=(k,)) for k in range(n_workers)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0] * n_workers
    assert sum(fetched.get() for _ in range(n_workers * N_SHARDS)) == data.nbytes
    assert not list(tmp_path.glob("cache/*"))


def killed_after(n: int, folder: Path, data: ShardedDataset) -> Callable[[], None]:
    """Use the cache in a process that is killed at its n-th call of the system."""
    left = n

    def counted(_: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return call

    def work() -> None:
        names = ("open", "write", "close", "replace", "rename", "unlink", "mkdir", "rmdir", "lstat")
        with os_calls(names, counted), opened(folder, data) as cache:
            for shard in range(2):
                cache.load(shard)
        os._exit(0)

    return work


def test_a_kill_at_any_step_leaves_whole_shards_or_none(
    tmp_path: Path, data: ShardedDataset
) -> None:
    folder, n = tmp_path / "cache", 0
    has_ended = False
    while not has_ended:
        exit_code = in_a_child(killed_after(n, folder, data))
        has_ended, n = exit_code == 0, n + 1
        assert exit_code in (0, -signal.SIGKILL)
        with opened(folder, data) as cache:
            there = [p.name for p in cache.folder.glob("*.shard")]
            mapped = [cache.load(shard) for shard in range(2)]
            for shard in range(2):
                check(mapped[shard], data, shard)
            is_new = [m.fetched_bytes > 0 for m in mapped]
            assert is_new == [not any(p.startswith(f"0000{s}") for p in there) for s in range(2)]
            assert not list(cache.folder.glob("*.tmp"))
        assert not files(folder)
    assert n > 30, "it was killed at each step"


def test_what_a_killed_run_has_left_is_removed_by_the_next(
    tmp_path: Path, data: ShardedDataset
) -> None:
    other = ShardedDataset.write(tmp_path / "other.zarr", {"x": np.arange(9.0)}, n_shards=1)
    folder = tmp_path / "cache"

    def work() -> None:
        for cached in (data, other):
            cache = ShardCache(folder, cached)
            cache.open()
            cache.load(0)
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(work) == -signal.SIGKILL
    assert len([name for name in files(folder) if name.endswith(".shard")]) == 2
    with opened(folder, data) as cache:
        assert only_shard(cache).is_file()
        assert len([name for name in files(folder) if name.endswith(".shard")]) == 1
        assert cache.load(0).fetched_bytes == 0
        with opened(folder, other) as its:
            assert its.load(0).fetched_bytes
            assert only_shard(cache).is_file(), "what is in use stays"
    assert not files(folder)


# ---- damage


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(draw=st.data(), how=st.sampled_from(["flip", "cut", "extend", "empty", "swap"]))
def test_a_damaged_file_is_found_and_fetched_anew(
    tmp_path: Path, data: ShardedDataset, draw: st.DataObject, how: str
) -> None:
    with opened(tmp_path / "cache", data) as first, opened(tmp_path / "cache", data) as second:
        first.load(0)
        path = only_shard(first)
        text = bytearray(path.read_bytes())
        if how == "flip":
            text[draw.draw(st.integers(0, len(text) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
        elif how == "cut":
            del text[draw.draw(st.integers(0, len(text) - 1)) :]
        elif how == "extend":
            text += b"\0"
        elif how == "empty":
            text.clear()
        else:  # another shard's file, of the same length
            first.load(1)
            text = bytearray(path.with_name(path.name.replace("00000", "00001")).read_bytes())
        path.unlink()
        path.write_bytes(text)
        mapped = second.load(0)
        assert mapped.fetched_bytes == data.shard_sizes[0].nbytes
        check(mapped, data, 0)
        path.with_name(path.name.replace("00000", "00001")).unlink(missing_ok=True)


def test_damage_in_the_store_is_told_and_nothing_is_kept(
    tmp_path: Path, data: ShardedDataset
) -> None:
    chunk = next(p for p in (tmp_path / "data.zarr").rglob("train/00001/x/c/0/0/0"))
    text = bytearray(chunk.read_bytes())
    text[len(text) // 2] ^= 1
    chunk.write_bytes(text)
    with opened(tmp_path / "cache", data) as cache:
        with pytest.raises(ShardCorruptError, match="shard 1 .*'x'.*checksum|shard 1"):
            cache.load(1)
        assert all(name.endswith(".lock") for name in files(cache.folder))
        chunk.unlink()
        with pytest.raises(ShardCorruptError, match="missing object"):
            cache.load(1)
        check(cache.load(0), data, 0)


def test_ragged_samples_that_do_not_fit_their_values_are_told(tmp_path: Path) -> None:
    ids = RaggedArray.of([np.arange(n) for n in (1, 2, 3, 4)])
    data = ShardedDataset.write(tmp_path / "data.zarr", {"ids": ids}, n_shards=1, ragged=["ids"])
    key, form = next(iter(data.manifest.forms("train", 0, data.manifest.arrays[0]).items()))
    with (tmp_path / "data.zarr" / key / form.key).open("wb") as file:  # with right checksums
        form.encode(file, [np.ones((form.n_samples, *form.shape), form.dtype)])
    told = "shard 0 .*shapes do not fit the values in 'ids'"
    with opened(tmp_path / "cache", data) as cache:
        for _ in range(2):
            with pytest.raises(ShardCorruptError, match=told):
                cache.load(0)
    with pytest.raises(ShardCorruptError, match=told):
        data.shard(0)


# ---- a full disk


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("name", ["open", "write", "replace"])
def test_a_disk_that_takes_no_more_leaves_nothing_half_written(
    tmp_path: Path, data: ShardedDataset, number: int, name: str
) -> None:
    calls = 0

    def failing(_: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            is_new = name != "open" or str(args[0]).endswith(".tmp")
            if is_new and (name != "write" or calls == 3):
                raise OSError(number, os.strerror(number))
            return function(*args, **kwargs)

        return call

    # Of `Path.replace` the system's call.
    names = ["rename" if name == "replace" and not hasattr(os, "replace") else name]
    with opened(tmp_path / "cache", data) as cache:
        with os_calls(names, failing), pytest.raises(NoRoomError, match=os.strerror(number)):
            cache.load(0)
        assert all(found.endswith(".lock") for found in files(cache.folder))
        check(cache.load(0), data, 0)  # there is room again


def test_a_shard_for_which_there_is_no_room_is_not_begun(
    tmp_path: Path, data: ShardedDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "cache", data) as cache:
        about = os.statvfs(tmp_path)
        none_free = os.statvfs_result([*about[:4], 0, *about[5:]])
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", lambda path: none_free)
            with pytest.raises(NoRoomError, match="0 bytes are free"):
                cache.load(0)
        check(cache.load(0), data, 0)


def test_a_file_that_may_not_grow_is_no_shard(tmp_path: Path, data: ShardedDataset) -> None:
    def work() -> None:
        with opened(tmp_path / "cache", data) as cache:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, resource.RLIM_INFINITY))
            with pytest.raises(NoRoomError, match="File too large"):
                cache.load(0)
            assert all(name.endswith(".lock") for name in files(cache.folder))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            check(cache.load(0), data, 0)
        os._exit(0)

    assert in_a_child(work) == 0


# ---- links, and what others have put there


def test_nothing_is_written_or_removed_through_a_link(tmp_path: Path, data: ShardedDataset) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    mine = elsewhere / f"{0:05d}-00000000.shard"
    mine.write_text("mine")
    with opened(tmp_path / "cache", data) as cache:
        cache.load(0)
        root, key, shard = cache.root, cache.folder, only_shard(cache)
    for link in (root, key):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(elsewhere)
        with pytest.raises(LinkError, match="is a link"), opened(tmp_path / "cache", data):
            pass
        link.unlink()
    for name in (shard.name, shard.with_suffix(".tmp").name, shard.with_suffix(".lock").name):
        with opened(tmp_path / "cache", data) as cache:
            (key / name).symlink_to(mine)
            if name.endswith(".lock"):
                with pytest.raises(NoRoomError):
                    cache.load(0)
            else:
                check(cache.load(0), data, 0)
    for stale in (root / ("0" * 32), root / ("1" * 32 + ".lock")):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        stale.symlink_to(elsewhere if not stale.suffix else mine)
        with opened(tmp_path / "cache", data):
            pass
        assert stale.is_symlink()
        stale.unlink()
    assert mine.read_text() == "mine"
    assert list(elsewhere.iterdir()) == [mine]


def test_a_folder_to_which_others_may_write_is_refused(
    tmp_path: Path, data: ShardedDataset
) -> None:
    root = ShardCache(tmp_path / "cache", data).root
    root.mkdir(parents=True)
    root.chmod(0o777)
    with pytest.raises(LinkError, match="others may write"), opened(tmp_path / "cache", data):
        pass


def test_files_of_others_stay(tmp_path: Path, data: ShardedDataset) -> None:
    with opened(tmp_path / "cache", data) as cache:
        cache.load(0)
        mine = [cache.root / "notes.txt", cache.folder / "notes.txt"]
        for path in mine:
            path.write_text("mine")
    assert all(path.read_text() == "mine" for path in mine)
    assert not list(tmp_path.rglob("*.shard"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, data: ShardedDataset) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NoRoomError, match="file/"), opened(tmp_path / "file", data):
        pass


# ---- pages


@pytest.fixture
def large(tmp_path: Path) -> ShardedDataset:
    x = np.random.default_rng(0).integers(0, 255, (20_000, 4_000), np.uint8)
    return ShardedDataset.write(tmp_path / "large.zarr", {"x": x}, n_shards=1)


def of_files() -> int:
    taken: Any = psutil.Process().memory_info()
    return int(taken.shared)


def test_pages_that_are_forgotten_leave_the_process_and_come_back(
    tmp_path: Path, large: ShardedDataset
) -> None:
    with opened(tmp_path / "cache", large) as cache:
        mapped, before = cache.load(0), of_files()
        array = mapped.arrays["train"]["x"]
        total = int(array.sum(dtype=np.int64))
        assert of_files() - before > 0.9 * array.nbytes
        mapped.forget_pages()
        assert of_files() - before < 0.1 * array.nbytes
        assert int(array.sum(dtype=np.int64)) == total


def test_what_the_system_does_not_hold_is_read_ahead(tmp_path: Path, large: ShardedDataset) -> None:
    with opened(tmp_path / "cache", large) as cache:
        mapped = cache.load(0)
        fd = os.open(only_shard(cache), os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        end = mapped._ends["train"]
        n_missing = len(_missing(mapped._mapping, 0, end))
        if n_missing < 10:
            pytest.skip("this file system is memory")
        before = psutil.Process().io_counters().read_chars
        with mapped.read_ahead("train"):
            wait_until(
                lambda: all(thread.name != "dagsel-ahead" for thread in threading.enumerate()),
                "all is read",
            )
        n_read = psutil.Process().io_counters().read_chars - before
        assert 0.9 * n_missing * _READ_BYTES < n_read < end + 2**22, "what is missing of the split"
        n_left = len(_missing(mapped._mapping, 0, end))  # the system may drop some at any moment
        assert n_left < n_missing / 2, "the system holds it"
        assert _missing(mapped._mapping, end, len(mapped._mapping)), "of the split alone"


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path: Path) -> None:
    """Who waits for the lock while its holder removes the file locks the one that is there then."""
    import fcntl

    path = tmp_path / "a.lock"
    held = locked(path, fcntl.LOCK_EX)
    assert held is not None
    got = FORK.SimpleQueue()

    def wait() -> None:
        found = locked(path, fcntl.LOCK_EX)
        assert found is not None
        got.put(os.fstat(found).st_ino == path.stat().st_ino)

    child = FORK.Process(target=wait)
    child.start()
    wait_until(lambda: "flock" in _waits_in(child.pid), "the child waits for the lock")
    path.unlink()
    unlock(held)  # which the child has inherited
    assert got.get()
    child.join()


def _waits_in(pid: int | None) -> str:
    """Return the system call in which a process waits."""
    try:
        return "flock" if Path(f"/proc/{pid}/syscall").read_text().startswith("73 ") else ""
    except OSError:
        return "flock"
