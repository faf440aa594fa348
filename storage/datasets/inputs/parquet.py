"""Parquet files at any fsspec URL, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from dagsel.errors import DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.reading import Input, Reading, joined
from dagsel.storage.datasets.inputs.tables import getter, make_array, say_missing
from dagsel.storage.datasets.sources import Batches

_BUFFER_BYTES = 1 << 16  # of a column, read ahead
_BATCH_BYTES = 8 << 20


def read_parquet(files: Sequence[str], reading: Reading, classes: Classes) -> Input:
    """Stream the row groups of Parquet files."""
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DatasetInputError(
            f'Parquet files need pyarrow: pip install "dagsel[parquet]" ({error})'
        ) from None

    @contextmanager
    def opened(name: str) -> Iterator[Any]:
        # Remote files are read a row group at a time, in few requests, and local ones as needed.
        is_local = isinstance(fsspec.core.url_to_fs(name)[0], LocalFileSystem)
        options = {"pre_buffer": False, "buffer_size": _BUFFER_BYTES} if is_local else {}
        try:
            with fsspec.open(name, "rb") as stream:
                yield parquet.ParquetFile(stream, **options)
        except (OSError, arrow.ArrowInvalid) as error:
            raise DatasetInputError(f"{name} cannot be read: {error}") from None

    schemas, length = list[Any](), 0
    for name in files:
        with opened(name) as file:
            schemas.append(file.schema_arrow)
            length += file.metadata.num_rows
        first, schema = schemas[0], schemas[-1]
        if not schema.equals(first):
            other = {one.name: str(one.type) for one in schema}
            differs = next((c.name for c in first if other.get(c.name) != str(c.type)), "a column")
            raise DatasetInputError(
                f"{name} has a schema of its own: {differs!r} is {other.get(differs)}, and in "
                f"{files[0]} {first.field(differs).type if differs in first.names else 'missing'}; "
                "give all files the same columns"
            )
    wanted = reading.chosen(first.names, files[0])
    key = reading.key(first.names, files[0])
    needed = list(dict.fromkeys(column for of in wanted.values() for column in of))

    def groups(only: list[str]) -> Iterator[tuple[str, Any]]:
        for name in files:
            row = 0
            with opened(name) as file:
                rows = _batch_rows(file.metadata)
                for batch in file.iter_batches(rows, columns=only):
                    n_rows = batch.num_rows
                    yield f"{name}, rows from {row} on", batch
                    del batch  # before the next one is read
                    row += n_rows

    for name, of in wanted.items() if not classes.is_fixed else ():
        if len(of) == 1 and _is_arrow_text(first.field(of[0]).type):
            tables = (table[of[0]].unique().to_pylist() for _, table in groups(of))
            found = {value for values in tables for value in values}
            classes.known[name] = sorted(value for value in found if value is not None)

    said: set[str] = set()

    def batches() -> Iterator[dict[str, Any]]:
        for where, table in groups(needed):
            get = getter(table)
            made = {name: make_array(name, of, get, classes, where) for name, of in wanted.items()}
            say_missing(where, made, wanted, said)
            del get, table
            arrow.default_memory_pool().release_unused()
            yield made
            del made

    def values() -> Iterator[Any]:
        return (getter(table)(str(key)) for _, table in groups([str(key)]))

    return Input(Batches(batches(), length), values, joined(wanted))


def _batch_rows(metadata: Any) -> int:
    """Return how many rows to read at once."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    row_bytes = max(
        (group.total_byte_size // max(1, group.num_rows) for group in groups), default=1
    )
    return max(1, _BATCH_BYTES // max(1, row_bytes))


def _is_arrow_text(kind: Any) -> bool:
    return any(word in str(kind) for word in ("string", "dictionary"))
