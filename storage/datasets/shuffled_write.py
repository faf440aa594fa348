"""Writes the samples of an input into shards: shuffled, in bounded memory.

The input is read once, in order. Each sample is written to a nameless scratch file, at the *run*
(a few inner chunks of one shard) that it belongs to after the shuffle. Then each run is loaded, put
in order and appended to its shard's object. So memory holds a block of the input and a run, however
large the input is, and no disk is asked for single samples. Arrays in memory need no scratch file.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.console import ProgressBar
from dagsel.storage.datasets.manifest import SPLITS, ArraySpec, Manifest, Split
from dagsel.storage.datasets.permutation import Shuffle
from dagsel.storage.datasets.plan import InputPlan, WritePlan
from dagsel.storage.datasets.sources import is_in_memory
from dagsel.storage.datasets.zarr_shard import group_metadata
from dagsel.storage.files import Folder

#: Bytes of a run, which is loaded whole.
RUN_BYTES = 32 << 20

ReadRun: TypeAlias = Callable[[int], NDArray[Any]]


def write_shards(folder: Folder, plan: WritePlan) -> None:
    """Write everything of a data set except its manifest."""
    manifest = plan.manifest
    folder.replace("zarr.json", group_metadata())
    folder.replace(f"{manifest.folder}/zarr.json", group_metadata())
    for split in SPLITS:
        folder.replace(f"{manifest.folder}/{split}/zarr.json", group_metadata())
        for shard in range(manifest.n_shards):
            key = f"{manifest.folder}/{split}/{shard:05d}/zarr.json"
            folder.replace(key, group_metadata())
    n_bytes = manifest.n_samples * manifest.sample_bytes
    # Local scratch lies beside the data, where there is space; else in the usual place.
    scratch_folder = folder.path(manifest.folder) if folder.is_local else None
    with ProgressBar(n_bytes, f"writing {folder.url}") as progress:
        for entry in plan.inputs:
            for names, stream in entry.source.streams:
                with contextlib.ExitStack() as stack:
                    writers = {
                        spec.name: _ArrayWriter(folder, manifest, spec, entry, progress)
                        for spec in manifest.arrays
                        if spec.name in names
                    }
                    readers = _readers(stack, names, stream, entry, writers, scratch_folder)
                    for name, writer in writers.items():
                        writer.write(readers[name])


@dataclass(frozen=True, slots=True)
class _ArrayWriter:
    """Writes one array of one input into its shards."""

    folder: Folder
    manifest: Manifest
    spec: ArraySpec
    entry: InputPlan
    progress: ProgressBar

    def runs_of(self, split: Split, n_samples: int) -> Iterator[int]:
        """Return the sizes of a shard's runs: whole chunks each, except the last."""
        chunk = self.spec.chunk(split)
        size = max(1, RUN_BYTES // (chunk * self.spec.sample_bytes)) * chunk
        return (min(size, n_samples - start) for start in range(0, n_samples, size))

    def edges(self) -> NDArray[np.int64]:
        """Return the first destination of each run, and the end of the last."""
        sizes = [run for split, _, n in self.entry.shards for run in self.runs_of(split, n)]
        return np.cumsum([0, *sizes], dtype=np.int64)

    def write(self, read: ReadRun) -> None:
        run = 0
        for split, index, n_samples in self.entry.shards:
            form = self.manifest.form(split, index, self.spec)
            key = self.manifest.key(split, index, self.spec.name)
            self.folder.replace(f"{key}/zarr.json", form.metadata())
            n_runs = len(list(self.runs_of(split, n_samples)))
            with self.folder.open_write(f"{key}/{form.key}") as stream:
                form.encode(stream, self._counted(read, range(run, run + n_runs)))
            run += n_runs

    def _counted(self, read: ReadRun, runs: range) -> Iterator[NDArray[Any]]:
        for run in runs:
            rows = read(run)
            yield rows
            self.progress.advance(rows.nbytes)


def _readers(
    stack: contextlib.ExitStack,
    names: tuple[str, ...],
    stream: Any,
    entry: InputPlan,
    writers: Mapping[str, _ArrayWriter],
    scratch_folder: str | None,
) -> dict[str, ReadRun]:
    """Return for each name a function that loads a run in its final order."""
    if is_in_memory(stream):
        (name,) = names
        edges = writers[name].edges()

        def gather(run: int) -> NDArray[Any]:
            places = np.arange(edges[run], edges[run + 1])
            rows: NDArray[Any] = stream[entry.shuffle.sources(places)]
            return rows

        return {name: gather}
    scratches = {
        name: stack.enter_context(
            _Scratch(writer.spec, entry.shuffle, writer.edges(), scratch_folder)
        )
        for name, writer in writers.items()
    }
    for start, block in entry.source.blocks(names, stream):
        n_rows = len(next(iter(block.values())))
        places = entry.shuffle.destinations(np.arange(start, start + n_rows))
        for name, rows in block.items():
            scratches[name].scatter(places, rows)
    return {name: scratch.run for name, scratch in scratches.items()}


class _Scratch(contextlib.AbstractContextManager["_Scratch"]):
    """A nameless file that holds an array's samples by run. It is gone when the process ends."""

    def __init__(
        self, spec: ArraySpec, shuffle: Shuffle, edges: NDArray[np.int64], directory: str | None
    ) -> None:
        self._spec, self._shuffle, self._edges = spec, shuffle, edges
        self._n_filled = np.zeros(len(edges) - 1, np.int64)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115

    def scatter(self, places: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Append each sample to the run that contains its destination."""
        runs = np.searchsorted(self._edges, places, side="right") - 1
        order = np.argsort(runs, kind="stable")
        data = np.ascontiguousarray(rows[order], self._spec.dtype)
        found, starts = np.unique(runs[order], return_index=True)
        for run, piece in zip(found, np.split(data, starts[1:]), strict=True):
            offset = int(self._edges[run] + self._n_filled[run]) * self._spec.sample_bytes
            _write_at(self._file.fileno(), piece, offset)
            self._n_filled[run] += len(piece)

    def run(self, run: int) -> NDArray[Any]:
        """Load a run in its final order."""
        first, last = self._edges[run], self._edges[run + 1]
        rows = np.empty((last - first, *self._spec.shape), self._spec.dtype)
        _read_at(self._file.fileno(), rows, int(first) * self._spec.sample_bytes)
        # Samples lie in the file in the order of the input, hence by rising source.
        order = np.argsort(self._shuffle.sources(np.arange(first, last)))
        arranged = np.empty_like(rows)
        arranged[order] = rows
        return arranged

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _write_at(fd: int, rows: NDArray[Any], offset: int) -> None:
    data = rows.reshape(-1).view(np.uint8).data
    while data:
        n_written = os.pwrite(fd, data, offset)
        data, offset = data[n_written:], offset + n_written


def _read_at(fd: int, rows: NDArray[Any], offset: int) -> None:
    data = rows.reshape(-1).view(np.uint8).data
    while data:
        n_read = os.preadv(fd, [data], offset)
        if not n_read:
            raise OSError("the scratch file of a write is shorter than what was written to it")
        data, offset = data[n_read:], offset + n_read
