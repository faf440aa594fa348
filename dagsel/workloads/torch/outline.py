"""What a module holds beside the numbers of its state: equal outlines, equal modules."""

from __future__ import annotations

import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset({
    type(None), bool, int, str, bytes, complex, type(...), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
})  # fmt: skip
#: Whose items are compared. Another library adds its own.
CONTAINERS = {list, tuple, dict, OrderedDict, Counter, set, frozenset}
_MOST_ITEMS = 20_000
#: Hooks and methods by which a module that is loaded may differ from the one that was saved.
_LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks",
                  "_state_dict_pre_hooks")  # fmt: skip
_LOADING = ("state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict")
_EXTRA = ("get_extra_state", "set_extra_state")


class UnknownError(Exception):
    """Something of which nobody can tell whether it has changed."""


class Outlines:
    """Makes outlines of the modules of one factory.

    Numbers, texts and containers of them are compared. Any other object is the same as before if
    an earlier module had it too: then the factory does not make it, and a module that is built
    anew would have it as it is. Of all else nothing is known.
    """

    def __init__(self) -> None:
        self._seen: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def of(self, whole: Any) -> Any:
        """Return the outline of a module, or of a value such as a configuration.

        Raises
        ------
        UnknownError
            If it holds something of which nothing is known, or is not loaded by PyTorch's methods.
        """
        return self._read(whole, _Reading(self._seen))

    def note(self, whole: Any) -> Any:
        """Return the outline of what was just made, or None; its objects are known from now on."""
        reading = _Reading(self._seen, is_new=True)
        try:
            found = self._read(whole, reading)
        except UnknownError:
            return None
        return None if reading.is_unknown else found

    def _read(self, whole: Any, reading: _Reading) -> Any:
        if not isinstance(whole, torch.nn.Module):
            return reading.value(whole)
        tensors = reading.tensors
        tensors.update((id(t), t) for t in (*whole.parameters(), *whole.buffers()))
        try:
            modules = [*map(reading.module, whole.modules())]
        except RecursionError:  # a container that holds itself
            raise UnknownError from None
        return modules, [*map(reading.tensor, tensors.values())]


def _is_loaded_by_pytorch(module: torch.nn.Module) -> bool:
    kind = type(module)
    return (
        all(getattr(kind, name).__module__.startswith("torch.") for name in _LOADING)
        and all(getattr(kind, name) is getattr(torch.nn.Module, name) for name in _EXTRA)
        and not any(getattr(module, name) for name in _LOADING_HOOKS)
    )


class _Reading:
    def __init__(self, seen: Any, *, is_new: bool = False) -> None:
        self.tensors: dict[int, torch.Tensor] = {}  # those of the module
        self.is_unknown = False
        self._seen, self._is_new, self._n_items = seen, is_new, 0

    def module(self, module: torch.nn.Module) -> Any:
        kind, held = type(module), vars(module)
        if self._is_new and not _is_loaded_by_pytorch(module):
            raise UnknownError
        return self.value(kind), [self._attribute(*item) for item in held.items()]

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "training":  # is set anew in each unit
            return None
        if type(value) not in CONTAINERS or value:  # most are empty
            children = name in ("_parameters", "_buffers", "_modules")
            return name, self._children(value) if children else self.value(value)
        return name, type(value)

    def tensor(self, tensor: torch.Tensor) -> Any:
        """Return where a tensor lies and how it is laid out, to compare."""
        # What is not strided, or not on the CPU, has no address to compare.
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        hooks = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
        if not plain or hooks or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnknownError
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        return (*place, tensor.requires_grad, self.value(vars(tensor)))

    def _children(self, held: dict[str, Any]) -> Any:
        return [(name, id(child)) for name, child in held.items()]

    def value(self, value: Any) -> Any:
        """Return what a value is, to compare; raise `UnknownError` if it cannot be told."""
        kind = type(value)
        self._n_items += 1
        if self._n_items > _MOST_ITEMS:
            raise UnknownError
        if kind in _PLAIN:
            return kind, value
        if kind is float:
            return value.hex()
        if kind in CONTAINERS:
            return kind, [*self._items(value)]
        if kind is weakref.ReferenceType:
            return kind, id(value())
        if id(value) not in self.tensors and self._seen.get(id(value)) is not value:
            self._meet(value)
        return id(value)

    def _items(self, container: Any) -> Iterator[Any]:
        if isinstance(container, dict):
            container = [part for item in container.items() for part in item]
        elif isinstance(container, (set, frozenset)):
            container = sorted(container, key=repr)
        return map(self.value, container)

    def _meet(self, value: Any) -> None:
        self.is_unknown = True
        if not self._is_new:
            raise UnknownError
        try:
            self._seen[id(value)] = value
        except TypeError:  # nothing can refer to it weakly, so it stays unknown
            return


def bits(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """View a tensor's numbers as integers, which are equal if all their bits are."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return tensor.detach().view(whole).numpy()
