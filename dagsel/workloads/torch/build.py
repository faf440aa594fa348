"""Checks what the user's factories make; builds modules without their first random numbers.

A module is built for every unit. With 25 million parameters, nine tenths of the time go into
random numbers that the trial's state then overwrites. They are left out only if nothing else can
differ:

- the factory draws no other random numbers: afterwards all streams are where they began;
- it only writes to the unfilled tensors, views or copies them (a copy counts as unfilled too) and
  asks for their shapes;
- each unfilled tensor that is still alive is a whole entry of the module's state dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from dagsel.errors import WorkloadError
from dagsel.workloads.random_streams import read_streams
from dagsel.workloads.torch.frozen import checksums

#: Bytes of a model for which random numbers cost more than leaving them out.
LARGE = 4_000_000

_T: Any = torch.Tensor
_FILLS = frozenset({
    _T.uniform_, _T.normal_,
    torch.nn.init.uniform_, torch.nn.init.normal_,
    torch.nn.init.xavier_uniform_, torch.nn.init.xavier_normal_,
    torch.nn.init.kaiming_uniform_, torch.nn.init.kaiming_normal_,
})  # fmt: skip
_WRITES = frozenset({
    _T.zero_, _T.fill_, _T.mul_, _T.add_, _T.div_, _T.sub_, _T.clamp_, _T.erfinv_, _T.copy_,
    torch.nn.init.zeros_, torch.nn.init.ones_, torch.nn.init.constant_, _T.__setitem__,
})  # fmt: skip
_LOOKS = frozenset({
    _T.shape.__get__, _T.dtype.__get__, _T.device.__get__, _T.requires_grad.__get__,
    _T.ndim.__get__, _T.is_leaf.__get__, _T.layout.__get__, _T.grad_fn.__get__,
    _T.grad.__get__, _T.data.__get__, _T.data.__set__, _T.is_meta.__get__,
    torch._has_compatible_shallow_copy_type,
    _T.is_sparse.__get__, _T.is_quantized.__get__,
    _T.size, _T.dim, _T.ndimension, _T.numel, _T.nelement, _T.stride, _T.is_floating_point,
    _T.is_complex, _T.is_contiguous, _T.element_size, _T.detach, _T.requires_grad_, _T.__len__,
    _T.__getitem__, _T.view, _T.t, _T.transpose, _T.narrow, _T.__hash__,
    _T.new_empty, _T.new_zeros, _T.new_ones, _T.new_full, _T.new_tensor,
})  # fmt: skip


_COPIES = frozenset(
    {_T.clone, _T.to, _T.bfloat16, _T.half, _T.float, _T.double, _T.contiguous, _T.cpu, _T.cuda}
)


class _Unfilled(TorchFunctionMode):
    # Leaves random fills out; `proved` turns false at the first use of an unfilled tensor that
    # could have looked at its numbers.
    def __init__(self) -> None:
        super().__init__()
        self.proved = True
        self._skipped: dict[int, StorageWeakRef] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        subject: Any = args[0] if args else next(iter(kwargs.values()), None)
        if func in _FILLS and type(subject) in (torch.Tensor, torch.nn.Parameter):
            if kwargs.get("generator") is None and not any(
                isinstance(argument, torch.Generator) for argument in args
            ):
                self._skip(subject)
                return subject
            self.proved = False
        touched = [self._is_skipped(argument) for argument in (*args, *kwargs.values())]
        if any(touched):
            if func in _WRITES and touched[0] and sum(touched) == 1:
                return subject
            if func in _COPIES:
                copy: torch.Tensor = func(*args, **kwargs)
                self._skip(copy)
                return copy
            self.proved &= func in _LOOKS
        return func(*args, **kwargs)

    def alive(self) -> set[int]:
        """Return the unfilled storages that something still holds."""
        held = self._skipped.items()
        return {key for key, storage in held if not storage.expired()}  # type: ignore[no-untyped-call]

    def _skip(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._skipped[storage._cdata] = reference

    def _is_skipped(self, argument: Any) -> bool:
        if isinstance(argument, (list, tuple)):
            return any(self._is_skipped(item) for item in argument)
        return _has_storage(argument) and argument.untyped_storage()._cdata in self._skipped


def _has_storage(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not torch.nn.parameter.is_lazy(value)
        and value.layout == torch.strided
    )


def build_unfilled(
    factory: Callable[[], torch.nn.Module], *, frozen_too: bool = True
) -> torch.nn.Module | None:
    """Build a module without its random numbers; return None if it might differ.

    The random streams must be where they were when the trial began. Unless `frozen_too`, frozen
    parameters are none of what is overwritten.
    """
    before = read_streams("cpu")
    with _Unfilled() as mode:
        try:
            module = factory()
        except Exception:
            if mode.proved:
                raise
            return None  # it has looked at numbers that are not there
    after = read_streams("cpu")
    if not mode.proved or not equal(before, after) or not isinstance(module, torch.nn.Module):
        return None
    covered = {
        value.untyped_storage()._cdata
        for value in module.state_dict(keep_vars=True).values()
        if _has_storage(value) and value.untyped_storage().nbytes() == value.nbytes
        if frozen_too or value.requires_grad or not isinstance(value, torch.nn.Parameter)
    }
    return module if mode.alive() <= covered else None


def check_module(module: Any) -> torch.nn.Module:
    """Return what a model factory has made, or raise a `WorkloadError`."""
    if not isinstance(module, torch.nn.Module):
        raise WorkloadError(
            f"model gave a {type(module).__name__}, not a torch.nn.Module; return one"
        )
    parameters = list(module.parameters())
    if not parameters:
        raise WorkloadError("model gave a module without parameters; give it layers that train")
    if any(torch.nn.parameter.is_lazy(parameter) for parameter in parameters):
        raise WorkloadError("model gave a lazy module; let it see a batch of zeros first")
    return module


def check_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return what an optimizer factory has made, or raise a `WorkloadError`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WorkloadError(
            f"optimizer gave a {type(optimizer).__name__}, not a torch.optim.Optimizer; return one"
        )
    return optimizer


def beside_state(module: torch.nn.Module) -> dict[str, list[int]]:
    """Return checksums of the tensors and arrays that a module holds and no state does, by name.

    Examples
    --------
    >>> module = torch.nn.Linear(2, 1)
    >>> module.features = torch.ones(3)
    >>> list(beside_state(module))
    ['features']
    """
    kept = {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    found = {}
    for place, part in module.named_modules():
        for name, value in {**vars(part), **part._buffers}.items():
            if name.startswith("_"):
                continue
            tensors = [it for it in tensors_in(value) if id(it) not in kept]
            if tensors:
                found[f"{place}.{name}".lstrip(".")] = checksums(tensors)
    return found


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, and its arrays as tensors."""
    waiting, seen = [value], {}  # one that holds itself is gone through once
    while waiting:
        it = waiting.pop()
        if isinstance(it, torch.Tensor) and it.layout == torch.strided and not it.is_meta:
            yield it
        elif isinstance(it, np.ndarray) and it.dtype.kind in "fiub":
            yield torch.frombuffer(bytearray(it.tobytes() or b"\0"), dtype=torch.uint8)
        elif isinstance(it, dict | list | tuple) and id(it) not in seen:
            seen[id(it)] = it
            waiting += [*(it.values() if isinstance(it, dict) else it)][::-1]


def check_alike(once: dict[str, list[int]], again: dict[str, list[int]]) -> None:
    """Raise a `WorkloadError` if two modules of one seed differ in what no state holds."""
    name = next((name for name in once if again.get(name, once[name]) != once[name]), None)
    if name is not None:
        raise WorkloadError(
            f"the model function makes another {name!r} each time, also from one seed, and a trial "
            f"is made anew for each unit: register_buffer({name.rpartition('.')[2]!r}, ...) keeps "
            "it in the state, or draw it of torch.randn or another global stream"
        )


def equal(before: Any, after: Any) -> bool:
    """Whether two nested structures of tensors, arrays and plain values are equal."""
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(equal(before[k], after[k]) for k in before)
    if isinstance(before, list | tuple) and isinstance(after, list | tuple):
        return len(before) == len(after) and all(map(equal, before, after))
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return before.dtype == after.dtype and torch.equal(before, after)
    if isinstance(before, np.ndarray):
        return np.array_equal(before, after)
    return type(before) is type(after) and bool(before == after)
