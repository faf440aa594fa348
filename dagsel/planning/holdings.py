"""Which worker holds, loads or shall hold which shards: the workers' side of the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dagsel.planning.events import DropShard, Instruction, LoadShard, Worker
from dagsel.planning.placement import Seat, place
from dagsel.planning.rounds import Unit
from dagsel.planning.rule import bits

WATCH_S = 2.0  # training time of a worker that must be seen before its shards move for its speed
DRIFT = 0.25  # relative change of a measured speed that makes a new placement worth a look
GAIN = 0.15  # share of the slowest worker's time that a new placement must save


@dataclass(slots=True)
class Seated:
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
        self.workers: dict[Worker, Seated] = {}

    def holders(self, shard: int) -> Iterator[Seated]:
        """Find the workers that hold the shard."""
        return (seat for seat in self.workers.values() if seat.held >> shard & 1)

    def replace(self, speeds: Mapping[Worker, float]) -> None:
        """Place the shards anew, with few moves, on the workers that stay."""
        seats = []
        for seat in self.workers.values():
            seat.wanted = 0
            if not seat.draining:
                held = frozenset(bits(seat.held | seat.loading))
                seat.placed_speed = speeds[seat.worker]
                seats.append(
                    Seat(
                        seat.worker,
                        speeds[seat.worker],
                        seat.max_shards,
                        held,
                        frozenset(seat.refused),
                    )
                )
        for worker, shards in place(self.n_shards, seats, replicas=self.replicas).items():
            self.workers[worker].wanted = sum(1 << shard for shard in shards)

    def drifted(self, speeds: Mapping[Worker, float]) -> bool:
        """Whether measured speeds make the present placement clearly worse than a new one.

        The slowest worker's time for its shards must fall by `GAIN`; so noise in the speeds does
        not move shards to and fro.
        """
        seats = [seat for seat in self.workers.values() if not seat.draining]
        if len(seats) < 2:
            return False
        mean = sum(speeds[seat.worker] for seat in seats) / len(seats)
        placed = sum(seat.placed_speed for seat in seats) / len(seats)
        if all(
            abs(speeds[seat.worker] / mean / (seat.placed_speed / placed) - 1.0) <= DRIFT
            for seat in seats
        ):
            return False
        fresh = [
            Seat(seat.worker, speeds[seat.worker], seat.max_shards, frozenset(bits(seat.wanted)))
            for seat in seats
        ]
        after = place(self.n_shards, fresh, replicas=self.replicas)
        now_s = max(seat.wanted.bit_count() / speeds[seat.worker] for seat in seats)
        then_s = max(len(after[seat.worker]) / speeds[seat.worker] for seat in seats)
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
        for seat in self.workers.values():
            if seat.draining:
                continue
            for shard in bits(seat.held & ~seat.wanted & ~in_use.get(seat.worker, 0)):
                if self._dispensable(seat, shard):
                    seat.held &= ~(1 << shard)
                    yield DropShard(seat.worker, shard)
            for shard in bits(seat.wanted & ~seat.held & ~seat.loading):
                if shard not in seat.refused and seat.has_room:
                    seat.loading |= 1 << shard
                    yield LoadShard(seat.worker, shard)

    def _dispensable(self, seat: Seated, shard: int) -> bool:
        wanted = [s for s in self.workers.values() if s.wanted >> shard & 1]
        there = sum(s.held >> shard & 1 for s in wanted)
        return there > 0 and there >= min(self.replicas, len(wanted))

    def homeless(self) -> list[int]:
        """Shards that nobody holds, loads, or can be asked to load."""
        covered = 0
        for seat in self.workers.values():
            covered |= seat.held | seat.loading
            covered |= sum(1 << s for s in bits(seat.wanted) if s not in seat.refused)
        return [shard for shard in range(self.n_shards) if not covered >> shard & 1]

    def drain_is_over(self, seat: Seated) -> bool:
        """Whether a draining worker runs nothing and holds nothing that others shall take."""
        if seat.bound:
            return False
        stay = [other for other in self.workers.values() if not other.draining]
        elsewhere = wanted = 0
        for other in stay:
            elsewhere |= other.held
            wanted |= other.wanted
        return not seat.held & wanted & ~elsewhere

    def shortage(self, shards: list[int]) -> str:
        """Why shards have no home, in numbers."""
        stay = [seat for seat in self.workers.values() if not seat.draining]
        refusals = [
            f"{seat.worker}: {seat.refused[shard]}"
            for shard in shards
            for seat in stay
            if shard in seat.refused
        ]
        if refusals:
            return f"shard {shards[0]} can be loaded nowhere: {'; '.join(refusals)}"
        room = sum(self.n_shards if seat.max_shards is None else seat.max_shards for seat in stay)
        return (
            f"{len(shards)} of {self.n_shards} shards have no worker: {len(stay)} workers have "
            f"memory for {room}; add workers or memory, or write the data set in smaller shards"
        )

    def check(self) -> None:
        """Invariants of the workers' side."""
        for seat in self.workers.values():
            assert not seat.held & seat.loading, f"{seat.worker} loads what it holds"
            if seat.max_shards is not None and not seat.draining:
                taken = (seat.held | seat.loading).bit_count()
                assert taken <= max(seat.max_shards, seat.held.bit_count()), (
                    f"{seat.worker} is asked to hold {taken} of at most {seat.max_shards} shards"
                )
