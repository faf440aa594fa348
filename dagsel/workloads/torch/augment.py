"""Changes training samples by chance: the same changes whenever an epoch is repeated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from dagsel.errors import WorkloadError
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.random_streams import preserved_streams, seed_streams

Augment: TypeAlias = Callable[[dict[str, torch.Tensor], Any], Any]


class Augmentation:
    """Calls a user's function for each sample, with random streams of that sample's own.

    What a sample becomes depends on the run's seed, the trial, the epoch, the shard and its place
    there. So it is the same in a replay, in a unit that was stopped and goes on, in a gang, and in
    batches of another size. The trial's own streams stay where they are.

    Parameters
    ----------
    function
        ``augment(sample, config)``.
    config
        The trial's configuration.
    visit
        The pass over the shard.
    n_samples
        Samples in the shard.
    """

    def __init__(self, function: Augment, config: Config, visit: Visit, n_samples: int) -> None:
        self._function, self._config = function, config
        key = [visit.seed, visit.trial, visit.epoch, visit.shard, 2]
        self._seeds: list[int] = np.random.default_rng(key).integers(2**63, size=n_samples).tolist()

    def __call__(self, batch: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
        """Return the batch of the samples at these places, changed."""
        made = []
        with preserved_streams(torch=True):
            for row, place in enumerate(places):
                seed_streams(self._seeds[place], torch=True)
                sample = self._function(
                    {name: rows[row] for name, rows in batch.items()}, self._config
                )
                if not isinstance(sample, Mapping) or set(sample) != set(batch):
                    raise WorkloadError(
                        f"augment returns {_shown(sample)} for a sample with {', '.join(batch)}: "
                        "return a mapping with the same names"
                    )
                made.append(sample)
        return {name: _joined(name, rows, made) for name, rows in batch.items()}


def _joined(name: str, rows: Any, made: list[Mapping[str, Any]]) -> Any:
    changed = [torch.as_tensor(sample[name]) for sample in made]
    if isinstance(rows, list):  # ragged, and ragged it stays
        return changed
    try:
        return torch.stack(changed)
    except RuntimeError as error:
        shapes = sorted({tuple(row.shape) for row in changed})
        raise WorkloadError(
            f"augment gives {name!r} the shapes {', '.join(map(str, shapes))} in one batch: give "
            f"all samples one shape and dtype ({error})"
        ) from None


def _shown(sample: Any) -> str:
    return ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
