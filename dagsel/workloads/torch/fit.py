"""Whether a data set fits a workload, by what is known before any of it is read."""

from __future__ import annotations

import numpy as np
import torch

from dagsel.errors import WorkloadError
from dagsel.workloads.base import DataOutline


def check_batches(batch_size: int, data: DataOutline) -> None:
    """Raise a `WorkloadError` if some shard has no whole batch; the others are left out.

    Examples
    --------
    >>> check_batches(512, DataOutline((301, 300), {}))
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: batch_size is 512 with drop_last=True, and the smallest of the 2 \
training shards has 300 samples: nothing of it would be trained on; take a batch_size of at most \
300, leave drop_last out, or write the data set with fewer shards
    """
    least = min(data.n_train)
    if batch_size > least:
        raise WorkloadError(
            f"batch_size is {batch_size} with drop_last=True, and the smallest of the "
            f"{len(data.n_train)} training shards has {least} samples: nothing of it would be "
            f"trained on; take a batch_size of at most {least}, leave drop_last out, or write the "
            "data set with fewer shards"
        )


def check_dtypes(data: DataOutline) -> None:
    """Raise a `WorkloadError` if an array cannot become a tensor.

    Examples
    --------
    >>> check_dtypes(DataOutline((8,), {"y": (np.dtype("<U3"), ())}))
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: array 'y' is text (dtype <U3), and a tensor holds numbers: write \
the data set with  classes, y = np.unique(y, return_inverse=True)
    """
    for name, (dtype, _) in data.arrays.items():
        if dtype.kind in "US":
            raise WorkloadError(
                f"array {name!r} is text (dtype {dtype.str}), and a tensor holds numbers: write "
                f"the data set with  classes, {name} = np.unique({name}, return_inverse=True)"
            )
        try:
            torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
        except TypeError as error:
            raise WorkloadError(
                f"array {name!r} of dtype {dtype} cannot become a tensor: {error}"
            ) from error
