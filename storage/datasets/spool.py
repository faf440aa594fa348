"""Writes a stream to nameless scratch files, from which it can be read as arrays.

For a stream whose length, classes or division are known only at its end. The files are gone when
their arrays are, or when the process ends.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dagsel.console import ProgressBar
from dagsel.errors import DatasetError, DatasetInputError
from dagsel.storage.datasets.inputs.classes import Classes
from dagsel.storage.datasets.inputs.labels import Labels
from dagsel.storage.datasets.inputs.reading import KEY
from dagsel.storage.datasets.inputs.tables import is_text
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.sources import Batches, Column, Source, check_input
from dagsel.storage.files import Folder

_RECODED = 1 << 20  # numbers of classes that are put in order at once


def must_be_spooled(batches: Batches) -> bool:
    """Whether a stream has to be read to its end before it can be divided."""
    first = batches.peek()
    if not isinstance(first, Mapping):
        return False  # `check_input` says what is wrong
    return batches.length is None or KEY in first or any(map(_is_text, first.values()))


def scratch_folder(folder: Folder) -> str | None:
    """Return where scratch files lie for a data set: beside it, where there is space.

    None stands for where `tempfile` puts them: for data sets that are not on a local disk.
    """
    if not folder.is_local:
        return None
    place = Path(folder.path())
    while not place.is_dir():
        place = place.parent
    return str(place)


def spool(
    batches: Batches,
    classes: Classes,
    labels: Labels | None,
    ragged: Collection[str],
    directory: str | None,
    what: str,
) -> dict[str, Any]:
    """Return the arrays of a stream, mapped from files; `labels` take in its `KEY`.

    Text becomes numbers, and `classes` gets what they stand for. The shapes of ragged arrays'
    samples are in memory.
    """
    learnt: set[str] = set()

    def numbered() -> Iterator[dict[str, Any]]:
        n_read = 0
        for batch in batches:
            rows = dict(batch)
            if labels is not None:
                labels.add(rows.pop(KEY))
            for name, values in rows.items():
                if _is_text(values):
                    where = f"{what}, samples from {n_read} on"
                    if name not in learnt and (classes.is_fixed or name in classes.known):
                        rows[name] = classes.encode(name, values, where)
                    else:
                        learnt.add(name)
                        rows[name] = classes.learn(name, values, where)
            yield rows
            n_read += len(next(iter(rows.values())))

    stream = Batches(numbered(), batches.length)
    source = check_input(stream, what, ragged)
    with contextlib.ExitStack() as stack:  # what is mapped stays when its file is closed
        try:
            spools = {name: _Spool(column, directory) for name, column in source.columns.items()}
            for each in spools.values():
                stack.enter_context(each)
            _write(source, stream, spools, what)
        except OSError as error:
            place = directory or tempfile.gettempdir()
            raise DatasetError(
                f"{os.strerror(error.errno or 0)} while {what} was read into scratch files in "
                f"{place}, which take as much room as the samples and once more to shuffle them; "
                "make room there"
            ) from None
        for name in learnt:
            spools[name].put_in_order(classes.settle(name))
        return {name: each.array() for name, each in spools.items()}


def _write(source: Source, stream: Batches, spools: Mapping[str, _Spool], what: str) -> None:
    n_rows = 0
    with ProgressBar(None, f"reading {what}") as progress:
        for _, block in source.blocks(tuple(source.columns), stream):
            for name, rows in block.items():
                spools[name].add(rows)
                progress.advance(rows.nbytes)
            n_rows += len(next(iter(block.values())))
    if not n_rows:
        raise DatasetInputError(f"{what}: there are no samples; give at least one a shard")


class _Spool(contextlib.AbstractContextManager["_Spool"]):
    """A nameless file of an array's values, in the order of the input."""

    def __init__(self, column: Column, directory: str | None) -> None:
        self._column = column
        self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115
        self._shapes: list[NDArray[np.int64]] = []  # of a ragged array's samples
        self._n = 0

    def add(self, rows: Any) -> None:
        """Append the next samples."""
        if self._column.n_axes:
            self._shapes.append(rows.shapes)
            rows = rows.values
        data = np.ascontiguousarray(rows, self._column.dtype)
        self._file.write(data.reshape(-1).view(np.uint8).data)
        self._n += len(data)

    def put_in_order(self, order: NDArray[np.int64]) -> None:
        """Replace each number by another one."""
        numbers = self._map("r+")
        for start in range(0, self._n, _RECODED):
            numbers[start : start + _RECODED] = order[numbers[start : start + _RECODED]]

    def array(self) -> Any:
        """Return the array."""
        if not self._column.n_axes:
            return self._map("r")
        shapes = np.concatenate(self._shapes)
        values = self._map("r") if self._n else np.empty(0, self._column.dtype)
        return RaggedArray(values, shapes)

    def _map(self, mode: Literal["r", "r+"]) -> Any:
        self._file.flush()
        return np.memmap(self._file, self._column.dtype, mode, shape=(self._n, *self._column.shape))

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _is_text(values: Any) -> bool:
    is_row = isinstance(values, np.ndarray) and values.ndim == 1
    return is_row and values.dtype.kind in "OUT" and is_text(values)
