"""Which worker holds, loads or shall hold which shards: the workers' side of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dagsel.dispatch.events import DropShard, Instruction, LoadShard, Worker
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.placement import Seat, place
from dagsel.dispatch.units import Unit

WATCH_S = 2.0  # training time of a worker that must be seen before its shards move for its speed
DRIFT = 0.25  # relative change of a measured speed that makes a new placement worth a look
GAIN = 0.15  # share of the slowest worker's time that a new placement must save


@dataclass(slots=True)
class KnownWorker:
    """A worker: what it holds, and which units are bound to it, the running one first.

    Attributes
    ----------
    held, loading, wanted
        Bit masks of shards: there, on their way, and where the placement wants them.
    refused
        Why it could not load a shard.
    placed_speed
        Its speed when shards were last placed.
    node
        The machine that it is on.
    """

    worker: Worker
    max_shards: int | None
    held: int = 0
    loading: int = 0
    wanted: int = 0
    refused: dict[int, str] = field(default_factory=dict)
    placed_speed: float = 1.0
    draining: bool = False
    drained: bool = False
    restarting: bool = False
    bound: list[Unit] = field(default_factory=list)
    node: str = ""

    @property
    def has_room(self) -> bool:
        """Whether it may load one more shard."""
        taken = (self.held | self.loading).bit_count()
        return self.max_shards is None or taken < self.max_shards


class Holdings:
    """All workers and their shards.

    Parameters
    ----------
    n_shards
        Number of shards.
    replicas
        Copies of each shard.
    """

    def __init__(self, n_shards: int, replicas: int) -> None:
        self.n_shards = n_shards
        self.replicas = replicas
        self.workers: dict[Worker, KnownWorker] = {}

    def holders(self, shard: int) -> Iterator[KnownWorker]:
        """Find the workers that hold the shard."""
        return (host for host in self.workers.values() if host.held >> shard & 1)

    def replace(self, speeds: Mapping[Worker, float]) -> None:
        """Place the shards anew, with few moves, on the workers that stay."""
        hosts = []
        for host in self.workers.values():
            host.wanted = 0
            if not host.draining:
                held = frozenset(bits(host.held | host.loading))
                host.placed_speed = speeds[host.worker]
                hosts.append(
                    Seat(
                        host.worker,
                        speeds[host.worker],
                        host.max_shards,
                        held,
                        frozenset(host.refused),
                    )
                )
        for worker, shards in place(self.n_shards, hosts, replicas=self.replicas).items():
            self.workers[worker].wanted = sum(1 << shard for shard in shards)

    def drifted(self, speeds: Mapping[Worker, float]) -> bool:
        """Whether measured speeds make the present placement clearly worse than a new one.

        The slowest worker's time for its shards must fall by `GAIN`; so noise in the speeds does
        not move shards to and fro.
        """
        hosts = [host for host in self.workers.values() if not host.draining]
        if len(hosts) < 2:
            return False
        mean = sum(speeds[host.worker] for host in hosts) / len(hosts)
        placed = sum(host.placed_speed for host in hosts) / len(hosts)
        if all(
            abs(speeds[host.worker] / mean / (host.placed_speed / placed) - 1.0) <= DRIFT
            for host in hosts
        ):
            return False
        fresh = [
            Seat(host.worker, speeds[host.worker], host.max_shards, frozenset(bits(host.wanted)))
            for host in hosts
        ]
        after = place(self.n_shards, fresh, replicas=self.replicas)
        now_s = max(host.wanted.bit_count() / speeds[host.worker] for host in hosts)
        then_s = max(len(after[host.worker]) / speeds[host.worker] for host in hosts)
        return then_s < (1.0 - GAIN) * now_s

    def moves(self, in_use: Mapping[Worker, int]) -> Iterator[Instruction]:
        """List loads and drops that bring the workers towards what is wanted.

        A shard is dropped only when enough of those that shall hold it do, and no unit that is
        bound to the worker needs it.

        Parameters
        ----------
        in_use
            Of each worker the bit mask of shards that bound units need.
        """
        for host in self.workers.values():
            if host.draining:
                continue
            for shard in bits(host.held & ~host.wanted & ~in_use.get(host.worker, 0)):
                if self._dispensable(host, shard):
                    host.held &= ~(1 << shard)
                    yield DropShard(host.worker, shard)
            for shard in bits(host.wanted & ~host.held & ~host.loading):
                if shard not in host.refused and host.has_room:
                    host.loading |= 1 << shard
                    yield LoadShard(host.worker, shard)

    def _dispensable(self, host: KnownWorker, shard: int) -> bool:
        wanted = [s for s in self.workers.values() if s.wanted >> shard & 1]
        there = sum(s.held >> shard & 1 for s in wanted)
        return there > 0 and there >= min(self.replicas, len(wanted))

    def homeless(self) -> list[int]:
        """Shards that nobody holds, loads, or can be asked to load."""
        covered = 0
        for host in self.workers.values():
            covered |= host.held | host.loading
            covered |= sum(1 << s for s in bits(host.wanted) if s not in host.refused)
        return [shard for shard in range(self.n_shards) if not covered >> shard & 1]

    def drain_is_over(self, host: KnownWorker) -> bool:
        """Whether a draining worker runs nothing and holds nothing that others shall take."""
        if host.bound:
            return False
        stay = [other for other in self.workers.values() if not other.draining]
        elsewhere = wanted = 0
        for other in stay:
            elsewhere |= other.held
            wanted |= other.wanted
        return not host.held & wanted & ~elsewhere

    def shortage(self, shards: list[int]) -> str:
        """Why shards have no home, in numbers."""
        stay = [host for host in self.workers.values() if not host.draining]
        refusals = [
            f"{host.worker}: {host.refused[shard]}"
            for shard in shards
            for host in stay
            if shard in host.refused
        ]
        if refusals:
            return f"shard {shards[0]} can be loaded nowhere: {'; '.join(refusals)}"
        room = sum(self.n_shards if host.max_shards is None else host.max_shards for host in stay)
        return (
            f"{len(shards)} of {self.n_shards} shards have no worker: {len(stay)} workers have "
            f"memory for {room}; add workers or memory, or write the data set in smaller shards"
        )

    def check(self) -> None:
        """Invariants of the workers' side."""
        for host in self.workers.values():
            assert not host.held & host.loading, f"{host.worker} loads what it holds"
            if host.max_shards is not None and not host.draining:
                taken = (host.held | host.loading).bit_count()
                assert taken <= max(host.max_shards, host.held.bit_count()), (
                    f"{host.worker} is asked to hold {taken} of at most {host.max_shards} shards"
                )
