"""Writes the samples of an input into shards: shuffled, in bounded memory.

The input is read once, in order. Each sample is written to a nameless scratch file, at the *run*
(a few inner chunks of one shard) that it belongs to after the shuffle. Then each run is loaded, put
in order and appended to its shard's object. So memory holds a block of the input and a run, however
large the input is, and no disk is asked for single samples. Arrays in memory need no scratch file.
Ragged arrays are written in the same way, by `ragged_write`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dagsel.console import ProgressBar
from dagsel.storage.datasets.division import Places
from dagsel.storage.datasets.manifest import SPLITS, ArraySpec, Manifest, Split
from dagsel.storage.datasets.plan import InputPlan, Shards, WritePlan
from dagsel.storage.datasets.ragged_write import RaggedInMemory, RaggedScratch, RaggedWriter
from dagsel.storage.datasets.scratch import RUN_BYTES, Scratch
from dagsel.storage.datasets.sources import is_in_memory
from dagsel.storage.datasets.zarr_shard import group_metadata
from dagsel.storage.files import Folder


class ReadsRuns(Protocol):
    """What an array is written from."""

    def run(self, run: int) -> NDArray[Any]:
        """Load a run in its final order."""
        ...


def write_shards(folder: Folder, plan: WritePlan) -> Manifest:
    """Write everything of a data set except its manifest; return that, now that all is counted."""
    manifest = plan.manifest
    folder.replace("zarr.json", group_metadata())
    folder.replace(f"{manifest.folder}/zarr.json", group_metadata())
    for split in SPLITS:
        folder.replace(f"{manifest.folder}/{split}/zarr.json", group_metadata())
        for shard in range(manifest.n_shards):
            key = f"{manifest.folder}/{split}/{shard:05d}/zarr.json"
            folder.replace(key, group_metadata())
    n_values: dict[str, dict[Split, list[int]]] = {}
    # Local scratch lies beside the data, where there is space; else in the usual place.
    scratch_folder = folder.path(manifest.folder) if folder.is_local else None
    with ProgressBar(manifest.nbytes, f"writing {folder.url}") as progress:
        for entry in plan.inputs:
            for names, stream in entry.source.streams:
                with contextlib.ExitStack() as stack:
                    writers = {
                        spec.name: _writer(spec, folder, manifest, entry, progress)
                        for spec in manifest.arrays
                        if spec.name in names
                    }
                    readers = _readers(stack, names, stream, entry, writers, scratch_folder)
                    for name, writer in writers.items():
                        counted = writer.write(readers[name])
                        if counted:
                            n_values[name] = {**n_values.get(name, {}), **counted}
    return replace(manifest, n_values=n_values)


def _writer(
    spec: ArraySpec, folder: Folder, manifest: Manifest, entry: InputPlan, progress: ProgressBar
) -> _ArrayWriter | RaggedWriter:
    if not spec.is_ragged:
        return _ArrayWriter(folder, manifest, spec, entry.shards, progress)
    sample_bytes = entry.source.columns[spec.name].sample_bytes
    return RaggedWriter(folder, manifest, spec, entry.shards, progress, sample_bytes)


@dataclass(frozen=True, slots=True)
class _ArrayWriter:
    """Writes one array of one input into its shards."""

    folder: Folder
    manifest: Manifest
    spec: ArraySpec
    shards: Shards
    progress: ProgressBar

    def runs_of(self, split: Split, n_samples: int) -> Iterator[int]:
        """Return the sizes of a shard's runs: whole chunks each, except the last."""
        chunk = self.spec.chunk(split)
        size = max(1, RUN_BYTES // (chunk * self.spec.sample_bytes)) * chunk
        return (min(size, n_samples - start) for start in range(0, n_samples, size))

    def edges(self) -> NDArray[np.int64]:
        """Return the first destination of each run, and the end of the last."""
        sizes = [run for split, _, n in self.shards for run in self.runs_of(split, n)]
        return np.cumsum([0, *sizes], dtype=np.int64)

    def write(self, scratch: ReadsRuns) -> None:
        run = 0
        for split, index, n_samples in self.shards:
            form = self.manifest.form(split, index, self.spec)
            key = self.manifest.key(split, index, self.spec.name)
            self.folder.replace(f"{key}/zarr.json", form.metadata())
            n_runs = len(list(self.runs_of(split, n_samples)))
            with self.folder.open_write(f"{key}/{form.key}") as stream:
                form.encode(stream, self._counted(scratch, range(run, run + n_runs)))
            run += n_runs

    def _counted(self, scratch: ReadsRuns, runs: range) -> Iterator[NDArray[Any]]:
        for run in runs:
            rows = scratch.run(run)
            yield rows
            self.progress.advance(rows.nbytes)


def _readers(
    stack: contextlib.ExitStack,
    names: tuple[str, ...],
    stream: Any,
    entry: InputPlan,
    writers: Mapping[str, Any],
    scratch_folder: str | None,
) -> dict[str, Any]:
    """Return for each name what loads its runs in their final order."""
    if is_in_memory(stream):
        (name,) = names
        kind: Any = RaggedInMemory if writers[name].spec.is_ragged else _InMemory
        return {name: kind(stream, entry.shuffle, writers[name].edges())}
    scratches: dict[str, Any] = {}
    for name, writer in writers.items():
        kind = RaggedScratch if writer.spec.is_ragged else Scratch
        made = kind(writer.spec, entry.shuffle, writer.edges(), scratch_folder)
        scratches[name] = stack.enter_context(made)
    for start, block in entry.source.blocks(names, stream):
        n_rows = len(next(iter(block.values())))
        places = entry.shuffle.destinations(np.arange(start, start + n_rows))
        kept = np.flatnonzero(places >= 0)
        if not len(kept):
            continue
        for name, rows in block.items():
            is_whole = len(kept) == n_rows
            scratches[name].scatter(places[kept], rows if is_whole else rows[kept])
    return scratches


@dataclass(frozen=True, slots=True)
class _InMemory:
    """An array in memory, read by run."""

    array: NDArray[Any]
    shuffle: Places
    edges: NDArray[np.int64]

    def run(self, run: int) -> NDArray[Any]:
        places = np.arange(self.edges[run], self.edges[run + 1])
        rows: NDArray[Any] = self.array[self.shuffle.sources(places)]
        return rows
