"""A gang: the ranks that train one trial together, as one of them sees it.

A gang is formed for one unit. It uses nothing of ``torch.distributed`` that belongs to the
process: no default group, no counter of groups, no environment variable, no fixed port. So a gang
that breaks leaves nothing behind, and workers in one process can be in different gangs.
"""

from __future__ import annotations

import builtins
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import numpy as np

import dagsel.errors
from dagsel.codec import from_json
from dagsel.errors import GangBrokenError, TrainingError, WorkloadError
from dagsel.state import State
from dagsel.workloads.base import Config, Trained, Visit, never
from dagsel.workloads.gang.rendezvous import (
    Rendezvous,
    RendezvousClient,
    RendezvousServer,
    seconds_left,
)

if TYPE_CHECKING:
    from dagsel.workloads.gang.process_group import Group


#: Attribute of an error: on which worker another rank has raised it.
_WORKER = "dagsel_worker"
#: Errors that a rank may raise in another rank's name; any other becomes a `TrainingError`.
_ERRORS: dict[str, type[Exception]] = {
    name: kind
    for home in (builtins, dagsel.errors)
    for name, kind in vars(home).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}


class Gang:
    """One worker of a gang, and its exchanges with the others.

    A gang is a group of workers that train one trial together. Each has a rank, from 0. All take
    part in each exchange, in the same order. If an exchange fails, the gang is broken. Rank 0 has
    the state and returns the result. A rank waits `timeout_s` for the others.

    Attributes
    ----------
    name, rank, size
        Name of the gang, number of this worker in it, and number of workers.
    timeout_s
        Seconds to wait for the others.
    broken
        Whether an exchange has failed.

    Examples
    --------
    >>> calls = []  # of the other ranks, to the port at which the leader waits
    >>> call = lambda rank, port: calls.append((rank, port))
    >>> with lead_gang("127.0.0.1", size=1, name="3", timeout_s=5.0, call=call) as gang:
    ...     total = gang.total(np.array([1.0, 2.0])).tolist()
    ...     state = gang.broadcast(State.pack({}, {"step": 1}))
    ...     gang.send(b"done")  # the others call gang.receive()
    ...     gang.rank, gang.size, gang.agree(True), total, state.meta
    (0, 1, True, [1.0, 2.0], {'step': 1})
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        rendezvous: Rendezvous,
        group: Group,
        timeout_s: float,
    ) -> None:
        self.name, self.rank, self.size = name, rank, size
        self.group, self.timeout_s = group, timeout_s
        self.broken = False
        self._rendezvous, self._n_messages = rendezvous, 0

    def send(self, message: bytes) -> None:
        """Send a message from rank 0; the others `receive` it, in order.

        Parameters
        ----------
        message
            Any bytes.
        """
        with self.exchange():
            self._rendezvous.put(f"message {self._n_messages}", message)
        self._n_messages += 1

    def receive(self) -> bytes:
        """Receive rank 0's next message."""
        with self.exchange():
            message = self._rendezvous.get(f"message {self._n_messages}", self.timeout_s)
            if message is None:
                raise TimeoutError(f"rank 0 has sent nothing in {self.timeout_s:g} s")
        self._n_messages += 1
        return message

    def agree(self, word: bool) -> bool:
        """Return rank 0's argument on every rank, when all have come here.

        Parameters
        ----------
        word
            What rank 0 says; that of other ranks does not count.
        """
        return bool(self.total(np.array([word and self.rank == 0], np.float64))[0])

    def total(self, values: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
        """Add up the values of all ranks, in place.

        Parameters
        ----------
        values
            Numbers, shape ``(n,)``, dtype ``float64``.
        """
        import torch

        with self.exchange():
            self.group.process_group.allreduce([torch.from_numpy(values)]).wait()
        return values

    def broadcast(self, state: State | None) -> State:
        """Return rank 0's state on every rank.

        Parameters
        ----------
        state
            The state on rank 0; None on the others.
        """
        import torch

        from dagsel.workloads.torch.state import as_torch

        process_group = self.group.process_group
        if self.rank == 0:
            assert state is not None, "rank 0 has the state"
            buffer = np.frombuffer(state.buffer, np.uint8)
            if not buffer.flags.aligned or buffer.ctypes.data % 8:
                buffer = buffer.copy()
            self.send(str(buffer.nbytes).encode())
            with self.exchange():
                process_group.broadcast(as_torch(buffer), 0).wait()
            return state
        buffer = np.empty(int(self.receive()), np.uint8)
        with self.exchange():
            process_group.broadcast(torch.from_numpy(buffer), 0).wait()
        return State(buffer.data, is_spare=True)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Mark the gang as broken if an exchange in the block fails."""
        try:
            yield
        except (RuntimeError, OSError):
            self.broken = True
            raise


@runtime_checkable
class GangWorkload(Protocol):
    """A workload that can train a trial on several workers at once.

    Examples
    --------
    >>> class Shared:
    ...     def validate_gang(self, config, size):
    ...         if config["batch_size"] < size:
    ...             raise WorkloadError(f"the batch is too small for {size} workers")
    ...
    ...     def train_gang(self, state, shard, config, *, visit, should_stop=never, gang):
    ...         state = gang.broadcast(state)
    ...         ...  # each rank takes its part of every batch; gang.total adds up the gradients
    >>> isinstance(Shared(), GangWorkload)
    True
    """

    def validate_gang(self, config: Config, size: int) -> None:
        """Raise a `WorkloadError` if so many workers cannot share a batch.

        Parameters
        ----------
        config
            The configuration.
        size
            How many workers train together.
        """
        ...

    def train_gang(
        self,
        state: State | None,
        shard: Any,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
        gang: Gang,
    ) -> Trained:
        """Train as ``train`` does, each rank on its part of every batch.

        All ranks hold the same shard and go through the same batches as a single worker. So the
        result depends on their number only by the order of additions.

        Parameters
        ----------
        state
            The trial's state on rank 0, None on the others.
        shard, config, visit
            As in ``train``.
        should_stop
            Rank 0's counts: once it is true, all stop at the same batch boundary.
        gang
            This rank's.
        """
        ...


def gang_workload(workload: object, *, instead: str) -> GangWorkload:
    """Return a workload that can train in gangs, or raise a `WorkloadError`."""
    if not isinstance(workload, GangWorkload):
        raise WorkloadError(
            f"a {type(workload).__name__} trains on one worker alone, as it has no train_gang; "
            f"{instead}"
        )
    return workload


@contextmanager
def lead_gang(
    host: str,
    *,
    size: int,
    name: str,
    timeout_s: float,
    call: Callable[[int, int], object],
    secret: str = "",
    come_within_s: float = threading.TIMEOUT_MAX,
    waits: Callable[[Callable[[str], None]], object] = lambda end: None,
) -> Iterator[Gang]:
    """Form a gang as its rank 0, for the duration of the block.

    `call` is called with each other rank and the port of `host` at which it is waited for, a rank
    only when those before it have come: so gangs that take their workers in one order never wait
    for each other. Those that do not know name and secret are refused. A rank whose worker trains
    something else comes when that has ended: each is waited for `come_within_s`. `waits` is called
    first, with what ends the wait and takes the reason. Raises a `GangBrokenError` if a rank does
    not come, or leaves.

    Examples
    --------
    >>> calls = []
    >>> call = lambda rank, port: calls.append(rank)
    >>> with lead_gang("127.0.0.1", size=1, name="3", timeout_s=5.0, call=call) as gang:
    ...     gang.agree(True), gang.rank, calls
    (True, 0, [])
    """
    with closing(RendezvousServer(host, f"{secret}{name}")) as rendezvous:
        have_come, reasons = threading.Event(), list[str]()

        def end(reason: str) -> None:
            if not have_come.is_set():
                reasons.append(reason)
                rendezvous.close()

        waits(end)
        for rank in range(1, size):
            call(rank, rendezvous.port)
            if rendezvous.get(f"rank {rank}", come_within_s) is None:
                why = f": {reasons[0]}" if reasons else f" within {come_within_s:g} s"
                raise _broken(name, 0, size, f"rank {rank} did not come{why}")
        have_come.set()
        rendezvous.put("all", b"")
        deadline = time.monotonic() + timeout_s
        with _connected(rendezvous, 0, size, name, deadline, timeout_s) as gang:
            yield gang


@contextmanager
def join_gang(
    host: str,
    port: int,
    *,
    rank: int,
    size: int,
    name: str,
    timeout_s: float,
    secret: str = "",
    worker: str = "",
) -> Iterator[Gang]:
    """Join the gang whose rank 0 waits at `host` and `port`, for the duration of the block.

    What the block raises is raised there too, by `worker_of` as that of `worker`.
    """
    try:
        client = RendezvousClient(host, port, f"{secret}{name}", timeout_s)
    except OSError as error:
        raise _broken(name, rank, size, f"its leader at {host}:{port} is not there") from error
    with closing(client) as rendezvous:
        try:
            rendezvous.put(f"rank {rank}", b"")
            while rendezvous.get("all", timeout_s) is None:
                pass  # the leader is there, and waits for another
        except OSError as error:
            raise _broken(name, rank, size, "its leader has left") from error
        deadline = time.monotonic() + timeout_s
        with _connected(rendezvous, rank, size, name, deadline, timeout_s, worker) as gang:
            yield gang


@contextmanager
def _connected(
    rendezvous: Rendezvous,
    rank: int,
    size: int,
    name: str,
    deadline: float,
    timeout_s: float,
    worker: str = "",
) -> Iterator[Gang]:
    from dagsel.workloads.gang.process_group import Group

    try:
        group = Group(
            rendezvous,
            rank=rank,
            size=size,
            connect_s=max(0.1, seconds_left(deadline)),
            timeout_s=timeout_s,
        )
    except (RuntimeError, OSError) as error:
        # A rank that was connected first may have failed already.
        _raise_cause(rendezvous, error, name, rank, size)
    gang, whole = Gang(name, rank, size, rendezvous, group, timeout_s), False
    try:
        yield gang
        whole = True
    except Exception as error:
        if not gang.broken:
            _send_error(rendezvous, error, rank, worker)  # before others can see that it has gone
            raise
        _raise_cause(rendezvous, error, name, rank, size)
    finally:
        group.close(broken=not whole)


def _raise_cause(
    rendezvous: Rendezvous, error: Exception, name: str, rank: int, size: int
) -> NoReturn:
    """Raise what broke a gang: on the leader the error of the rank that failed, if it is known."""
    culprit = _read_error(rendezvous)
    if culprit is None:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        raise _broken(name, rank, size, first_line) from error
    if rank == 0:
        raise culprit.rebuilt() from None
    about = f"rank {culprit.rank} failed with {culprit.kind}: {culprit.text}"
    raise _broken(name, rank, size, about) from error


def _broken(name: str, rank: int, size: int, reason: str) -> GangBrokenError:
    return GangBrokenError(f"gang {name} broke, as rank {rank} of {size} saw: {reason}")


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank says of the error that it raises: plain text, since it comes by the network."""

    rank: int
    kind: str
    args: list[str | int | float | bool | None] | None  # None if it cannot be made from them
    text: str
    traceback: str
    worker: str = ""

    def rebuilt(self) -> Exception:
        """Return the error, if it is one of Python's own or of dagsel's, or a `TrainingError`."""
        error: Exception | None = None
        if self.kind in _ERRORS and self.args is not None:
            with suppress(Exception):
                error = _ERRORS[self.kind](*self.args)
        if error is None or str(error) != self.text:
            error = TrainingError(f"{self.kind}: {self.text}")
        error.add_note(f"On rank {self.rank} of its gang:\n{self.traceback}")
        vars(error)[_WORKER] = self.worker
        return error


def worker_of(error: BaseException) -> str:
    """Return the name of the worker where an error was raised, if that is another of a gang."""
    worker: str = vars(error).get(_WORKER, "")
    return worker


def _send_error(rendezvous: Rendezvous, error: Exception, rank: int, worker: str) -> None:
    kind = type(error)
    plain = all(value is None or type(value) in (str, int, float, bool) for value in error.args)
    is_known = _ERRORS.get(kind.__qualname__) is kind
    told = _Told(
        rank,
        kind.__qualname__,
        list(error.args) if plain and is_known else None,
        str(error),
        "".join(traceback.format_exception(error)),
        worker,
    )
    with suppress(OSError):
        rendezvous.put("error", json.dumps(asdict(told)).encode())


def _read_error(rendezvous: Rendezvous) -> _Told | None:
    with suppress(OSError, ValueError, RecursionError):
        told = rendezvous.get("error", 0.0)
        if told is not None:
            read: _Told = from_json(_Told, json.loads(told))
            return read
    return None
