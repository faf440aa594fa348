"""The inputs of a data set: arrays of any kind, and streams of batches."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown, whole
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.manifest import check_names

#: Bytes of the input that are taken at once, all arrays of a stream together.
BLOCK_BYTES = 32 << 20

Block: TypeAlias = "Mapping[str, NDArray[Any]]"


class Batches:
    """A stream of batches with a known total length. It is read once.

    Parameters
    ----------
    iterable
        Yields batches: mappings of names to arrays of equal length. If the stream is one array of a
        data set, it yields arrays.
    length
        Samples in all batches together.

    Examples
    --------
    >>> import numpy as np
    >>> from dagsel.storage import ShardedDataset
    >>> batches = ({"x": np.full((5, 2), i), "y": np.arange(5)} for i in range(4))
    >>> data = ShardedDataset.write(
    ...     "memory://batches.zarr", Batches(batches, length=20), n_shards=2, overwrite=True
    ... )
    >>> len(data), data.shard(0)["x"].shape
    (20, (8, 2))
    """

    def __init__(self, iterable: Iterable[Any], length: int) -> None:
        self.length = whole("length of Batches", length, error=DatasetInputError)
        if not isinstance(iterable, Iterable):
            raise DatasetInputError(
                f"Batches go over an iterable of batches, got {shown(iterable)}; write "
                "Batches(iterable, length=...)"
            )
        self._iterator = iter(iterable)
        self._first: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        while self._first:
            yield self._first.pop()
        yield from self._iterator

    def peek(self) -> Any:
        """Return the first batch without using it up."""
        if not self._first:
            try:
                self._first.append(next(self._iterator))
            except StopIteration:
                raise DatasetInputError("the stream of batches is empty or already used") from None
        return self._first[0]

    def __repr__(self) -> str:
        return f"Batches(length={self.length})"


Arrays: TypeAlias = "Mapping[str, Any] | Batches"


@dataclass(frozen=True, slots=True)
class Column:
    """Dtype (little-endian) and sample shape of an array, known before it is read."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample."""
        return int(math.prod(self.shape)) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checked input: its length, dtype and shape of each array, and where these are read from.

    A stream of mappings has one entry with all names in `streams`; else each array has its own.
    """

    length: int
    columns: Mapping[str, Column]
    streams: Sequence[tuple[tuple[str, ...], Any]]

    def blocks(self, names: tuple[str, ...], stream: Any) -> Iterator[tuple[int, Block]]:
        """Read a stream from its beginning to its end.

        Yields the place of each block's first sample, and its samples by name: about `BLOCK_BYTES`
        where the input's own chunks allow it.
        """
        columns = {name: self.columns[name] for name in names}
        block_rows = max(1, BLOCK_BYTES // sum(column.sample_bytes for column in columns.values()))
        if isinstance(stream, Batches):
            yield from _blocks_of_batches(stream, columns, block_rows)
        else:
            yield from _blocks_of_array(stream, names[0], columns[names[0]], block_rows)


def check_input(arrays: Arrays, what: str = "arrays") -> Source:
    """Check an input and return its dtypes and lengths; reads at most a first batch."""
    if isinstance(arrays, Batches):
        first = arrays.peek()
        if not isinstance(first, Mapping):
            raise DatasetInputError(
                f"{what}: a batch is a {type(first).__name__}; yield mappings of names to arrays"
            )
        check_names(first)
        columns = {name: _column(np.asarray(rows), name) for name, rows in first.items()}
        return Source(arrays.length, columns, [(tuple(columns), arrays)])
    if not isinstance(arrays, Mapping):
        raise DatasetInputError(
            f"{what} is a {type(arrays).__name__}; pass a mapping of names to arrays, or Batches"
        )
    check_names(arrays)
    columns, lengths = {}, {}
    for name, array in arrays.items():
        if isinstance(array, Batches):
            columns[name], lengths[name] = _column(np.asarray(array.peek()), name), array.length
        else:
            columns[name], lengths[name] = _column(array, name), _length(array, name)
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise DatasetInputError(f"{what} differ in length: {each} samples; make them equal")
    return Source(
        next(iter(lengths.values())), columns, [((name,), array) for name, array in arrays.items()]
    )


def is_in_memory(array: object) -> bool:
    """Whether an input is a NumPy array in memory, not one mapped from a file."""
    return isinstance(array, np.ndarray) and _mapping(array) is None


def _of_objects(name: str) -> str:
    return (
        f"array {name!r} has an object dtype; convert it to numbers, labels by  classes, {name} = "
        f"np.unique({name}, return_inverse=True)  and others by {name}.astype('float32'), or to "
        f"fixed-length strings by {name}.astype('U')"
    )


def _column(array: Any, name: str) -> Column:
    if not (hasattr(array, "shape") and hasattr(array, "dtype") and hasattr(array, "__getitem__")):
        raise DatasetInputError(
            f"array {name!r} is a {type(array).__name__}; pass an array, or numpy.asarray of it"
        )
    try:
        dtype = np.dtype(array.dtype)
    except TypeError:
        if "str" in str(array.dtype).lower():  # of pandas
            raise DatasetInputError(_of_objects(name)) from None
        raise DatasetInputError(
            f"array {name!r} has dtype {array.dtype}, which NumPy does not know; pass a NumPy "
            "array, such as tensor.numpy()"
        ) from None
    if dtype.hasobject:
        raise DatasetInputError(_of_objects(name))
    if dtype.kind not in "biufcSUmM" or dtype.char in "gG":
        raise DatasetInputError(
            f"array {name!r} has dtype {dtype}, which Zarr does not store; convert it to a plain "
            "dtype, a structured one to one array a field"
        )
    if len(array.shape) < 1:
        raise DatasetInputError(f"array {name!r} is a scalar; its first axis must be the samples")
    shape = tuple(int(size) for size in array.shape[1:])
    if 0 in (dtype.itemsize, *shape):
        raise DatasetInputError(
            f"array {name!r} has samples of {dtype} with shape {shape}: there is nothing in them"
        )
    return Column(dtype.newbyteorder("<").str, shape)


def _length(array: Any, name: str) -> int:
    length = array.shape[0]
    if isinstance(length, float) and math.isnan(length):
        raise DatasetInputError(
            f"array {name!r} has an unknown length; call its compute_chunk_sizes() first"
        )
    return int(length)


def _blocks_of_array(
    array: Any, name: str, column: Column, block_rows: int
) -> Iterator[tuple[int, Block]]:
    mapping = _mapping(array)
    for start, stop in _block_bounds(array, block_rows):
        rows = _checked(np.asarray(array[start:stop]), name, column, f"{name}[{start}:{stop}]")
        if len(rows) != stop - start:
            raise DatasetInputError(f"array {name!r} gave {len(rows)} samples for {start}:{stop}")
        yield start, {name: rows}
        del rows
        if mapping is not None:
            # Pages that were read would count as this process's memory until it ends.
            with contextlib.suppress(OSError, ValueError):
                mapping.madvise(mmap.MADV_DONTNEED)


def _block_bounds(array: Any, block_rows: int) -> Iterator[tuple[int, int]]:
    """Cut an array into blocks of whole chunks of its own: none is read twice."""
    length = int(array.shape[0])
    chunks = getattr(array, "chunks", None) or (1,)
    own = chunks[0] if isinstance(chunks, Sequence) and len(chunks) else 1
    if isinstance(own, int):
        own = (own,) * math.ceil(length / max(1, own)) if own > 1 else ()
    start = stop = 0
    for size in own:
        if stop > start and stop + size - start > block_rows:
            yield start, min(stop, length)
            start = stop
        stop += size
    if own:
        yield start, length
        return
    for start in range(0, length, block_rows):
        yield start, min(start + block_rows, length)


def _blocks_of_batches(
    batches: Batches, columns: Mapping[str, Column], block_rows: int
) -> Iterator[tuple[int, Block]]:
    """Join small batches and cut large ones."""
    start = n_held = n_seen = 0
    held: list[Block] = []
    for number, batch in enumerate(batches):
        rows = _batch(batch, columns, number)
        n_rows = len(next(iter(rows.values())))
        n_seen += n_rows
        if n_seen > batches.length:
            raise DatasetInputError(
                f"the stream of batches gave {n_seen} samples by batch {number}, but its stated "
                f"length is {batches.length}; state the true length"
            )
        for cut in range(0, n_rows, block_rows):
            piece = {name: array[cut : cut + block_rows] for name, array in rows.items()}
            held.append(piece)
            n_held += len(next(iter(piece.values())))
            if n_held >= block_rows:
                yield start, _joined(held)
                start, n_held, held = start + n_held, 0, []
    if held:
        yield start, _joined(held)
    if n_seen != batches.length:
        raise DatasetInputError(
            f"the stream of batches ended after {n_seen} samples, but its stated length is "
            f"{batches.length}; state the true length"
        )


def _batch(batch: Any, columns: Mapping[str, Column], number: int) -> Block:
    named = batch if isinstance(batch, Mapping) else dict.fromkeys(columns, batch)
    if set(named) != set(columns):
        raise DatasetInputError(
            f"batch {number} has {sorted(map(str, named))}, the first one {sorted(columns)}"
        )
    rows = {
        name: _checked(np.asarray(named[name]), name, column, f"batch {number}")
        for name, column in columns.items()
    }
    lengths = {name: len(array) for name, array in rows.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetInputError(f"the arrays of batch {number} differ in length: {lengths}")
    return rows


def _checked(rows: NDArray[Any], name: str, column: Column, where: str) -> NDArray[Any]:
    found = Column(rows.dtype.newbyteorder("<").str, rows.shape[1:])
    if found != column:
        raise DatasetInputError(
            f"array {name!r}, {where}: samples are {found.dtype}{list(found.shape)}, but the array "
            f"began or was declared as {column.dtype}{list(column.shape)}"
        )
    return rows


def _joined(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _mapping(array: object) -> mmap.mmap | None:
    """Find the file mapping that an array is a view of, if its pages may be dropped."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            # The changed pages of a copy-on-write mapping exist nowhere else.
            return None if array.mode == "c" else array._mmap  # type: ignore[attr-defined]
        array = array.base
    return None
