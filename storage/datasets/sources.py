"""The inputs of a data set: arrays of any kind, and streams of batches."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from dagsel.checks import shown, whole
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.arrays import check_labels, of_list
from dagsel.storage.datasets.manifest import check_names
from dagsel.storage.datasets.ragged import RaggedArray, any_shape, join_rows

#: Bytes of the input that are taken at once, all arrays of a stream together.
BLOCK_BYTES = 16 << 20

#: A sample's part of an array by name: arrays, and ragged ones.
Block: TypeAlias = "Mapping[str, Any]"


class Batches:
    """A stream of batches. It is read once.

    Parameters
    ----------
    iterable
        Yields batches: mappings of names to arrays of equal length. If the stream is one array of a
        data set, it yields arrays.
    length
        Samples in all batches together. A stream without it is first read to its end, into scratch
        files: that takes room for its samples once more.

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

    def __init__(self, iterable: Iterable[Any], length: int | None = None) -> None:
        self.length = (
            None if length is None else whole("length of Batches", length, error=DatasetInputError)
        )
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
                raise DatasetInputError(
                    "the stream of batches is empty or already used; make a new one for each write"
                ) from None
        return self._first[0]

    def __repr__(self) -> str:
        return f"Batches(length={self.length})"


Arrays: TypeAlias = "Mapping[str, Any] | Batches"


@dataclass(frozen=True, slots=True)
class Column:
    """Dtype (little-endian) and sample shape of an array, known before it is read.

    A ragged array has the number of axes of a sample, and how many values one has on average, as
    far as is known.
    """

    dtype: str
    shape: tuple[int, ...]
    n_axes: int = 0
    mean_values: float = field(default=0.0, compare=False)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample: of a ragged array's, on average."""
        n_values = math.ceil(self.mean_values) if self.n_axes else math.prod(self.shape)
        return n_values * np.dtype(self.dtype).itemsize + 8 * self.n_axes

    def __str__(self) -> str:
        return f"{self.dtype}{any_shape(self.n_axes) if self.n_axes else list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A checked input: its length, dtype and shape of each array, and where these are read from.

    A stream of mappings has one entry with all names in `streams`; else each array has its own.
    """

    length: int
    columns: Mapping[str, Column]
    streams: Sequence[tuple[tuple[str, ...], Any]]

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample of all arrays."""
        return sum(column.sample_bytes for column in self.columns.values())

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


def check_input(arrays: Arrays, what: str = "arrays", ragged: Collection[str] = ()) -> Source:
    """Check an input and return its dtypes and lengths; reads at most a first batch.

    `ragged` are names of arrays whose samples may differ in shape though the first ones do not.
    """
    source = _source(arrays, what, ragged)
    unknown = sorted(set(ragged) - set(source.columns))
    if unknown:
        raise DatasetInputError(
            f"{what}: ragged= names {unknown[0]!r}, and there is {', '.join(source.columns)}"
        )
    return source


def _source(arrays: Arrays, what: str, ragged: Collection[str]) -> Source:
    if isinstance(arrays, Batches):
        first = arrays.peek()
        if not isinstance(first, Mapping):
            raise DatasetInputError(
                f"{what}: a batch is a {type(first).__name__}; yield mappings of names to arrays"
            )
        check_names(first)
        columns = {
            name: _column(as_rows(name, rows, is_ragged=name in ragged), name)
            for name, rows in first.items()
        }
        return Source(arrays.length or 0, columns, [(tuple(columns), arrays)])
    if not isinstance(arrays, Mapping):
        raise DatasetInputError(
            f"{what} is a {type(arrays).__name__}; pass a mapping of names to arrays, or Batches"
        )
    check_names(arrays)
    columns, lengths, streams = {}, {}, []
    for name, array in arrays.items():
        is_ragged = name in ragged
        if isinstance(array, Batches):
            if array.length is None:
                raise DatasetInputError(
                    f"array {name!r} is a stream without a length; state it, Batches(..., "
                    "length=...), or pass Batches of mappings, which have all arrays"
                )
            first = as_rows(name, array.peek(), is_ragged=is_ragged)
            columns[name], lengths[name] = _column(first, name), array.length
            streams.append(((name,), array))
        else:
            rows = as_rows(name, array, is_ragged=True) if is_ragged else array
            if is_in_memory(rows):
                check_labels(name, rows, what)
            columns[name], lengths[name] = _column(rows, name), _length(rows, name)
            streams.append(((name,), rows))
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise DatasetInputError(f"{what} differ in length: {each} samples; make them equal")
    return Source(next(iter(lengths.values())), columns, streams)


def as_rows(name: str, values: Any, *, is_ragged: bool = False) -> Any:
    """Return samples as an array; as a `RaggedArray` if they are one or are to be one."""
    if isinstance(values, RaggedArray):
        return values
    if not is_ragged:
        return of_list(name, values)
    try:
        return RaggedArray.of(values)
    except ValueError as error:
        raise DatasetInputError(f"{name} is no ragged array: {error}") from None


def is_in_memory(array: object) -> bool:
    """Whether an input is an array in memory, not one mapped from a file."""
    return isinstance(array, np.ndarray | RaggedArray) and _mapping(array) is None


def _of_objects(name: str) -> str:
    return (
        f"array {name!r} has an object dtype; convert numbers by {name}.astype('float32'), and "
        f"labels by {name}.astype('U'), which become numbers"
    )


def _column(array: Any, name: str) -> Column:
    if isinstance(array, RaggedArray):
        dtype = _column(array.values, name).dtype
        mean = len(array.values) / max(1, len(array))
        return Column(dtype, (), array.n_axes, mean)
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
    if np.ma.is_masked(array):
        row = int(np.argwhere(np.ma.getmaskarray(array))[0, 0])
        raise DatasetInputError(
            f"row {row} of array {name!r} is masked; leave such rows out, or fill them in: "
            f"{name}.filled(0)"
        )
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
            f"array {name!r} has samples of {dtype} with shape {shape}: there is "
            "nothing in them, so leave the array out"
        )
    return Column(dtype.newbyteorder("<").str, shape)


def _length(array: Any, name: str) -> int:
    length = len(array) if isinstance(array, RaggedArray) else array.shape[0]
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
        rows = _checked(array[start:stop], name, column, f"{name}[{start}:{stop}]")
        if len(rows) != stop - start:
            raise DatasetInputError(
                f"array {name!r} gave {len(rows)} samples for {start}:{stop}; give one whose "
                "length is true"
            )
        yield start, {name: rows}
        del rows
        if mapping is not None:
            # Pages that were read would count as this process's memory until it ends.
            with contextlib.suppress(OSError, ValueError):
                mapping.madvise(mmap.MADV_DONTNEED)


def _block_bounds(array: Any, block_rows: int) -> Iterator[tuple[int, int]]:
    """Cut an array into blocks of whole chunks of its own: none is read twice."""
    length = _length(array, "")
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
    start = n_held = held_bytes = n_seen = 0
    held: list[Block] = []
    for number, batch in enumerate(batches):
        rows = _batch(batch, columns, number)
        n_rows = len(next(iter(rows.values())))
        n_seen += n_rows
        if batches.length is not None and n_seen > batches.length:
            raise DatasetInputError(
                f"the stream of batches gave {n_seen} samples by batch {number}, but its stated "
                f"length is {batches.length}; state the true length"
            )
        # Samples of ragged arrays may have become larger than the first ones.
        n_bytes = sum(array.nbytes for array in rows.values())
        step = max(1, min(block_rows, BLOCK_BYTES * n_rows // max(1, n_bytes)))
        for cut in range(0, n_rows, step):
            piece = {name: array[cut : cut + step] for name, array in rows.items()}
            held.append(piece)
            n_held += len(next(iter(piece.values())))
            held_bytes += sum(array.nbytes for array in piece.values())
            if n_held >= block_rows or held_bytes >= BLOCK_BYTES:
                yield start, _joined(held)
                start, n_held, held_bytes, held = start + n_held, 0, 0, []
    if held:
        yield start, _joined(held)
    if batches.length not in (None, n_seen):
        raise DatasetInputError(
            f"the stream of batches ended after {n_seen} samples, but its stated length is "
            f"{batches.length}; state the true length"
        )


def _batch(batch: Any, columns: Mapping[str, Column], number: int) -> Block:
    named = batch if isinstance(batch, Mapping) else dict.fromkeys(columns, batch)
    if set(named) != set(columns):
        raise DatasetInputError(
            f"batch {number} has {sorted(map(str, named))}, the first one {sorted(columns)}; "
            "yield the same names each time"
        )
    rows = {
        name: _checked(named[name], name, column, f"batch {number}")
        for name, column in columns.items()
    }
    lengths = {name: len(array) for name, array in rows.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetInputError(
            f"the arrays of batch {number} differ in length: {lengths}; make them equal"
        )
    return rows


def _checked(given: Any, name: str, column: Column, where: str) -> Any:
    rows = as_rows(name, given, is_ragged=column.n_axes > 0)
    if isinstance(rows, RaggedArray) and not len(rows.values):
        rows = RaggedArray(rows.values.astype(column.dtype), rows.shapes)  # empty lists have none
    dtype = rows.dtype.newbyteorder("<").str
    if isinstance(rows, RaggedArray):
        found = Column(dtype, (), rows.n_axes)
    else:
        found = Column(dtype, rows.shape[1:])
    if found != column:
        if found.n_axes and not column.n_axes:
            raise DatasetInputError(
                f"array {name!r}, {where}: samples differ in shape, and the first ones had the "
                f"shape {list(column.shape)}; if they may differ, write ragged=[{name!r}]"
            )
        raise DatasetInputError(
            f"array {name!r}, {where}: samples are {found}, but the array began or was declared as "
            f"{column}; convert all to one dtype"
        )
    check_labels(name, rows, where)
    return rows


def _joined(blocks: Sequence[Block]) -> Block:
    return {name: join_rows([block[name] for block in blocks]) for name in blocks[0]}


def _mapping(array: object) -> mmap.mmap | None:
    """Find the file mapping that an array is a view of, if its pages may be dropped."""
    array = array.values if isinstance(array, RaggedArray) else array
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap):
            # The changed pages of a copy-on-write mapping exist nowhere else.
            return None if array.mode == "c" else array._mmap  # type: ignore[attr-defined]
        array = array.base
    return None
