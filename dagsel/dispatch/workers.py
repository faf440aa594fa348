"""The workers: which shards each holds, loads and should hold, and which units it runs."""

from __future__ import annotations

import ast
import builtins
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from dagsel import errors
from dagsel.dispatch.events import DropShard, Instruction, LoadShard, Worker
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.placement import Capacity, place
from dagsel.dispatch.units import Unit

WATCH_S = 2.0  # a worker's training time that must be seen before its shards move for its speed
DRIFT = 0.25  # relative change of a measured speed from which a new placement is considered
GAIN = 0.15  # share of the slowest worker's time that a new placement must save

#: How the text of an exception begins by which the data is damaged or gone.
_OF_DATA = tuple(
    f"{name}("
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.DatasetError)
)


@dataclass(slots=True)
class KnownWorker:
    """A worker, its shards and the units that are bound to it, the running one first."""

    worker: Worker
    max_shards: int | None
    held: int = 0  # bit mask of shards in its memory
    loading: int = 0  # those on their way
    wanted: int = 0  # those that the placement assigns to it
    refused: dict[int, str] = field(default_factory=dict)  # shards that it could not load, and why
    placed_speed: float = 1.0  # when shards were last placed
    draining: bool = False
    drained: bool = False
    unfit: str = ""  # why it cannot store what it trains
    restarting: bool = False
    # Bytes that it had taken when it was to be restarted for that, and those that it may take.
    filled: tuple[int, int | None] | None = None
    bound: list[Unit] = field(default_factory=list)
    node: str = ""
    process: str = ""  # "" for one of its own
    copy_room: int | None = None  # how many shards it may hold where copies are spare
    most: int | None = None  # how many the placement may assign to it
    number: int = 0  # in the order in which they came
    room: int | None = None  # bytes for a unit and, in its memory, shards
    shard_room: int | None = None  # bytes of it that shards may take

    def room_beside(self, shard_bytes: int) -> int | None:
        """Return what is left for a unit beside the shards that it holds; None for no limit."""
        if self.room is None:
            return None
        taken = self.held.bit_count() * shard_bytes
        return self.room - (taken if self.shard_room is None else min(taken, self.shard_room))

    def holds(self, shard: int) -> bool:
        """Whether the shard is in its memory."""
        return bool(self.held >> shard & 1)


def n_processes(hosts: Iterable[KnownWorker]) -> int:
    """Count the processes that workers live in."""
    return len({host.process or host.worker for host in hosts})


class WorkerTable(dict[Worker, KnownWorker]):
    """All workers, by address."""

    def __init__(self, n_shards: int, replicas: int | None) -> None:
        super().__init__()
        self.n_shards = n_shards
        self.replicas = replicas  # of each shard; None: as many as there is `copy_room` for
        self._copies = replicas or 1  # likewise, of the present placement
        self._is_split = False  # some have too little room for a trial
        self._n_added = 0
        self._unbound: list[tuple[float, int, KnownWorker]] = []  # sorted by rank, then by number
        self._ranks: dict[Worker, float] = {}  # of those

    def add(self, host: KnownWorker, rank: float) -> None:
        """Add a worker that has come; those without a unit are asked in the order of the ranks."""
        self._n_added += 1
        host.number = self._n_added
        self[host.worker] = host
        self._enter(host, rank)

    def remove(self, worker: Worker) -> None:
        """Remove a worker that has gone."""
        self._leave(self.pop(worker))

    def bind(self, unit: Unit, host: KnownWorker) -> None:
        """Bind a unit to a worker, behind those that it has."""
        host.bound.append(unit)
        self._leave(host)

    def release(self, unit: Unit, host: KnownWorker, rank: float) -> None:
        """Take a unit off a worker; one without a unit is asked in the order of the ranks."""
        host.bound.remove(unit)
        if not host.bound and self.get(host.worker) is host:
            self._enter(host, rank)

    def rank(self, ranks: Mapping[Worker, float]) -> None:
        """Note new ranks: the worker with the highest is asked first."""
        hosts = [host for _, _, host in self._unbound]
        self._unbound = sorted((-ranks[host.worker], host.number, host) for host in hosts)
        self._ranks = {host.worker: rank for rank, _, host in self._unbound}

    @property
    def unbound(self) -> Iterator[KnownWorker]:
        """Workers without a unit that were not told to go, highest rank first.

        Units may be bound to them meanwhile.
        """
        at = 0
        while at < len(self._unbound):
            host = self._unbound[at][2]
            if not host.draining:
                yield host
            at += at < len(self._unbound) and self._unbound[at][2] is host

    def check(self, ranks: Mapping[Worker, float] | None) -> None:
        """Raise ``AssertionError`` if the workers without a unit are others, or in another order.

        `ranks` are None where they are to be counted anew.
        """
        hosts = [host for host in self.staying if not host.bound]
        unbound = list(self.unbound)
        if ranks is None:
            hosts.sort(key=lambda host: host.number)
            unbound.sort(key=lambda host: host.number)
        else:
            hosts.sort(key=lambda host: -ranks[host.worker])
        assert unbound == hosts, (
            f"{[host.worker for host in unbound]} are said to have no unit, in that order, and "
            f"{[host.worker for host in hosts]} have none"
        )

    def _enter(self, host: KnownWorker, rank: float) -> None:
        self._ranks[host.worker] = -rank
        insort(self._unbound, (-rank, host.number, host))

    def _leave(self, host: KnownWorker) -> None:
        rank = self._ranks.pop(host.worker, None)
        if rank is not None:
            del self._unbound[bisect_left(self._unbound, (rank, host.number, host))]

    @property
    def staying(self) -> list[KnownWorker]:
        """Workers that were not told to go."""
        return [host for host in self.values() if not host.draining]

    @property
    def room(self) -> int:
        """How many shards fit in the memory of the staying workers."""
        limits = [host.max_shards for host in self.staying]
        return sum(self.n_shards if limit is None else limit for limit in limits)

    def replace(self, speeds: Mapping[Worker, float], *, need: int = 0) -> None:
        """Place the shards anew on the staying workers, with few moves.

        If some have less room than `need`, which is a trial's, the others hold all shards, too.
        """
        self._copies = self.replicas or max(1, self._spare_copies())
        is_spare = self.replicas is None and self._copies > 1
        capacities: tuple[list[Capacity], list[Capacity]] = [], []
        for host in self.values():
            host.wanted = 0
            host.most = host.copy_room if is_spare else host.max_shards
            if not host.draining:
                speed = host.placed_speed = speeds[host.worker]
                held = frozenset(bits(host.held | host.loading))
                refused = frozenset(host.refused)
                is_small = host.room is not None and host.room < need
                about = Capacity(host.worker, speed, host.most, held, refused)
                capacities[is_small].append(about)
        self._is_split = all(capacities)
        for those in capacities:
            for worker, shards in place(self.n_shards, those, replicas=self._copies).items():
                self[worker].wanted = sum(1 << shard for shard in shards)

    def _spare_copies(self) -> int:
        """Count the copies of each shard that the staying workers have `copy_room` for."""
        n = self.n_shards
        rooms = [n if host.copy_room is None else host.copy_room for host in self.staying]
        return sum(min(n, room) for room in rooms) // n

    def drifted(self, speeds: Mapping[Worker, float]) -> bool:
        """Whether measured speeds make the present placement clearly worse than a new one.

        The slowest worker's time for its shards must fall by `GAIN`, so that noise in the speeds
        does not move shards to and fro.
        """
        hosts = self.staying
        if len(hosts) < 2 or self._is_split:
            return False
        mean = sum(speeds[host.worker] for host in hosts) / len(hosts)
        placed = sum(host.placed_speed for host in hosts) / len(hosts)
        if all(
            abs(speeds[host.worker] / mean / (host.placed_speed / placed) - 1.0) <= DRIFT
            for host in hosts
        ):
            return False
        capacities = [
            Capacity(host.worker, speeds[host.worker], host.most, frozenset(bits(host.wanted)))
            for host in hosts
        ]
        after = place(self.n_shards, capacities, replicas=self._copies)
        now_s = max(host.wanted.bit_count() / speeds[host.worker] for host in hosts)
        then_s = max(len(after[host.worker]) / speeds[host.worker] for host in hosts)
        return then_s < (1.0 - GAIN) * now_s

    def moves(self, in_use: Mapping[Worker, int]) -> Iterator[Instruction]:
        """Yield the loads and drops that bring the staying workers towards their placement.

        A shard is dropped only if enough of the workers that should hold it do, and no unit that is
        bound to the worker needs it. `in_use` has the bit masks of the shards that units need.
        """
        for host in self.staying:
            for shard in bits(host.held & ~host.wanted & ~in_use.get(host.worker, 0)):
                if self._is_spare(shard):
                    host.held &= ~(1 << shard)
                    yield DropShard(host.worker, shard)
            for shard in self._in_turn(host.wanted & ~host.held & ~host.loading, host):
                taken, most = (host.held | host.loading).bit_count(), host.max_shards
                if shard not in host.refused and (most is None or taken < most):
                    host.loading |= 1 << shard
                    yield LoadShard(host.worker, shard)

    def _in_turn(self, shards: int, host: KnownWorker) -> list[int]:
        """Return shards in an order that lets each worker begin with others."""
        n = self.n_shards
        first = (host.number - 1) * n // len(self)
        return sorted(bits(shards), key=lambda shard: (shard - first) % n)

    def _is_spare(self, shard: int) -> bool:
        wanted = [host for host in self.values() if host.wanted >> shard & 1]
        n_held = sum(host.holds(shard) for host in wanted)
        return n_held > 0 and n_held >= min(self._copies, len(wanted))

    def missing(self) -> list[int]:
        """Return the shards that no worker holds, loads, or can be asked to load."""
        covered = 0
        for host in self.values():
            covered |= host.held | host.loading
            covered |= sum(1 << s for s in bits(host.wanted) if s not in host.refused)
        return [shard for shard in range(self.n_shards) if not covered >> shard & 1]

    def drain_is_over(self, host: KnownWorker) -> bool:
        """Whether a draining worker runs nothing, and others hold what they should take from it."""
        if host.bound:
            return False
        elsewhere = wanted = 0
        for other in self.staying:
            elsewhere |= other.held
            wanted |= other.wanted
        return not host.held & wanted & ~elsewhere

    def damage(self, shards: list[int]) -> str:
        """Say what all workers found damaged, if the data is why shards are missing."""
        refusals = self._refusals(shards)
        if not refusals or not all(reason.startswith(_OF_DATA) for _, reason in refusals):
            return ""
        return (
            f"shard {shards[0]} can be loaded nowhere: {_told(refusals[0][1])}; restore it from a "
            "copy, or write the data set again and search anew"
        )

    def _refusals(self, shards: list[int]) -> list[tuple[Worker, str]]:
        return [
            (host.worker, host.refused[shard])
            for shard in shards
            for host in self.staying
            if shard in host.refused
        ]

    def shortage(self, shards: list[int]) -> str:
        """Say why shards are missing, in numbers."""
        hosts, refusals = self.staying, self._refusals(shards)
        if refusals:
            told = "; ".join(f"{worker}: {_told(reason)}" for worker, reason in refusals)
            return f"shard {shards[0]} can be loaded nowhere: {told}"
        return (
            f"{len(shards)} of {self.n_shards} shards have no worker: {len(hosts)} workers have "
            f"memory for {self.room}; add workers or memory, write the data set in smaller shards, "
            "or leave hold= out"
        )

    def why_unfit(self) -> str:
        """Say why no worker can store what it trains."""
        first = next(iter(self.values()))
        return (
            f"none of {len(self)} workers can use the store: {first.unfit}; mend that, and go on "
            "with dagsel.resume"
        )


def _told(reason: str) -> str:
    """Return an error as it reads, of its ``repr``, which is what Dask says of it.

    Examples
    --------
    >>> _told("DatasetNotFoundError('nothing is at d.zarr')")
    'DatasetNotFoundError: nothing is at d.zarr'
    >>> _told("a shard could not be read")
    'a shard could not be read'
    """
    name, _, rest = reason.partition("(")
    kind = getattr(errors, name, getattr(builtins, name, None))
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(ValueError, TypeError, SyntaxError):
            return f"{name}: {kind(*ast.literal_eval(f'({rest[:-1]},)'))}"
    return reason
