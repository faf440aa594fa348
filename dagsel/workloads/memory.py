"""Memory: what a workload says of it, and how a unit that had too little of it is known."""

from __future__ import annotations

import ctypes
import errno
import functools
import platform
import re
from collections.abc import Iterator
from traceback import clear_frames
from typing import Any, Protocol, runtime_checkable

from dagsel.console import readable_size
from dagsel.dispatch.units import Kind, Unit
from dagsel.errors import TrainingError
from dagsel.workloads.base import Config, DataOutline, Workload
from dagsel.workloads.raised import Raised, RanOut

#: What errors say that are no `MemoryError`: those of PyTorch, CUDA's libraries, C++ and JAX.
_SAYS_SO = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc"
    r"|unable to allocate|RESOURCE_EXHAUSTED|_ALLOC_FAILED",
    re.IGNORECASE,
)
_ASKED = re.compile(r"allocate ([\d,.]+) ?([KMGTPE]?i?)(?:B\b|bytes)", re.IGNORECASE)
_PREFIXES = ["", "K", "M", "G", "T", "P", "E"]
_MOST_LETTERS = 200


@runtime_checkable
class NeedsMemory(Protocol):
    """A workload that knows how much memory training takes.

    Examples
    --------
    >>> class Known:
    ...     is_counted = True
    ...
    ...     def memory_bytes(self, config, data):
    ...         return 4 * config["width"] ** 2
    >>> isinstance(Known(), NeedsMemory)
    True
    """

    def memory_bytes(self, config: Config, data: DataOutline) -> int | None:
        """Return the bytes that training takes beside the shard; None if they are not known.

        A trial is not given to a worker that has less. On a GPU it is the GPU's memory that counts,
        else that of the process.

        Parameters
        ----------
        config
            The configuration.
        data
            What is known of the data set.
        """
        ...

    @property
    def is_counted(self) -> bool:
        """Whether that is an estimate: what `dagsel.profile` has measured counts instead."""
        ...


@runtime_checkable
class SavesMemory(Protocol):
    """A workload that can do with less memory than it usually takes.

    Examples
    --------
    >>> class InParts:
    ...     def __init__(self, samples=64):
    ...         self.samples = samples
    ...
    ...     def forget(self):
    ...         pass
    ...
    ...     def at_once(self, config, kind):
    ...         return self.samples
    ...
    ...     def halved(self, times):
    ...         return InParts(max(1, self.samples // 2**times))
    >>> InParts().halved(2).at_once({}, "train"), isinstance(InParts(), SavesMemory)
    (16, True)
    """

    def forget(self) -> None:
        """Drop what is kept of earlier units, if anything is."""
        ...

    def at_once(self, config: Config, kind: Kind) -> int | None:
        """Return the samples that are computed at once; None if they cannot be fewer.

        Parameters
        ----------
        config
            The configuration.
        kind
            ``"train"``, ``"evaluate"``, or ``"check"`` for a score of a paused trial.
        """
        ...

    def halved(self, times: int) -> Workload:
        """Return this workload with half the samples at once, at least one.

        Parameters
        ----------
        times
            How often to halve them.
        """
        ...


def text_of(told: RanOut) -> str:
    """Say how a unit has run out of memory, in numbers.

    Examples
    --------
    >>> error = "RuntimeError: can't allocate memory: you tried to allocate 64000000000 bytes."
    >>> print(text_of(RanOut(Unit("train", 7, 1, 2), "w3", error, limit=2 * 10**9, at_once=64)))
    64.0 GB were asked for in unit 3 of epoch 1 (64 samples at once), on worker w3, which has 2.0 GB
    """
    asked, unit = asked_bytes(told.error), told.unit
    what = f"{readable_size(asked)} were asked for" if asked else "memory ran out"
    place = {
        "train": f"unit {unit.position + 1} of epoch {unit.epoch}",
        "evaluate": f"the evaluation of epoch {unit.epoch} on shard {unit.position}",
        "check": f"an evaluation on shard {unit.position}",
    }[unit.kind]
    samples = f" ({told.at_once} samples at once)" if told.at_once else ""
    has = [f"has {readable_size(told.limit)}"] if told.limit else []
    has += [f"had taken {readable_size(told.peak)} at most"] if told.peak else []
    which = f", which {' and '.join(has)}" if has else ""
    return f"{what} in {place}{samples}, on worker {told.worker}{which}"


def restarted_at(unit: Unit, worker: str, n_bytes: int, limit: int | None) -> Raised:
    """Say that Dask has restarted a worker whose memory a unit has filled.

    Examples
    --------
    >>> print(restarted_at(Unit("train", 7, 1, 0), "w3", 1_900_000_000, 2 * 10**9).message)
    memory ran out in unit 1 of epoch 1, on worker w3, which has 2.0 GB and had taken 1.9 GB at most
    """
    error = "Dask restarts a worker that takes nearly all of its memory limit"
    told = RanOut(unit, worker, error, limit, n_bytes)
    return Raised("OutOfMemoryError", text_of(told), place="", ran_out=told)


def lost_under(trial: int, worker: str, filled: tuple[int, int | None] | None) -> str:
    """Say that a worker was lost while it ran a trial; `filled` are the bytes it took, of how many.

    Examples
    --------
    >>> lost_under(7, "w3", None)
    'worker w3 was lost while it ran trial 7, which goes on from its last unit'
    >>> print(lost_under(7, "w3", (1_900_000_000, 2 * 10**9)))
    Dask restarts worker w3, whose memory trial 7 has filled: it had taken 1.9 GB of 2.0 GB
    """
    if filled is None:
        return (
            f"worker {worker} was lost while it ran trial {trial}, which goes on from its last unit"
        )
    taken, limit = filled
    of = f" of {readable_size(limit)}" if limit else ""
    why = f"it had taken {readable_size(taken)}{of}"
    return f"Dask restarts worker {worker}, whose memory trial {trial} has filled: {why}"


def why_it_fails(first: RanOut | None, second: RanOut) -> str:
    """Say why a trial fails whose unit has run out of memory, mostly for the second time."""
    before = "" if first is None else f"{text_of(first)}; the second time, alone in its worker: "
    return (
        f"{before}{text_of(second)}; take a smaller batch_size or model, or give "
        f"the workers more memory; the error was {second.error}"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or what has led to it, says that there was too little memory.

    Examples
    --------
    >>> is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    True
    >>> is_out_of_memory(RuntimeError("the memory of this model is full"))
    False
    """
    return any(
        isinstance(each, MemoryError)
        or (isinstance(each, OSError) and each.errno == errno.ENOMEM)
        or (
            isinstance(each, RuntimeError | TrainingError)
            and _SAYS_SO.search(str(each)) is not None
        )
        for each in _causes(error)
    )


def said(error: BaseException) -> str:
    """Return in one line what an error says of the memory that it lacked.

    Examples
    --------
    >>> said(MemoryError())
    'MemoryError'
    """
    whole = [each for each in _causes(error) if is_out_of_memory(each)][-1]
    text = " ".join(str(whole).split())
    return f"{type(whole).__name__}: {text}"[:_MOST_LETTERS] if text else type(whole).__name__


def asked_bytes(text: str) -> int | None:
    """Return the bytes that an error says were asked for; None if it does not.

    Examples
    --------
    >>> asked_bytes("you tried to allocate 4000000000 bytes. Error code 12"), asked_bytes("no")
    (4000000000, None)
    >>> asked_bytes("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")
    21474836480
    """
    found = _ASKED.search(text)
    if found is None:
        return None
    number, prefix = found[1].replace(",", "").rstrip("."), found[2]
    base = 1024 if prefix[1:] else 1000  # Gi or G
    return int(float(number) * base ** _PREFIXES.index(prefix[:1].upper()))


def drop_frames(error: BaseException) -> None:
    """Forget the local variables of the frames that an error has passed: they hold tensors."""
    for each in _causes(error):
        clear_frames(each.__traceback__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    now: BaseException | None = error
    while now is not None and id(now) not in seen:
        seen.add(id(now))
        yield now
        now = now.__cause__ or (None if now.__suppress_context__ else now.__context__)


@functools.cache
def glibc() -> ctypes.CDLL | None:
    """Return the C library, with what is told of its allocator; None if it is another one."""
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def give_back_freed() -> None:
    """Return to the kernel what this process has freed, and keeps for what is next."""
    if (libc := glibc()) is not None:
        libc.malloc_trim(0)


def with_halved(workload: Workload, times: int) -> Any:
    """Return a workload with half the samples at once, so many times over, if it can have that."""
    return workload.halved(times) if times and isinstance(workload, SavesMemory) else workload
