"""Arrays whose samples differ in shape: token lists, point clouds, images of unequal size. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RaggedArray:
    """Samples of one dtype and number of axes, and of any shape.

    Sample ``i`` has ``values[offsets[i] : offsets[i + 1]]`` in the shape ``shapes[i]``.

    Parameters
    ----------
    values
        The values of all samples, one sample after the other: one axis.
    shapes
        The shape of each sample: ``(n_samples, n_axes)``.

    Attributes
    ----------
    offsets
        Where each sample begins, and where the last one ends: ``(n_samples + 1,)``.

    Examples
    --------
    >>> ids = RaggedArray.of([[7, 1], [5], [9, 9, 2]])
    >>> len(ids), ids[2].tolist(), ids.shapes.tolist(), ids.offsets.tolist()
    (3, [9, 9, 2], [[2], [1], [3]], [0, 2, 3, 6])
    >>> [sample.tolist() for sample in ids[[2, 0]]]
    [[9, 9, 2], [7, 1]]
    >>> len(RaggedArray.join([ids, ids]))
    6
    """

    __slots__ = ("offsets", "shapes", "values")

    def __init__(self, values: NDArray[Any], shapes: NDArray[np.int64]) -> None:
        self.values, self.shapes = values, shapes
        self.offsets = np.concatenate([[0], np.cumsum(shapes.prod(axis=1, dtype=np.int64))])
        if values.ndim != 1 or self.offsets[-1] != len(values):
            raise ValueError(
                f"values have the shape {values.shape}, and the samples' shapes hold "
                f"{self.offsets[-1]} values"
            )

    @classmethod
    def of(cls, samples: Iterable[Any]) -> RaggedArray:
        """Join samples into one array.

        Parameters
        ----------
        samples
            Arrays, or lists of numbers, of one number of axes.

        Raises
        ------
        ValueError
            If a sample's dtype or number of axes is not that of the others; names its place.
        """
        if isinstance(samples, RaggedArray):
            return samples
        arrays = [np.asarray(sample) for sample in samples]
        dtype, n_axes = _common(arrays)
        shapes = np.array([array.shape for array in arrays], np.int64)
        values = [array.ravel() for array in arrays if array.size]
        joined = np.concatenate(values) if values else np.empty(0)
        return cls(joined.astype(dtype, copy=False), shapes.reshape(len(arrays), n_axes))

    @classmethod
    def join(cls, parts: Sequence[RaggedArray]) -> RaggedArray:
        """Put arrays one after the other.

        Parameters
        ----------
        parts
            Ragged arrays of one dtype.
        """
        if len(parts) == 1:
            return parts[0]
        values = np.concatenate([part.values for part in parts])
        return cls(values, np.concatenate([part.shapes for part in parts]))

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def n_axes(self) -> int:
        """Number of axes of a sample."""
        return int(self.shapes.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes of values and shapes."""
        return self.values.nbytes + self.shapes.nbytes

    def __len__(self) -> int:
        """Count the samples."""
        return len(self.shapes)

    def __getitem__(self, index: Any) -> Any:
        """Return a sample, an array; of a slice or of several indices, a `RaggedArray`."""
        if isinstance(index, int | np.integer):
            place = range(len(self))[index]
            piece = self.values[self.offsets[place] : self.offsets[place + 1]]
            return piece.reshape(self.shapes[place])
        if isinstance(index, slice) and index.step in (None, 1):
            start, stop, _ = index.indices(len(self))
            stop = max(start, stop)
            return RaggedArray(
                self.values[self.offsets[start] : self.offsets[stop]], self.shapes[start:stop]
            )
        places = np.arange(len(self))[index]
        bounds = zip(self.offsets[places], self.offsets[places + 1], strict=True)
        pieces = [self.values[start:stop] for start, stop in bounds]
        joined = np.concatenate(pieces) if pieces else self.values[:0]
        return RaggedArray(joined, self.shapes[places])

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[place] for place in range(len(self)))

    def __repr__(self) -> str:
        sizes = f"{len(self)} samples, {len(self.values)} values"
        return f"<RaggedArray {self.dtype}{any_shape(self.n_axes)}: {sizes}>"


def any_shape(n_axes: int) -> str:
    """Write the shape of a ragged array's sample, such as ``[*]``."""
    return f"[{', '.join('*' * n_axes)}]"


def join_rows(parts: Sequence[Any]) -> Any:
    """Put arrays one after the other, be they ragged or not."""
    if isinstance(parts[0], RaggedArray):
        return RaggedArray.join(parts)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _common(arrays: Sequence[NDArray[Any]]) -> tuple[np.dtype[Any], int]:
    """Return the dtype and number of axes that all samples have."""
    first = next((at for at, array in enumerate(arrays) if array.size), 0)
    if not arrays or not arrays[first].ndim:
        raise ValueError("samples of a ragged array are arrays or lists")
    dtype, n_axes = arrays[first].dtype, arrays[first].ndim
    for at, array in enumerate(arrays):
        # An empty list has NumPy's float64.
        if array.ndim != n_axes or (array.size and array.dtype.kind != dtype.kind):
            raise ValueError(
                f"sample {at} is {array.dtype} with {array.ndim} axes, and sample {first} {dtype} "
                f"with {n_axes}"
            )
    found = [array.dtype for array in arrays if array.size]
    return np.result_type(*found) if found else dtype, n_axes
