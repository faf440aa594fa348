"""What a unit trains or scores: built from a trial's state, or still here from the unit before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dagsel.state import State
from dagsel.workloads.base import Config
from dagsel.workloads.random_streams import seed_streams
from dagsel.workloads.torch.build import LARGE, build_unfilled, check_module
from dagsel.workloads.torch.device import Shard, accelerator, device_of
from dagsel.workloads.torch.fit import Casting
from dagsel.workloads.torch.live import BuiltTrial, LiveTrials
from dagsel.workloads.torch.schedules import FollowsMetrics
from dagsel.workloads.torch.speed import Precision, equip
from dagsel.workloads.torch.state import (
    StateReader,
    load_module,
    load_optimizer,
    load_schedule,
)


class MakesTrials(FollowsMetrics):
    """The part of a workload of PyTorch that makes modules and optimizers of a state."""

    model: Callable[[Any], torch.nn.Module]
    train_fn: Any
    precision: Precision
    compile: bool | str
    channels_last: bool
    _casting: Casting
    _live: LiveTrials
    _unfilled = True  # until a build shows that it cannot be done

    def _trial(self, state: State, config: Config, shard: Shard, *, lives: bool) -> BuiltTrial:
        """Return what is trained: the live trial, or else one that is built from the state."""
        about = self._about(config, shard) if lives else None
        live = None if about is None else self._live.take(state, about)
        if live is not None:
            return live
        reader = StateReader(state)
        module = self._equipped(reader, config, shard)
        optimizer, schedule = self._build_optimizer(module, config)
        load_optimizer(reader, optimizer, module)
        if schedule is not None:
            load_schedule(reader, schedule, optimizer)
        set_streams, cursor = reader.set_streams, reader.meta.get("cursor")
        trial = BuiltTrial(module, optimizer, schedule, reader.seed, set_streams, cursor)
        if about is not None:
            self._live.built(trial, about)
        return trial

    @contextmanager
    def _scored(
        self, state: State, config: Config, shard: Shard
    ) -> Iterator[tuple[torch.nn.Module, Callable[[torch.device], object]]]:
        """Make the module that is scored, and what sets its random streams."""
        about = self._about(config, shard)
        with self._live.lend(state, about) as live:
            if live is not None:
                yield live.module, live.set_streams
                return
            reader = StateReader(state)
            yield self._equipped(reader, config, shard), reader.set_streams

    def _about(self, config: Config, shard: Shard) -> Any:
        """Return what a trial is built with; None if it is always built from its state."""
        on_cpu = accelerator() is None and device_of(shard).type == "cpu"
        if not on_cpu or self.train_fn is not None or self.compile:
            return None
        options = self.precision, self.channels_last
        return {**config}, self.model, self.optimizer, self.lr_scheduler, options

    def _build(self, config: Config, seed: int, *, large: bool = False) -> torch.nn.Module:
        # Always from the trial's first random numbers: a factory may draw more than its weights.
        module: Any = None
        if large and self._unfilled:
            seed_streams(seed, torch=True)
            module = build_unfilled(lambda: self.model(config))
            self._unfilled = module is not None
        if module is None:
            seed_streams(seed, torch=True)
            module = self.model(config)
        return self._casting.learn(check_module(module))

    def _restore(
        self, reader: StateReader, config: Config, device: torch.device
    ) -> torch.nn.Module:
        large = reader.nbytes("model.") > LARGE
        module = self._build(config, reader.seed, large=large)
        if any(parameter.device != device for parameter in module.parameters()):
            module = module.to(device)
        load_module(reader, module)
        return module

    def _equipped(self, reader: StateReader, config: Config, shard: Shard) -> torch.nn.Module:
        module = self._restore(reader, config, device_of(shard))
        equip(
            module, precision=self.precision, compile=self.compile, channels_last=self.channels_last
        )
        return module
