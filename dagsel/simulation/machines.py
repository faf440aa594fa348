"""Workers of a model cluster: what runs on them, and what has run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from dagsel.dispatch.events import Bind, TrialRests, Worker
from dagsel.dispatch.list_scheduler import ROUNDING_S
from dagsel.dispatch.units import Unit


class Ran(NamedTuple):
    """A unit, or a piece of one, as it ran."""

    unit: Unit
    worker: Worker
    shard: int
    start_s: float
    stop_s: float
    hop: bool  # its state had to move
    members: tuple[Worker, ...] = ()
    done: float = 1.0  # share of the unit after it
    waits_s: float = 0.0  # before it began to train


@dataclass(slots=True)
class VirtualOutcome:
    """What has happened on a model cluster; all lists are in the order of time."""

    timeline: list[Ran] = field(default_factory=list)  # units that were done
    pieces: list[Ran] = field(default_factory=list)  # trained parts of units that were stopped
    loaded: list[tuple[Worker, int]] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # why trials, or (as trial -1) the run
    rests: list[TrialRests] = field(default_factory=list)
    noticed: list[Worker] = field(default_factory=list)  # workers that are to be taken back

    @property
    def makespan_s(self) -> float:
        """When the last unit was done."""
        return self.timeline[-1].stop_s if self.timeline else 0.0


@dataclass(slots=True, eq=False)
class Running:
    """A bound unit that runs, or one of those after it in its task."""

    bind: Bind
    unit: Unit
    shard: int
    start_s: float
    takes_s: float  # to its end, if nothing stops it
    waits_s: float  # before it trains: its state moves
    hop: bool
    visits: tuple[Ran, ...] = ()  # units of the task that are done
    trained_at_s: float | None = None  # since when it scores
    scoring_s: tuple[float, ...] = ()  # of each validation shard

    @property
    def trains_s(self) -> float:
        """How long it trains, to its end."""
        return self.takes_s - self.waits_s

    def until(self, stop_s: float, done: float = 1.0) -> Ran:
        """Return it as it has run until a moment, when so much of the unit is done."""
        worker, members = self.bind.worker, self.bind.members
        return Ran(self.unit, worker, self.shard, self.start_s, stop_s, self.hop, members,
                   done, self.waits_s)  # fmt: skip

    def scored(self, now_s: float) -> list[Ran]:
        """Return the evaluating units that were done with it until now."""
        if self.trained_at_s is None:
            return []
        bind, done, start_s = self.bind, list[Ran](), self.trained_at_s
        for shard, took_s in zip(bind.scores, self.scoring_s, strict=True):
            if start_s + took_s > now_s + ROUNDING_S:
                break
            unit = bind.unit._replace(kind="evaluate", position=shard)
            done.append(Ran(unit, bind.worker, shard, start_s, start_s + took_s, hop=False))
            start_s += took_s
        return done


@dataclass(slots=True)
class Machine:
    """A worker: its bound units, the first of which runs, and its shards."""

    held: set[int]
    queue: list[Bind] = field(default_factory=list)
    running: Running | None = None
    trained: int = -1  # the trial that it trained last
