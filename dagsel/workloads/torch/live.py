"""Trials that were just trained here: their modules and optimizers, as long as they are the state.

A worker often trains or scores a trial that it has just trained. What it has built for it is used
again if that is, bit for bit, what would be built from the state:

- every byte of the state is compared: its header with the one that was written, its tensors with
  those of module and optimizer;
- what a module holds beside its state is as it was when it was built (`Outlines`);
- optimizer and schedule are PyTorch's own, and hold nothing that their state dicts do not say.

A copy of which this cannot be shown is dropped, and the trial is built from its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import LRScheduler

from dagsel.codec import Json
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.workloads.random_streams import write_streams
from dagsel.workloads.torch.frozen import Frozen
from dagsel.workloads.torch.outline import Outlines, UnknownError, bits
from dagsel.workloads.torch.state import Captured

#: Trials that are kept, and the bytes of their states together.
MOST, MOST_BYTES = 4, 64_000_000
_OPTIMIZERS = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta,
)  # fmt: skip
_HOOKS = (
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
)  # fmt: skip


class _StorageRef(StorageWeakRef):
    """Knows whether a storage is still there; says nothing if it is still there at Python's end."""

    def __del__(self) -> None:
        try:
            super().__del__()  # type: ignore[no-untyped-call]
        except (AttributeError, TypeError):  # PyTorch's modules are empty then
            return


@dataclass(slots=True)
class BuiltTrial:
    """What a unit trains."""

    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    seed: int
    set_streams: Callable[[torch.device], object]  # to those of the trial
    cursor: dict[str, Any] | None = None  # where its unit was stopped inside a shard
    frozen: Frozen = field(default_factory=Frozen)  # what of the module is in no state
    outline: Any = None  # of what it was built of, and the module; None if it cannot be kept
    scratch: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    loss: Any = None  # where the module is, for one pass
    as_made: dict[str, bool] = field(default_factory=dict)  # which parameters the function trains

    def unfrozen(self) -> dict[str, Json]:
        """Return what a state says of parameters that training has frozen or unfrozen."""
        now = {name: it.requires_grad for name, it in self.module.named_parameters()}
        changed = {
            name: trains
            for name, trains in now.items()
            if self.as_made.get(name, trains) is not trains
        }
        return {"requires_grad": {**changed}} if changed else {}

    def free(self) -> None:
        """Free the memory of what trains; nobody uses the trial any more."""
        self.optimizer.state.clear()
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad, parameter.data = None, parameter.data.new_empty(0)


@dataclass(slots=True)
class _Kept:
    trial: BuiltTrial
    steps: Any  # outline of optimizer and schedule
    header: bytes
    n_bytes: int
    numbers: list[tuple[int, int, bool, Any]]  # begin, end, whether it is the module's; their bits
    scratch: list[tuple[torch.Tensor, torch.Tensor]]  # buffers of a base that are as they were

    def is_of(self, state: State, *, steps: bool) -> bool:
        """Whether a state is, bit for bit, what is held: all of it, or all but the steps' part."""
        data = np.frombuffer(state.buffer, np.uint8)[len(self.header) :]
        for begin, end, is_the_modules, held in self.numbers:
            if steps or is_the_modules:
                there = data[begin:end]
                if (there.view(held.dtype).reshape(held.shape) != held).any():
                    return False
        scratch = [*self.trial.scratch, *self.scratch]
        return all(bool((bits(now) == bits(then)).all()) for now, then in scratch)


class LiveTrials:
    """Keeps the last few trials that were trained, and gives each back for its own state.

    One thread at a time uses it: the one that has the random streams.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []  # the last one that was used at the end
        self._outlines = Outlines()
        self._made: dict[int, _StorageRef] = {}  # storages of parameters that train
        self.n_used = 0

    def __reduce__(self) -> Any:
        """Pickle and copy it as an empty one."""
        return LiveTrials, ()

    def clear(self) -> None:
        """Keep none."""
        self._kept.clear()

    def check_own(self, module: torch.nn.Module) -> None:
        """Raise a `WorkloadError` if a module that was just made trains what another one has."""
        self._made = {key: made for key, made in self._made.items() if not made.expired()}  # type: ignore[no-untyped-call]
        new = {}
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad or parameter.layout != torch.strided:
                continue
            storage = parameter.untyped_storage()
            if storage._cdata in self._made:
                raise WorkloadError(
                    f"the model function gives the same parameter {name!r} each time, so trials "
                    "would train each other's: make it inside the function, or copy there what "
                    "was made outside (copy.deepcopy); freeze what is not to train "
                    "(requires_grad_(False))"
                )
            new[storage._cdata] = _StorageRef(storage)  # type: ignore[no-untyped-call]
        self._made |= new

    def built(self, trial: BuiltTrial, about: Any) -> None:
        """Take note of a trial that was built, before anything trains it.

        `about` is all that it was built of: functions, options, the configuration.
        """
        module = trial.module
        known = [self._outlines.note(module), self._outlines.note(about)]
        if None in known:
            return
        trial.outline = known
        names = {id(t) for t in module.state_dict(keep_vars=True).values()}
        trial.scratch = [(b, b.clone()) for b in module.buffers() if id(b) not in names]

    def keep(self, trial: BuiltTrial, captured: Captured) -> None:
        """Keep a trial that was trained, of which a state was captured."""
        state = captured.state
        if trial.outline is None or state.nbytes > MOST_BYTES or not _is_plain(trial):
            return
        try:
            steps = self._outlines.of(_steps(trial))
        except UnknownError:
            return
        entries, n_header = state.header, 8 + int.from_bytes(state.buffer[:8], "little")
        numbers = [
            (*entries[name]["data_offsets"], name.startswith("model."), bits(tensor))
            for name, tensor in captured.tensors.items()
        ]
        header = bytes(state.buffer[:n_header])
        as_they_were = [(b.buffer, b.original) for b in trial.frozen.buffers if not b.is_changed()]
        kept = _Kept(trial, steps, header, state.nbytes, numbers, as_they_were)
        streams = captured.streams
        trial.set_streams, trial.cursor = lambda device: write_streams(streams), None
        self._kept.append(kept)
        while len(self._kept) > MOST or sum(kept.n_bytes for kept in self._kept) > MOST_BYTES:
            self._kept.pop(0)

    def take(self, state: State, about: Any) -> BuiltTrial | None:
        """Return the trial of a state, if it is kept.

        Keep it again once it was trained.
        """
        kept = self._find(state, about, steps=True)
        return None if kept is None else kept.trial

    @contextmanager
    def lend(self, state: State, about: Any) -> Iterator[BuiltTrial | None]:
        """Lend the trial of a state to score it; it is dropped if the block raises."""
        kept = None if about is None else self._find(state, about, steps=False)
        yield None if kept is None else kept.trial
        if kept is not None:
            self._kept.append(kept)

    def _find(self, state: State, about: Any, *, steps: bool) -> _Kept | None:
        for kept in reversed(self._kept):
            n_header = len(kept.header)
            if kept.n_bytes == state.nbytes and state.buffer[:n_header].tobytes() == kept.header:
                self._kept.remove(kept)  # for good if it is not as it was
                if not (self._is_as_it_was(kept, about) and kept.is_of(state, steps=steps)):
                    return None
                for parameter in kept.trial.module.parameters():
                    parameter.grad = None
                self.n_used += 1
                return kept
        return None

    def _is_as_it_was(self, kept: _Kept, about: Any) -> bool:
        try:
            return bool(
                [self._outlines.of(kept.trial.module), self._outlines.of(about)]
                == kept.trial.outline
                and self._outlines.of(_steps(kept.trial)) == kept.steps
            )
        except UnknownError:
            return False


def _is_plain(trial: BuiltTrial) -> bool:
    """Whether optimizer and schedule, loaded from their state dicts, are what these ones are."""
    optimizer, schedule = trial.optimizer, trial.schedule
    if type(optimizer) not in _OPTIMIZERS or any(getattr(optimizer, name) for name in _HOOKS):
        return False
    if schedule is not None and (
        type(schedule).__module__ != LRScheduler.__module__
        or type(schedule).state_dict is not LRScheduler.state_dict
    ):
        return False
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    known = {id(parameter) for parameter in trial.module.parameters()}
    stepped = [parameter for parameter in parameters if parameter in optimizer.state]
    return (
        all(id(parameter) in known for parameter in parameters)
        and [*map(id, optimizer.state)] == [*map(id, stepped)]  # their order is in the state
        and not any(isinstance(value, torch.Tensor) for group in groups for value in group.values())
        and all(
            value.shape != parameter.shape or value.stride() == parameter.stride()
            for parameter, held in optimizer.state.items()
            for value in held.values()
            if isinstance(value, torch.Tensor)
        )
    )


def _steps(trial: BuiltTrial) -> Any:
    groups = trial.optimizer.param_groups
    schedule = {} if trial.schedule is None else vars(trial.schedule)
    return (
        [{**group, "params": [*map(id, group["params"])]} for group in groups],
        [(id(of), [(key, _held(value)) for key, value in held.items()])
         for of, held in trial.optimizer.state.items()],
        {name: value for name, value in schedule.items() if name != "optimizer"},
    )  # fmt: skip


def _held(value: Any) -> Any:
    return (id(value), value.data_ptr()) if isinstance(value, torch.Tensor) else value
