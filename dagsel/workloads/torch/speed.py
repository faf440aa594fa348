"""Options that make a training step fast. None of them shows in a trial's state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from torch.utils import _pytree as pytree

from dagsel.errors import WorkloadError
from dagsel.workloads.torch.device import Accelerator
from dagsel.workloads.torch.layout import ChannelsLast, lay_out
from dagsel.workloads.torch.loop import ShardBatches, apply, check_shapes

Precision: TypeAlias = Literal["fp32", "tf32", "bf16"]
Fused: TypeAlias = bool | Literal["auto"]
_WARM_UP = 3  # ordinary steps before one is recorded


def check_options(
    *,
    precision: str,
    compile: bool | str,  # noqa: A002 - PyTorch's own word
    fused: Fused,
    channels_last: ChannelsLast = False,
    device_memory: int | float,
    flags: Mapping[str, Any],
) -> None:
    """Raise a `WorkloadError` if an option is not what it may be."""
    if precision not in ("fp32", "tf32", "bf16"):
        raise WorkloadError(f"precision must be 'fp32', 'tf32' or 'bf16', got {precision!r}")
    if isinstance(compile, str) and compile not in _backends():
        raise WorkloadError(
            f"compile is {compile!r}; take one that this PyTorch has: {_backends()}"
        )
    for name, flag in {"compile": isinstance(compile, str) or compile, **flags}.items():
        if not isinstance(flag, bool):
            raise WorkloadError(f"{name} is {flag!r}, not True or False")
    for name, flag in {"fused": fused, "channels_last": channels_last}.items():
        if not (isinstance(flag, bool) or flag == "auto"):
            raise WorkloadError(f"{name} is {flag!r}, not 'auto', True or False")
    room: Any = device_memory
    is_number = isinstance(room, Real) and not isinstance(room, bool)
    if not is_number or not 0 <= room <= (1 if isinstance(room, float) else 1 << 60):
        raise WorkloadError(f"device_memory is {device_memory!r}, not a share such as 0.5 or a "
                            "number of bytes")  # fmt: skip


def _backends() -> list[str]:
    return torch.compiler.list_backends(exclude_tags=())


def equip(
    module: torch.nn.Module,
    *,
    precision: Precision,
    compile: bool | str,  # noqa: A002
    channels_last: bool,
) -> None:
    """Make a module's forward pass fast, in place; names and values of its state stay."""
    if channels_last:
        lay_out(module)
    if compile:
        module.compile(backend="inductor" if compile is True else compile)
    if precision == "bf16":
        module.__class__ = _autocasting(type(module))


def _autocasting(kind: type[torch.nn.Module]) -> type[torch.nn.Module]:
    # A class of its own as PyTorch's parametrizations have it: unlike a hook or another `forward`
    # it is around what `torch.compile` compiles and is copied right. Each class has one, or
    # `torch.compile` would take every unit's module for a new kind.
    known: type[torch.nn.Module] | None = kind.__dict__.get("_dagsel_autocasting")
    if known is not None:
        return known

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(next(self.parameters()).device.type, torch.bfloat16):
            output = kind.__call__(self, *args, **kwargs)
        return pytree.tree_map(_as_float32, output)

    about = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made = type(kind.__name__, (kind,), about)
    kind._dagsel_autocasting = made  # type: ignore[attr-defined]
    return made


def _as_float32(value: Any) -> Any:
    return value.float() if _is_tensor(value) and value.dtype is torch.bfloat16 else value


@contextmanager
def multiplying(precision: Precision, device: torch.device) -> Iterator[None]:
    """Multiply float32 in TF32 on a CUDA device, if `precision` says so."""
    if precision != "tf32" or device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # fused on the CPU and on CUDA
_WHOLE = (torch.float32, torch.float64)
_DENSE = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


@contextmanager
def stepping(optimizer: torch.optim.Optimizer, *, fused: Fused, capturable: bool) -> Iterator[None]:
    """Step an optimizer by other kernels inside the block; afterwards its groups are as before.

    `fused` selects one kernel for all parameters, where there is one; ``"auto"`` only where the
    optimizer does not say itself how it steps, and where that kernel computes what others do.
    `capturable` selects kernels that can be recorded as a graph, and needs `can_record`.
    """
    groups = optimizer.param_groups
    flags: dict[str, Any] = {}
    fuses = type(optimizer) in _FUSED and fused and _fusible(groups)
    if fused == "auto":
        fuses = fuses and _is_left_open(groups)
    if fuses:
        flags |= {"fused": True, "foreach": None}
    if capturable and all("capturable" in group for group in groups):
        flags |= {"capturable": True}
    before = [{flag: group[flag] for flag in flags} for group in groups]
    for group in groups:
        group.update(flags)
    if flags:
        _put_counts(optimizer, optimizer.state, fuses=bool(fuses))
    watch = fuses and fused == "auto"
    handle = optimizer.register_step_pre_hook(_fuse_what_fits) if watch else None
    try:
        yield
    finally:
        if handle is not None:
            handle.remove()
        for group, values in zip(groups, before, strict=False):  # there may be new ones
            group.update(values)


def _put_counts(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], *, fuses: bool
) -> None:
    """Put the numbers of steps where kernels read them: on the device of each parameter."""
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), torch.Tensor):
            # A fused kernel on CUDA reads it so, whatever PyTorch's default dtype made it.
            dtype = torch.float32 if fuses else state["step"].dtype
            state["step"] = state["step"].to(parameter.device, dtype)


def _fusible(groups: list[dict[str, Any]]) -> bool:
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(map(_has_right_kernel, parameters)) and not any(
        group["differentiable"] for group in groups
    )


def _has_right_kernel(parameter: torch.Tensor) -> bool:
    # PyTorch 2.13 has kernels for half precision on the CPU too; their numbers are wrong.
    return parameter.is_floating_point() and (
        parameter.dtype in _WHOLE or parameter.device.type != "cpu"
    )


def _is_left_open(groups: list[dict[str, Any]]) -> bool:
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(
        group.get("fused") is None and group.get("foreach") is None for group in groups
    ) and all(p.device.type in ("cpu", "cuda") and _is_dense(p) for p in parameters)


def _is_dense(parameter: torch.Tensor) -> bool:
    return any(
        parameter.is_contiguous(memory_format=form)
        for form, dims in zip(_DENSE, (None, 4, 5), strict=True)
        if dims in (None, parameter.dim())
    )


def _fuse_what_fits(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Step each group by the fused kernel if its gradients lie in memory as its parameters do.

    The kernel does not look at their strides, and has no sparse gradients, and that of SGD wants a
    momentum of all or of none. This depends on the present gradients and the optimizer's state
    alone, so a unit that was cut into pieces steps as an uncut one.
    """
    for group in optimizer.param_groups:
        fits = not (group.get("momentum") and _is_in_part(optimizer, group["params"]))
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and (
                gradient.layout is not torch.strided or gradient.stride() != parameter.stride()
            ):
                fits = False
        if fits and not group["fused"]:
            _put_counts(optimizer, group["params"], fuses=True)  # other kernels may have begun them
        group["fused"] = True if fits else None


def _is_in_part(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor]) -> bool:
    """Whether some of the parameters that step have a momentum, and some have none yet."""
    state, nothing = optimizer.state, dict[str, Any]()
    step = (state.get(it, nothing) for it in parameters if it.grad is not None)
    return len({of_it.get("momentum_buffer") is None for of_it in step}) > 1


def can_record(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's steps can be recorded: a graph keeps the rate that it saw.

    Examples
    --------
    >>> weights = [torch.nn.Parameter(torch.zeros(2))]
    >>> can_record(torch.optim.Adam(weights)), can_record(torch.optim.LBFGS(weights))
    (True, False)
    """
    groups = optimizer.param_groups
    kinds = type(optimizer) is torch.optim.SGD or all("capturable" in group for group in groups)
    return kinds and not any(isinstance(group.get("lr"), torch.Tensor) for group in groups)


def recorded_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: ShardBatches,
    loss_of: Callable[[Any, Any], torch.Tensor],
    device: Accelerator,
) -> None:
    """Train on the batches as `standard_loop` does, after the first ones by one recorded step.

    Libraries choose their kernels in the ordinary steps. A batch of another shape is an ordinary
    step.
    """
    replay: Callable[[], torch.Tensor] | None = None
    shapes: list[Any] = []
    inputs_kept: Any = None
    n_alike = 0

    def step(inputs: Any, targets: Any) -> torch.Tensor:
        output = apply(model, inputs)
        check_shapes(loss_of, output, targets)
        loss = loss_of(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    for batch in batches:
        leaves = pytree.tree_leaves(batch)
        found = [(leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf for leaf in leaves]
        shapes = shapes or found
        n_alike += found == shapes
        if found != shapes or n_alike <= _WARM_UP:
            with device.graph_stream():
                optimizer.zero_grad(set_to_none=True)
                batches.log(step(*batch))
            continue
        if replay is None:
            inputs_kept = pytree.tree_map(_kept, batch)
            optimizer.zero_grad(set_to_none=True)
            replay = device.record(functools.partial(step, *inputs_kept))
        for kept, leaf in zip(pytree.tree_leaves(inputs_kept), leaves, strict=True):
            if _is_tensor(leaf):
                kept.copy_(leaf)
        batches.log(replay().clone())
    optimizer.zero_grad(set_to_none=True)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _kept(leaf: Any) -> Any:
    return leaf.clone() if _is_tensor(leaf) else leaf
