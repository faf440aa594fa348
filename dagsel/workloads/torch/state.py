"""The state of a trial as bytes and as PyTorch's tensors, each copied once."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dagsel.codec import Json, from_json
from dagsel.errors import WorkloadError
from dagsel.state import State, flatten, reading_state, unflatten
from dagsel.workloads.memory import give_back_freed
from dagsel.workloads.random_streams import read_streams, write_streams
from dagsel.workloads.torch.device import to_host

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_TORCH = {code: dtype for dtype, code in DTYPES.items()}

#: Gradients of so many bytes go back to the kernel.
LARGE = 50_000_000


class _Memory:
    # NumPy's array interface over the memory of another array, which it keeps alive.
    def __init__(self, owner: NDArray[Any]) -> None:
        self.owner = owner
        self.__array_interface__ = {**owner.__array_interface__}
        self.__array_interface__["data"] = (owner.__array_interface__["data"][0], False)


def as_torch(array: NDArray[Any]) -> torch.Tensor:
    """View an array as a tensor, also a read-only one.

    PyTorch has no read-only tensors and warns; here such a tensor is only ever copied from.
    """
    if array.dtype.byteorder not in "=|" or any(stride < 0 for stride in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array if array.flags.writeable else np.asarray(_Memory(array)))


@dataclass(frozen=True, slots=True)
class Captured:
    """A state, the tensors by name that were copied into it, and the random streams in it."""

    state: State
    tensors: dict[str, torch.Tensor]
    streams: dict[str, Any]


def pack(tree: dict[str, Any], meta: dict[str, Json]) -> State:
    """Pack a nested structure of tensors, arrays and plain values.

    Tensors that share one memory are stored once, and share it again when they are read.
    """
    return _packed(tree, meta)[0]


def _packed(tree: Any, meta: dict[str, Json]) -> tuple[State, dict[str, torch.Tensor]]:
    json_tree, tensors = flatten(tree, _leaf, same=_same)
    shapes = {name: (DTYPES[leaf.dtype], tuple(leaf.shape)) for name, leaf in tensors.items()}
    state, views = State.reserve(shapes, {**meta, "tree": json_tree})
    with torch.no_grad():
        for name, leaf in zip(tensors, to_host([*tensors.values()]), strict=True):
            view = torch.from_numpy(views[name].data).view(leaf.dtype).view(leaf.shape)
            view.copy_(leaf)
    return state, tensors


def capture(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    meta: dict[str, Json],
    device: Any = "cpu",
    *,
    more: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> Captured:
    """Pack a trial: its model, optimizer, learning-rate schedule and random streams.

    `more` are other parts of it by name; `StateReader.decode` returns each. The entries of the
    module's state dict that are named in `without` are left out. The gradients, which nothing reads
    after the last step, are freed: the state needs memory now.
    """
    trained = [parameter for parameter in module.parameters() if parameter.grad is not None]
    for parameter in trained:
        parameter.grad = None
    if sum(it.numel() * it.element_size() for it in trained) >= LARGE:
        give_back_freed()  # the state does not fit in where it was
    streams = read_streams(device)
    tree = {**_tree(module, optimizer, schedule, without), **(more or {}), "random": streams}
    state, tensors = _packed(tree, {"kind": "torch", **meta})
    return Captured(state, tensors, streams)


def check(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    *,
    more: Mapping[str, Any] | None = None,
    without: Collection[str] = (),
) -> None:
    """Raise a `WorkloadError` if something of a trial cannot be in a state."""
    known = {id(parameter) for parameter in module.parameters()}
    for parameter in (it for group in optimizer.param_groups for it in group["params"]):
        if id(parameter) not in known:
            raise WorkloadError(
                f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is none of "
                "the model's: no state would hold it, and trials would train each other's; let the "
                "model hold it, as one that its loss learns, and return it with its output"
            )
    tree = _tree(module, optimizer, schedule, without)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        sides = zip(tensor.shape, tensor.stride(), strict=True) if _is_strided(tensor) else ()
        if any(size > 1 and not stride for size, stride in sides) and name in tree["model"]:
            raise WorkloadError(
                f"{name!r} of the model is expanded, so that several of its elements are one, and "
                "no state can be loaded into it: write .clone() after .expand(...)"
            )
    flatten({**tree, **(more or {})}, _leaf)
    if _loads_itself(optimizer):
        _check_loading(optimizer, tree["optimizer"])


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not torch.nn.parameter.is_lazy(tensor)


def _check_loading(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Raise a `WorkloadError` if an optimizer does not load what it has saved."""
    try:
        optimizer.load_state_dict(copy.deepcopy(saved))
    except Exception as error:
        raise WorkloadError(
            f"the {type(optimizer).__name__} does not load what its own state_dict() returns, as a "
            f"trial does in each unit: {error!r}"
        ) from error


def _loads_itself(optimizer: Any) -> bool:
    """Whether a class or a hook has changed how an optimizer's state dict is made or loaded."""
    kind, plain = type(optimizer), torch.optim.Optimizer
    return isinstance(optimizer, plain) and (
        kind.load_state_dict is not plain.load_state_dict
        or kind.state_dict is not plain.state_dict
        or bool(optimizer._optimizer_load_state_dict_pre_hooks)
        or bool(optimizer._optimizer_load_state_dict_post_hooks)
    )


def check_names(
    before: State, after: Captured, module: torch.nn.Module, may_lack: Collection[str] = ()
) -> None:
    """Raise a `WorkloadError` if training has made the model one that a new one cannot load.

    A state may lack what is named in `may_lack`.
    """
    for name, parameter in module.named_parameters():
        is_new = f"model.{name}" in after.tensors and f"model.{name}" not in before.header
        if is_new and parameter.requires_grad:
            raise WorkloadError(
                f"training has made {name!r}, which the model function does not make, so no "
                "optimizer trains it and no unit could go on with it: make all layers before the "
                "function returns, none in forward or in train_fn"
            )
    plain = torch.nn.Module._load_from_state_dict
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        then = before.header.get(f"model.{name}")
        is_new = then is None and name not in may_lack and name not in before.meta["tree"]["model"]
        is_other = then is not None and (
            (then["dtype"], then["shape"]) != (DTYPES.get(tensor.dtype), list(tensor.shape))
        )
        if not (is_new or is_other) or f"model.{name}" not in after.tensors:
            continue
        owner = type(module.get_submodule(name.rpartition(".")[0]))
        if owner._load_from_state_dict is not plain:  # it may know how
            continue
        if is_new:
            raise WorkloadError(
                f"training has made the buffer {name!r}, which is None as the model function makes "
                "it: make it there, with the shape and the dtype that it keeps"
            )
        raise WorkloadError(
            f"training has made {name!r} a tensor of {tensor.dtype} and shape "
            f"{tuple(tensor.shape)}, and the model function makes another one: let it keep its "
            "shape and its dtype, as a buffer for all rows beside a number of those that are filled"
        )


def _tree(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    without: Collection[str],
) -> Any:
    return {
        **module_tree(module, without),
        "optimizer": optimizer.state_dict(),
        "schedule": None if schedule is None else schedule.state_dict(),
    }


def _leaf(node: Any) -> torch.Tensor | None:
    if isinstance(node, np.ndarray):
        if node.dtype == object or node.dtype.kind in "SUVmM":
            return None
        node = as_torch(node)
    if not isinstance(node, torch.Tensor):
        return None
    if node.layout != torch.strided:
        raise WorkloadError(f"a tensor of {node.layout} cannot be in a state; keep dense tensors")
    if node.dtype not in DTYPES:
        raise WorkloadError(
            f"a tensor of {node.dtype} cannot be in a state, which the safetensors format does not "
            f"hold; take one of {', '.join(str(it).removeprefix('torch.') for it in DTYPES)}"
        )
    return node


def _same(leaf: torch.Tensor) -> Hashable:
    if leaf.numel() == 0:
        return None
    return leaf.device, leaf.data_ptr(), leaf.dtype, leaf.shape, leaf.stride()


class StateReader:
    """Reads the tensors of a state, which is not changed."""

    def __init__(self, state: State) -> None:
        self.meta = state.meta
        with reading_state():
            self.tree: dict[str, Any] = from_json(dict[str, Any], self.meta["tree"])
            self.seed: int = from_json(int, self.meta["seed"])
        data = np.frombuffer(state.buffer, np.uint8)
        data = data[8 + int.from_bytes(state.buffer[:8], "little") :]
        if data.ctypes.data % 8:
            data = data.copy()
        self._data = as_torch(data)
        self._entries = {name: e for name, e in state.header.items() if name != "__metadata__"}
        self._copies: dict[str, torch.Tensor] = {}

    def view(self, name: str) -> torch.Tensor:
        """View a tensor in the state's own memory: to copy from, never to write to."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        return self._data[begin:end].view(_TORCH[entry["dtype"]]).view(entry["shape"])

    def copy(self, name: str) -> torch.Tensor:
        """Copy a tensor; a second call returns the same copy."""
        if name not in self._copies:
            self._copies[name] = self.view(name).clone()
        return self._copies[name]

    def nbytes(self, prefix: str) -> int:
        """Return the bytes of the tensors whose names start with a prefix."""
        spans = [e["data_offsets"] for name, e in self._entries.items() if name.startswith(prefix)]
        return sum(end - begin for begin, end in spans)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in the state's memory."""
        begin = self._data.data_ptr()
        return begin <= tensor.data_ptr() < begin + self._data.nbytes

    @reading_state(torch.OutOfMemoryError)
    def decode(self, part: str, leaf: Callable[[str], Any]) -> Any:
        """Return a part of the tree; `leaf` returns the tensor of a name."""
        return unflatten(self.tree[part], leaf, lambda name: self.view(name).numpy().copy())

    def streams(self) -> Callable[[torch.device], None]:
        """Return what sets this process's random streams to the trial's; it holds nothing else."""
        streams, seed = self.decode("random", self.copy), self.seed

        @reading_state(torch.OutOfMemoryError)
        def set_streams(device: torch.device) -> None:
            if device.type == "cuda" and "cuda" not in streams:
                torch.cuda.manual_seed(seed % 2**63)
            write_streams(streams)

        return set_streams


@reading_state(torch.OutOfMemoryError)
def load_module(
    reader: StateReader, module: torch.nn.Module, may_lack: Collection[str] = ()
) -> None:
    """Copy a state's model into a module; the state may lack some entries of its state dict."""

    def leaves(leaf: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        # Unlike a dict, it can have the attribute that PyTorch reads.
        state_dict: dict[str, Any] = OrderedDict(reader.decode("model", leaf))
        state_dict._metadata = {  # type: ignore[attr-defined]
            name: {"version": version} for name, version in reader.decode("versions", leaf).items()
        }
        return state_dict

    def load(leaf: Callable[[str], torch.Tensor]) -> None:
        missing, unexpected = module.load_state_dict(leaves(leaf), strict=not may_lack)
        wrong = [*unexpected, *(name for name in missing if name not in may_lack)]
        if wrong:
            raise KeyError(wrong[0])

    extra = any(name.endswith("_extra_state") for name in reader.tree["model"])
    load(reader.copy if extra else reader.view)
    if any(reader.owns(value) for value in _tensors(module)):
        load(lambda name: reader.view(name).clone())


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


@reading_state(torch.OutOfMemoryError)
def unfreeze(reader: StateReader, module: torch.nn.Module) -> None:
    """Freeze and unfreeze the parameters of a module as training has done before."""
    changed: dict[str, bool] = from_json(dict[str, bool], reader.meta.get("requires_grad", {}))
    parameters = dict(module.named_parameters()) if changed else {}
    for name, trains in changed.items():
        parameters[name].requires_grad_(trains)


def module_tree(module: torch.nn.Module, without: Collection[str] = ()) -> dict[str, Any]:
    """Return a module's part of a state: its tensors and the versions of their meaning."""
    state_dict = module.state_dict()
    metadata: dict[str, Any] = getattr(state_dict, "_metadata", {})
    model = {name: value for name, value in state_dict.items() if name not in without}
    # A module without a tensor in the state has nothing whose meaning could change.
    owners = {""}.union(name.rpartition(".")[0] for name in model) if without else metadata
    return {
        "model": model,
        "versions": {
            name: entry.get("version") for name, entry in metadata.items() if name in owners
        },
    }


@reading_state(torch.OutOfMemoryError)
def load_schedule(
    reader: StateReader, schedule: torch.optim.lr_scheduler.LRScheduler, optimizer: Any
) -> None:
    """Copy a state's learning-rate schedule into a schedule."""
    schedule.load_state_dict(reader.decode("schedule", reader.copy))
    optimizer._opt_called = True  # a restored one was, or PyTorch warns


@reading_state(torch.OutOfMemoryError)
def load_optimizer(
    reader: StateReader, optimizer: torch.optim.Optimizer, module: torch.nn.Module
) -> None:
    """Copy a state's optimizer into an optimizer, and keep all dtypes.

    ``Optimizer.load_state_dict`` casts moments to the dtype of their parameter and shares memory
    with its argument. So it is called only if a class or a hook has changed it.
    """
    fill_optimizer(optimizer, read_optimizer(reader, module))


def read_optimizer(reader: StateReader, module: torch.nn.Module) -> Any:
    """Return an optimizer's state dict, copied of a state; what is a weight is the module's."""
    alive: dict[str, Any] = {}

    def leaf(name: str) -> Any:
        if not name.startswith("model."):
            return reader.copy(name)
        if not alive:
            alive.update(module.state_dict(keep_vars=True))
        return alive[name.removeprefix("model.")]

    return reader.decode("optimizer", leaf)


@reading_state(torch.OutOfMemoryError)
def fill_optimizer(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Let an optimizer own a state dict that `read_optimizer` has returned."""
    if _loads_itself(optimizer):
        optimizer.load_state_dict(saved)
        return
    groups = optimizer.param_groups
    if [len(g["params"]) for g in groups] != [len(g["params"]) for g in saved["param_groups"]]:
        raise WorkloadError(
            "the optimizer has other parameter groups than the trial's state; give the "
            "optimizer that the search began with"
        )
    state: defaultdict[Any, Any] = defaultdict(dict)
    left = saved["state"]
    for group, new in zip(groups, saved["param_groups"], strict=True):
        for index, parameter in zip(new["params"], group["params"], strict=True):
            if index in left:
                state[parameter] = _place(left.pop(index), parameter, new)
        new["params"] = group["params"]
    state.update(left)
    optimizer.__setstate__({"state": state, "param_groups": saved["param_groups"]})


def _place(value: Any, parameter: torch.Tensor, group: dict[str, Any], key: Any = None) -> Any:
    # On the parameter's device and in its memory format, as PyTorch itself would have it.
    if isinstance(value, torch.Tensor):
        stays = key == "step" and not (group.get("capturable") or group.get("fused"))
        device = value.device if stays else parameter.device
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            return torch.empty_like(parameter, dtype=value.dtype, device=device).copy_(value)
        return value.to(device)
    if isinstance(value, dict):
        return type(value)((k, _place(v, parameter, group, k)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(_place(item, parameter, group, key) for item in value)
    return value
