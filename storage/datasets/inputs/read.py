"""Tells what somebody gives as data, and reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dagsel.checks import shown
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.arrays import as_array, of_list
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.images import ImageFolder
from dagsel.storage.datasets.inputs.parquet import parquet_files, read_parquet
from dagsel.storage.datasets.inputs.samples import read_samples
from dagsel.storage.datasets.inputs.tables import (
    Columns,
    chosen_columns,
    getter,
    make_array,
    table_columns,
)
from dagsel.storage.datasets.sources import Arrays, Batches


def read(source: Any, columns: Columns | None, classes: Classes, what: str = "arrays") -> Arrays:
    """Return what `ShardedDataset.write` was given as arrays.

    Parameters
    ----------
    source
        Arrays by name, of which lists and tensors become arrays; `Batches`, as they are; a table; a
        path of Parquet files or of images in folders; a data set with a length whose items are
        samples; one that was written before.
    columns
        Which of its columns become which arrays; None for all of them.
    classes
        Gets the classes of text columns.
    what
        What to call it in an error.

    Raises
    ------
    DatasetInputError
        If it is nothing of these, or a column cannot become an array; names file, column and row.

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0], "kind": ["cat", "ant"]})
    >>> classes = Classes()
    >>> arrays = read(table, {"x": ["a", "b"], "y": "kind"}, classes)
    >>> arrays["x"].tolist(), arrays["y"].tolist(), classes.known
    ([[1.0, 3.0], [2.0, 4.0]], [1, 0], {'y': ['ant', 'cat']})
    """
    if isinstance(source, Batches | Mapping):
        if columns is not None:
            raise DatasetInputError(
                f"columns= chooses columns of a table or of files, and {what} has arrays by name"
            )
        return source if isinstance(source, Batches) else _plain(source)
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if parquet := parquet_files(path):
            return read_parquet(parquet, columns, classes)
        source = ImageFolder(path)
    if isinstance(source, ImageFolder):
        if columns is not None:
            raise DatasetInputError("images in folders have two arrays, x and y, and no columns=")
        return source.arrays(classes)
    if isinstance(source, Sharded):
        return _again(source, columns, classes, what)
    names = table_columns(source)
    if names is not None:
        wanted = chosen_columns(columns, names, what)
        get = getter(source)
        return {name: make_array(name, of, get, classes, what) for name, of in wanted.items()}
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        if hasattr(source, "dtype") or isinstance(source, bytes):
            raise DatasetInputError(
                f"{what} is a {type(source).__name__}; pass a mapping of names to arrays, such as "
                f'{{"x": {what}}}'
            )
        if isinstance(source, list | tuple) and 0 < len(source) < 5:
            lengths = {len(part) if hasattr(part, "shape") else 0 for part in source}
            if len(lengths) == 1 and min(lengths) > len(source):
                raise DatasetInputError(
                    f"{what} is a {type(source).__name__} of {len(source)} arrays; pass a mapping "
                    'of names to arrays, such as {"x": ..., "y": ...}'
                )
        return read_samples(source, columns, classes, what)
    raise DatasetInputError(
        f"{what} is a {type(source).__name__}, {shown(source)}; pass a mapping of names to arrays, "
        "a table, a path of Parquet files or images, a data set with a length, or "
        "Batches(iterable, length=...)"
    )


@runtime_checkable
class Sharded(Protocol):
    """A data set that was written before."""

    n_shards: int
    manifest: Any

    def __len__(self) -> int: ...
    def shard(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of a training shard."""
        ...

    def validation_shard(self, index: int) -> Mapping[str, Any]:
        """Return the arrays of a validation shard."""
        ...


def _again(source: Sharded, columns: Columns | None, classes: Classes, what: str) -> Batches:
    """Stream a data set's shards, to be divided anew."""
    wanted = chosen_columns(columns, [spec.name for spec in source.manifest.arrays], what)
    if any(len(of) > 1 for of in wanted.values()):
        raise DatasetInputError(f"{what}: an array is made of one array of a data set")
    for name, (of,) in wanted.items():
        if of in source.manifest.classes:
            classes.known[name] = list(source.manifest.classes[of])
    reads = (source.shard, source.validation_shard)
    shards = (read(index) for read in reads for index in range(source.n_shards))
    batches = ({name: shard[of] for name, (of,) in wanted.items()} for shard in shards)
    return Batches(batches, len(source))


def _holds_arrays(value: Any) -> bool:
    """Whether an array of objects has arrays or lists as its samples."""
    is_objects = isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1
    return is_objects and len(value) > 0 and isinstance(value[0], np.ndarray | list | tuple)


def _plain(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by name; lists and tensors become arrays, others may be larger than memory."""
    return {
        name: of_list(name, list(value))
        if isinstance(value, list | tuple) or _holds_arrays(value)
        else as_array(name, value)
        if hasattr(value, "detach")
        else value
        for name, value in arrays.items()
    }
