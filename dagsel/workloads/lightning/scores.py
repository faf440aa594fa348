"""Metrics of validation: what is kept of each shard, and the numbers that come of all.

The values that a module logs are kept batch by batch, and objects of torchmetrics by what they have
accumulated. The driver puts the shards together in their order. So a metric is that of the whole
validation set, bit for bit what Lightning computes over the same batches (objects of torchmetrics
whose sums are no whole numbers: but for rounding).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from dagsel.codec import Json
from dagsel.errors import WorkloadError
from dagsel.state import State, Tensor
from dagsel.workloads.lightning.trainer import Logged
from dagsel.workloads.pooled import check_pooled, packed_metric, pooled_values
from dagsel.workloads.torch.state import as_torch

_MAKES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.max,
    "min": torch.min,
}


def names_of(results: Logged) -> dict[str, str]:
    """Return the names by which a search can ask for what was logged, each with its key."""
    found: dict[str, str] = {}
    for key, result in results.items():
        if result.meta.on_epoch:
            found |= {result.meta.name: key, result.meta.forked_name(on_step=False): key}
    return found


def check_names(module: LightningModule, metrics: Sequence[str], results: Logged) -> None:
    """Raise a `WorkloadError` if a metric is not logged."""
    known = names_of(results)
    for name in metrics:
        if name not in known:
            what = ", ".join(map(repr, known)) or "nothing that is kept for an epoch"
            raise WorkloadError(
                f"metrics names {name!r}, and {type(module).__name__} logs {what} in validation; "
                f"write metrics={{{next(iter(known), name)!r}: ...}}, or self.log({name!r}, ...)"
            )


def keep(
    module: LightningModule,
    metrics: Sequence[str],
    results: Logged,
    config: Mapping[str, Any],
) -> State:
    """Return what is kept of a shard, of which at least one batch was scored."""
    check_names(module, metrics, results)
    known, rows = names_of(results), results.rows or {}
    tensors: dict[str, Tensor] = {}
    kinds: dict[str, Json] = {}
    lists: dict[str, Json] = {}
    kept_config: Json = None
    for name in metrics:
        key = known[name]
        result = results[key]
        if result.is_tensor:
            kinds[name] = {"reduce": result.meta.reduce_fx.__name__}  # "mean", "max", ...
            values = torch.stack([_as_number(value) for value, _ in rows[key]]).cpu()
            sizes = torch.tensor([size for _, size in rows[key]])
            tensors[f"{name}.values"] = Tensor.from_numpy(values.numpy())
            tensors[f"{name}.sizes"] = Tensor.from_numpy(sizes.numpy())
            continue
        check_pooled(name, result.value)
        kept_config = _plain(config, name)
        kinds[name] = {"attribute": result.meta.metric_attribute}
        of_metric, of_lists = packed_metric(name, result.value)
        tensors |= of_metric
        lists |= of_lists
    meta: dict[str, Json] = {"kinds": kinds, "lists": lists, "forms": {}, "config": kept_config}
    return State.pack(tensors, meta)


def keep_nothing() -> State:
    """Return what is kept of a shard without samples."""
    return State.pack({}, {"kinds": {}, "lists": {}, "forms": {}, "config": None})


def values_of(
    metrics: Sequence[str],
    kept: Sequence[State],
    metric_of: Callable[[Mapping[str, Any], str], Metric],
) -> dict[str, float]:
    """Return the metrics of the whole set; `metric_of` gives the object at an attribute."""
    metas = [part.meta for part in kept]
    found: dict[str, float] = {}
    for name in metrics:
        parts = [(p, meta) for p, meta in zip(kept, metas, strict=True) if name in meta["kinds"]]
        if not parts:
            found[name] = 0.0
            continue
        first = parts[0][1]
        kind = first["kinds"][name]
        if "attribute" in kind:
            metric = metric_of(first["config"], kind["attribute"])
            found |= pooled_values({name: metric}, [part for part, _ in parts], as_torch)
            continue
        tensors = [part.tensors for part, _ in parts]
        values, sizes = (
            torch.cat([as_torch(held[f"{name}.{what}"].numpy()) for held in tensors])
            for what in ("values", "sizes")
        )
        found[name] = float(_reduced(kind["reduce"], values, sizes))
    return found


def _reduced(reduce: str, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Add up as Lightning does: one after the other, in the dtype of the values."""
    if reduce != "mean":
        total = values[0] + 0
        for value in values[1:]:
            total = _MAKES[reduce](total, value)
        return total
    total = torch.zeros((), dtype=torch.float32)
    for value, size in zip(values, sizes.tolist(), strict=True):
        total = total + value * size
    return total / sizes.sum()


def _as_number(value: torch.Tensor) -> torch.Tensor:
    """Return a value in the dtype in which Lightning adds it up."""
    wide = value.dtype in (torch.float32, torch.float64)
    return value if wide else value.to(torch.get_default_dtype())


def _plain(config: Mapping[str, Any], name: str) -> Json:
    for key, value in config.items():
        if not _is_plain(value):
            raise WorkloadError(
                f"metric {name!r} is an object of torchmetrics, which is made again of the "
                f"configuration to put shards together, and {key!r} there has no form in JSON; "
                "suggest a name in its place"
            )
    return dict(config)


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except TypeError:
        return False
