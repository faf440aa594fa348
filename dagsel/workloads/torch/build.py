"""Building a module whose numbers will be overwritten, without drawing them first.

A module is built for every unit. For a small one that takes a millisecond or less; for one of 25
million parameters nine tenths of the time go into random numbers that the trial's state then
overwrites. They are left out only where it is proved, build by build, that nothing else can have
come out differently:

- the factory draws no other random numbers: all streams stand at its end where they began;
- it does with the unfilled tensors nothing but write to them, view them, copy them (a copy counts
  as unfilled too) and ask for their shapes;
- each unfilled tensor that is still alive is a whole entry of the module's state dict, so that
  all of it is overwritten.

Where this does not hold, `build_unfilled` gives ``None`` and the module is built in full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from dagsel.workloads.random_streams import read_streams

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
        """Give the unfilled storages that something still holds."""
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


def build_unfilled(factory: Callable[[], torch.nn.Module]) -> torch.nn.Module | None:
    """Build a module without its random numbers, or give ``None`` where that cannot be proved.

    Parameters
    ----------
    factory
        Builds the module. The streams must stand where they stood when the trial began.
    """
    before = read_streams("cpu")
    with _Unfilled() as mode:
        module = factory()
    after = read_streams("cpu")
    if not mode.proved or not _equal(before, after) or not isinstance(module, torch.nn.Module):
        return None
    covered = {
        value.untyped_storage()._cdata
        for value in module.state_dict().values()
        if _has_storage(value) and value.untyped_storage().nbytes() == value.nbytes
    }
    return module if mode.alive() <= covered else None


def _equal(before: Any, after: Any) -> bool:
    if isinstance(before, dict):
        return all(_equal(value, after[key]) for key, value in before.items())
    if hasattr(before, "tobytes"):
        return bool((before == after).all())
    if isinstance(before, torch.Tensor):
        return torch.equal(before, after)
    return bool(before == after)
