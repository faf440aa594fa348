"""A data set all of whose samples are trained on, those for validation too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dagsel.storage.datasets.dataset import ShardedDataset
from dagsel.storage.datasets.manifest import ShardSize
from dagsel.storage.datasets.ragged import RaggedArray


@dataclass(frozen=True, slots=True, repr=False)
class WholeDataset(ShardedDataset):
    """A view of a data set: a shard is its training part, and then its validation part.

    Nothing is written, and each part is read once. There are no validation samples.

    Examples
    --------
    >>> import numpy as np
    >>> arrays = {"x": np.arange(10)}
    >>> data = ShardedDataset.write("memory://whole.zarr", arrays, n_shards=2, overwrite=True)
    >>> whole = WholeDataset(data.folder, data.manifest)
    >>> sorted(x for shard in range(2) for x in whole.shard(shard)["x"].tolist())
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    >>> len(whole.validation_shard(0)["x"])
    0
    """

    @property
    def is_view(self) -> bool:
        """Whether its shards are put together from those of another one: they are."""
        return True

    @property
    def shard_sizes(self) -> tuple[ShardSize, ...]:
        """Size of each shard."""
        sizes = ShardedDataset.shard_sizes.fget(self)  # type: ignore[attr-defined]
        return tuple(
            replace(size, n_train=size.n_train + size.n_validation, n_validation=0)
            for size in sizes
        )

    def shard(self, index: int) -> dict[str, Any]:
        """Read all samples of a shard."""
        parts = self._read(index, "train"), self._read(index, "validation")
        return {name: _joined([part[name] for part in parts]) for name in self.schema}

    def validation_shard(self, index: int) -> dict[str, Any]:
        """Return arrays without samples."""
        empty: dict[str, Any] = {}
        for name, spec in self.schema.items():
            values = np.empty(0 if spec.is_ragged else (0, *spec.shape), spec.numpy_dtype)
            shapes = np.empty((0, spec.n_axes), np.int64)
            empty[name] = RaggedArray(values, shapes) if spec.is_ragged else values
        return empty


def _joined(parts: list[Any]) -> Any:
    return RaggedArray.join(parts) if isinstance(parts[0], RaggedArray) else np.concatenate(parts)
