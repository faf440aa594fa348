"""Reads and writes Zarr v3 shard objects piece by piece.

Zarr's sharding codec stores inner chunks one after the other, each followed by its CRC32C, and
then an index of their offsets and lengths with a CRC32C. zarr-python reads and writes such an
object whole, with a few copies. Here it is written while little of it is in memory, and is read
straight into the array. The tests compare both directions with zarr-python.

Between chunks and index are four bytes that Zarr does not look at: the *seal*, a CRC32C of the
object's place in its data set and of the checksums of its chunks. So a shard that was copied over
another one, or chunks that changed places, are found. Data sets of version 1 have no seals.

Chunks are not compressed: all have one length, and the object's length is known before it is read.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray

_CRC_BYTES = 4


class DamagedError(Exception):
    """An object is not a shard as it was written; the text says what is wrong."""


@dataclass(frozen=True, slots=True)
class ShardFormat:
    """One array of one shard as an object of bytes.

    `dtype` is NumPy's string, little-endian; `shape` that of a sample; `chunk` the samples in an
    inner chunk, to which the last one is padded; `place` what its seal says where it belongs, or
    empty if it has no seal.
    """

    n_samples: int
    dtype: str
    shape: tuple[int, ...]
    chunk: int
    place: str = ""

    @property
    def n_chunks(self) -> int:
        """Number of inner chunks."""
        return math.ceil(self.n_samples / self.chunk)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of an inner chunk, without its checksum."""
        return self.chunk * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def object_bytes(self) -> int:
        """Bytes of the whole object."""
        n_seals = 1 if self.place else 0
        return self.n_chunks * (self.chunk_bytes + _CRC_BYTES + 16) + _CRC_BYTES * (1 + n_seals)

    @property
    def key(self) -> str:
        """Key of the object in the folder of its array."""
        return "/".join(["c", *["0"] * (1 + len(self.shape))])

    def encode(self, stream: BinaryIO, runs: Any) -> None:
        """Write the object.

        `runs` yields arrays of shape ``(n, *shape)``: the shard's samples in order. Each but the
        last holds whole chunks.
        """
        n_left, seal = self.n_samples, _Seal(self.place)
        for rows in runs:
            for start in range(0, len(rows), self.chunk):
                data = self._padded(rows[start : start + self.chunk])
                stream.write(data.data)
                stream.write(seal.add(_crc(data)))
            n_left -= len(rows)
        assert n_left == 0
        stream.write(seal.text)
        stream.write(self._index())

    def decode(self, stream: BinaryIO) -> NDArray[Any]:
        """Read an object of `object_bytes` bytes into a new array of shape ``(n_samples, *shape)``.

        Raises a `DamagedError` if a checksum does not match or the stream ends early.
        """
        out = np.empty((self.n_samples, *self.shape), self.dtype)
        for _ in self.pieces(stream, out.reshape(-1).view(np.uint8)):
            pass
        return out

    def pieces(
        self, stream: BinaryIO, into: NDArray[np.uint8] | None = None
    ) -> Iterator[NDArray[np.uint8]]:
        """Read an object chunk by chunk: yield the samples' bytes of each once it is checked.

        They are written `into` an array of all bytes, if it is given; else each piece takes the
        place of the one before. Raises as `decode` does, at the latest after the last piece.
        """
        buffer, seal = np.empty(self.chunk_bytes, np.uint8), _Seal(self.place)
        n_bytes = self.n_samples * (self.chunk_bytes // self.chunk)
        for start in range(0, self.n_chunks * self.chunk_bytes, self.chunk_bytes):
            end = min(start + self.chunk_bytes, n_bytes)
            data = buffer[: end - start] if into is None else into[start:end]
            whole = data if data.nbytes == self.chunk_bytes else buffer
            _read_into(stream, whole)
            if stream.read(_CRC_BYTES) != seal.add(_crc(whole)):
                raise DamagedError("checksum mismatch")
            if whole is not data:
                data[:] = whole[: data.nbytes]
            yield data
        if stream.read(len(seal.text)) != seal.text:
            raise DamagedError("checksum mismatch: it was written for another place")
        index = self._index()
        if stream.read(len(index)) != index:
            raise DamagedError("damaged index")

    def metadata(self) -> bytes:
        """Return the array's ``zarr.json``, made by zarr-python, or raise ValueError."""
        return _array_metadata(self.dtype, self.shape, self.n_samples, self.chunk)

    def _padded(self, rows: NDArray[Any]) -> NDArray[np.uint8]:
        data = np.ascontiguousarray(rows, self.dtype).reshape(-1).view(np.uint8)
        if data.nbytes == self.chunk_bytes:
            return data
        padded = np.zeros(self.chunk_bytes, np.uint8)
        padded[: data.nbytes] = data
        return padded

    def _index(self) -> bytes:
        stride = self.chunk_bytes + _CRC_BYTES
        index = np.empty((self.n_chunks, 2), "<u8")
        index[:, 0] = np.arange(self.n_chunks, dtype="<u8") * stride
        index[:, 1] = stride
        return index.tobytes() + _crc(index.reshape(-1).view(np.uint8))


class _Seal:
    """Grows with the checksum of each chunk; without a place it is empty."""

    def __init__(self, place: str) -> None:
        self._place, self._value = place, google_crc32c.value(place.encode())

    def add(self, checksum: bytes) -> bytes:
        """Take in the checksum of the next chunk; return that."""
        self._value = google_crc32c.extend(self._value, checksum)
        return checksum

    @property
    def text(self) -> bytes:
        """The bytes of the seal."""
        return self._value.to_bytes(_CRC_BYTES, "little") if self._place else b""


@functools.lru_cache(maxsize=256)
def group_metadata() -> bytes:
    """Return the ``zarr.json`` of a group."""
    body = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    return json.dumps(body, indent=2).encode()


@functools.lru_cache(maxsize=256)
def _array_metadata(dtype: str, shape: tuple[int, ...], n_samples: int, chunk: int) -> bytes:
    # Readers of shards have no need of zarr-python, which takes a quarter of a second to import.
    import zarr
    from zarr.codecs import Crc32cCodec
    from zarr.core.buffer import Buffer
    from zarr.storage import MemoryStore

    stored: dict[str, Buffer] = {}
    with warnings.catch_warnings():
        # Strings: zarr-python stores them in a way that the specification does not name yet.
        warnings.simplefilter("ignore")
        zarr.create_array(
            MemoryStore(stored),
            shape=(n_samples, *shape),
            dtype=dtype,
            chunks=(chunk, *shape),
            shards=(max(1, math.ceil(n_samples / chunk)) * chunk, *shape),
            compressors=[Crc32cCodec()],
            filters=None,
        )
    return stored["zarr.json"].to_bytes()


def _crc(data: NDArray[np.uint8]) -> bytes:
    value: int = google_crc32c.value(data)
    return value.to_bytes(_CRC_BYTES, "little")


def _read_into(stream: BinaryIO, data: NDArray[np.uint8]) -> None:
    if stream.readinto(data.data) != data.nbytes:  # type: ignore[attr-defined]
        raise DamagedError("unexpected end")
