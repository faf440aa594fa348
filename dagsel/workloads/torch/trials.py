"""What a unit trains or scores: built from a trial's state, or still here from the unit before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch

from dagsel.codec import Json
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.workloads.base import Config
from dagsel.workloads.random_streams import preserved_streams, read_streams, seed_streams
from dagsel.workloads.torch.batches import Making
from dagsel.workloads.torch.build import LARGE, build_unfilled, check_module, equal
from dagsel.workloads.torch.device import Shard, accelerator, device_of, rows_at
from dagsel.workloads.torch.fit import Casting
from dagsel.workloads.torch.frozen import Frozen, checksums
from dagsel.workloads.torch.generators import Generator, generators_of
from dagsel.workloads.torch.layout import ChannelsLast, bears, gains
from dagsel.workloads.torch.live import BuiltTrial, LiveTrials
from dagsel.workloads.torch.loop import following
from dagsel.workloads.torch.outline import Outlines, UnknownError
from dagsel.workloads.torch.pretrained import Base, own_what_trains
from dagsel.workloads.torch.schedules import FollowsMetrics
from dagsel.workloads.torch.speed import Precision, equip
from dagsel.workloads.torch.state import (
    StateReader,
    load_module,
    load_optimizer,
    load_schedule,
    unfreeze,
)
from dagsel.workloads.torch.unkept import Beside
from dagsel.workloads.unread import unread_by

#: What may draw random numbers while a trial trains.
_FUNCTIONS = ("model", "loss", "optimizer", "lr_scheduler", "input_fn", "collate", "augment",
              "train_fn")  # fmt: skip
#: What is called while a trial trains, and is neither its module nor its optimizer.
_CALLED = ("loss", "input_fn", "collate", "augment", "train_fn")
#: The generators that a workload's functions use. They do not travel with it.
_GENERATORS: WeakKeyDictionary[Any, dict[str, list[Generator]]] = WeakKeyDictionary()


class MakesTrials(FollowsMetrics):
    """The part of a workload of PyTorch that makes modules and optimizers of a state."""

    model: Callable[..., torch.nn.Module]
    train_fn: Any
    input_fn: Any
    collate: Any
    augment: Any
    precision: Precision
    compile: bool | str
    bucket_by: str | None
    channels_last: ChannelsLast
    base: Base | None
    state: Literal["all", "trainable"] | None
    _casting: Casting
    _live: LiveTrials
    _borne: dict[str, bool]  # which configurations bear channels last, as far as it was tried
    _batch_size: Callable[[Config], int]
    _unfilled = True  # until a build shows that it cannot be done

    def unread(self, config: Config) -> frozenset[str]:
        """Return the parameters that training with this configuration does not read.

        Examples
        --------
        >>> from dagsel.workloads import TorchWorkload
        >>> linear = lambda config: torch.nn.Linear(4, 2)
        >>> mse, adam = torch.nn.functional.mse_loss, torch.optim.Adam
        >>> workload = TorchWorkload(linear, mse, adam, batch_size=8)
        >>> sorted(workload.unread({"lr": 0.1, "momentum": 0.9, "batch_size": 32}))
        ['batch_size', 'momentum']
        """
        if not (self.train_fn is self.input_fn is self.augment is None):
            return frozenset()  # they read it while a trial trains

        def build(config: Config) -> object:
            self._batch_size(config)
            module = self._build(config, seed=0, large=True)
            return module, self._build_optimizer(module, config)

        with preserved_streams(torch=True):
            return unread_by(build, config)

    @property
    def _making(self) -> Making:
        return Making(self.input_fn, self.collate, self.augment, self.bucket_by)

    def _trial(self, state: State, config: Config, shard: Shard, *, lives: bool) -> BuiltTrial:
        """Return what is trained: the live trial, or else one that is built from the state."""
        about = self._about(config, shard) if lives else None
        live = None if about is None else self._live.take(state, about)
        if live is not None:
            return live
        reader = StateReader(state)
        module = self._equipped(reader, config, shard)
        streams = read_streams("cpu")
        optimizer, schedule = self._build_optimizer(module, config)
        if not equal(streams, read_streams("cpu")):  # it draws: what came after the first weights
            self._build(config, reader.seed)
            optimizer, schedule = self._build_optimizer(module, config)
        load_optimizer(reader, optimizer, module)
        if schedule is not None:
            load_schedule(reader, schedule, optimizer)
        set_streams, cursor = reader.streams(), reader.meta.get("cursor")
        trial = BuiltTrial(
            module, optimizer, schedule, reader.seed, set_streams, cursor, self._frozen(module),
            as_made={name: it.requires_grad for name, it in module.named_parameters()},
        )  # fmt: skip
        unfreeze(reader, module)
        if about is not None:
            self._live.built(trial, about)
        state.let_go()
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
                frozen = live.frozen
            else:
                reader = StateReader(state)
                module, set_streams = self._equipped(reader, config, shard), reader.streams()
                frozen = self._frozen(module)
                del reader
                state.let_go()
                yield module, set_streams
            self._check_frozen(frozen, state.meta, config)

    def _beside(self, trial: BuiltTrial) -> Beside:
        """Return what stands beside a trial; its loss is made ready for a pass."""
        generators = _GENERATORS.get(self)
        if generators is None:
            functions = (getattr(self, name) for name in _FUNCTIONS)
            generators = _GENERATORS[self] = generators_of(it for it in functions if it is not None)
        trial.loss = following(self.loss, trial.module.parameters())
        called = [getattr(self, name) for name in _CALLED]
        return Beside(trial.module, trial.optimizer, trial.loss, generators, called)

    def _about(self, config: Config, shard: Shard) -> Any:
        """Return what a trial is built with; None if it is always built from its state."""
        if not _is_on_cpu(shard) or self.train_fn is not None or self.compile:
            return None
        options = self.precision, self.channels_last
        return {**config}, self.model, self.optimizer, self.lr_scheduler, options

    def _build(
        self,
        config: Config,
        seed: int,
        *,
        large: bool = False,
        device: torch.device | None = None,
    ) -> torch.nn.Module:
        base, model = self.base, self.model
        if base is not None:
            base.load(device)  # not between the trial's random numbers

        def make() -> Any:
            return model(config) if base is None else model(config, base.module(device))

        module: torch.nn.Module | None = None
        # Always from the trial's first random numbers: a factory may draw more than its weights.
        if large and self._unfilled:
            seed_streams(seed, torch=True)
            module = build_unfilled(make, frozen_too=not self._leaves_out)
            self._unfilled = module is not None
        if module is None:
            seed_streams(seed, torch=True)
            module = make()
        self._casting.learn(check_module(module))
        if self._leaves_out:
            own_what_trains(module, base)
        self._live.check_own(module)
        return module

    @property
    def _leaves_out(self) -> bool:
        """Whether a state holds only what trains."""
        return self.state == "trainable" or (self.state is None and self.base is not None)

    def _parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        """Return the parameters that the optimizer gets; it may go through them more than once."""
        return [it for it in module.parameters() if it.requires_grad or not self._leaves_out]

    def _frozen(self, module: torch.nn.Module) -> Frozen:
        """Return what of a module that was just built is in no state."""
        if not self._leaves_out:
            return Frozen()
        return Frozen.of(module, () if self.base is None else self.base.buffers_of(module))

    def _about_frozen(self, frozen: Frozen) -> dict[str, Json]:
        """Return what a state says of the part that it leaves out."""
        if not self._leaves_out:
            return {}
        digest = None if self.base is None else self.base.digest
        return {"base": digest, "frozen": frozen.checksum()}

    def _check_frozen(self, frozen: Frozen, meta: Mapping[str, Any], config: Config) -> None:
        """Raise a `WorkloadError` if frozen parameters are not those that a trial began with."""
        if not self._leaves_out or frozen.checksum() == meta.get("frozen"):
            return
        self._live.clear()
        was_changed = self.base is not None and not self.base.is_intact()
        if self.base is not None and was_changed:
            self.base.forget()
        fresh = self._build(config, meta["seed"]).state_dict()
        names = [
            name
            for name, held in frozen.parameters.items()
            if name in fresh and checksums([fresh[name].to(held.device)]) != checksums([held])
        ]
        what = f"such as {names[0]!r}" if names else "though a new model has the same ones now"
        raise WorkloadError(
            f"weights that do not train (requires_grad=False) are not as they were when the trial "
            f"began, {what}: set requires_grad=True in model(...) for all that training changes, "
            "and build the others the same each time"
        )

    def _restore(
        self, reader: StateReader, config: Config, device: torch.device
    ) -> torch.nn.Module:
        if self.base is not None and reader.meta.get("base") != self.base.digest:
            raise WorkloadError(
                f"the state is of a trial of another base: its sha256 is {reader.meta.get('base')} "
                f"there and {self.base.digest} here; give the base that the search began with"
            )
        large = reader.nbytes("model.") > LARGE
        module = self._build(config, reader.seed, large=large, device=device)
        if any(held.device != device for held in (*module.parameters(), *module.buffers())):
            module = module.to(device)
        load_module(reader, module, self._frozen(module).may_lack())
        return module

    def _equipped(self, reader: StateReader, config: Config, shard: Shard) -> torch.nn.Module:
        module = self._restore(reader, config, device_of(shard))
        channels_last = self._has_channels_last(module, config, shard)
        equip(module, precision=self.precision, compile=self.compile, channels_last=channels_last)
        return module

    def _has_channels_last(self, module: torch.nn.Module, config: Config, shard: Shard) -> bool:
        """Whether four-dimensional weights are stored with channels last.

        Under ``"auto"`` a function of the configuration, so that each unit of a trial and a replay
        have the same: samples of one shape go through a copy of the model, and nobody else calls
        its parts.
        """
        if self.channels_last != "auto":
            return self.channels_last
        calls_all = self.train_fn is self.collate is None and not (self.compile or self._leaves_out)
        if not (calls_all and _is_on_cpu(shard) and gains(module)):
            return False

        def make_inputs() -> Any:
            twice = torch.zeros(2, dtype=torch.int64)  # a norm wants more than one
            batch = {name: rows_at(rows, twice) for name, rows in shard.items()}
            return self._making.pair(batch, config)[0]

        try:
            about = repr((Outlines().of({**config}), [rows.shape[1:] for rows in shard.values()]))
        except (UnknownError, AttributeError):  # of what it holds nobody can tell if it is the same
            return bears(module, make_inputs)
        if about not in self._borne:
            self._borne[about] = bears(module, make_inputs)
        return self._borne[about]


def _is_on_cpu(shard: Shard) -> bool:
    return accelerator() is None and device_of(shard).type == "cpu"
