"""How much memory a trial takes, and how it can do with less.

What it takes is counted before anything trains: parameters, gradients, and what the optimizer
keeps of each, as its step on parameters of a few numbers shows. If that is asked for, a few samples
of zeros go through the model, too, and what autograd keeps of them is what each sample takes; a
large model gets a whole batch on PyTorch's device ``meta``, where tensors have a shape and no
numbers. The count leaves out what cannot be known so: it is no more than what training takes.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Literal, Self, TypeAlias

import numpy as np
import torch

from dagsel.checks import whole
from dagsel.dispatch.units import Kind
from dagsel.errors import WorkloadError
from dagsel.workloads.base import Config, DataOutline
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.torch.batches import Making
from dagsel.workloads.torch.fit import Casting
from dagsel.workloads.torch.live import LiveTrials
from dagsel.workloads.torch.loop import apply, following, needs_closure
from dagsel.workloads.torch.speed import Precision

logger = logging.getLogger("dagsel")

#: What `TorchWorkload` is told of memory.
Memory: TypeAlias = int | Callable[[Any], int] | Literal["estimate"] | None

#: Configurations whose counts are kept, the newest ones.
MOST_COUNTS = 256
#: So many samples go through a model, the second time more.
FEW = (2, 4)
#: Bytes of a model whose batch is counted without numbers, which takes a while to get ready.
LARGE = 50_000_000


class Counts:
    """What trials take, counted where each was built to be checked, for who asks of it next.

    A configuration is known by its identity; what is copied or pickled is empty.

    Examples
    --------
    >>> counts, config = Counts(), {"lr": 0.1}
    >>> counts.note(config, 1000)
    >>> counts.of({"lr": 0.1}), counts.of(config)
    (None, 1000)
    """

    def __init__(self) -> None:
        self._counts: deque[tuple[Config, int]] = deque(maxlen=MOST_COUNTS)

    def __reduce__(self) -> Any:
        return Counts, ()

    def note(self, config: Config, n_bytes: int) -> None:
        """Keep a count."""
        self._counts.append((config, n_bytes))

    def of(self, config: Config) -> int | None:
        """Return the count for a configuration; None if there is none."""
        return next((n_bytes for known, n_bytes in self._counts if known is config), None)


class SparesMemory:
    """The part of a workload of PyTorch that knows what it takes, and does with less."""

    loss: Any
    train_fn: Any
    eval_batch_size: int
    max_batch: int | None
    precision: Precision
    _memory: Memory
    _batch_size: Callable[[Config], int]
    _build: Callable[..., torch.nn.Module]
    _build_optimizer: Callable[..., tuple[torch.optim.Optimizer, Any]]
    _casting: Casting
    _live: LiveTrials
    _counts: Counts
    _halvings = 0

    @property
    def _making(self) -> Making:
        raise NotImplementedError

    def forget(self) -> None:
        """Drop the trials that were just trained."""
        self._live.clear()

    def at_once(self, config: Config, kind: Kind) -> int | None:
        """Return the samples that are computed at once; None if they cannot be fewer."""
        if kind != "train":
            size = self.eval_batch_size
        elif self.train_fn is not None or _is_sum(self.loss):
            return None
        else:
            size = self._batch_size(config)
            size = min(size, self.max_batch or size)
        return max(1, -(-size // (1 << self._halvings)))

    def halved(self, times: int) -> Self:
        """Return this workload with half the samples at once, so many times over, at least one."""
        then = copy.copy(self)  # that keeps the same trials
        then._halvings = times
        return then

    def _most_at_once(self, config: Config, gang: int = 1) -> int | None:
        """Return the samples of a rank's share of a batch that are computed at once; None: all."""
        size = self.at_once(config, "train") if self._halvings else None
        if size is None:
            return self.max_batch
        share = -(-self._batch_size(config) // gang)
        return max(1, min(size, -(-share // (1 << self._halvings))))

    @property
    def is_counted(self) -> bool:
        """Whether what a unit takes is counted by dagsel, as the user does not say it."""
        return self._memory in (None, "estimate")

    def memory_bytes(self, config: Config, data: DataOutline) -> int | None:
        """Return the bytes that a training unit takes beside its shard, as far as it is known."""
        if not self.is_counted:
            return self._said(config)
        if (counted := self._counts.of(config)) is not None:
            return counted
        with preserved_streams(torch=True):
            module = self._build(config, seed=0, large=True)
            optimizer, _ = self._build_optimizer(module, config)
            n_bytes = self._count(module, optimizer)
            if self._memory == "estimate":  # which runs the user's own code
                n_bytes += self._of_a_batch(module, config, data)
            return n_bytes

    def _count(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Return the bytes of what is there for a whole unit."""
        kept = _bytes_of([*module.parameters(), *module.buffers()])
        trained = _bytes_of(p for p in module.parameters() if p.requires_grad)
        is_pytorchs = type(optimizer).__module__.startswith("torch.optim.")
        may_step = is_pytorchs or self._memory == "estimate"
        return kept + trained + (_moments(optimizer) if may_step else 0)

    def _said(self, config: Config) -> int | None:
        """Return what the user says that a unit takes; raise a `WorkloadError` if it is odd."""
        if self.is_counted:
            return None
        given: Any = self._memory(config) if callable(self._memory) else self._memory
        n_bytes: int = whole("memory", given, error=WorkloadError)
        return n_bytes

    def _of_a_batch(self, module: torch.nn.Module, config: Config, data: DataOutline) -> int:
        """Return the bytes of a batch and of what its backward pass needs; 0 if not known."""
        size = self.at_once(config, "train") or self._batch_size(config)
        size = min(size, max(data.n_train, default=size))
        if data.ragged or self._making.collate is not None or self._making.augment is not None:
            return 0
        casts = self._casting.dtypes(data) if self._making.input_fn is None else {}

        def saved(n_samples: int, device: str) -> int:
            def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
                return torch.zeros((n_samples, *shape), dtype=dtype, device=device)

            arrays = data.arrays.items()
            batch = {n: zeros(shape, _torch(casts.get(n, of))) for n, (of, shape) in arrays}
            with nullcontext() if device == "cpu" else torch.device(device):
                kept = _saved(module, self._making.pair(batch, config), self.loss, device)
            if self.precision == "bf16":  # under autocast what is kept is half as long
                kept //= 2
            return kept + _bytes_of(batch.values())

        try:
            if size <= FEW[1] or _bytes_of(module.parameters()) > LARGE:
                return saved(size, "meta" if size > FEW[1] else "cpu")
            few, more = (saved(n, "cpu") for n in FEW)
        except Exception:  # the user's own code may refuse zeros, or need numbers
            logger.debug("what a batch takes is not known", exc_info=True)
            return 0
        return more + (size - FEW[1]) * (more - few) // (FEW[1] - FEW[0])


def _torch(dtype: Any) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors; what they share counts once."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _saved(module: torch.nn.Module, pair: tuple[Any, Any], loss: Any, device: str = "cpu") -> int:
    """Return the bytes that autograd keeps of a batch between its passes.

    Examples
    --------
    >>> from torch.nn import Linear, ReLU, Sequential
    >>> model, loss = Sequential(Linear(4, 256), ReLU(), Linear(256, 1)), torch.nn.MSELoss()
    >>> kept = _saved(model, (torch.zeros(100, 4), torch.zeros(100, 1)), loss)
    >>> kept == 4 * 100 * (4 + 256 + 1 + 1)  # what goes into each layer, and into the loss
    True
    """
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    there = {name: tensor.detach().to(device) for name, tensor in own.items()}
    for name, tensor in own.items():
        there[name].requires_grad_(tensor.requires_grad)
    not_counted = {tensor.untyped_storage()._cdata for tensor in there.values()}
    kept: list[torch.Tensor] = []  # so that no storage takes the place of another

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in not_counted:
            kept.append(tensor.detach())
        return tensor

    def called(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(module, there, args, kwargs)

    module.train()
    inputs, targets = pair
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda it: it):
        following(loss, there.values())(apply(called, inputs), targets)
    return _bytes_of(kept)


def _moments(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes that an optimizer keeps once it has made a step; 0 if that is not known.

    Examples
    --------
    >>> weights = [torch.nn.Parameter(torch.zeros(100, 10))]
    >>> _moments(torch.optim.Adam(weights)), _moments(torch.optim.SGD(weights))
    (8004, 0)
    """
    if needs_closure(type(optimizer).step):
        return 0
    small: dict[torch.Tensor, torch.Tensor] = {}  # and the parameter in whose place it is
    then = copy.copy(optimizer)
    then.state, then.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        there = []
        for parameter in group["params"]:
            # No two sides alike: what is kept of rows alone is seen to be that.
            shape = tuple(range(2, 2 + parameter.dim()))
            few = torch.zeros(shape, dtype=parameter.dtype, requires_grad=True)
            few.grad = torch.zeros_like(few)
            small[few] = parameter
            there.append(few)
        then.param_groups.append({**group, "params": there})
    try:
        then.step()
    except Exception:  # a class of the user's own may need other gradients
        logger.debug("what %s keeps is not known", type(optimizer).__name__, exc_info=True)
        return 0
    n_bytes = 0
    for few, state in then.state.items():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                is_whole = value.shape == few.shape and few.dim()
                n_bytes += (small[few] if is_whole else value).numel() * value.element_size()
    return n_bytes


def _is_sum(loss: Any) -> bool:
    """Whether a loss adds up what it says of samples: that of a piece has no share of it.

    Examples
    --------
    >>> _is_sum(torch.nn.MSELoss(reduction="sum")), _is_sum(torch.nn.MSELoss())
    (True, False)
    """
    while isinstance(loss, functools.partial):
        if loss.keywords.get("reduction") == "sum":
            return True
        loss = loss.func
    return getattr(loss, "reduction", None) == "sum"
