"""Nameless files that hold an array's samples by run, while a data set is written."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.storage.datasets.division import Places
from dagsel.storage.datasets.manifest import ArraySpec

#: Bytes of a run, which is loaded whole.
RUN_BYTES = 32 << 20


class Scratch(contextlib.AbstractContextManager["Scratch"]):
    """A nameless file that holds an array's samples by run. It is gone when the process ends.

    Parameters
    ----------
    spec
        The array.
    shuffle
        Where its samples go.
    edges
        The first destination of each run, and the end of the last.
    directory
        Where the file is; None for the usual place.
    """

    def __init__(
        self, spec: ArraySpec, shuffle: Places, edges: NDArray[np.int64], directory: str | None
    ) -> None:
        self._spec, self._shuffle, self._edges = spec, shuffle, edges
        self._n_filled = np.zeros(len(edges) - 1, np.int64)
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115

    def scatter(self, places: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Append each sample to the run that contains its destination."""
        for run, piece in by_run(self._edges, places):
            data = np.ascontiguousarray(rows[piece], self._spec.dtype)
            offset = int(self._edges[run] + self._n_filled[run]) * self._spec.sample_bytes
            write_at(self._file.fileno(), data, offset)
            self._n_filled[run] += len(piece)

    def run(self, run: int) -> NDArray[Any]:
        """Load a run in its final order."""
        first, last = self._edges[run], self._edges[run + 1]
        rows = np.empty((last - first, *self._spec.shape), self._spec.dtype)
        read_at(self._file.fileno(), rows, int(first) * self._spec.sample_bytes)
        arranged: NDArray[Any] = rows[final_order(self._shuffle, int(first), int(last))]
        return arranged

    def __exit__(self, *_: object) -> None:
        self._file.close()


def by_run(
    edges: NDArray[np.int64], places: NDArray[np.int64]
) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each run that contains some of the destinations, and which of them, in their order."""
    runs = np.searchsorted(edges, places, side="right") - 1
    order = np.argsort(runs, kind="stable")
    found, starts = np.unique(runs[order], return_index=True)
    for run, piece in zip(found, np.split(order, starts[1:]), strict=True):
        yield int(run), piece


def final_order(shuffle: Places, first: int, last: int) -> NDArray[np.int64]:
    """Return which of a run's samples, in the order of the input, comes at which place."""
    # In the order of the input means by rising source.
    order: NDArray[np.int64] = np.argsort(np.argsort(shuffle.sources(np.arange(first, last))))
    return order


def write_at(fd: int, rows: NDArray[Any], offset: int) -> None:
    """Write an array's bytes at a place of a file."""
    data = rows.reshape(-1).view(np.uint8).data
    while data:
        n_written = os.pwrite(fd, data, offset)
        data, offset = data[n_written:], offset + n_written


def read_at(fd: int, rows: NDArray[Any], offset: int) -> None:
    """Fill an array with the bytes at a place of a file."""
    data = rows.reshape(-1).view(np.uint8).data
    while data:
        n_read = os.preadv(fd, [data], offset)
        if not n_read:
            raise OSError("the scratch file of a write is shorter than what was written to it")
        data, offset = data[n_read:], offset + n_read
