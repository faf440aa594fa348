"""Scaling profiles, which are kept with a data set."""

from __future__ import annotations

import re
from typing import Any

from dagsel.errors import SearchError
from dagsel.storage.datasets.dataset import ShardedDataset

_ARCHITECTURE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


def write_profile(data: ShardedDataset, architecture: str, text: bytes) -> None:
    """Store a scaling profile with the data, in place of an earlier one.

    Profiles are in the folder of the shards. A data set that is written again has none.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = {"x": np.zeros(10)}
    >>> data = ShardedDataset.write("memory://profiled.zarr", arrays, n_shards=1, overwrite=True)
    >>> write_profile(data, "resnet-50", b"{}")
    >>> read_profile(data, "resnet-50"), read_profile(data, "vgg-16"), profile_names(data)
    (b'{}', None, ['resnet-50'])
    """
    data.folder.replace(_profile_key(data, architecture), text)


def read_profile(data: ShardedDataset, architecture: str) -> bytes | None:
    """Read a scaling profile; None if there is none."""
    return data.folder.read(_profile_key(data, architecture))


def profile_names(data: ShardedDataset) -> list[str]:
    """List the architectures that have a scaling profile."""
    found = data.folder.names(f"{data.manifest.folder}/profiles")
    return [name.removesuffix(".json") for name in found if name.endswith(".json")]


def _profile_key(data: ShardedDataset, architecture: Any) -> str:
    if not isinstance(architecture, str) or not _ARCHITECTURE.fullmatch(architecture):
        raise SearchError(
            f"{architecture!r} cannot be an architecture's name: use letters, digits, '_', '-' and "
            "'.', at most 100, not beginning with '-' or '.'"
        )
    return f"{data.manifest.folder}/profiles/{architecture}.json"
