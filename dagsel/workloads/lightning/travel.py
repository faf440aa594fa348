"""What travels with a trial beside weights, moments, schedules and random streams.

- How far it is: its epoch, its batches and its steps.
- Gradients that wait for more batches, or for a step of the module's own.
- What objects of torchmetrics have accumulated, and what was logged in the epoch so far.
- Which parameters are frozen, which parts are in evaluation mode: hooks change that.
- What the module's `on_save_checkpoint` has added to a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torchmetrics import Metric

from dagsel.codec import from_json
from dagsel.errors import WorkloadError
from dagsel.state import reading_state
from dagsel.workloads.lightning.trainer import REDUCES, Progress, ShardTrainer

#: What is known of a logged value beside its sum.
_ABOUT = (
    "fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph",
    "add_dataloader_idx", "dataloader_idx", "metric_attribute",
)  # fmt: skip
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def packed(trainer: ShardTrainer) -> dict[str, Any]:
    """Return all of it, as tensors and plain values."""
    module = trainer.lightning_module
    return {
        "progress": asdict(trainer.progress),
        "gradients": _gradients(trainer),
        "accumulated": accumulated(module),
        "logged": _logged(trainer),
        "shown": {name: dict(getattr(trainer.logs, name)) for name in _SHOWN},
        "frozen": [name for name, p in module.named_parameters() if not p.requires_grad],
        "evaluates": [name for name, part in module.named_modules() if not part.training],
        "checkpoint": _checkpoint(trainer),
    }


def load_checkpoint(trainer: ShardTrainer, saved: Mapping[str, Any]) -> None:
    """Give the module what it has added to a checkpoint; before its weights are loaded."""
    module = trainer.lightning_module
    if is_overridden("on_load_checkpoint", module) or saved["checkpoint"]:
        progress = _progress(saved)
        about = {"epoch": progress.epoch, "global_step": progress.n_steps}
        held = {**about, "state_dict": module.state_dict(), **saved["checkpoint"]}
        trainer.hook("on_load_checkpoint", held)


@reading_state(torch.OutOfMemoryError)
def load(trainer: ShardTrainer, saved: Mapping[str, Any]) -> None:
    """Set all of it; the weights are loaded already."""
    module = trainer.lightning_module
    trainer.begin(_progress(saved))
    frozen, evaluates = set(saved["frozen"]), set(saved["evaluates"])
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
        gradient = saved["gradients"].get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device)
    for name, part in module.named_modules():
        part.training = name not in evaluates
    _load_accumulated(module, saved["accumulated"])
    for name in _SHOWN:
        getattr(trainer.logs, name).update(saved["shown"][name])
    results = trainer.results
    results.clear()
    for key, entry in saved["logged"].items():
        attribute = entry["about"]["metric_attribute"]
        value = entry["value"] if attribute is None else module.get_submodule(attribute)
        if attribute is None:
            value = value.to(module.device)
        result = results.put(key, entry["about"], value, trainer.strategy.reduce)
        if entry["n"] is not None:
            result.cumulated_batch_size = entry["n"].to(module.device)


def _progress(saved: Mapping[str, Any]) -> Progress:
    with reading_state():
        progress: Progress = from_json(Progress, saved["progress"])
        if min(progress.epoch, progress.n_batches, progress.n_steps) < 0:
            raise ValueError(f"a trial is at {progress}")
        return progress


def _gradients(trainer: ShardTrainer) -> dict[str, torch.Tensor]:
    """Return the gradients that a later batch may add to or step by."""
    module = trainer.lightning_module
    # By default they are dropped at the next batch, before its backward pass.
    are_dropped = (
        module.automatic_optimization
        and not trainer.accumulates
        and not is_overridden("optimizer_zero_grad", module)
    )
    if are_dropped or trainer.progress.n_batches == 0:
        return {}
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def metrics_of(module: LightningModule) -> dict[str, Metric]:
    """Return the objects of torchmetrics in a module, by the names of its attributes."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Metric)}


def accumulated(module: LightningModule) -> dict[str, Any]:
    """Return what objects of torchmetrics have accumulated."""
    return {
        name: {"n": metric._update_count, "state": dict(metric.metric_state)}
        for name, metric in metrics_of(module).items()
        if metric._update_count
    }


def _load_accumulated(module: LightningModule, saved: Mapping[str, Any]) -> None:
    for name, metric in metrics_of(module).items():
        entry = saved.get(name)
        if entry is None:
            if metric._update_count:
                metric.reset()
            continue
        for key, value in entry["state"].items():
            is_list = isinstance(value, list)
            here = (
                [part.to(metric.device) for part in value] if is_list else value.to(metric.device)
            )
            setattr(metric, key, here)
        metric._update_count, metric._computed = entry["n"], None


def _logged(trainer: ShardTrainer) -> dict[str, Any]:
    """Return the sums of what was logged in the epoch so far."""
    found = {}
    for key, result in trainer.results.items():
        meta = result.meta
        if result.has_reset or not meta.on_epoch:
            continue
        about = {name: getattr(meta, name) for name in _ABOUT}
        about["reduce_fx"] = next(n for n, how in REDUCES.items() if how is meta.reduce_fx)
        is_mean = result.is_tensor and meta.is_mean_reduction
        found[key] = {
            "about": about,
            "value": result.value if result.is_tensor else None,
            "n": result.cumulated_batch_size if is_mean else None,
        }
    return found


def _checkpoint(trainer: ShardTrainer) -> dict[str, Any]:
    """Return what the module adds to a checkpoint."""
    module, progress = trainer.lightning_module, trainer.progress
    if not is_overridden("on_save_checkpoint", module):
        return {}
    own = {"epoch": progress.epoch, "global_step": progress.n_steps,
           "state_dict": module.state_dict()}  # fmt: skip
    checkpoint: dict[str, Any] = dict(own)
    trainer.hook("on_save_checkpoint", checkpoint)
    changed = [name for name in own if checkpoint.get(name) is not own[name]]
    if changed:
        raise WorkloadError(
            f"{type(module).__name__}.on_save_checkpoint changes {changed[0]!r} of the checkpoint, "
            "which dagsel keeps itself; add keys of your own"
        )
    return {name: value for name, value in checkpoint.items() if name not in own}
