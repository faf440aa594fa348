"""Shards and batches on a GPU: where they are kept, and how they are copied.

Everything that needs a GPU is in `_Cuda`; the rest runs on the CPU with another `Accelerator`.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, Protocol, TypeAlias

import torch

from dagsel.workloads.torch.ragged import RaggedTensor

Tensors: TypeAlias = dict[str, torch.Tensor]
Shard: TypeAlias = dict[str, Any]  # of tensors, and of `RaggedTensor`
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_BATCHES_AHEAD = 2  # one on its way while another waits; more only takes memory


class MemoryUse:
    """Counts the bytes that shards take on a device, until their tensors are gone."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.RLock()  # garbage may be collected while this thread has it

    def claim(self, n_bytes: int, *, free: int, total: int, budget: int | float) -> bool:
        """Count so many bytes if `place` puts them on the device; return whether it does."""
        with self._lock:
            fits = place(n_bytes, self.taken, free=free, total=total, budget=budget) == "device"
            self.taken += n_bytes if fits else 0
            return fits

    def release_with(self, tensor: torch.Tensor | RaggedTensor) -> None:
        """Release the bytes of a tensor when it is gone."""
        weakref.finalize(tensor, self.release, tensor.nbytes).atexit = False

    def release(self, n_bytes: int) -> None:
        """Count so many bytes less."""
        with self._lock:
            self.taken -= n_bytes


class Accelerator(Protocol):
    """A device with a memory of its own."""

    memory_use: MemoryUse

    @property
    def device(self) -> torch.device:
        """Where models train."""
        ...

    def memory(self) -> tuple[int, int]:
        """Return the bytes that are free, and all bytes."""
        ...

    def pinned(self, like: torch.Tensor, n: int | None = None) -> torch.Tensor:
        """Make an unfilled tensor like another, with `n` rows, in pinned host memory."""
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in pinned memory."""
        ...

    def send(self, batch: Tensors) -> Callable[[], Tensors]:
        """Start to copy a pinned batch; call the result to receive it, ready for use."""
        ...

    def mark(self) -> Callable[[], object]:
        """Mark the work requested so far; call the result to wait until it is done."""
        ...

    def graph_stream(self) -> AbstractContextManager[object]:
        """Work on the stream on which graphs are recorded."""
        ...

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record a step as a graph without running it; call the result to run it."""
        ...


class _Cuda:
    """A CUDA device of this process."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.memory_use = MemoryUse()
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        # What PyTorch has taken and does not use is free too.
        spare = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + spare, total

    def pinned(self, like: torch.Tensor, n: int | None = None) -> torch.Tensor:
        shape = like.shape if n is None else (n, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def send(self, batch: Tensors) -> Callable[[], Tensors]:
        """Copy a pinned batch on a stream of its own; the result waits for it."""
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            to_device = functools.partial(torch.Tensor.to, device=self.device, non_blocking=True)
            moved = {name: _mapped(to_device, rows) for name, rows in batch.items()}
            there.record(self._copies)

        def receive() -> Tensors:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(there)
            for rows in moved.values():  # or the side stream reuses their memory too early
                _mapped(lambda tensor: tensor.record_stream(stream), rows)
            return moved

        return receive

    def mark(self) -> Callable[[], object]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    @contextmanager
    def graph_stream(self) -> Iterator[None]:
        stream = torch.cuda.current_stream(self.device)
        self._graphs.wait_stream(stream)
        with torch.cuda.stream(self._graphs):
            yield
        stream.wait_stream(self._graphs)

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record a step as a CUDA graph; the result runs it."""
        graph = torch.cuda.CUDAGraph()
        # Another thread of the worker may pin memory for a shard meanwhile: not this one's affair.
        with torch.cuda.graph(graph, stream=self._graphs, capture_error_mode="thread_local"):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def accelerator() -> Accelerator | None:
    """Return this process's current CUDA device; None if there is none."""
    return _cuda(torch.cuda.current_device()) if torch.cuda.is_available() else None


@functools.cache
def _cuda(index: int) -> _Cuda:
    return _Cuda(index)  # one for all runs of the process, which share its memory


def place(
    n_bytes: int, taken: int, *, free: int, total: int, budget: int | float
) -> Literal["device", "pinned"]:
    """Decide where a shard is kept.

    `taken` are the bytes of other shards on the device, `budget` is what all shards may take:
    bytes, or a share of the device's memory if it is a float.
    """
    allowed = budget * total if isinstance(budget, float) else budget
    return "device" if taken + n_bytes <= allowed and n_bytes <= free else "pinned"


class ShardOnDisk(dict[str, Any]):
    """A shard on the host's disk; its batches are gathered from there and sent ahead."""


def place_shard(
    arrays: Shard, device: Accelerator | None, budget: int | float, *, stays: bool = False
) -> Shard:
    """Copy a shard to the device's memory, or to pinned memory of the host.

    If it `stays` where it is, on the host's disk, it is not copied to pinned memory.
    """
    if device is None:
        return arrays
    free, total = device.memory()
    n_bytes = sum(array.nbytes for array in arrays.values())
    if device.memory_use.claim(n_bytes, free=free, total=total, budget=budget):
        try:
            there = functools.partial(torch.Tensor.to, device=device.device, copy=True)
            placed = {name: _mapped(there, array) for name, array in arrays.items()}
        except torch.OutOfMemoryError:  # somebody else was faster, or no gap is large enough
            device.memory_use.release(n_bytes)
        else:
            for array in placed.values():
                device.memory_use.release_with(array)
            return placed
    if stays:
        return ShardOnDisk(arrays)
    pinned = functools.partial(_pinned, device)
    return {name: _mapped(pinned, array) for name, array in arrays.items()}


def _mapped(function: Callable[[torch.Tensor], Any], array: Any) -> Any:
    if isinstance(array, RaggedTensor):
        return array.map(function)
    if isinstance(array, list):  # the samples of a ragged array in a batch
        return [_mapped(function, row) for row in array]
    return function(array) if isinstance(array, torch.Tensor) else array


def _pinned(device: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    return device.pinned(tensor).copy_(tensor)


def transfer_device(shard: Shard) -> Accelerator | None:
    """Return the device that batches of a shard must be sent to; None if they are on it."""
    device, first = accelerator(), next(iter(shard.values()))
    tensor = first.values if isinstance(first, RaggedTensor) else first
    if device is None or not (isinstance(shard, ShardOnDisk) or device.is_pinned(tensor)):
        return None
    return device


def send_ahead(
    gather: Callable[[Any], Tensors],
    parts: Iterable[Any],
    device: Accelerator,
    n: int = _BATCHES_AHEAD,
) -> Iterator[Tensors]:
    """Send batches to a device before they are needed.

    `gather` makes a batch of each part in pinned memory; `n` batches are sent ahead of the one in
    use. The device may be `n` batches behind: a fast loop would fill its memory with batches
    otherwise.
    """
    sent: deque[Callable[[], Tensors]] = deque()
    marks: deque[Callable[[], object]] = deque()
    for part in parts:
        sent.append(device.send(gather(part)))
        if len(sent) > n:
            yield sent.popleft()()
            marks.append(device.mark())
            if len(marks) > n:
                marks.popleft()()
    while sent:
        yield sent.popleft()()


def to_host(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Copy tensors of a GPU into pinned memory, with one wait for all; others stay."""
    if not any(tensor.is_cuda for tensor in tensors):
        return tensors
    copies = [
        torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)
        if t.is_cuda
        else t
        for t in tensors
    ]
    torch.cuda.current_stream().synchronize()
    return copies


def moved(batch: Tensors, device: torch.device) -> Tensors:
    """Return a batch whose tensors are all on a device."""
    to_device = functools.partial(torch.Tensor.to, device=device)
    return {name: _mapped(to_device, rows) for name, rows in batch.items()}


def pin(batch: Tensors, device: Accelerator) -> Tensors:
    """Copy a batch into pinned memory."""
    pinned = functools.partial(_pinned, device)
    return {name: _mapped(pinned, rows) for name, rows in batch.items()}


def rows_at(
    rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a copy of some rows; PyTorch selects none of unsigned numbers of 16 bits and more.

    Examples
    --------
    >>> rows_at(torch.tensor([7, 65_535, 9], dtype=torch.uint16), torch.tensor([1, 0])).tolist()
    [65535, 7]
    """
    signed = _SIGNED.get(rows.dtype)
    if signed is None:
        return torch.index_select(rows, 0, index, out=out)
    there = None if out is None else out.view(signed)
    return torch.index_select(rows.view(signed), 0, index, out=there).view(rows.dtype)


def gather_rows(shard: Tensors, device: Accelerator, index: torch.Tensor) -> Tensors:
    """Copy some rows of a shard into pinned memory."""
    return {
        name: rows_at(array, index, out=device.pinned(array, index.numel()))
        for name, array in shard.items()
    }


def copy_rows(shard: Tensors, device: Accelerator | None, rows: slice) -> Tensors:
    """Copy a range of a shard's rows, into pinned memory if they are to be sent."""
    parts = {name: array[rows] for name, array in shard.items()}
    if device is None:
        return {name: part.clone() for name, part in parts.items()}
    return {name: device.pinned(part).copy_(part) for name, part in parts.items()}


def device_of(shard: Shard) -> torch.device:
    """Return the device on which a shard is trained."""
    device = transfer_device(shard)  # the shard itself may be on the host
    held: torch.device = next(iter(shard.values())).device
    return held if device is None else device.device
