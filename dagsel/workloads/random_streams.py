"""The random streams of a process: Python's, NumPy's and PyTorch's.

A trial has its own streams. They are set before a unit and read after it; then the process's own
are restored, so that a workload does not change the random numbers of others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias

import numpy as np

Device: TypeAlias = Literal["cpu", "cuda"]


def seed_streams(seed: int, *, torch: bool = False) -> None:
    """Seed the streams, as a script does with ``random.seed`` and its like."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if torch:
        library = _torch()
        # Where there is no GPU to seed, `torch.manual_seed` only takes longer: half a millisecond.
        seed_torch = library if library.cuda.is_available() else library.default_generator
        seed_torch.manual_seed(seed % 2**63)


def read_streams(device: Device | None = None) -> dict[str, Any]:
    """Return the streams of Python and NumPy, and of PyTorch on a device if one is named."""
    version, words, gauss = random.getstate()
    streams: dict[str, Any] = {
        "python": {"version": version, "words": np.array(words, np.uint32), "gauss": gauss},
        "numpy": np.random.get_state(legacy=False),
    }
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
    if "torch" in streams:
        _torch().set_rng_state(streams["torch"])
    if "cuda" in streams:
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


@contextmanager
def preserved_streams(*, torch: bool = False) -> Iterator[None]:
    """Restore the process's streams at the end of the block."""
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
