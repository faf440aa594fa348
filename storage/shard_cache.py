"""Shards on a machine's own disk: fetched once from the store, checked, then mapped into memory.

The workers of a machine share one folder, and so do runs on the same data set::

    dagsel-shards-1000/              of the user 1000, who alone may write to it
        5f1c….lock                   its users hold a lock on it, which dies with them
        5f1c…/00003-9a41c2.shard     all arrays of a shard as they lie in memory, and a checksum
        5f1c…/00003-9a41c2.lock      held while the shard is fetched

A shard is written aside and renamed, so a file with that name is whole unless the disk has damaged
it; who has not written it himself reads it through once and compares the checksum. Whoever leaves
last removes the folder. What a killed run has left is removed by the next that comes, or used, if
it has the same data. A name with another ending is never touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dagsel.errors import ShardCorruptError
from dagsel.storage.datasets.dataset import ShardedDataset, ragged_array
from dagsel.storage.datasets.manifest import SPLITS, Split
from dagsel.storage.datasets.zarr_shard import DamagedError, ShardFormat
from dagsel.storage.disk import write_all
from dagsel.storage.mapped_shard import MappedShard
from dagsel.storage.shared_folder import (
    check_room,
    locked,
    make_own,
    on_disk,
    opened,
    remove_unused,
    sweep,
    unlock,
)

#: Where a worker holds shards; ``"auto"`` puts on the disk what does not fit into memory.
Hold: TypeAlias = Literal["memory", "disk", "auto"]

_ALIGNED = 1 << 16  # a page is no larger anywhere
_CRC_BYTES = 4
_READ_BYTES = 1 << 20
_OWN_FILE = re.compile(r"\d{5,}-[0-9a-f]{8}\.(shard|lock|tmp)")
_logger = logging.getLogger("dagsel")


@dataclass(frozen=True, slots=True)
class _Part:
    """An array, or the shapes or the values of a ragged one, as they lie in a shard's file."""

    split: Split
    name: str
    key: str  # where they are in the store
    form: ShardFormat
    dtype: np.dtype[Any]
    offset: int

    @property
    def n_bytes(self) -> int:
        count = self.form.n_samples * int(np.prod(self.form.shape, dtype=np.int64))
        return count * self.dtype.itemsize


class ShardCache:
    """The shards of a data set on this machine's disk.

    Threads and processes may use it at once.

    Parameters
    ----------
    folder
        Where the folder of all data sets is, or is made.
    data
        The data set.
    dtypes
        Arrays that are kept in another dtype, by name.

    Examples
    --------
    >>> import tempfile
    >>> arrays = {"x": np.arange(10.0)}
    >>> data = ShardedDataset.write("memory://cached.zarr", arrays, n_shards=2, overwrite=True)
    >>> folder = tempfile.TemporaryDirectory()
    >>> cache = ShardCache(folder.name, data, {"x": "float32"})
    >>> cache.open()
    >>> shard = cache.load(1)
    >>> shard.fetched_bytes, shard.arrays["train"]["x"].dtype
    (40, dtype('float32'))
    >>> cache.load(1).fetched_bytes
    0
    >>> cache.close()
    >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        data: ShardedDataset,
        dtypes: Mapping[str, Any] | None = None,
    ) -> None:
        self.root = Path(folder) / f"dagsel-shards-{os.getuid()}"
        self._data = data
        self._dtypes = {name: np.dtype(dtype) for name, dtype in (dtypes or {}).items()}
        # What two data sets with one manifest hold is equal: it names the folder of its own write.
        self._key = hashlib.sha256(data.manifest.to_json()).hexdigest()[:32]
        kept = repr(sorted((name, dtype.str) for name, dtype in self._dtypes.items()))
        self._kind = hashlib.sha256(kept.encode()).hexdigest()[:8]
        self._lock: int | None = None
        self._own: set[int] = set()  # shards that this process has written or checked

    @property
    def folder(self) -> Path:
        """Where the data set's shards are."""
        return self.root / self._key

    def open(self) -> None:
        """Make the folder, or use it with others, and remove what dead runs have left.

        Raises
        ------
        LinkError
            If the folder is a link, or somebody else may write to it.
        NoRoomError
            If it cannot be made.
        """
        try:
            with on_disk(self.root):
                while self._lock is None:
                    self.root.parent.mkdir(parents=True, exist_ok=True)
                    make_own(self.root)
                    with contextlib.suppress(FileNotFoundError):  # who left last has removed it
                        sweep(self.root, _OWN_FILE, besides=self._key)
                        self._lock = locked(self.root / f"{self._key}.lock", fcntl.LOCK_SH)
                make_own(self.folder)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the folder, and remove it if nobody else uses it. Mapped shards stay readable."""
        lock, self._lock = self._lock, None
        if lock is not None:
            unlock(lock)
            with contextlib.suppress(OSError):
                remove_unused(self.root, self._key, _OWN_FILE)
                self.root.rmdir()

    def load(self, shard: int) -> MappedShard:
        """Map a shard; fetch it from the store if it is not there or damaged.

        Raises
        ------
        NoRoomError
            If the disk does not take it. Nothing of it is left there.
        ShardCorruptError
            If it is damaged in the store.
        """
        assert self._lock is not None, "opened before"
        path = self.folder / f"{shard:05d}-{self._kind}.shard"
        with on_disk(path.parent):
            lock = locked(path.with_suffix(".lock"), fcntl.LOCK_EX)
        assert lock is not None
        try:
            parts = self._parts(shard)
            found = self._found(path, shard, parts)
            if found is not None:
                return found
            self._fetch(path, shard, parts)
            self._own.add(shard)
            with on_disk(path.parent):
                return self._mapped(path, shard, parts, self._data.shard_sizes[shard].nbytes)
        finally:
            unlock(lock)

    def _parts(self, shard: int) -> list[_Part]:
        """Return where the arrays of a shard lie in its file, one after the other."""
        parts: list[_Part] = []
        end = 0
        for split in SPLITS:
            for spec in self._data.manifest.arrays:
                forms = self._data.manifest.forms(split, shard, spec)
                cast = self._dtypes.get(spec.name, spec.numpy_dtype)
                dtypes = [*[np.dtype(form.dtype) for form in forms.values()][:-1], cast]
                for (key, form), dtype in zip(forms.items(), dtypes, strict=True):
                    parts.append(_Part(split, spec.name, f"{key}/{form.key}", form, dtype, end))
                    end = _aligned(end + parts[-1].n_bytes)
        return parts

    def _found(self, path: Path, shard: int, parts: list[_Part]) -> MappedShard | None:
        """Map a file that is there, unless it is damaged; that of another process is read through.

        Whoever holds the shard's lock may remove it.
        """
        try:
            if shard not in self._own:
                with opened(path) as file:
                    _check(file, self._seal(shard), _size(parts))
                self._own.add(shard)
            return self._mapped(path, shard, parts, 0)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, DamagedError, ShardCorruptError) as error:
            _logger.warning("%s is fetched again from %s: %s", path, self._data.url, error)
            self._own.discard(shard)
            with on_disk(path.parent):
                path.unlink(missing_ok=True)
            return None

    def _fetch(self, path: Path, shard: int, parts: list[_Part]) -> None:
        aside = path.with_suffix(".tmp")
        try:
            with on_disk(path.parent):
                aside.unlink(missing_ok=True)  # of a process that was killed
                check_room(path.parent, _size(parts))
                fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                self._write(fd, path, shard, parts)
            finally:
                os.close(fd)
            with on_disk(path.parent):
                aside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
            raise

    def _write(self, fd: int, path: Path, shard: int, parts: list[_Part]) -> None:
        """Write a shard's arrays as they come from the store, and the checksum of all."""
        seal, end = self._seal(shard), 0
        for part in parts:
            gap = np.zeros(part.offset - end, np.uint8)
            for data in itertools.chain([gap], self._read(shard, part)):
                seal = google_crc32c.extend(seal, data)
                with on_disk(path.parent):
                    write_all(fd, data.data)
            end = part.offset + part.n_bytes
        with on_disk(path.parent):
            write_all(fd, seal.to_bytes(_CRC_BYTES, "little"))

    def _read(self, shard: int, part: _Part) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of an array piece by piece, each checked and in the dtype it has here."""
        data = self._data
        try:
            stream, n_bytes = data.folder.open_read(part.key, expected=part.form.object_bytes)
            with stream:
                if n_bytes != part.form.object_bytes:
                    raise DamagedError(f"{n_bytes} bytes instead of {part.form.object_bytes}")
                for piece in part.form.pieces(stream):
                    values = piece.view(part.form.dtype)
                    yield np.asarray(values, part.dtype).view(np.uint8)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            reason = "missing object"
        except DamagedError as error:
            reason = str(error)
        else:
            return
        raise ShardCorruptError(shard, part.name, data.url, reason, part.split)

    def _seal(self, shard: int) -> int:
        place = f"{self._key}/{shard:05d}-{self._kind}"
        value: int = google_crc32c.value(place.encode())
        return value

    def _mapped(
        self, path: Path, shard: int, parts: list[_Part], fetched_bytes: int
    ) -> MappedShard:
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size != _size(parts):
                raise DamagedError("its length has changed")
            # One open file for each shard would come near the limit of open files.
            options = {"trackfd": False} if sys.version_info >= (3, 13) else {}
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ, **options)
        found: dict[tuple[Split, str], list[NDArray[Any]]] = {}
        for part in parts:
            shape = (part.form.n_samples, *part.form.shape)
            count = part.n_bytes // part.dtype.itemsize
            flat = np.frombuffer(mapping, part.dtype, count, part.offset)
            found.setdefault((part.split, part.name), []).append(flat.reshape(shape))
        arrays: dict[Split, dict[str, Any]] = {split: {} for split in SPLITS}
        for (split, name), its_parts in found.items():
            try:
                is_ragged = len(its_parts) > 1
                arrays[split][name] = ragged_array(*its_parts) if is_ragged else its_parts[0]
            except DamagedError as error:
                raise ShardCorruptError(shard, name, self._data.url, str(error), split) from None
        ends = {part.split: _aligned(part.offset + part.n_bytes) for part in parts}
        return MappedShard(path, mapping, arrays, ends, fetched_bytes)


def _check(file: BinaryIO, seal: int, size: int) -> None:
    """Raise a `DamagedError` if a shard's file is not as it was written."""
    found = os.fstat(file.fileno()).st_size
    if found != size:
        raise DamagedError(f"{found} bytes instead of {size}")
    buffer = np.empty(_READ_BYTES, np.uint8)
    left = size - _CRC_BYTES
    while left:
        n_read = file.readinto(buffer[: min(left, _READ_BYTES)].data)  # type: ignore[attr-defined]
        if not n_read:
            raise DamagedError("unexpected end")
        seal = google_crc32c.extend(seal, buffer[:n_read])
        left -= n_read
    if file.read(_CRC_BYTES) != seal.to_bytes(_CRC_BYTES, "little"):
        raise DamagedError("checksum mismatch")


def _size(parts: list[_Part]) -> int:
    return parts[-1].offset + parts[-1].n_bytes + _CRC_BYTES


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNED) * _ALIGNED
