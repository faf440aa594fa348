"""The training loop over a shard: batches by index, which may end at a batch boundary."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from dagsel.checks import shown
from dagsel.errors import WorkloadError
from dagsel.workloads.batches import ShardPass, sizes_of, weighted_means
from dagsel.workloads.pooled import Pool

logger = logging.getLogger("dagsel")

_F: Any = torch.nn.functional
#: Losses that bear outputs and targets of different shapes.
_ELEMENTWISE = (_F.mse_loss, _F.l1_loss, _F.smooth_l1_loss, _F.huber_loss, _F.poisson_nll_loss)
_ELEMENTWISE_LOSSES = (
    torch.nn.MSELoss, torch.nn.L1Loss, torch.nn.SmoothL1Loss, torch.nn.HuberLoss,
    torch.nn.PoissonNLLLoss,
)  # fmt: skip

MakeBatch = Callable[[torch.Tensor], tuple[Any, Any]]


class Piece(NamedTuple):
    """A part of a batch that is trained on at once, and its share of the batch."""

    share: float
    inputs: Any
    targets: Any


class ShardBatches(ShardPass):
    """The batches of one pass over a shard, as a user's own training loop sees them.

    One pass only: ``for inputs, targets in batches:``. It ends early, at a batch boundary, when
    the unit is told to stop, and the trial's next unit continues with the next batch. It does not
    end while gradients wait for an ``optimizer.step()``.
    """

    def __init__(
        self,
        order: torch.Tensor,  # the samples of the visit, on the shard's device
        make: MakeBatch,
        *,
        batch_size: int,
        drop_last: bool,
        max_batch: int | None = None,  # if given, each batch is a list of `Piece` of similar sizes
        **options: Any,  # those of `ShardPass`
    ) -> None:
        sizes = sizes_of(order.numel(), batch_size, drop_last=drop_last)
        parts = torch.split(order[: sum(sizes)], batch_size) if sizes else ()
        super().__init__(parts, sizes, make=make, **options)
        self.max_batch = max_batch
        self.is_empty = False  # whether `input_fn` has given no sample of any batch so far
        # Makes the batches of some indices instead of `make`: ahead of time, where they travel.
        self.feed: Callable[[Sequence[torch.Tensor]], Iterable[tuple[Any, Any]]] | None = None

    def log(self, loss: torch.Tensor | float) -> None:
        """Report the mean loss of the present batch; costs no synchronization with a GPU."""
        super().log(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def agreed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's loss, given this worker's share of it."""
        return loss

    def _batches(self, parts: Sequence[torch.Tensor]) -> Iterable[Any]:
        if self.max_batch is None:
            return self._made(parts)
        cut = [part.tensor_split(-(-part.numel() // self.max_batch)) for part in parts]
        made = iter(self._made([piece for pieces in cut for piece in pieces]))
        shares = ([piece.numel() / sum(map(len, pieces)) for piece in pieces] for pieces in cut)
        return ([Piece(share, *next(made)) for share in batch] for batch in shares)

    def _made(self, parts: Sequence[torch.Tensor]) -> Iterable[tuple[Any, Any]]:
        return map(self._make, parts) if self.feed is None else self.feed(parts)

    def _numbers(self, values: list[Any]) -> list[float]:
        return _numbers(values)

    def gave_nothing(self) -> bool:
        """Whether every batch of the shard was handed out, and none had a sample in it."""
        n = self._taken - self._cursor.n_batches
        return self.is_empty and 0 < len(self._parts) == n


def _numbers(values: list[Any]) -> list[float]:
    if values and all(isinstance(value, torch.Tensor) and value.dim() == 0 for value in values):
        numbers: list[float] = torch.stack(values).tolist()
        return numbers
    return [float(value) for value in values]


def apply(model: Callable[..., Any], inputs: Any) -> Any:
    """Call a model: with named inputs if they are a mapping, one by one if they are a tuple.

    Examples
    --------
    >>> apply(torch.nn.Bilinear(2, 2, 1), (torch.ones(3, 2), torch.ones(3, 2))).shape
    torch.Size([3, 1])
    """
    if type(inputs) is tuple:  # a packed sequence is a tuple too, and one input
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def following(loss: Any, weights: Iterable[torch.Tensor]) -> Any:
    """Return a loss whose weights are where a model's are, and not wider.

    Weights of classes that come from NumPy are float64, and on the CPU.

    Examples
    --------
    >>> loss = torch.nn.CrossEntropyLoss(weight=torch.ones(2, dtype=torch.float64))
    >>> following(loss, torch.nn.Linear(3, 2).parameters()).weight.dtype
    torch.float32
    """
    held = [*loss.buffers(), *loss.parameters()] if isinstance(loss, torch.nn.Module) else []
    like = next((it for it in weights if it.is_floating_point()), None) if held else None
    if like is None:
        return loss
    is_wide = like.dtype != torch.float64 and any(it.dtype == torch.float64 for it in held)
    if not is_wide and all(it.device == like.device for it in held):
        return loss
    moved = copy.deepcopy(loss).to(like.device)
    return moved.to(like.dtype) if is_wide else moved


def check_shapes(loss: Any, output: Any, targets: Any) -> None:
    """Raise a `WorkloadError` if a loss would compare each output with each target.

    PyTorch warns of it, on the worker: a model with outputs ``(n, 1)`` learns the mean of targets
    ``(n,)``.

    Examples
    --------
    >>> check_shapes(torch.nn.functional.mse_loss, torch.zeros(8, 1), torch.zeros(8))
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: mse_loss of outputs (8, 1) and targets (8,) would compare each \
output with each target: let the model return its output without the last axis, output.squeeze(-1)
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    if not any(loss is it for it in _ELEMENTWISE) and not isinstance(loss, _ELEMENTWISE_LOSSES):
        return
    shapes = [tuple(getattr(it, "shape", ())) for it in (output, targets)]
    if shapes[0] == shapes[1]:
        return
    cure = "make them alike"
    if shapes[0] == (*shapes[1], 1):
        cure = "let the model return its output without the last axis, output.squeeze(-1)"
    name = getattr(loss, "__name__", type(loss).__name__)
    raise WorkloadError(
        f"{name} of outputs {shapes[0]} and targets {shapes[1]} would compare each output with "
        f"each target: {cure}"
    )


def say_weighted(loss: Any) -> None:
    """Log that the loss of a set is not the mean of those of its batches, if that is known."""
    options: dict[str, Any] = {}
    while isinstance(loss, functools.partial):
        options, loss = {**loss.keywords, **options}, loss.func
    if isinstance(loss, (torch.nn.CrossEntropyLoss, torch.nn.NLLLoss)):
        options = {"weight": loss.weight, "ignore_index": loss.ignore_index}
    elif not any(loss is it for it in (_F.cross_entropy, _F.nll_loss)):
        return
    why = "weights its classes" if options.get("weight") is not None else ""
    if not why and options.get("ignore_index", -100) != -100:
        why = f"leaves out targets of {options['ignore_index']}"
    if why:
        logger.warning(
            "the validation loss is the mean over batches, and %s %s, so it is not the loss of the "
            "whole set, and another epoch or trial may be the best one: write metric='whole', and "
            "metrics={'whole': dagsel.metrics.over_set(loss, direction='minimize')} with your loss",
            getattr(loss, "__name__", type(loss).__name__),
            why,
        )


def standard_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: ShardBatches,
    loss_of: Callable[[Any, Any], torch.Tensor],
) -> None:
    """Train on the batches: forward, backward, step."""
    if batches.max_batch is not None or needs_closure(type(optimizer).step):
        return closure_loop(
            optimizer, batches, functools.partial(_accumulate, model, loss_of=loss_of)
        )
    zero_grad, step, log, is_first = optimizer.zero_grad, optimizer.step, batches.log, True
    for inputs, targets in batches:
        zero_grad(set_to_none=True)
        output = apply(model, inputs)
        if is_first:
            check_shapes(loss_of, output, targets)
            is_first = False
        loss = loss_of(output, targets)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        log(loss)
    return None


def closure_loop(
    optimizer: torch.optim.Optimizer,
    batches: ShardBatches,
    backward: Callable[[list[Piece]], torch.Tensor],
) -> None:
    """Train on the batches by a function that adds up a batch's gradients, and returns its loss.

    An optimizer that evaluates the loss itself calls it as often as it likes.
    """
    asks_for_loss = needs_closure(type(optimizer).step)
    for batch in batches:
        pieces = [Piece(1.0, *batch)] if batches.max_batch is None else batch

        def closure(pieces: list[Piece] = pieces) -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = backward(pieces)
            return batches.agreed(loss) if asks_for_loss else loss

        if asks_for_loss:
            batches.log(optimizer.step(closure))
        else:
            batches.log(closure())
            optimizer.step()


def _accumulate(
    model: torch.nn.Module, pieces: list[Piece], loss_of: Callable[[Any, Any], torch.Tensor]
) -> torch.Tensor:
    # Ranks of a gang add up their gradients in the backward pass, once a batch is enough.
    losses = []
    for n_left, (share, inputs, targets) in zip(range(len(pieces))[::-1], pieces, strict=True):
        waits = n_left and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            output = apply(model, inputs)
            check_shapes(loss_of, output, targets)
            loss = loss_of(output, targets) * share
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


@functools.lru_cache(maxsize=64)
def needs_closure(step: Callable[..., Any]) -> bool:
    """Whether an optimizer, as LBFGS, evaluates the loss itself, more than once a step."""
    closure = inspect.signature(inspect.unwrap(step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@contextmanager
def track_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: ShardBatches
) -> Iterator[None]:
    """Allow a stop in a user's loop only where no gradient waits for a later step.

    Raises
    ------
    WorkloadError
        If gradients wait for a step at the end of the loop.
    """
    stepped = stepped_by_any = -1  # in which batch, by the optimizer and by one of train_fn's own

    def note(stepping: Any, *_: Any) -> None:
        nonlocal stepped, stepped_by_any
        stepped_by_any = batches._done
        if stepping is optimizer:
            stepped = batches._done

    its = weakref.proxy(batches)  # they hold `may_stop`, which holds the model

    def may_stop() -> bool:
        # The boundary after batch i is seen as i + 1 batches done.
        return stepped == its._done - 1 or all(p.grad is None for p in model.parameters())

    batches.may_stop = may_stop
    handles = [register_optimizer_step_post_hook(note)]
    # A class of a script or a notebook may be here by its code, with a copy of PyTorch's own hooks.
    if hasattr(optimizer, "_optimizer_step_post_hooks"):
        handles.append(optimizer.register_step_post_hook(note))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if stepped_by_any < batches._done - 1 and any(map(_waits, model.parameters())):
        raise WorkloadError(
            "train_fn ends with gradients that wait for an optimizer.step(), and no later pass has "
            "them: step after the last batch of the shard too, as by a last optimizer.step() after "
            "the loop"
        )


def _waits(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter has a gradient that a step would follow."""
    gradient = parameter.grad
    if gradient is None or not gradient.any():
        return False
    return bool(gradient.to_dense().isfinite().all())  # PyTorch asks that of no sparse one


def mean_metrics(
    model: torch.nn.Module,
    parts: Iterator[tuple[int, Any, Any]],
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    pool: Pool | None = None,
) -> tuple[int, dict[str, float]]:
    """Average metrics over the samples of ``(n_samples, inputs, targets)`` batches.

    `pool` takes in all outputs and targets.
    """
    values: dict[str, list[Any]] = {name: [] for name in metrics}
    sizes: list[int] = []
    for size, inputs, targets in parts:
        output = apply(model, inputs)
        sizes.append(size)
        for name, metric in metrics.items():
            values[name].append(metric(output, targets))
        if pool is not None:
            pool.add(output, targets)
    return weighted_means(
        sizes, {name: _of_batches(name, column) for name, column in values.items()}
    )


def _of_batches(name: str, values: list[Any]) -> list[float]:
    """Return what a metric makes of each batch; raise a `WorkloadError` if it is no number."""
    try:
        return _numbers(values)
    except (TypeError, ValueError, RuntimeError):
        raise WorkloadError(
            f"metric {name!r} must return a number for a batch, and returns {shown(values[0])}: "
            "return a mean, as in .float().mean()"
        ) from None
