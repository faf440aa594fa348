"""A pass of a trial over a shard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dagsel.errors import NothingTrainedError
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.batches import Cursor
from dagsel.workloads.gang.gang import Gang
from dagsel.workloads.torch.batches import training_batches
from dagsel.workloads.torch.ddp import GangBatches, check_end, distribute, seed_rank
from dagsel.workloads.torch.device import Accelerator, Shard, accelerator, device_of
from dagsel.workloads.torch.live import BuiltTrial
from dagsel.workloads.torch.loop import (
    ShardBatches,
    needs_closure,
    standard_loop,
    track_steps,
)
from dagsel.workloads.torch.memory import SparesMemory
from dagsel.workloads.torch.schedules import begin_epoch, end_epoch
from dagsel.workloads.torch.speed import Fused, can_record, multiplying, recorded_loop, stepping
from dagsel.workloads.torch.trials import MakesTrials
from dagsel.workloads.torch.unkept import refusing_other_optimizers


class TrainsOnShards(MakesTrials, SparesMemory):
    """The part of a workload of PyTorch that trains a trial on a shard."""

    fused: Fused
    cuda_graphs: bool

    def _pass(
        self,
        trial: BuiltTrial,
        shard: Shard,
        config: Config,
        visit: Visit,
        should_stop: Callable[[], bool],
        gang: Gang | None,
    ) -> ShardBatches:
        device = device_of(shard)
        cursor = Cursor.begin(trial.cursor, visit)
        batches = training_batches(
            shard,
            config,
            visit,
            making=self._making,
            gang=gang,
            batch_size=self._batch_size(config),
            drop_last=self.drop_last,
            cursor=cursor,
            should_stop=should_stop,
            max_batch=self._most_at_once(config, 1 if gang is None else gang.size),
        )
        module, optimizer, schedule = trial.module, trial.optimizer, trial.schedule
        if schedule is not None and trial.cursor is None:
            begin_epoch(schedule, visit)
        if gang is None or gang.rank == 0:
            trial.set_streams(device)
        else:
            seed_rank(trial.seed, cursor, gang.rank)
        model = module.train()
        if isinstance(batches, GangBatches):
            model = distribute(model, batches)
        own_loop = self.train_fn is not None
        refusing = refusing_other_optimizers(module, optimizer, own_loop=own_loop)
        with multiplying(self.precision, device), refusing:
            self._loop(model, optimizer, schedule, trial.loss, batches, config)
        if isinstance(batches, GangBatches):
            check_end(module, batches, own_loop=own_loop)
        if self.input_fn is not None and batches.gave_nothing():
            raise NothingTrainedError(
                f"input_fn returns inputs without a sample for every batch of shard "
                f"{visit.shard}: return what the model gets of the batch's arrays"
            )
        if visit.ends_epoch and not batches.stopped:
            end_epoch(schedule, self.lr_scheduler_interval)
        return batches

    def _loop(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loss: Any,
        batches: ShardBatches,
        config: Config,
    ) -> None:
        self._step_by_batch(schedule, batches, config)
        device = self._recorder(module, optimizer, batches)
        with stepping(optimizer, fused=self.fused, capturable=device is not None):
            if device is not None:
                recorded_loop(module, optimizer, batches, loss, device)
            elif self.train_fn is None:
                standard_loop(module, optimizer, batches, loss)
            else:
                with track_steps(module, optimizer, batches):
                    self.train_fn(module, optimizer, batches, config)

    def _recorder(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: ShardBatches
    ) -> Accelerator | None:
        plain = self.train_fn is None and batches.after_batch is None and batches.max_batch is None
        if not (self.cuda_graphs and plain) or isinstance(module, DistributedDataParallel):
            return None
        may = can_record(optimizer) and not needs_closure(type(optimizer).step)
        return accelerator() if may else None
