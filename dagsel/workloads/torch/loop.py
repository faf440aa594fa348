"""The training loop over a shard: batches by index, which may end at a batch boundary."""

from __future__ import annotations

import functools
import inspect
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from dagsel.codec import from_json
from dagsel.errors import WorkloadError
from dagsel.flow import Losses
from dagsel.state import reading_state
from dagsel.workloads.base import Visit
from dagsel.workloads.pooled import Pool

MakeBatch = Callable[[torch.Tensor], tuple[Any, Any]]
_FOLD = 4096  # losses kept as tensors before they are added up


@dataclass(frozen=True, slots=True)
class Cursor:
    """The place inside a shard at which a unit stopped, and the losses so far."""

    trial: int
    epoch: int
    shard: int
    n_batches: int = 0
    n_samples: int = 0
    loss_sum: float = 0.0
    n_logged: int = 0

    @classmethod
    def begin(cls, saved: dict[str, Any] | None, visit: Visit) -> Cursor:
        """Return the place where a visit begins: its start, or the saved place in its shard."""
        here = cls(visit.trial, visit.epoch, visit.shard)
        with reading_state():
            cursor: Cursor = here if saved is None else from_json(cls, saved)
            if min(cursor.n_batches, cursor.n_samples, cursor.n_logged) < 0:
                raise ValueError(f"a place inside a shard is {cursor}")
        if (cursor.trial, cursor.epoch, cursor.shard) != (here.trial, here.epoch, here.shard):
            raise WorkloadError(
                f"the state was stopped inside shard {cursor.shard} of epoch {cursor.epoch} of "
                f"trial {cursor.trial}; it cannot go on with shard {visit.shard} of epoch "
                f"{visit.epoch} of trial {visit.trial}"
            )
        return cursor


class Piece(NamedTuple):
    """A part of a batch that is trained on at once, and its share of the batch."""

    share: float
    inputs: Any
    targets: Any


class ShardBatches:
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
        cursor: Cursor,
        should_stop: Callable[[], bool],  # called after every batch but the last
        max_batch: int | None = None,  # if given, each batch is a list of `Piece` of similar sizes
    ) -> None:
        n_kept = order.numel() - order.numel() % batch_size if drop_last else order.numel()
        self._parts = torch.split(order[:n_kept], batch_size) if n_kept else ()
        self._sizes = [batch_size] * len(self._parts)
        if n_kept % batch_size:
            self._sizes[-1] = n_kept % batch_size
        self._make, self._should_stop, self._cursor = make, should_stop, cursor
        self._done, self.max_batch = cursor.n_batches, max_batch
        self._taken = self._done  # batches that were handed out, also one that a loop broke off at
        self._losses: dict[int, Any] = {}
        self._loss_sum, self._n_logged = cursor.loss_sum, cursor.n_logged
        self._low, self._high = math.inf, -math.inf
        self.stopped = False
        self.is_empty = False  # whether `input_fn` has given no sample of any batch so far
        self.after_batch: Callable[[], object] | None = None
        self.may_stop: Callable[[], bool] = lambda: True
        # Makes the batches of some indices instead of `make`: ahead of time, where they travel.
        self.feed: Callable[[Sequence[torch.Tensor]], Iterable[tuple[Any, Any]]] | None = None

    def __len__(self) -> int:
        """Count the batches of the whole shard."""
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        n_batches = len(self._parts)
        wanted = False
        for batch in self._batches(self._parts[self._done :]):
            self._taken = self._done + 1
            yield batch
            self._done += 1
            if self.after_batch is not None:
                self.after_batch()
            wanted = wanted or self._is_to_stop()
            if wanted and self._done < n_batches and self.may_stop():
                self.stopped = True
                return

    def log(self, loss: torch.Tensor | float) -> None:
        """Report the mean loss of the present batch; costs no synchronization with a GPU."""
        self._losses[self._done] = loss.detach() if isinstance(loss, torch.Tensor) else loss
        if len(self._losses) >= _FOLD:
            self._fold()

    def agreed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's loss, given this worker's share of it."""
        return loss

    def _is_to_stop(self) -> bool:
        return self._should_stop()

    def _batches(self, parts: Sequence[torch.Tensor]) -> Iterable[Any]:
        if self.max_batch is None:
            return self._made(parts)
        cut = [part.tensor_split(-(-part.numel() // self.max_batch)) for part in parts]
        made = iter(self._made([piece for pieces in cut for piece in pieces]))
        shares = ([piece.numel() / sum(map(len, pieces)) for piece in pieces] for pieces in cut)
        return ([Piece(share, *next(made)) for share in batch] for batch in shares)

    def _made(self, parts: Sequence[torch.Tensor]) -> Iterable[tuple[Any, Any]]:
        return map(self._make, parts) if self.feed is None else self.feed(parts)

    def _fold(self) -> None:
        indices, losses = self._collect()
        if not losses:
            return
        self._low, self._high = min(self._low, *losses), max(self._high, *losses)
        # One after the other in float64, so that a unit cut into pieces has the same sum.
        for index, loss in zip(indices, losses, strict=True):
            size = self._sizes[min(index, len(self._sizes) - 1)]
            self._loss_sum += loss * size
            self._n_logged += size

    def _collect(self) -> tuple[list[int], list[float]]:
        # The batches with a loss that is not yet counted, and these losses.
        collected = [*self._losses], _numbers([*self._losses.values()])
        self._losses.clear()
        return collected

    @property
    def cursor(self) -> Cursor:
        """The place that has been reached."""
        self._fold()
        start = self._cursor
        return Cursor(
            start.trial, start.epoch, start.shard, self._taken, sum(self._sizes[: self._taken]),
            self._loss_sum, self._n_logged,
        )  # fmt: skip

    @property
    def loss(self) -> float:
        """Mean of the losses reported; NaN if none was, 0 if there was nothing to report on."""
        self._fold()
        if self._n_logged:
            return self._loss_sum / self._n_logged
        return math.nan if self._taken else 0.0

    @property
    def losses(self) -> Losses:
        """Range of the losses reported since the beginning of this piece."""
        self._fold()
        n = self._taken - self._cursor.n_batches
        known = self._low <= self._high and not math.isnan(self._loss_sum)
        return Losses(n, self._low, self._high) if known else Losses(n)

    def gave_nothing(self) -> bool:
        """Whether every batch of the shard was handed out, and none had a sample in it."""
        n = self._taken - self._cursor.n_batches
        return self.is_empty and 0 < len(self._parts) == n

    @property
    def diverged(self) -> bool:
        """Whether a loss reported was NaN."""
        self._fold()
        return math.isnan(self._loss_sum)


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


def standard_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: ShardBatches,
    loss_of: Callable[[Any, Any], torch.Tensor],
) -> None:
    """Train on the batches: forward, backward, step."""
    if batches.max_batch is not None or needs_closure(type(optimizer).step):
        return _closure_loop(model, optimizer, batches, loss_of)
    zero_grad, step, log = optimizer.zero_grad, optimizer.step, batches.log
    for inputs, targets in batches:
        zero_grad(set_to_none=True)
        loss = loss_of(apply(model, inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        step()
        log(loss)
    return None


def _closure_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: ShardBatches,
    loss_of: Callable[[Any, Any], torch.Tensor],
) -> None:
    asks_for_loss = needs_closure(type(optimizer).step)
    for batch in batches:
        pieces = [Piece(1.0, *batch)] if batches.max_batch is None else batch

        def closure(pieces: list[Piece] = pieces) -> Any:
            optimizer.zero_grad(set_to_none=True)
            loss = _accumulate(model, pieces, loss_of)
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
            loss = loss_of(apply(model, inputs), targets) * share
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


@functools.lru_cache(maxsize=64)
def needs_closure(step: Callable[..., Any]) -> bool:
    """Whether an optimizer, as LBFGS, evaluates the loss itself, more than once a step."""
    closure = inspect.signature(inspect.unwrap(step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def track_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: ShardBatches
) -> Callable[[], None]:
    """Allow a stop in a user's loop only where no gradient waits for a later step.

    Returns a function that ends the tracking.
    """
    stepped = -1
    its = weakref.proxy(batches)  # they hold `may_stop`, which holds the model

    def note(*_: Any) -> None:
        nonlocal stepped
        stepped = its._done

    def may_stop() -> bool:
        # The boundary after batch i is seen as i + 1 batches done.
        return stepped == its._done - 1 or all(p.grad is None for p in model.parameters())

    batches.may_stop = may_stop
    handle = optimizer.register_step_post_hook(note)
    return handle.remove


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
    total = sum(sizes)
    means = {
        name: math.fsum(n * value for n, value in zip(sizes, _numbers(column), strict=True)) / total
        if total
        else 0.0
        for name, column in values.items()
    }
    return total, means
