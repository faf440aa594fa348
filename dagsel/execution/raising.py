"""What units raise: how the scheduler hears of it, and what is done where memory ran out."""

from __future__ import annotations

import errno
import gc
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distributed import Reschedule

from dagsel.dispatch.units import Unit
from dagsel.errors import DagselError, NothingTrainedError, OutOfMemoryError, WorkloadError
from dagsel.execution.allocator import give_back_memory
from dagsel.execution.process import imported_torch
from dagsel.messages import Note, Notice, UnitRaised, WorkerLeaves
from dagsel.workloads.base import Workload
from dagsel.workloads.gang.gang import worker_of
from dagsel.workloads.memory import (
    SavesMemory,
    drop_frames,
    is_out_of_memory,
    said,
    text_of,
    with_halved,
)
from dagsel.workloads.raised import RanOut, raised

#: What is wrong with one object and not with its store, which answers; and too little memory.
_NOT_OF_STORE = {
    errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.EFBIG, errno.ENAMETOOLONG,
    errno.ENOMEM,
}  # fmt: skip
#: What errors name that lacked memory of the GPU, and not of the host.
_OF_GPU = re.compile(r"CUDA|CUBLAS|CUDNN|CUSPARSE|CUSOLVER|NCCL|RESOURCE_EXHAUSTED", re.IGNORECASE)


class StoreFailedError(Exception):
    """A store fails on this worker, and may do what it should on others; the text says how."""


@contextmanager
def asking_store(url: str) -> Iterator[None]:
    """Tell where a store fails from all that is its answer."""
    try:
        yield
    except OSError as error:
        if is_of_store(error):
            raise StoreFailedError(f"{url}: {type(error).__name__}: {error}") from error
        raise


def is_of_store(error: OSError) -> bool:
    """Whether a store fails, and does not answer that an object is missing, damaged or in the way.

    Examples
    --------
    >>> is_of_store(PermissionError(errno.EACCES, "The provided token has expired."))
    True
    >>> is_of_store(IsADirectoryError(errno.EISDIR, "Is a directory"))
    False
    """
    return not isinstance(error, DagselError) and error.errno not in _NOT_OF_STORE


class Raising:
    """Tells what a run's units raise on a worker.

    Parameters
    ----------
    workload
        What is trained.
    tell
        Tells the scheduler something.
    worker
        Name of the worker.
    memory_limit
        That of its process by Dask; None for none.
    address
        Address of the worker.
    restart
        Begins to restart the process of the worker.
    """

    def __init__(
        self,
        workload: Workload,
        tell: Callable[[Notice], None],
        *,
        worker: str = "",
        memory_limit: int | None = None,
        address: str = "",
        restart: Callable[[], object] = lambda: None,
    ) -> None:
        self._workload, self._tell, self._restart = workload, tell, restart
        self.worker, self._memory_limit = worker, memory_limit
        self._address, self._has_left = address, False

    @contextmanager
    def telling(self, unit: Unit, config: Mapping[str, Any], halvings: int) -> Iterator[None]:
        """Tell what a unit raises; where memory ran out, free what can be freed."""
        ran_out: RanOut | None = None
        text = ""
        try:
            with process_stays():
                yield
        except Reschedule:
            raise
        except StoreFailedError as error:
            self._leave(str(error))
            raise Reschedule from error
        except Exception as error:
            told = raised(error, self._workload)
            is_ours = isinstance(error, DagselError) and not isinstance(
                error, WorkloadError | NothingTrainedError
            )
            if is_out_of_memory(error):
                ran_out = self._ran_out(unit, error, config, halvings)
                text = f"{text_of(ran_out)}: {ran_out.error}"
                told, is_ours = told.of_memory(ran_out, text), False
                drop_frames(error)
            self._tell(UnitRaised(unit, told, is_the_workloads=not is_ours))
            if ran_out is None:
                raise
        if ran_out is not None:
            self.relieve()
            raise OutOfMemoryError(text) from None

    def _leave(self, reason: str) -> None:
        """Take no more units, once: they go on elsewhere."""
        if self._has_left:
            return
        self._has_left = True
        told = f"worker {self.worker} at {self._address} cannot use the store: {reason}"
        cure = "mend that on its machine, and restart the worker to have it back"
        self._tell(Note(f"{told}; it gets no more units, and its own go on elsewhere; {cure}"))
        self._tell(WorkerLeaves(self._address, told))

    def check_gpu(self) -> None:
        """Give the unit back and restart if an earlier one has left this process no use of its GPU.

        After some errors, such as an index outside a table, CUDA refuses all that a process asks.
        """
        if (error := gpu_error()) is None:
            return
        if not self._has_left:
            self._has_left = True
            told = f"worker {self.worker} at {self._address} restarts, since CUDA refuses all that"
            self._tell(Note(f"{told} its process asks after an error of a trial: {error}"))
            self._tell(WorkerLeaves(self._address))
            self._restart()
        raise Reschedule

    def begin(self, *, alone: bool) -> None:
        """Make ready for a unit that begins, and free what can be freed if it is to be `alone`."""
        self.check_gpu()
        if alone:
            self.relieve()

    def relieve_of(self, error: Exception) -> None:
        """Free the memory of this process if an error says that there was too little."""
        if is_out_of_memory(error):
            drop_frames(error)
            self.relieve()

    def relieve(self) -> None:
        """Free the memory of this process that units do without."""
        if isinstance(self._workload, SavesMemory):
            self._workload.forget()
        gc.collect()
        give_back_gpu_memory()
        give_back_memory()

    def _ran_out(
        self, unit: Unit, error: Exception, config: Mapping[str, Any], halvings: int
    ) -> RanOut:
        workload, at_once = with_halved(self._workload, halvings), None
        if isinstance(workload, SavesMemory):
            with suppress(Exception):  # the user's own function of the configuration
                at_once = workload.at_once(config, unit.kind)
        text = said(error)
        if other := worker_of(error):
            return RanOut(unit, other, text, None, None, at_once, halvings)
        limit, peak = memory_numbers(self._memory_limit, of_gpu=_OF_GPU.search(text) is not None)
        return RanOut(unit, self.worker, text, limit, peak, at_once, halvings)


@contextmanager
def process_stays() -> Iterator[None]:
    """Fail the trial alone whose code would end the worker's process."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as error:
        raise WorkloadError(
            f"the trial's code raised {error!r}, which would end the worker: raise another error "
            "to fail the trial, or return to end its epoch"
        ) from error


def memory_numbers(limit: int | None, *, of_gpu: bool) -> tuple[int | None, int | None]:
    """Return how many bytes training may take in this process, and how many were taken at most.

    Of the GPU, or of the process: by `limit`, or by the system's limits on it.
    """
    cuda = cuda_here()
    if cuda is not None and of_gpu:
        return int(cuda.mem_get_info()[1]), int(cuda.max_memory_allocated())
    bounds = {"VmHWM": limit} if limit else {}
    with suppress(ImportError, ValueError, OSError):  # not everywhere
        import resource

        for name, which in (("VmPeak", resource.RLIMIT_AS), ("VmData", resource.RLIMIT_DATA)):
            soft, _ = resource.getrlimit(which)
            if soft != resource.RLIM_INFINITY:
                bounds[name] = soft
    name = min(bounds, key=lambda bound: bounds[bound] or 0, default="VmHWM")
    return bounds.get(name), process_bytes(name)


def own_bytes() -> int | None:
    """Return the memory of this process that it shares with no other; None if nobody knows.

    A worker that is a copy of the user's program has all of that in its memory, and takes none.

    Examples
    --------
    >>> own = own_bytes()
    >>> own is None or own > 1_000_000
    True
    """
    with suppress(OSError, ValueError):
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return None


def gpu_memory() -> int | None:
    """Return the free bytes of this process's GPU; None if it has none."""
    cuda = cuda_here()
    if cuda is None:
        return None
    unused = cuda.memory_reserved() - cuda.memory_allocated()  # PyTorch keeps it for later
    return int(cuda.mem_get_info()[0] + unused)


def give_back_gpu_memory() -> None:
    """Return what PyTorch keeps of the GPU and does not use; does nothing without one."""
    if (cuda := cuda_here()) is not None and gpu_error() is None:
        cuda.empty_cache()


def gpu_error() -> str | None:
    """Return what this process gets for anything that it asks of its GPU; None if that works."""
    cuda = cuda_here()
    if cuda is not None and cuda.is_initialized():
        try:
            cuda.mem_get_info()  # which waits for nothing, and disturbs no graph that is recorded
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    return None


def process_bytes(name: str) -> int | None:
    """Return what the system says of this process's memory by a name; None if it says nothing.

    Examples
    --------
    >>> peak = process_bytes("VmHWM")
    >>> peak is None or peak > 1_000_000
    True
    """
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{os.getpid()}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None


def cuda_here() -> Any:
    """Return ``torch.cuda`` if this process has imported PyTorch and has a GPU, else None."""
    torch = imported_torch()
    return torch.cuda if torch is not None and torch.cuda.is_available() else None
