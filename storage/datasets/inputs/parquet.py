"""Parquet files at any fsspec URL, read row group by row group."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.paths import reading_file
from dagsel.storage.datasets.inputs.reading import Input, Reading, joined
from dagsel.storage.datasets.inputs.tables import getter, make_array, say_missing
from dagsel.storage.datasets.sources import Batches
from dagsel.storage.urls import without_credentials

_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}")
_BUFFER_BYTES = 1 << 16  # of a column, read ahead
_BATCH_BYTES = 8 << 20


def read_parquet(
    files: Mapping[str, Mapping[str, str]], reading: Reading, classes: Classes
) -> Input:
    """Stream the row groups of Parquet files; each has with it what its folders say of its rows."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DatasetInputError(
            f'Parquet files need pyarrow: pip install "dagsel[parquet]" ({error})'
        ) from None

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        return "string" in str(kind) and not arrow.types.is_nested(kind)

    @contextmanager
    def opened(name: str) -> Iterator[Any]:
        # Remote files are read a row group at a time, in few requests, and local ones as needed.
        is_local = isinstance(fsspec.core.url_to_fs(name)[0], LocalFileSystem)
        options = {"pre_buffer": False, "buffer_size": _BUFFER_BYTES} if is_local else {}
        with reading_file(name), fsspec.open(name, "rb") as stream:
            yield parquet.ParquetFile(stream, **options)

    what = without_credentials(next(iter(files)))
    first, length, encoded = _one_schema(files, opened, what)
    folders = _columns_of_folders(files, first.names)
    names = [*first.names, *folders]
    wanted = reading.chosen(names, what)
    key = reading.key(names, what)
    needed = list(dict.fromkeys(column for of in wanted.values() for column in of))

    def groups(only: list[str]) -> Iterator[tuple[str, str, Any]]:
        stored = [column for column in only if column not in folders]
        for name in files:
            row = 0
            with opened(name) as file:
                rows = _batch_rows(file.metadata)
                for batch in file.iter_batches(rows, columns=stored):
                    n_rows = batch.num_rows
                    yield name, f"{without_credentials(name)}, rows from {row} on", batch
                    del batch  # before the next one is read
                    row += n_rows

    def getter_of(name: str, table: Any) -> Callable[[str], NDArray[Any]]:
        get, n_rows = getter(table), table.num_rows
        return lambda column: (
            np.full(n_rows, folders[column][name]) if column in folders else get(column)
        )

    for name, (of, *more) in wanted.items() if not classes.is_fixed else ():
        if more:
            continue
        if of in folders:
            found = set(folders[of].values())
            if not any(isinstance(value, str) for value in found):
                continue
        elif is_text(kind := first.field(of).type):
            found, orders = set[Any](), set[tuple[str, ...]]()
            for _, _, table in groups([of]):
                found |= {*table[of].unique().to_pylist()}
                if getattr(kind, "ordered", False) and all(of in group for group in encoded):
                    orders.add((*table[of].dictionary.to_pylist(),))
            if len(orders) == 1:  # else nothing says which it is
                classes.known[name] = [*orders.pop()]
                continue
        else:
            continue
        classes.known[name] = sorted(value for value in found if value is not None)

    said: set[str] = set()

    def batches() -> Iterator[dict[str, Any]]:
        for file, where, table in groups(needed):
            get = getter_of(file, table)
            made = {name: make_array(name, of, get, classes, where) for name, of in wanted.items()}
            say_missing(where, made, wanted, said)
            del get, table
            arrow.default_memory_pool().release_unused()
            yield made
            del made

    def values() -> Iterator[Any]:
        return (getter_of(file, table)(str(key)) for file, _, table in groups([str(key)]))

    return Input(Batches(batches(), length), values, joined(wanted))


def _one_schema(
    files: Mapping[str, Mapping[str, str]],
    opened: Callable[[str], AbstractContextManager[Any]],
    what: str,
) -> tuple[Any, int, list[set[str]]]:
    """Return the schema of all files, how many rows they have, and `_with_dictionary` of each.

    `what` is the first file.
    """
    first, length, ours, encoded = None, 0, dict[str, Any](), list[set[str]]()
    for name, told in files.items():
        with opened(name) as file:
            schema = file.schema_arrow
            length += file.metadata.num_rows
            encoded += _with_dictionary(file.metadata)
        kinds = dict.fromkeys(told, "a folder's name") | {one.name: one.type for one in schema}
        if first is None:
            first, ours = schema, kinds
        differs = next((c for c in {**ours, **kinds} if ours.get(c) != kinds.get(c)), None)
        if differs is not None:
            raise DatasetInputError(
                f"{without_credentials(name)} has a schema of its own: {differs!r} is "
                f"{kinds.get(differs, 'missing')}, and in {what} "
                f"{ours.get(differs, 'missing')}; give all files the same columns"
            )
    return first, length, encoded


def _with_dictionary(metadata: Any) -> list[set[str]]:
    """Return of each row group the columns whose values it lists, in their order."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = ([group.column(at) for at in range(group.num_columns)] for group in groups)
    return [{one.path_in_schema for one in of if one.has_dictionary_page} for of in columns]


def _batch_rows(metadata: Any) -> int:
    """Return how many rows to read at once."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    row_bytes = max(
        (group.total_byte_size // max(1, group.num_rows) for group in groups), default=1
    )
    return max(1, _BATCH_BYTES // max(1, row_bytes))


def _columns_of_folders(
    files: Mapping[str, Mapping[str, str]], stored: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return the columns that only the folders' names hold: their value for each file."""
    columns: dict[str, dict[str, Any]] = {}
    for key in next(iter(files.values())):
        if key in stored:
            continue
        texts = {name: None if of[key] == _NO_VALUE else of[key] for name, of in files.items()}
        columns[key] = texts
        if all(value is None or _INTEGER.fullmatch(value) for value in texts.values()):
            number = float if None in texts.values() else int
            columns[key] = {
                name: np.nan if value is None else number(value) for name, value in texts.items()
            }
    return columns
