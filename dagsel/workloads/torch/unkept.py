"""What training changes and no state holds: it would begin anew in each unit, or be all trials'.

A state has the state dicts of module, optimizer and schedule, and the random streams of the
process. What a user's code keeps beside them is looked at before and after a unit: numbers in
attributes, generators of random numbers, moments of other optimizers, buffers of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from dagsel.errors import WorkloadError
from dagsel.workloads.describe import is_a_users
from dagsel.workloads.torch.build import equal, tensors_in
from dagsel.workloads.torch.frozen import checksums
from dagsel.workloads.torch.generators import Generator, is_own, place_of

_PLAIN = frozenset({int, float, bool})
#: Parts with the numbers in their attributes.
_Numbers: TypeAlias = list[tuple[Any, dict[str, int | float]]]
#: Of model, optimizer, loss or generator; which of its parts, of which class; the name there.
Key: TypeAlias = tuple[str, int, str, str]
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
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        loss: Any,
        generators: Mapping[str, Generator],
    ) -> None:
        while isinstance(loss, partial):
            loss = loss.func
        self._optimizer, self._loss, self._drawn = optimizer, loss, {**generators}
        self._numbers = {
            "model": _numbers(_looked_at(module), self._drawn),
            "optimizer": _numbers(_parts_of_optimizer(optimizer), self._drawn),
            "loss": _numbers(_parts_of(loss), self._drawn),
        }
        self._before = self.now()

    def now(self) -> dict[Key, Any]:
        """Return what all of it is now: of what it is, at which of its parts, and its name."""
        found: dict[Key, Any] = {
            (of, at, type(part).__name__, name): _number(part, name)
            for of, parts in self._numbers.items()
            for at, (part, before) in enumerate(parts)
            for name in before
        }
        tensors = _tensors(self._optimizer), _buffers(self._loss)
        for of, held in zip(("optimizer", "loss"), tensors, strict=True):
            found |= {(of, -1, "", name): sums for name, sums in held.items()}
        for name, generator in self._drawn.items():
            found["generator", -1, "", name] = place_of(generator)
        return found

    def put_back(self) -> None:
        """Set the numbers of the loss, which all trials have, to what they were."""
        for part, before in self._numbers["loss"]:
            part.__dict__.update(before)

    def changed(self) -> dict[Key, WorkloadError]:
        """Return an error for each thing that training has changed, so that it may be lost."""
        now = self.now().items()
        return {
            key: WorkloadError(self._told(key))
            for key, value in now
            if value is not None and not same(self._before.get(key), value)
        }

    def _told(self, key: Key) -> str:
        of, _, kind, name = key
        if of == "model":
            return (
                f"training has changed {kind}.{name}, which no state holds, so it begins anew in "
                "each pass over a shard: keep it in a buffer (register_buffer) or in "
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
    plain = torch.nn.Module
    for part in module.modules():
        kind = type(part)
        if (
            kind.get_extra_state is plain.get_extra_state
            and kind.state_dict is plain.state_dict
            and kind._save_to_state_dict is plain._save_to_state_dict
        ):
            yield part


def _numbers(parts: Iterable[Any], drawn: dict[str, Generator]) -> _Numbers:
    """Return the numbers in the parts, and add the generators in them to `drawn`."""
    found = []
    for part in parts:
        kind, numbers = type(part), {}
        for name, value in vars(part).items():
            if type(value) in _PLAIN:
                if name[0] != "_" and name != "training":  # each unit sets that anew
                    numbers[name] = value
            elif is_own(value):
                drawn[f"{kind.__name__}.{name}"] = value
        if numbers and (kind.__module__.startswith("torch.nn.") or _is_a_users(kind)):
            found.append((part, numbers))
    return found


def _is_a_users(kind: type) -> bool:
    """Whether a class is a user's, and did not come with a model of the Hub, as nobody edits it."""
    return is_a_users(kind.__module__) and not kind.__module__.startswith("transformers_modules.")


def _number(part: Any, name: str) -> Any:
    value = vars(part).get(name)
    return value if type(value) in _PLAIN else None


def _parts_of(loss: Any) -> list[Any]:
    if isinstance(loss, torch.nn.Module):
        return [*loss.modules()]
    return [loss] if hasattr(loss, "__dict__") and not isinstance(loss, FunctionType) else []


def _buffers(loss: Any) -> dict[str, list[int]]:
    if not isinstance(loss, torch.nn.Module):
        return {}
    return {name: checksums([it]) for name, it in loss.named_buffers() if not it.is_meta}


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
