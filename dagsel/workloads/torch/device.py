"""A GPU's part in training: where shards lie, and how batches and states travel.

What decides is pure and what counts is here; what needs a GPU is in `Cuda` alone, so that all else
runs on the CPU with another `Accelerator` in its place.
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

Arrays: TypeAlias = dict[str, torch.Tensor]
_BATCHES_AHEAD = 2  # one on its way while another waits; more only takes memory


class Room:
    """Counts the bytes that shards take on a device, until their tensors are gone."""

    def __init__(self) -> None:
        self.taken = 0
        self._lock = threading.Lock()

    def claim(self, n_bytes: int, *, free: int, total: int, budget: int | float) -> bool:
        """Take so many bytes if `place` finds that they may lie on the device."""
        with self._lock:
            fits = place(n_bytes, self.taken, free=free, total=total, budget=budget) == "device"
            self.taken += n_bytes if fits else 0
            return fits

    def hold(self, tensor: torch.Tensor) -> None:
        """Give the bytes of a tensor back when it is gone."""
        weakref.finalize(tensor, self.give_back, tensor.nbytes).atexit = False

    def give_back(self, n_bytes: int) -> None:
        """Say that so many bytes are not taken any more."""
        with self._lock:
            self.taken -= n_bytes


class Accelerator(Protocol):
    """A device with a memory of its own, and what is asked of it."""

    room: Room

    @property
    def device(self) -> torch.device:
        """Where models train."""
        ...

    def memory(self) -> tuple[int, int]:
        """Give the bytes that are free and the bytes that there are."""
        ...

    def pinned(self, like: torch.Tensor, n: int | None = None) -> torch.Tensor:
        """Make an unfilled tensor in host memory that the device reads by itself.

        It is as another one, with `n` rows if that is given.
        """
        ...

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor lies there."""
        ...

    def send(self, batch: Arrays) -> Callable[[], Arrays]:
        """Begin to copy a pinned batch; the function given back gives it, for use at once."""
        ...

    def mark(self) -> Callable[[], object]:
        """Mark what the device has been asked to do; the function given back waits until then."""
        ...

    def aside(self) -> AbstractContextManager[object]:
        """Work on the stream on which graphs are recorded."""
        ...

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record a step as a graph, without running it; the function given back runs it."""
        ...


class Cuda:
    """A CUDA device of this process.

    Parameters
    ----------
    index
        Its number, as this process counts them.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        self.room = Room()
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def memory(self) -> tuple[int, int]:
        """Give the bytes that are free and the bytes that there are."""
        free, total = torch.cuda.mem_get_info(self.device)
        # What PyTorch has taken and does not use is free too.
        spare = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + spare, total

    def pinned(self, like: torch.Tensor, n: int | None = None) -> torch.Tensor:
        """Make an unfilled pinned tensor."""
        shape = like.shape if n is None else (n, *like.shape[1:])
        return torch.empty(shape, dtype=like.dtype, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor is pinned."""
        return tensor.is_pinned()

    def send(self, batch: Arrays) -> Callable[[], Arrays]:
        """Begin to copy a batch on a side stream."""
        there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._copies):
            moved = {name: t.to(self.device, non_blocking=True) for name, t in batch.items()}
            there.record(self._copies)

        def receive() -> Arrays:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(there)
            for tensor in moved.values():
                tensor.record_stream(stream)  # or the side stream reuses its memory too early
            return moved

        return receive

    def mark(self) -> Callable[[], object]:
        """Mark the present place in the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event.synchronize

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Work on the stream of the graphs."""
        stream = torch.cuda.current_stream(self.device)
        self._graphs.wait_stream(stream)
        with torch.cuda.stream(self._graphs):
            yield
        stream.wait_stream(self._graphs)

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Record a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        # Another thread of the worker may pin memory for a shard meanwhile: not this one's affair.
        with torch.cuda.graph(graph, stream=self._graphs, capture_error_mode="thread_local"):
            result = step()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay


def accelerator() -> Accelerator | None:
    """Give the CUDA device that is this process's current one; None where there is none."""
    return _cuda(torch.cuda.current_device()) if torch.cuda.is_available() else None


@functools.cache
def _cuda(index: int) -> Cuda:
    return Cuda(index)  # one for all runs of the process, which share its memory


def place(
    n_bytes: int, taken: int, *, free: int, total: int, budget: int | float
) -> Literal["device", "pinned"]:
    """Decide where a shard lies.

    Parameters
    ----------
    n_bytes
        Of the shard.
    taken
        Bytes that other shards take on the device.
    free, total
        Bytes of the device that are free, and that there are.
    budget
        What all shards may take: bytes, or a share of the device's memory if it is a float.

    Examples
    --------
    >>> place(30, taken=20, free=60, total=100, budget=0.5)
    'device'
    >>> place(31, taken=20, free=60, total=100, budget=0.5)
    'pinned'
    >>> place(30, taken=0, free=29, total=100, budget=90)
    'pinned'
    """
    allowed = budget * total if isinstance(budget, float) else budget
    return "device" if taken + n_bytes <= allowed and n_bytes <= free else "pinned"


def lay_down(arrays: Arrays, device: Accelerator | None, budget: int | float) -> Arrays:
    """Bring a shard to where it stays: the device's memory, or pinned memory of the host."""
    if device is None:
        return arrays
    free, total = device.memory()
    n_bytes = sum(array.nbytes for array in arrays.values())
    if device.room.claim(n_bytes, free=free, total=total, budget=budget):
        try:
            placed = {name: array.to(device.device, copy=True) for name, array in arrays.items()}
        except torch.OutOfMemoryError:  # somebody else was faster, or no gap is large enough
            device.room.give_back(n_bytes)
        else:
            for array in placed.values():
                device.room.hold(array)
            return placed
    return {name: device.pinned(array).copy_(array) for name, array in arrays.items()}


def away(shard: Arrays) -> Accelerator | None:
    """Give the device to which batches of a shard must be sent; None where they lie on it."""
    device, first = accelerator(), next(iter(shard.values()))
    return device if device is not None and device.is_pinned(first) else None


def send_ahead(
    gather: Callable[[Any], Arrays],
    parts: Iterable[Any],
    device: Accelerator,
    n: int = _BATCHES_AHEAD,
) -> Iterator[Arrays]:
    """Send batches to a device before they are asked for.

    Parameters
    ----------
    gather
        Makes a batch in pinned memory.
    parts
        What it is called with for each batch.
    device
        Where to.
    n
        Batches that are sent ahead of the one in use, and batches that the device may be behind
        with: a loop that only asks it to compute would fill its memory with batches otherwise.
    """
    sent: deque[Callable[[], Arrays]] = deque()
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
    """Copy the tensors of a GPU into pinned memory, with one wait for all; others stay."""
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


def gather_rows(shard: Arrays, device: Accelerator, index: torch.Tensor) -> Arrays:
    """Copy some rows of a shard into pinned memory."""
    return {
        name: torch.index_select(array, 0, index, out=device.pinned(array, index.numel()))
        for name, array in shard.items()
    }


def copy_rows(shard: Arrays, device: Accelerator | None, rows: slice) -> Arrays:
    """Copy a run of rows of a shard, into pinned memory where they are to be sent."""
    parts = {name: array[rows] for name, array in shard.items()}
    if device is None:
        return {name: part.clone() for name, part in parts.items()}
    return {name: device.pinned(part).copy_(part) for name, part in parts.items()}
