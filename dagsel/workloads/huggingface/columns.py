"""Whether a data set has what a model is called with, before anything trains."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dagsel.errors import WorkloadError
from dagsel.workloads.base import DataOutline
from dagsel.workloads.huggingface.passes import OwnLoss, arguments, core_of, is_shifted
from dagsel.workloads.torch.batches import Making

logger = logging.getLogger("dagsel")

#: What may stand in place of a model's main input.
_INSTEAD = {"input_ids": ("inputs_embeds",)}


@dataclass(frozen=True)
class AsItIs:
    """What a batch is made into before a model is known: nothing else."""

    def __call__(self, batch: dict[str, Any], config: Any) -> tuple[Any, Any]:
        """Return a batch; what of it are inputs, and what labels, the model says."""
        return batch, None


class MakingTokens(Making):
    """Makes batches by the lengths of ``input_ids`` only where these differ."""

    def check(self, data: DataOutline) -> None:
        """Raise a `WorkloadError` if batches of a data set cannot become tensors."""
        is_even = self.bucket_by == "input_ids" and "input_ids" not in data.ragged
        Making.check(replace(self, bucket_by=None) if is_even else self, data)


@dataclass(frozen=True)
class ModelCall:
    """What a model is called with.

    Parameters
    ----------
    model
        Name of its class.
    known
        Its arguments; none if it takes any.
    needed
        Those without a default.
    main
        The one that it cannot do without.
    makes_labels
        Whether its ids are its labels.
    """

    model: str
    known: tuple[str, ...]
    needed: tuple[str, ...]
    main: str
    makes_labels: bool

    @classmethod
    def by(cls, model: Any) -> ModelCall:
        """Return what a model is called with."""
        core = core_of(model)
        its = arguments(core)
        needed = tuple(name for name, its in its.items() if its.default is its.empty)
        return cls(type(core).__name__, (*its,), needed, core.main_input_name, is_shifted(core))

    def check(self, given: list[str], label_names: tuple[str, ...], loss: Any) -> None:
        """Raise a `WorkloadError` if something is not among what is `given`."""
        columns = f"the batches have {', '.join(given) or 'nothing'}"
        main = (self.main, *_INSTEAD.get(self.main, ()))
        missing = [name for name in self.needed if name not in given]
        if not set(main) & set(given):
            missing.insert(0, self.main)
        if missing:
            raise WorkloadError(
                f"{self.model} is called with {missing[0]!r}, and no column gives it: {columns}; "
                f'write a column of that name, as in ShardedDataset.write("data.zarr", '
                f"{{{missing[0]!r}: ..., 'labels': ...}}, n_shards=8), or give a collator= that "
                "makes it"
            )
        lacking = [name for name in label_names if name not in given]
        if lacking and not (self.makes_labels and lacking == [*label_names]):
            what = f"the loss of {self.model}" if isinstance(loss, OwnLoss) else "loss="
            raise WorkloadError(
                f"{what} needs the labels {lacking[0]!r}, and no column gives them: {columns}; "
                "write a column of that name, or name yours in label_names="
            )

    def say_left_out(self, given: list[str], label_names: tuple[str, ...], said: set[str]) -> None:
        """Log which of what is `given` the model does not know, unless that is `said` already."""
        left_out = [name for name in given if name not in (*self.known, *label_names)]
        if self.known and (new := [name for name in left_out if name not in said]):
            said |= {*new}
            logger.warning(
                "%s takes no argument %s: columns of that name are left out; it takes %s",
                self.model,
                " and no ".join(map(repr, new)),
                ", ".join(self.known),
            )


def columns_of(data: DataOutline, collate: Any) -> list[str] | None:
    """Return what batches of a data set have, as tried on two small samples.

    None if a collator of somebody else does not take these.
    """
    batch = {name: _small(name in data.ragged, *data.arrays[name]) for name in data.arrays}
    try:
        return list(collate(batch))
    except Exception as error:  # noqa: BLE001 - zeros may be nothing that it can collate
        logger.debug("the collator does not take samples of zeros: %s", error)
        return None


def _small(is_ragged: bool, dtype: Any, shape: tuple[int, ...]) -> Any:
    kind = torch.from_numpy(np.zeros(1, np.dtype(dtype).newbyteorder("="))).dtype
    if is_ragged:
        return [torch.zeros(3, dtype=kind), torch.zeros(2, dtype=kind)]
    return torch.zeros((2, *shape), dtype=kind)


def check_packing(data: DataOutline) -> None:
    """Raise a `WorkloadError` if the sequences of a data set cannot be put into one row."""
    if "input_ids" not in data.ragged:
        why = "samples of one shape" if "input_ids" in data.arrays else "no column of the data set"
        raise WorkloadError(
            f"packing=True joins sequences of unequal length, and 'input_ids' is {why}; leave "
            "packing out"
        )
    whole = [name for name in data.arrays if name not in data.ragged]
    if whole:
        raise WorkloadError(
            f"packing=True joins sequences into rows, and {whole[0]!r} has one value a sample; "
            "write the data set without it, or leave packing out"
        )
