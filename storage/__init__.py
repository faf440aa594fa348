"""Sharded data sets and the states of trials, at any URL that fsspec knows.

`ShardedDataset` is the data; `Batches`, `ImageFolder` and `WebDataset` are what it may be written
from, and `RaggedArray` is an array whose samples differ in shape. A `RunDir` holds a run: its
`Journal` and the states of its trials (`CheckpointStore`). Importing this package loads neither
torch nor Dask.
"""

from __future__ import annotations

from dagsel.storage.datasets.dataset import ShardedDataset
from dagsel.storage.datasets.inputs.images import ImageFolder
from dagsel.storage.datasets.inputs.webdataset import WebDataset
from dagsel.storage.datasets.manifest import ShardSize
from dagsel.storage.datasets.ragged import RaggedArray
from dagsel.storage.datasets.sources import Batches
from dagsel.storage.runs.checkpoints import CheckpointStore
from dagsel.storage.runs.journal import Journal
from dagsel.storage.runs.run_dir import RunDir

__all__ = [
    "Batches",
    "CheckpointStore",
    "ImageFolder",
    "Journal",
    "RaggedArray",
    "RunDir",
    "ShardSize",
    "ShardedDataset",
    "WebDataset",
]


def __dir__() -> list[str]:
    return __all__
