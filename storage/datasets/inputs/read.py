"""Tells what somebody gives as data, and reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from dagsel.checks import shown
from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.arrays import (
    as_array,
    check_is_read,
    check_order,
    of_list,
)
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.images import ImageFolder
from dagsel.storage.datasets.inputs.parquet import read_parquet
from dagsel.storage.datasets.inputs.paths import PARQUET, TAR, are_paths, find_files, partition_of
from dagsel.storage.datasets.inputs.reading import KEY, Input, Reading, check_column, joined
from dagsel.storage.datasets.inputs.samples import is_stream, read_samples
from dagsel.storage.datasets.inputs.tables import (
    getter,
    is_text,
    learn_orders,
    make_array,
    say_missing,
    table_columns,
)
from dagsel.storage.datasets.inputs.webdataset import WebDataset
from dagsel.storage.datasets.manifest import SPLITS, Split, check_name
from dagsel.storage.datasets.sources import Batches
from dagsel.storage.urls import without_credentials

_ROWS = 1 << 20  # whose values are looked at together


def read(source: Any, reading: Reading, classes: Classes, what: str = "arrays") -> Input:
    """Return what `ShardedDataset.write` was given as arrays.

    Parameters
    ----------
    source
        Arrays by name, of which lists and tensors become arrays; `Batches`; a table; paths of
        Parquet files, tar files or images in folders; a data set or a stream whose items are
        samples; one that was written before.
    reading
        What is read of it.
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
    >>> arrays = read(table, Reading(columns={"x": ["a", "b"], "y": "kind"}), classes).arrays
    >>> arrays["x"].tolist(), arrays["y"].tolist(), classes.known
    ([[1.0, 3.0], [2.0, 4.0]], [1, 0], {'y': ['ant', 'cat']})
    """
    if are_paths(source):
        if parquet := find_files(source, PARQUET):
            reading.nothing_to_decode(what)
            folders = {file: partition_of(file, source) for file in parquet}
            return read_parquet(folders, reading, classes)
        source = WebDataset(source) if find_files(source, TAR) else _folder(source)
    if isinstance(source, ImageFolder | WebDataset):
        return source.arrays(reading, classes)
    if _is_samples(source, what):
        return read_samples(source, reading, classes, what)
    reading.nothing_to_decode(what)
    if isinstance(source, Part):
        return _again(source.source, reading, classes, what, [source.split])
    if isinstance(source, Sharded):
        return _again(source, reading, classes, what)
    if isinstance(source, Batches | Mapping):
        reading.no_columns(
            f"columns= chooses columns of a table or of files, and {what} has arrays by "
            "name; leave columns= out"
        )
        if isinstance(source, Batches):
            return _batches(source, reading, what)
        return _arrays(source, reading, classes, what)
    wanted = reading.chosen(names := table_columns(source) or [], what)
    for name in wanted:
        _check_array_name(name)
    key, get = reading.key(names, what), getter(source)
    learn_orders(source, wanted, classes)
    arrays = {name: make_array(name, of, get, classes, what) for name, of in wanted.items()}
    say_missing(what, arrays, wanted, set())
    return Input(arrays, lambda: [get(str(key))], joined(wanted))


def _check_array_name(name: object) -> None:
    """Raise a `DatasetInputError` if the column of a table needs another name as an array."""
    try:
        check_name(name)
    except DatasetInputError as error:
        raise DatasetInputError(
            f'{error}; columns={{"x": {name!r}, ...}} gives it another name'
        ) from None


def _folder(path: Any) -> ImageFolder:
    if not isinstance(path, str | os.PathLike):
        if len(path) > 1:
            raise _not_read(path)
        (path,) = path
    if Path(path).is_file():
        raise DatasetInputError(
            f"{os.fspath(path)} is a file of a kind that is not read; give what reads it, such as "
            f"pandas.read_csv({os.fspath(path)!r}) or numpy.load, in its place"
        )
    return ImageFolder(without_credentials(os.fspath(path)))  # a URL stands in an error alone


def _not_read(paths: Sequence[Any]) -> DatasetInputError:
    return DatasetInputError(
        f"{os.fspath(paths[0])} is the first of {len(paths)} paths of a kind that is not read "
        "together; give what reads them, such as pandas.concat(map(pandas.read_csv, paths))"
    )


def _are_files(source: Any) -> bool:
    """Whether something is a list of names of files that are there: no data by themselves."""
    is_list = isinstance(source, list | tuple) and len(source) > 0
    return is_list and all(isinstance(each, str) and os.path.isfile(each) for each in source)  # noqa: PTH113


def _is_samples(source: Any, what: str) -> bool:
    """Whether a source has samples; raise a `DatasetInputError` if it has nothing we know."""
    kind = type(source).__name__
    check_is_read(what, source)
    if _are_files(source):
        raise _not_read(source)
    if kind in ("DatasetDict", "IterableDatasetDict"):
        raise DatasetInputError(
            f"{what} is a {kind} of {', '.join(map(repr, source))}; give one of them, and "
            'validation=... of another: write(url, data["train"], validation=data["test"])'
        )
    if isinstance(source, Batches | Mapping | Sharded | Part) or table_columns(source) is not None:
        return False
    if any(base.__name__ == "DataLoader" for base in type(source).__mro__):
        raise DatasetInputError(
            f"{what} is a DataLoader, which makes batches; give its dataset: loader.dataset"
        )
    if hasattr(source, "dtype") or isinstance(source, bytes):
        raise DatasetInputError(
            f'{what} is a {kind}; pass a mapping of names to arrays, such as {{"x": {what}}}'
        )
    if isinstance(source, list | tuple) and source and all(map(is_dataset, source)):
        raise DatasetInputError(
            f"{what} is a {kind} of {len(source)} data sets; give one of them, and validation=... "
            "of another: write(url, data[0], validation=data[1])"
        )
    if isinstance(source, list | tuple) and 0 < len(source) < 5:
        lengths = {len(part) if hasattr(part, "shape") else 0 for part in source}
        if len(lengths) == 1 and min(lengths) > len(source):
            raise DatasetInputError(
                f"{what} is a {kind} of {len(source)} arrays; pass a mapping of names to arrays, "
                'such as {"x": ..., "y": ...}'
            )
    if is_stream(source) or (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        return True
    raise DatasetInputError(
        f"{what} is a {kind}, {shown(source)}; pass a mapping of names to arrays, a table, a path "
        "of Parquet files or images, a data set, or a stream of samples"
    )


def is_dataset(part: Any) -> bool:
    """Whether something is a data set of PyTorch or of Hugging Face, or a part of one."""
    kinds = {(base.__module__.partition(".")[0], base.__name__) for base in type(part).__mro__}
    return not kinds.isdisjoint({("torch", "Dataset"), ("datasets", "Dataset")})


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


@dataclass(frozen=True, slots=True)
class Part:
    """The training or the validation part of a data set that was written before."""

    source: Sharded
    split: Split


def _again(
    source: Sharded,
    reading: Reading,
    classes: Classes,
    what: str,
    splits: Sequence[Split] = SPLITS,
) -> Input:
    """Stream a data set's shards, or those of one of its parts."""
    manifest = source.manifest
    names = [spec.name for spec in manifest.arrays]
    wanted = reading.chosen_ones(names, what, "array of a data set")
    key = str(reading.key(names, what))
    recoded = {
        name
        for name, of in wanted.items()
        if not classes.takes_over(name, manifest.classes.get(of), what)
    }
    reads = {"train": source.shard, "validation": source.validation_shard}

    def shards() -> Iterator[Mapping[str, Any]]:
        return (reads[split](index) for split in splits for index in range(source.n_shards))

    def texts(shard: Mapping[str, Any], of: str) -> Any:
        return np.array(manifest.classes[of], object)[shard[of]]

    def array(shard: Mapping[str, Any], name: str, of: str) -> Any:
        return classes.encode(name, texts(shard, of), what) if name in recoded else shard[of]

    def values() -> Iterator[Any]:
        is_text = key in manifest.classes
        return (texts(shard, key) if is_text else shard[key] for shard in shards())

    batches = ({name: array(shard, name, of) for name, of in wanted.items()} for shard in shards())
    length = sum(sum(manifest.sizes(split)) for split in splits)
    columns = {name: manifest.columns.get(of, ()) for name, of in wanted.items()}
    return Input(Batches(batches, length), values, joined(columns))


def _holds_arrays(value: Any) -> bool:
    """Whether an array of objects has arrays or lists as its samples."""
    is_objects = isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1
    return is_objects and len(value) > 0 and isinstance(value[0], np.ndarray | list | tuple)


def _is_column(value: Any) -> bool:
    """Whether something is a column of a table, or an array of objects as one is."""
    if getattr(value, "ndim", 1) != 1 or not hasattr(value, "dtype"):
        return False
    return hasattr(value, "to_numpy") or (isinstance(value, np.ndarray) and value.dtype == object)


def _batches(source: Batches, reading: Reading, what: str) -> Input:
    """Return batches, with the column by which samples are divided as their `KEY`."""
    first, by = source.peek(), reading.by
    if by is None or not isinstance(first, Mapping):
        return Input(source)
    check_column(by, list(first), what)
    keyed = (
        {**{name: rows for name, rows in batch.items() if reading.keeps(name)}, KEY: batch.get(by)}
        for batch in source
    )
    return Input(Batches(keyed, source.length))


def _becomes_array(value: Any) -> bool:
    """Whether it is a tensor; or a sparse matrix, which says that it is none."""
    return hasattr(value, "detach") or hasattr(value, "toarray")


def _arrays(source: Mapping[str, Any], reading: Reading, classes: Classes, what: str) -> Input:
    """Return arrays by name; lists and tensors become arrays, others may be larger than memory."""
    check_order(source)
    arrays = {
        name: of_list(name, list(value))
        if _holds_arrays(value)
        else as_array(name, list(value) if isinstance(value, tuple) else value)
        if isinstance(value, list | tuple) or _is_column(value) or _becomes_array(value)
        else value
        for name, value in source.items()
    }
    for name in arrays:
        if reading.keeps(name):
            value, arrays[name] = arrays[name], _numbered(name, arrays[name], classes, what)
            if arrays[name] is value:
                classes.takes_over(name, None, what)
    if reading.by is None:
        return Input(arrays)
    check_column(reading.by, list(arrays), what)
    told: Any = arrays[reading.by]
    if isinstance(told, Batches):
        raise DatasetInputError(
            f"{what}: {reading.by!r} is a stream, and says how samples are divided; give it as an "
            "array"
        )

    texts = np.array(classes.known.get(reading.by, []), object)

    def values() -> Iterator[Any]:
        for at in range(0, len(told), _ROWS):
            rows = np.asarray(told[at : at + _ROWS])
            yield texts[rows] if len(texts) else rows

    return Input({name: arrays[name] for name in arrays if reading.keeps(name)}, values)


def _numbered(name: str, value: Any, classes: Classes, what: str) -> Any:
    """Return a column or an array of texts, one a sample, as the numbers of its classes."""
    if not isinstance(value, np.ndarray | Batches) and not hasattr(value, "to_numpy"):
        return _numbered_in_blocks(name, value, classes, what)
    is_column = hasattr(value, "to_numpy") and getattr(value, "ndim", 1) == 1
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "OUT" and value.ndim == 1
    if not (is_column or is_array):
        return value
    values = getter({name: value})(name)
    is_objects = values.dtype == object
    if not is_text(values) or (is_objects and not all(isinstance(each, str) for each in values)):
        return value
    return make_array(name, [name], lambda _: values, classes, what)


def _numbered_in_blocks(name: str, value: Any, classes: Classes, what: str) -> Any:
    """Return an array of Dask, Zarr or h5py as numbers, if it holds texts, one a sample."""
    shape: tuple[Any, ...] = getattr(value, "shape", ())
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if len(shape) != 1 or kind not in ("O", "U", "T") or not shape[0] > 0:  # Dask's may be NaN
        return value
    rows = value
    if hasattr(value, "asstr"):  # h5py's, whose texts are bytes
        try:
            rows = value.asstr()
        except TypeError:
            return value
    if not is_text(np.asarray(rows[:1])):
        return value
    blocks = (np.asarray(rows[at : at + _ROWS]) for at in range(0, shape[0], _ROWS))
    if classes.is_fixed or name in classes.known:
        return np.concatenate([classes.encode(name, block, what) for block in blocks])
    numbers = np.concatenate([classes.learn(name, block, what) for block in blocks])
    return classes.settle(name)[numbers]
