"""What a unit trains or scores: module, optimizers and schedules, built from a trial's state.

A module is built as Lightning's `fit` does it: from the trial's first random numbers, with the
hooks that come before the first batch. What the state holds is loaded over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.data import AttributeDict
from lightning.pytorch import LightningModule

from dagsel.errors import WorkloadError
from dagsel.state import State, reading_state
from dagsel.workloads.base import Config
from dagsel.workloads.lightning import travel
from dagsel.workloads.lightning.hooks import check_module
from dagsel.workloads.lightning.trainer import ShardTrainer, TrainerOptions
from dagsel.workloads.random_streams import seed_streams
from dagsel.workloads.torch.build import check_module as check_parameters
from dagsel.workloads.torch.device import Shard, accelerator, device_of
from dagsel.workloads.torch.live import BuiltTrial, LiveTrials
from dagsel.workloads.torch.outline import CONTAINERS
from dagsel.workloads.torch.state import (
    Captured,
    StateReader,
    capture,
    fill_optimizer,
    load_module,
    read_optimizer,
)

CONTAINERS.add(AttributeDict)  # in which `save_hyperparameters` keeps them


class SeveralOptimizers:
    """The optimizers of a module that steps them itself, as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for part in self.parts for group in part.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all."""
        return {"_optimizers": [part.state_dict() for part in self.parts]}


class SeveralSchedules:
    """The learning-rate schedules of a module, as one."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts

    def step(self) -> None:
        """Raise an error: each has its own turn."""
        raise AssertionError("each schedule has its own turn")

    def state_dict(self) -> dict[str, Any]:
        """Return the state dicts of all."""
        return {"_schedulers": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state dicts of all."""
        for part, held in zip(self.parts, state["_schedulers"], strict=True):
            part.load_state_dict(held)


@dataclass(slots=True)
class LightningTrial(BuiltTrial):
    """What a unit trains; `trainer` is there as long as it does."""

    optimizers: Sequence[torch.optim.Optimizer] = ()
    configs: Sequence[Any] = ()  # of the schedules
    trainer: Any = None

    def close(self) -> None:
        """Leave the module without a trainer."""
        self.trainer.close()
        self.trainer = None

    def captured(self, meta: dict[str, Any], device: Any = "cpu") -> Captured:
        """Pack it with the random streams of this process."""
        more = {"loop": travel.packed(self.trainer)}
        return capture(self.module, self.optimizer, self.schedule, meta, device, more=more)


class MakesLightningTrials:
    """The part of a `LightningWorkload` that makes modules and optimizers of a state."""

    module: Callable[[Any], Any]
    _live: LiveTrials

    def _options(self, config: Config) -> TrainerOptions:
        raise NotImplementedError

    @property
    def metrics(self) -> Mapping[str, Any]:
        """Names of the metrics of validation."""
        raise NotImplementedError

    def _new(self, config: Config, seed: int, device: torch.device) -> LightningTrial:
        """Begin a trial as a script does that makes a module and fits it."""
        seed_streams(seed, torch=True)
        module = check_module(self.module(config))
        trainer = self._trainer(module, config, device)
        trainer.check_asked()
        trainer.hook("setup", "fit")
        trainer.hook("configure_model")
        check_parameters(module)
        self._live.check_own(module)
        if any(held.device != device for held in (*module.parameters(), *module.buffers())):
            module.to(device)
        trainer.configure_optimizers()
        trainer.hook("on_fit_start")
        trainer.hook("on_train_start")
        optimizers, configs = trainer.optimizers, trainer.lr_scheduler_configs
        schedules = [held.scheduler for held in configs]
        optimizer: Any = optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)
        schedule: Any = SeveralSchedules(schedules) if len(schedules) > 1 else None
        if len(schedules) == 1:
            schedule = schedules[0]
        return LightningTrial(
            module, optimizer, schedule, seed, lambda device: None,
            optimizers=optimizers, configs=configs, trainer=trainer,
        )  # fmt: skip

    def _trainer(
        self, module: LightningModule, config: Config, device: torch.device
    ) -> ShardTrainer:
        options, scores = self._options(config), frozenset(self.metrics)
        is_automatic = module.automatic_optimization
        for name, is_given in {
            "gradient_clip_val": options.gradient_clip_val is not None,
            "accumulate_grad_batches": options.accumulate_grad_batches != 1,
        }.items():
            if is_given and not is_automatic:
                raise WorkloadError(
                    f"{type(module).__name__} optimizes by itself (automatic_optimization is "
                    f"False), so {name} has no effect; do it in training_step, and leave {name} out"
                )
        return ShardTrainer(module, options, device, scores)

    def _trial(self, state: State, config: Config, shard: Shard) -> LightningTrial:
        """Return what is trained: the live trial, or else one that is built from the state."""
        device, about = device_of(shard), self._about(config, shard)
        reader = StateReader(state)
        trial: Any = None if about is None else self._live.take(state, about)
        if trial is None:
            trial = self._loaded(reader, config, device)
            if about is None:
                return trial  # type: ignore[no-any-return]
            trial.close()
            self._live.built(trial, about)
        self._open(trial, reader, config, device)
        return trial  # type: ignore[no-any-return]

    @contextmanager
    def _scored(self, state: State, config: Config, shard: Shard) -> Iterator[LightningTrial]:
        """Make the trial that is scored, in which nothing of training is accumulated."""
        device, reader = device_of(shard), StateReader(state)
        with self._live.lend(state, self._about(config, shard)) as live:
            trial: Any = live
            if trial is None:
                trial = self._loaded(reader, config, device)
            else:
                self._open(trial, reader, config, device)
            for metric in travel.metrics_of(trial.module).values():
                metric.reset()
            yield trial
            trial.close()

    def _about(self, config: Config, shard: Shard) -> Any:
        """Return what a trial is built with; None if it is always built from its state."""
        if accelerator() is not None or device_of(shard).type != "cpu":
            return None
        options = self._options(config)
        said = [getattr(options, name) for name in TrainerOptions.__slots__]
        return {**config}, self.module, said

    def _loaded(self, reader: StateReader, config: Config, device: torch.device) -> LightningTrial:
        """Build a trial, and load all that the state holds of it."""
        trial = self._new(config, reader.seed, device)
        module, trainer = trial.module, trial.trainer
        held = reader.decode("loop", reader.copy)
        with reading_state(torch.OutOfMemoryError):
            travel.load_checkpoint(trainer, held)
        load_module(reader, module)
        saved = read_optimizer(reader, module)
        with reading_state(torch.OutOfMemoryError):
            several = [saved] if len(trial.optimizers) == 1 else saved["_optimizers"]
            for optimizer, part in zip(trial.optimizers, several, strict=True):
                fill_optimizer(optimizer, part)
                optimizer._opt_called = True  # type: ignore[attr-defined]  # or PyTorch warns
            if trial.schedule is not None:
                trial.schedule.load_state_dict(reader.decode("schedule", reader.copy))
        travel.load(trainer, held)
        trial.set_streams, trial.cursor = reader.streams(), reader.meta.get("cursor")
        return trial

    def _open(
        self, trial: LightningTrial, reader: StateReader, config: Config, device: torch.device
    ) -> None:
        """Give a trial a trainer that is where its state says."""
        assert isinstance(trial.module, LightningModule)
        trial.trainer = self._trainer(trial.module, config, device)
        trial.trainer.strategy.optimizers = trial.optimizers
        trial.trainer.strategy.lr_scheduler_configs = trial.configs
        travel.load(trial.trainer, reader.decode("loop", reader.copy))
