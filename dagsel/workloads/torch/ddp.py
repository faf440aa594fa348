"""Training in a gang: each rank's share of every batch, and gradients of the whole batch."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from dagsel.errors import WorkloadError
from dagsel.workloads.batches import FOLD, Cursor
from dagsel.workloads.gang.gang import Gang
from dagsel.workloads.random_streams import seed_streams
from dagsel.workloads.torch.loop import MakeBatch, ShardBatches

#: Types that every backend can send, by their bytes.
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_INTEGERS = {**_BITS, 2: torch.int16}
#: Ranks on unlike machines round differently: by so many times what their numbers resolve.
_ROUNDING = 64.0


def share(part: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return a rank's share of a batch, given as the indices of its samples.

    A batch with less than two samples per rank is trained on whole by each of them: a rank might
    have none otherwise, and batch normalisation needs two.

    Examples
    --------
    >>> part = torch.arange(5)
    >>> share(part, 0, 2), share(part, 1, 2)
    (tensor([0, 1, 2]), tensor([3, 4]))
    >>> share(part, 1, 3)
    tensor([0, 1, 2, 3, 4])
    """
    if part.numel() < 2 * size:
        return part
    return part.tensor_split(size)[rank]


def weight(n_samples: int, rank: int, size: int) -> float:
    """Return the weight of a rank's share in the mean over the batch.

    Examples
    --------
    >>> weight(5, 0, 2), weight(1, 0, 2)
    (0.6, 0.5)
    """
    if n_samples < 2 * size:
        return 1 / size
    return (n_samples // size + (rank < n_samples % size)) / n_samples


class GangBatches(ShardBatches):
    """One rank's shares of the batches; losses and the place are those of the whole batches.

    The options are those of `ShardBatches`, for the whole gang; rank 0's `should_stop` counts.
    """

    def __init__(
        self,
        order: torch.Tensor,
        make: MakeBatch,
        *,
        gang: Gang,
        **options: Any,
    ) -> None:
        super().__init__(order, make, **options)
        rank, size = gang.rank, gang.size
        self._parts = tuple(share(part, rank, size) for part in self._parts)
        self._weights = [weight(n, rank, size) for n in self._sizes]
        self.gang = gang
        self._n_collected, self._has_collected = self._done, False
        self._passed = self._present
        self.check: Callable[[], object] = lambda: None

    @property
    def weight(self) -> float:
        """Weight of this rank's share of the batch that has gone through the model last."""
        return self._weights[self._passed]

    def note_pass(self) -> None:
        """Note that the present batch goes through the model; a backward pass may come later."""
        self._passed = self._present

    @property
    def _present(self) -> int:
        return min(self._done, len(self._weights) - 1)  # a loop may go on after the last batch

    def weigh(self, amount: float) -> None:
        """Weight this rank's share of the present batch by what is in it, such as its labels.

        All ranks call it, before the backward pass.
        """
        total = float(self.gang.total(np.array([amount]))[0])
        self._weights[self._present] = amount / total if total else 1 / self.gang.size

    def log(self, loss: torch.Tensor | float) -> None:
        """Report the mean loss of this rank's share of the present batch."""
        self._losses[self._done] = loss.detach() if isinstance(loss, torch.Tensor) else loss

    def agreed(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's loss, given this rank's share of it."""
        total = self.gang.total(np.array([float(loss) * self.weight]))
        return torch.as_tensor(total[0], dtype=loss.dtype, device=loss.device)

    def gave_nothing(self) -> bool:
        """Whether no rank had a sample in any batch of the shard."""
        return not self.gang.total(np.array([not super().gave_nothing()], np.float64))[0]

    def _is_to_stop(self) -> bool:
        self.check()
        if self._done - self._n_collected >= FOLD:
            self._fold()
        return self.gang.agree(self.gang.rank == 0 and self._should_stop())

    def _collect(self) -> tuple[list[int], list[float]]:
        # All ranks come here at the same batches, for a slot of each batch since the last time and
        # one for a loss that was reported after the last batch.
        if self._has_collected and self._done == self._n_collected:
            return [], []
        first, last = self._n_collected, self._done
        own, n_slots = super()._collect(), last + 1 - first
        sums = np.zeros(2 * n_slots)
        for index, loss in zip(*own, strict=True):
            of_batch = self._weights[min(index, len(self._weights) - 1)]
            sums[index - first] = loss * of_batch
            sums[n_slots + index - first] = of_batch
        losses, weights = self.gang.total(sums).reshape(2, n_slots)
        self._n_collected, self._has_collected = last, True
        reported = np.flatnonzero(weights)
        return (reported + first).tolist(), (losses[reported] / weights[reported]).tolist()


class _Distributed(DistributedDataParallel):
    def __init__(
        self, module: torch.nn.Module, gang: Gang, note_pass: Callable[[], object]
    ) -> None:
        # The ranks' models are equal already: their states are.
        super().__init__(module, process_group=gang.group.process_group, init_sync=False)
        self.gang, self._note_pass = gang, note_pass

    # A loop of the user's own may read what its model has.
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Tell an unfinished reduction from a gang that broke."""
        try:
            yield
        except RuntimeError as error:
            if "finished reduction" in str(error):  # PyTorch's word for an unused parameter
                raise WorkloadError(_unused(self.module, str(error))) from error
            self.gang.broken = True
            raise

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._note_pass()
        with self.reducing():  # the second one agrees on the buckets
            return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        with self.gang.exchange():
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def _distributed_broadcast_coalesced(self, tensors: Any, *rest: Any, **options: Any) -> None:
        # gloo and NCCL know few types of numbers, and nothing is computed here.
        sent = [it if it.is_complex() else it.view(_BITS[it.itemsize]) for it in tensors]
        super()._distributed_broadcast_coalesced(sent, *rest, **options)  # type: ignore[no-untyped-call]


def distribute(module: torch.nn.Module, batches: GangBatches) -> torch.nn.Module:
    """Wrap a module, equal on all ranks, so that its gradients are those of the whole batch."""
    gang = batches.gang
    # PyTorch holds the hook where Python's collector does not see it: a hook that held the batches,
    # which hold the model, would keep both and the gang's connections for ever.
    its = weakref.proxy(batches)
    with gang.exchange():
        model = _Distributed(module, gang, lambda: its.note_pass())
    complete = False

    def result(future: Any) -> torch.Tensor:
        with gang.exchange():
            reduced: torch.Tensor = future.value()[0]
            return reduced

    def reduce(_: None, bucket: Any) -> Any:
        nonlocal complete
        complete = complete or bucket.is_last()
        part = bucket.buffer().mul_(its.weight)
        with gang.exchange():
            work = gang.group.process_group.allreduce([part])
        return work.get_future().then(result)

    reduce.__annotations__.clear()  # PyTorch knows them as classes only, and here they are text
    model.register_comm_hook(None, reduce)

    def check() -> None:
        """Raise if not all gradients were reduced."""
        with model.reducing():
            model.reducer._rebuild_buckets()  # also says whether the last reduction was whole
        put_off = not model.require_forward_param_sync  # by the loop's own no_sync()
        if not (complete or put_off) and any(p.grad is not None for p in module.parameters()):
            raise WorkloadError(
                "gradients came about that no other rank has seen: in a gang train_fn must call "
                "the model itself, not a method of its own"
            )

    batches.check = check
    return model


def check_end(module: torch.nn.Module, batches: GangBatches, *, own_loop: bool) -> None:
    """Raise a `WorkloadError` if gradients of the batches were not added up over the gang."""
    batches.check()  # the last batch too, if train_fn has left the loop there
    if own_loop:
        _check_alike(module, batches.gang)


def _check_alike(module: torch.nn.Module, gang: Gang) -> None:
    """Raise a `WorkloadError` if the ranks have trained a model to different parameters."""
    checksums = np.zeros(gang.size)
    checksums[gang.rank] = _checksum(module)
    if len({*gang.total(checksums).tolist()}) == 1:
        return
    differences = {}
    for name, parameter in module.named_parameters():
        if parameter.is_floating_point() or parameter.is_complex():
            rounding = _ROUNDING * torch.finfo(parameter.dtype).eps
            differences[name] = _difference(parameter.detach(), gang) / rounding
    worst = max(differences, key=lambda name: differences[name], default="")
    if worst and differences[worst] > 1.0:
        raise WorkloadError(
            f"the workers of a gang have trained {worst!r} to different numbers, as train_fn took "
            "steps by gradients that were not added up over them: let it call the model itself, "
            "then backward() once for each call, on parameters that require gradients from the "
            "start, or train with gangs of 1"
        )


def _difference(tensor: torch.Tensor, gang: Gang) -> float:
    """Return how far, relatively, the ranks' tensors are from their mean; 0 if one has a NaN."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    own = real.double().cpu().numpy().ravel()
    with np.errstate(all="ignore"):
        apart = own - gang.total(own.copy()) / gang.size
        squares = gang.total(np.array([apart @ apart, own @ own]))
        return float(np.nan_to_num(np.sqrt(squares[0] / squares[1])))


def _checksum(module: torch.nn.Module) -> int:
    """Return a number that differs where a bit of a parameter does, below 2^52."""
    sums = [
        (torch.view_as_real(own) if own.itemsize > 8 else own)
        .view(_INTEGERS[min(own.itemsize, 8)])
        .sum(dtype=torch.int64)
        for own in (parameter.detach() for parameter in module.parameters())
    ]
    return int(torch.stack(sums).sum()) % 2**52 if sums else 0


def _unused(module: torch.nn.Module, said: str) -> str:
    # The gradients themselves do not tell: a loop may have cleared them, or kept earlier ones.
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    first = re.search(r"did not receive grad for rank \d+: (\d+)", said)
    which = repr(names[int(first[1])]) if first else "some parameter"
    return (
        f"the loss does not depend on {which}: in a gang every parameter must have a gradient "
        "from every batch; freeze it by requires_grad=False or train with gangs of 1"
    )


def seed_rank(seed: int, cursor: Cursor, rank: int) -> None:
    """Start the random streams of a rank other than 0, which has the trial's own."""
    place = [cursor.trial, cursor.epoch, cursor.shard, cursor.n_batches]
    key = np.random.SeedSequence([abs(seed), *place, rank])
    seed_streams(int(key.generate_state(1, np.uint64)[0]), torch=True)


def check_shares(batch_size: int, size: int) -> None:
    """Raise a `WorkloadError` if a batch has no sample for some rank."""
    if size > batch_size:
        raise WorkloadError(
            f"a batch of {batch_size} cannot be shared by a gang of {size}: give a larger "
            "batch_size or use smaller gangs"
        )
