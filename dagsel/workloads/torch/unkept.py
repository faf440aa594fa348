"""What training changes and no state holds: it would begin anew in each unit, or be all trials'.

A state has the state dicts of module, optimizer and schedule, and the random streams of the
process. What a user's code keeps beside them is looked at before and after a unit: numbers and
tensors in attributes, generators of random numbers, moments of other optimizers, buffers of the
loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dagsel.errors import WorkloadError
from dagsel.workloads.describe import is_a_users
from dagsel.workloads.torch.build import LARGE, equal, tensors_in
from dagsel.workloads.torch.frozen import checksums
from dagsel.workloads.torch.generators import Generator, is_own, place_of, used_by

_PLAIN = frozenset({int, float, bool})
#: Parts with the numbers in their attributes.
_Numbers: TypeAlias = list[tuple[Any, dict[str, int | float]]]
_Drawn: TypeAlias = dict[str, list[Generator]]
#: Of model, optimizer, loss or generator; which of its parts, of which class; the name there.
Key: TypeAlias = tuple[str, int, str, str]
_CONTAINERS = dict, list, tuple, set, deque
_MOST_ITEMS = 1000  # of an attribute: one that has more is not looked at
_STATE_DICT_HOOKS = ("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")


@contextmanager
def refusing_other_optimizers(
    module: torch.nn.Module, optimizer: Optimizer, *, own_loop: bool
) -> Iterator[None]:
    """Raise a `WorkloadError` if training steps what no state holds, or adds to the optimizer."""
    n_groups = len(optimizer.param_groups)
    steppers: set[Optimizer] = set()  # also those that nothing else holds at the end of the loop
    handle = None
    if own_loop:
        handle = register_optimizer_step_post_hook(lambda stepper, *_: steppers.add(stepper))
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
    if len(optimizer.param_groups) != n_groups:
        raise WorkloadError(
            f"training has added a parameter group to the {type(optimizer).__name__}, and that of "
            "the next unit lacks it: let optimizer(parameters, config) make all groups; it steps "
            "no parameter without a gradient, such as one with requires_grad=False"
        )
    _check_views(optimizer)
    _check_moments(module, optimizer, steppers)


class Beside:
    """What stands beside a trial's state, as it is before training.

    Parameters
    ----------
    module, optimizer, loss
        What trains, and by what.
    generators
        Those that the workload's functions use, by name.
    called
        Functions that are called while it trains.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        loss: Any,
        generators: Mapping[str, list[Generator]],
        called: Iterable[Any] = (),
    ) -> None:
        self._module, self._optimizer, self._called = module, optimizer, [*called]
        of_loss = _parts_of(loss)
        self._drawn: _Drawn = {name: [*them] for name, them in generators.items()}
        self._numbers = {
            "model": _numbers(_looked_at(module), self._drawn),
            "optimizer": _numbers(_parts_of_optimizer(optimizer), self._drawn),
            "loss": _numbers(of_loss, self._drawn),
        }
        self._loss = [(part, dict(_public(part))) for part in of_loss]
        self.before = {**self.now(), **self._held()}

    def now(self) -> dict[Key, Any]:
        """Return what numbers and generators are now: of what, at which of its parts, its name."""
        found: dict[Key, Any] = {
            (of, at, type(part).__name__, name): plain(vars(part).get(name))
            for of, parts in self._numbers.items()
            for at, (part, before) in enumerate(parts)
            for name in before
        }
        for at, (part, _) in enumerate(self._loss):
            for name, it in vars(part).get("_buffers", {}).items():
                if it is not None and not it.is_meta:
                    found["loss", at, type(part).__name__, name] = checksums([it])
        for name, sums in _tensors(self._optimizer).items():
            found["optimizer", -1, "", name] = sums
        for name, them in self._drawn.items():
            found["generator", -1, "", name] = [*map(place_of, them)]
        return found

    def _held(self) -> dict[Key, Any]:
        """Return what a user's modules and functions hold beside parameters and kept buffers."""
        found: dict[Key, list[Any]] = {}
        kept = {*map(id, self._module.parameters())}
        for part in self._module.modules():
            lost = part._non_persistent_buffers_set
            kept.update(id(it) for name, it in part._buffers.items() if name not in lost)
        for of in ("model", "loss"):
            for at, (part, _) in enumerate(self._numbers[of]):
                kind, buffers = type(part), vars(part).get("_buffers", {}) if of == "model" else {}
                if not _is_a_users(kind):
                    continue
                for name, value in (*vars(part).items(), *buffers.items()):
                    if name[0] != "_" and name != "training" and (held := _content(value, kept)):
                        found[of, at, kind.__name__, name] = held
        for name, value in _used(self._called):
            if held := _content(value, kept):
                found["function", -1, "", name] = found.get(("function", -1, "", name), []) + held
        return found

    def numbers(self, keys: Iterable[Key]) -> dict[Key, int | float]:
        """Return those of some things that are numbers now."""
        now = self.now()
        return {key: now[key] for key in keys if type(now.get(key)) in _PLAIN}

    def put(self, numbers: Mapping[Key, int | float]) -> None:
        """Set numbers to what they were."""
        for (of, at, _, name), value in numbers.items():
            self._numbers[of][at][0].__dict__[name] = value

    def put_back(self) -> None:
        """Set the attributes of the loss, which all trials have, to what they were."""
        for part, before in self._loss:
            part.__dict__.update(before)

    def changed(self) -> dict[Key, WorkloadError]:
        """Return an error for each thing that training has changed, so that it may be lost."""
        now = {**self.now(), **self._held()}.items()
        return {
            key: self.lost(key)
            for key, value in now
            if value is not None and not same(self.before.get(key), value)
        }

    def lost(self, key: Key, *others: Key) -> WorkloadError:
        """Return the error for something that may be lost, or for one of several."""
        return WorkloadError(self._told(key, others))

    def _told(self, key: Key, others: Iterable[Key]) -> str:
        of, _, kind, name = key
        if of == "model":
            also = (f"{kind}.{name}" for of, _, kind, name in others if of == "model")
            names = " or ".join(dict.fromkeys((f"{kind}.{name}", *also)))
            return (
                f"training has changed {names}, which no state holds, so it begins anew in "
                "each pass over a shard: keep it in a persistent buffer (register_buffer) or in "
                "get_extra_state, or set it in each forward from what is kept there; if no result "
                "depends on that, let its name begin with an underscore"
            )
        if of == "optimizer":
            return (
                f"training has changed {name!r} of the {type(self._optimizer).__name__}, which its "
                "state_dict() does not hold, so it begins anew in each pass over a shard: keep it "
                "in self.state or in a parameter group; if no result depends on that, let its name "
                "begin with an underscore"
            )
        if of == "loss":
            return (
                f"training has changed {name!r} of the loss, which all trials of a worker share "
                "and no state holds: let the model hold it, and return it with its output; if no "
                "result depends on that, let its name begin with an underscore"
            )
        if of == "function":
            return (
                f"training has changed {name!r}, which a function of the workload uses, so all "
                "trials of a worker share it and no state holds it: keep it in a persistent buffer "
                "of the model (register_buffer)"
            )
        return (
            f"training draws from {name!r}, a generator of random numbers that no state holds, so "
            "another worker or a replay would see other numbers: call torch, numpy.random or "
            "random themselves, whose streams travel with the trial"
        )


def same(one: Any, other: Any) -> bool:
    """Whether two things that `Beside.now` has found are alike, also if both are NaN."""
    if type(one) in _PLAIN:
        return one is other or repr(one) == repr(other)
    return equal(one, other)


def _looked_at(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the parts of a module that keep nothing beside parameters and buffers."""
    base = torch.nn.Module
    for part in module.modules():
        kind = type(part)
        if (
            kind.get_extra_state is base.get_extra_state
            and kind.state_dict is base.state_dict
            and kind._save_to_state_dict is base._save_to_state_dict
        ):
            yield part


def _numbers(parts: Iterable[Any], drawn: _Drawn) -> _Numbers:
    """Return the numbers in the parts, and add the generators in them to `drawn`."""
    found = []
    for part in parts:
        kind, numbers = type(part), {}
        for name, value in vars(part).items():
            if plain(value) is not None:
                if name[0] != "_" and name != "training":  # each unit sets that anew
                    numbers[name] = value
            elif is_own(value):
                drawn.setdefault(f"{kind.__name__}.{name}", []).append(value)
        if kind.__module__.startswith("torch.nn.") or _is_a_users(kind):
            found.append((part, numbers))
    return found


def _is_a_users(kind: type) -> bool:
    """Whether a class is a user's, and did not come with a model of the Hub, as nobody edits it."""
    return is_a_users(kind.__module__) and not kind.__module__.startswith("transformers_modules.")


def plain(value: Any) -> int | float | None:
    """Return a number, also one of NumPy, as Python's; None for all else.

    Examples
    --------
    >>> plain(np.float32(0.5)), plain(True), plain("5")
    (0.5, True, None)
    """
    if isinstance(value, np.generic):
        value = value.item()
    return value if type(value) in _PLAIN else None


def _content(value: Any, kept: Container[int]) -> list[Any]:
    """Return the numbers in a value, and checksums of tensors that are not kept by their ids."""
    numbers: list[Any] = []
    tensors, waiting, n = [], [value], 0
    while waiting:
        it, n = waiting.pop(), n + 1
        if n > _MOST_ITEMS or (isinstance(it, _CONTAINERS) and len(it) > _MOST_ITEMS):
            return []  # such as a vocabulary, or one that holds itself
        if isinstance(it, dict):
            waiting += it.values()
        elif isinstance(it, _CONTAINERS):
            waiting += it
        elif isinstance(it, torch.nn.Module):  # one that is no part of the model
            waiting += it.parameters()
            waiting += it.buffers()
            waiting += (value for part in it.modules() for _, value in _public(part))
        elif callable(it) and not isinstance(it, type) and _is_a_users(type(it)):
            waiting += (value for _, value in _public(it))
        elif (number := plain(it)) is not None:
            numbers.append(repr(number))
        elif type(it) in (torch.Tensor, torch.nn.Parameter) and id(it) not in kept:
            if it.layout != torch.strided or it.is_quantized or it.is_meta:
                continue
            if it.nbytes > LARGE and not it.is_inference():
                numbers.append((id(it), it._version))  # not all of a table is read for each shard
            else:
                tensors.append(it)
    return [*numbers, *(sums for it in tensors for sums in checksums([it]))]


def _public(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that anybody may see, by name."""
    return (item for item in getattr(part, "__dict__", {}).items() if item[0][0] != "_")


def _used(functions: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what functions use, and those that they call, by name; of objects the attributes."""
    waiting, seen = [*functions], dict[int, Any]()
    while waiting:
        it = waiting.pop()
        if id(it) in seen:
            continue
        seen[id(it)] = it
        if isinstance(it, MethodType):
            waiting += [it.__func__, it.__self__]
        elif isinstance(it, partial | FunctionType):
            for name, value in used_by(it):
                if isinstance(value, partial | FunctionType | MethodType):
                    waiting.append(value)
                elif not isinstance(value, type | ModuleType):
                    yield name, value
        elif not isinstance(it, type | torch.nn.Module) and _is_a_users(type(it)):
            waiting += [it.__call__] if callable(it) else []
            yield from _public(it)


def _parts_of(loss: Any) -> list[Any]:
    """Return the objects that a loss is, or that its function calls."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    waiting = [loss]
    while waiting:
        it = waiting.pop()
        if id(it) in seen:
            continue
        seen[id(it)] = it
        if isinstance(it, partial | FunctionType):
            waiting += [used for _, used in used_by(it) if callable(used)]
        elif isinstance(it, MethodType):
            waiting.append(it.__self__)
        elif isinstance(it, torch.nn.Module):
            found += it.modules()
        elif hasattr(it, "__dict__") and not isinstance(it, type):
            found.append(it)
    return found


def _parts_of_optimizer(optimizer: Any) -> list[Any]:
    """Return the optimizer, unless it may keep what it holds in a state dict of its own making."""
    is_plain = type(optimizer).state_dict is Optimizer.state_dict and not any(
        vars(optimizer).get(name) for name in _STATE_DICT_HOOKS
    )
    return [optimizer] if is_plain and is_a_users(type(optimizer).__module__) else []


def _tensors(optimizer: Any) -> dict[str, list[int]]:
    """Return checksums of the tensors that an optimizer holds beside its state, by name."""
    found = {}
    for part in _parts_of_optimizer(optimizer):
        groups = [parameter for group in part.param_groups for parameter in group["params"]]
        held = (*groups, *tensors_in(dict(part.state)))
        kept = {tensor.untyped_storage().data_ptr() for tensor in held}
        for name, value in vars(part).items():
            if name[0] == "_" or name in ("state", "param_groups", "defaults"):
                continue
            tensors = [t for t in tensors_in(value) if t.untyped_storage().data_ptr() not in kept]
            if tensors:
                found[name] = checksums(tensors)
    return found


def _check_views(optimizer: Any) -> None:
    """Raise a `WorkloadError` if two tensors of a user's optimizer share a part of their memory."""
    held = [it for part in _parts_of_optimizer(optimizer) for it in tensors_in(dict(part.state))]
    spans = {
        (it.data_ptr(), it.data_ptr() + it.nbytes, it.dtype, it.shape, it.stride())
        for it in held
        if it.numel() and it.is_contiguous()
    }
    for one, other in pairwise(sorted(spans, key=lambda span: span[:2])):
        if other[0] < one[1]:
            raise WorkloadError(
                f"two tensors in the state of the {type(optimizer).__name__}, of shapes "
                f"{tuple(one[3])} and {tuple(other[3])}, share memory, and in the next unit they "
                "would not: keep one of them, and make the other in step()"
            )


def _check_moments(
    module: torch.nn.Module, optimizer: Optimizer, steppers: Iterable[Optimizer]
) -> None:
    """Raise a `WorkloadError` if another optimizer has learnt what no state holds."""
    within = [
        it
        for value in vars(optimizer).values()
        for it in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(it, Optimizer)
    ]
    others = [it for it in {*within, *steppers} if it is not optimizer]
    if not others:
        return
    kept = {id(tensor) for tensor in tensors_in(optimizer.state_dict())}
    weights = set(map(id, module.parameters()))
    for other in others:
        learnt = [held for weight, held in other.state.items() if id(weight) in weights]
        if all(id(tensor) in kept for tensor in tensors_in(learnt)):
            continue
        kind = type(other).__name__
        if other in within:
            raise WorkloadError(
                f"the {type(optimizer).__name__} holds another optimizer, {kind}, whose moments "
                "its state_dict() does not have, so they begin anew in each pass over a shard: let "
                "its state_dict() return them too, and its load_state_dict() load them"
            )
        raise WorkloadError(
            f"train_fn steps an optimizer of its own, {kind}, whose moments no state holds, so "
            "they begin anew in each pass over a shard: step the optimizer that it is given; of "
            "parts that take turns set p.grad = None for those that wait, or take a "
            "LightningWorkload, which trains with several"
        )
