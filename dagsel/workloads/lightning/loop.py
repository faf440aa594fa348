"""Epochs, batches and scores, with the hooks where Lightning calls them.

An epoch of dagsel is all shards, one after the other: its first batch is that of the trial's first
shard, its last batch that of the last one. `batch_idx` counts through all of them in training, and
within its shard in validation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dagsel.errors import WorkloadError
from dagsel.workloads.base import Visit
from dagsel.workloads.lightning.hooks import step_arguments
from dagsel.workloads.lightning.trainer import Logged, ShardTrainer
from dagsel.workloads.torch.loop import ShardBatches


def train_shard(
    trainer: ShardTrainer, batches: ShardBatches, visit: Visit, *, scores: frozenset[str]
) -> None:
    """Train on the batches of a shard, and begin and end the epoch where it does.

    `scores` names the metrics of validation.
    """
    progress = trainer.progress
    if not (progress.is_open and progress.epoch == visit.epoch - 1):
        if visit.last_value is not None:
            step_plateaus(trainer, _tensor(visit.last_value), scores)
        progress.epoch, progress.n_batches, progress.is_open = visit.epoch - 1, 0, True
        trainer.hook("on_train_epoch_start")
    for number, (batch, _) in enumerate(batches, 1):
        is_last = visit.ends_epoch and number == len(batches)
        output = _train_batch(trainer, batch, is_last=is_last)
        if isinstance(output.get("loss"), torch.Tensor):
            batches.log(output["loss"] * trainer.accumulate_grad_batches)
    if visit.ends_epoch and not batches.stopped:
        _end_epoch(trainer, scores)


def _train_batch(trainer: ShardTrainer, batch: Any, *, is_last: bool) -> Any:
    module = trainer.lightning_module
    batch = _sent(trainer, batch)
    number = trainer.begin_batch(is_last=is_last)
    trainer.logs.on_batch_start(batch)
    if trainer.hook("on_train_batch_start", batch, number) == -1:
        raise WorkloadError(
            f"{type(module).__name__}.on_train_batch_start returns -1, and dagsel trains on all "
            "batches of an epoch; return None, and let a flow stop trials"
        )
    output = trainer.optimize(batch, number)
    _step_schedules(trainer, "step")
    if is_last:
        _step_schedules(trainer, "epoch")
    trainer.hook("on_train_batch_end", output, batch, number)
    trainer.logs.on_batch_end()
    if is_last:
        trainer.hook("on_validation_model_zero_grad")
    _step_schedules(trainer, "step", by_metric=True)
    return output


def _end_epoch(trainer: ShardTrainer, scores: frozenset[str]) -> None:
    trainer.logs.epoch_end_reached()
    trainer.hook("on_train_epoch_end")
    trainer.logs.on_epoch_end()
    _step_schedules(trainer, "epoch", by_metric=True, but=scores)
    trainer.logs.reset_results()
    trainer.progress.is_open = False


def _sent(trainer: ShardTrainer, batch: Any) -> Any:
    batch = trainer.hook("on_before_batch_transfer", batch, 0)
    batch = trainer.hook("transfer_batch_to_device", batch, trainer.strategy.root_device, 0)
    return trainer.hook("on_after_batch_transfer", batch, 0)


def _step_schedules(
    trainer: ShardTrainer,
    interval: str,
    *,
    by_metric: bool = False,
    but: frozenset[str] = frozenset(),
) -> None:
    """Step the schedules whose turn it is, but those that follow a metric of validation."""
    module, progress = trainer.lightning_module, trainer.progress
    is_early = interval == "step" and trainer.accumulates
    if is_early or not module.automatic_optimization:
        return
    number = progress.n_batches if interval == "step" else progress.epoch + 1
    for config in trainer.lr_scheduler_configs:
        is_meant = config.reduce_on_plateau == by_metric and config.interval == interval
        if not is_meant or number % config.frequency or config.monitor in but:
            continue
        value = _monitored(trainer, config) if by_metric else None
        if value is not None or not by_metric:
            trainer.hook("lr_scheduler_step", config.scheduler, value)


def _monitored(trainer: ShardTrainer, config: Any) -> Any:
    known = dict(trainer.callback_metrics)
    if config.monitor not in known and config.strict:
        raise WorkloadError(
            f"{type(config.scheduler).__name__} monitors {config.monitor!r}, and training logs "
            f"{', '.join(known) or 'nothing'}; log it in training_step, or name it in metrics= and "
            f"search by metric={config.monitor!r}"
        )
    return known.get(config.monitor)


def step_plateaus(trainer: ShardTrainer, value: torch.Tensor, scores: frozenset[str]) -> None:
    """Step the schedules that follow the search's metric, now that it is known of an epoch."""
    for config in trainer.lr_scheduler_configs:
        is_meant = config.reduce_on_plateau and config.monitor in scores
        is_turn = (trainer.progress.epoch + 1) % config.frequency == 0
        if is_meant and is_turn and trainer.lightning_module.automatic_optimization:
            trainer.hook("lr_scheduler_step", config.scheduler, value)


def _tensor(value: float) -> torch.Tensor:
    exact = torch.tensor(value, dtype=torch.float64)
    return exact.float() if float(exact.float()) == value else exact


def score_shard(trainer: ShardTrainer, parts: Iterable[tuple[int, Any, Any]]) -> tuple[int, Logged]:
    """Score on the ``(n_samples, batch, _)`` of a shard; return its samples and what is logged."""
    module, logs, n_samples = trainer.lightning_module, trainer.logs, 0
    results = trainer.begin_scoring()
    with torch.no_grad():
        trainer.hook("on_validation_model_eval")
        trainer.hook("on_validation_start")
        trainer.hook("on_validation_epoch_start")
        for number, (size, batch, _) in enumerate(parts):
            n_samples += size
            batch = _sent(trainer, batch)
            logs.on_batch_start(batch)
            trainer.hook("on_validation_batch_start", batch, number)
            arguments = step_arguments(module.validation_step, batch, number)
            with trainer.precision_plugin.val_step_context():
                output = trainer.hook("validation_step", *arguments)
            trainer.hook("on_validation_batch_end", output, batch, number)
            logs.on_batch_end()
        logs.epoch_end_reached()
    return n_samples, results
