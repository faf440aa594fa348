"""Writes ragged arrays into shards: shuffled, in bounded memory.

Of each shard first the shapes of its samples are written, which tell how many values there are, and
then the values. Samples have no place of their own in the scratch file before all are known. So it
is appended to, and the pieces of each run are a list that is linked backwards: each begins with the
place of the piece before it.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.console import ProgressBar
from dagsel.storage.datasets.division import Places
from dagsel.storage.datasets.manifest import SHAPE_DTYPE, ArraySpec, Manifest, Split
from dagsel.storage.datasets.plan import Shards
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.scratch import (
    RUN_BYTES,
    Scratch,
    by_run,
    final_order,
    read_at,
    write_at,
)
from dagsel.storage.datasets.zarr_shard import ShardFormat, group_metadata
from dagsel.storage.files import Folder

_NONE = -1  # no piece is before it


@dataclass(frozen=True, slots=True)
class RaggedWriter:
    """Writes one ragged array of one input into its shards."""

    folder: Folder
    manifest: Manifest
    spec: ArraySpec
    shards: Shards
    progress: ProgressBar
    sample_bytes: int  # on average, as far as is known

    def _runs_of(self, n_samples: int) -> Iterator[int]:
        """Return the sizes of a shard's runs."""
        size = max(1, RUN_BYTES // self.sample_bytes)
        return (min(size, n_samples - start) for start in range(0, n_samples, size))

    def edges(self) -> NDArray[np.int64]:
        """Return the first destination of each run, and the end of the last."""
        sizes = [run for _, _, n in self.shards for run in self._runs_of(n)]
        return np.cumsum([0, *sizes], dtype=np.int64)

    def write(self, scratch: RaggedInMemory | RaggedScratch) -> dict[Split, list[int]]:
        """Write all shards; return the number of values in each."""
        run = 0
        counted: dict[Split, list[int]] = {}
        for split, index, n_samples in self.shards:
            key = self.manifest.key(split, index, self.spec.name)
            self.folder.replace(f"{key}/zarr.json", group_metadata())
            runs = range(run, run + len(list(self._runs_of(n_samples))))
            n_values = sum(int(scratch.shapes(k).prod(axis=1).sum()) for k in runs)
            counted.setdefault(split, []).append(n_values)
            shapes = self.manifest.form(split, index, self.spec)
            self._encode(f"{key}/shapes", shapes, map(scratch.shapes, runs))
            values = self.manifest.values_form(split, index, self.spec, n_values)
            self._encode(f"{key}/values", values, (scratch.run(k).values for k in runs))
            run = runs.stop
        return counted

    def _encode(self, key: str, form: ShardFormat, parts: Iterable[NDArray[Any]]) -> None:
        self.folder.replace(f"{key}/zarr.json", form.metadata())
        with self.folder.open_write(f"{key}/{form.key}") as stream:
            form.encode(stream, self._counted(_whole_chunks(parts, form.chunk)))

    def _counted(self, parts: Iterable[NDArray[Any]]) -> Iterator[NDArray[Any]]:
        for part in parts:
            yield part
            self.progress.advance(part.nbytes)


def _whole_chunks(parts: Iterable[NDArray[Any]], chunk: int) -> Iterator[NDArray[Any]]:
    """Cut arrays anew, so that each but the last one holds whole chunks."""
    left: NDArray[Any] | None = None
    for part in parts:
        rows = part if left is None else np.concatenate([left, part])
        end = len(rows) - len(rows) % chunk
        if end:
            yield rows[:end]
        left = rows[end:].copy()  # a view would keep the whole part
    if left is not None and len(left):
        yield left


@dataclass(frozen=True, slots=True)
class RaggedInMemory:
    """A ragged array in memory, read by run."""

    array: RaggedArray
    shuffle: Places
    edges: NDArray[np.int64]

    def shapes(self, run: int) -> NDArray[np.int64]:
        """Return the shapes of a run's samples in their final order."""
        return self.array.shapes[self._sources(run)]

    def run(self, run: int) -> RaggedArray:
        """Return a run's samples in their final order."""
        rows: RaggedArray = self.array[self._sources(run)]
        return rows

    def _sources(self, run: int) -> NDArray[np.int64]:
        return self.shuffle.sources(np.arange(self.edges[run], self.edges[run + 1]))


class RaggedScratch(contextlib.AbstractContextManager["RaggedScratch"]):
    """Nameless files that hold a ragged array's samples by run; parameters as `Scratch`."""

    def __init__(
        self, spec: ArraySpec, shuffle: Places, edges: NDArray[np.int64], directory: str | None
    ) -> None:
        self._spec, self._shuffle, self._edges = spec, shuffle, edges
        of_shapes = replace(spec, dtype=SHAPE_DTYPE, shape=(spec.n_axes,), n_axes=0)
        self._shapes = Scratch(of_shapes, shuffle, edges, directory)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        self._last = np.full(len(edges) - 1, _NONE, np.int64)  # where each run's last piece is
        self._end = 0

    def scatter(self, places: NDArray[np.int64], rows: RaggedArray) -> None:
        """Append each sample to the run that contains its destination."""
        self._shapes.scatter(places, rows.shapes)
        for run, piece in by_run(self._edges, places):
            values = np.ascontiguousarray(rows[piece].values, self._spec.dtype)
            head = np.array([self._last[run], len(values)], np.int64)
            write_at(self._file.fileno(), head, self._end)
            write_at(self._file.fileno(), values, self._end + head.nbytes)
            self._last[run] = self._end
            self._end += head.nbytes + values.nbytes

    def shapes(self, run: int) -> NDArray[np.int64]:
        """Load the shapes of a run's samples in their final order."""
        return self._shapes.run(run)

    def run(self, run: int) -> RaggedArray:
        """Load a run in its final order."""
        first, last = int(self._edges[run]), int(self._edges[run + 1])
        order = final_order(self._shuffle, first, last)
        as_read = np.empty_like(shapes := self.shapes(run))
        as_read[order] = shapes
        values = np.empty(int(shapes.prod(axis=1).sum()), self._spec.dtype)
        place, end = int(self._last[run]), len(values)
        head = np.empty(2, np.int64)
        while place != _NONE:
            read_at(self._file.fileno(), head, place)
            start = end - int(head[1])
            read_at(self._file.fileno(), values[start:end], place + head.nbytes)
            place, end = int(head[0]), start
        rows: RaggedArray = RaggedArray(values, as_read)[order]
        return rows

    def __exit__(self, *_: object) -> None:
        self._shapes.__exit__()
        self._file.close()
