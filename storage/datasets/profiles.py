"""Scaling profiles beside the data that they were measured on.

They stand in the folder of the shards, which is new with each write: a data set that is written
anew has none.
"""

from __future__ import annotations

import re

from dagsel.errors import SearchError
from dagsel.storage.datasets.dataset import ShardedDataset

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def keep(data: ShardedDataset, architecture: str, text: bytes) -> None:
    """Store a profile, in the place of an earlier one.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = {"x": np.zeros(10)}
    >>> data = ShardedDataset.write("memory://kept.zarr", arrays, n_shards=1, overwrite=True)
    >>> keep(data, "resnet-50", b"{}")
    >>> find(data, "resnet-50"), find(data, "vgg-16"), names(data)
    (b'{}', None, ['resnet-50'])
    """
    data.folder.replace(_key(data, architecture), text)


def find(data: ShardedDataset, architecture: str) -> bytes | None:
    """Read a profile; None if there is none."""
    return data.folder.read(_key(data, architecture))


def names(data: ShardedDataset) -> list[str]:
    """List the architectures that have a profile."""
    found = data.folder.names(_folder(data))
    return [name.removesuffix(".json") for name in found if name.endswith(".json")]


def _folder(data: ShardedDataset) -> str:
    return f"{data.manifest.folder}/profiles"


def _key(data: ShardedDataset, architecture: str) -> str:
    if not _NAME.fullmatch(architecture):
        raise SearchError(
            f"{architecture!r} cannot be an architecture's name: use letters, digits, '_', '-' and "
            "'.', at most 100, not beginning with '-' or '.'"
        )
    return f"{_folder(data)}/{architecture}.json"
