"""The random streams of a process: Python's, NumPy's and PyTorch's.

A trial has its own streams. They are set before a unit and read after it; then the process's own
are restored, so that a workload does not change the random numbers of others. A process has one set
of them, so only one thread at a time may do that: `own_streams`.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np

Device: TypeAlias = Literal["cpu", "cuda"]
#: Of the threads of a gang, one at a time. PyTorch makes a tensor while it holds its generator's
#: mutex, and the garbage collection which that may begin lets another thread run: if that one asks
#: for the state too, it waits for the mutex and does not let the first one go on.
_TORCH = threading.Lock()
#: A thread that waits for the streams looks so often whether it has to give up.
LOOK_UP_S = 0.05


def seed_streams(seed: int, *, torch: bool = False) -> None:
    """Seed the streams, as a script does with ``random.seed`` and its like."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch:
        library = _torch()
        # Where there is no GPU to seed, `torch.manual_seed` only takes longer: half a millisecond.
        seed_torch = library if library.cuda.is_available() else library.default_generator
        with _TORCH:
            seed_torch.manual_seed(seed % 2**63)


def read_streams(device: Device | None = None) -> dict[str, Any]:
    """Return the streams of Python and NumPy, and of PyTorch on a device if one is named."""
    version, words, gauss = random.getstate()
    streams: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
    with _TORCH:
        if device is not None:
            streams["torch"] = _torch().get_rng_state()
        if device == "cuda":
            streams["cuda"] = _torch().cuda.get_rng_state()
    return streams


def write_streams(streams: dict[str, Any]) -> None:
    """Set all streams that were read."""
    python = streams["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(checked_stream(streams["numpy"]))
    with _TORCH:
        if "torch" in streams:
            _torch().set_rng_state(streams["torch"])
        # Without a GPU PyTorch would keep the state, and a traceback, for when there is one.
        if "cuda" in streams and _torch().cuda.is_available():
            _torch().cuda.set_rng_state(streams["cuda"])


def checked_stream(stream: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a stream of NumPy, or raise a ValueError if it points outside itself.

    NumPy does not look: it reads memory from there, or crashes.
    """
    place, size = 0, 0
    match stream["bit_generator"]:
        case "MT19937":
            place, size = stream["state"]["pos"], 624
        case "Philox":
            place, size = stream["buffer_pos"], 4
    if type(place) is not int or not 0 <= place <= size:
        raise ValueError(f"a random stream is at number {place!r} of {size}")
    return stream


class _Turns:
    """Whose turn it is to use the streams: in the order in which threads have come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: str | int | None = None  # a gang, or a thread
        self._depths: Counter[int] = Counter()  # by thread: in how many blocks it is
        self._waiting: deque[object] = deque()

    def enter(self, gang: str | None, give_up: Callable[[], bool] | None) -> bool:
        """Wait until the streams are free, and take them; return False if told to give up."""
        thread = threading.get_ident()
        owner = gang or thread
        with self._changed:
            ticket = object()
            self._waiting.append(ticket)
            try:
                while not (
                    thread in self._depths
                    or self._owner == owner
                    or (self._owner is None and self._waiting[0] is ticket)
                ):
                    if give_up is not None and give_up():
                        return False
                    self._changed.wait(None if give_up is None else LOOK_UP_S)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()  # another one may be the first now
            if self._owner is None:
                self._owner = owner
            self._depths[thread] += 1
            return True

    def leave(self) -> None:
        """Give the streams free when this thread has left all of its blocks."""
        thread = threading.get_ident()
        with self._changed:
            self._depths[thread] -= 1
            if not self._depths[thread]:
                del self._depths[thread]
            if not self._depths:
                self._owner = None
                self._changed.notify_all()


_TURNS = _Turns()


@contextmanager
def own_streams(
    *, gang: str | None = None, give_up: Callable[[], bool] | None = None
) -> Iterator[bool]:
    """Wait until no other thread uses the streams; keep them for the block, which gets true.

    The same thread may enter again. The threads that name the same `gang` use them together. Once
    `give_up` returns true the wait ends, and the block gets false.
    """
    entered = _TURNS.enter(gang, give_up)
    try:
        yield entered
    finally:
        if entered:
            _TURNS.leave()


@contextmanager
def preserved_streams(*, torch: bool = False, gang: str | None = None) -> Iterator[None]:
    """Keep the streams as in `own_streams`, and restore them at the end of the block."""
    with own_streams(gang=gang):
        device: Device | None = None
        if torch:
            device = "cuda" if _torch().cuda.is_initialized() else "cpu"
        streams = read_streams(device)
        try:
            yield
        finally:
            write_streams(streams)


def _torch() -> Any:
    import torch

    return torch
