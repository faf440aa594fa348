"""What the dispatcher is told (`DispatchEvent`) and what it asks for (`Instruction`).

All are frozen. Workers are named by their address; a shard is an index, and a worker that holds
shard ``i`` holds training shard ``i`` and validation shard ``i``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dagsel.dispatch.units import Round, Unit

Worker: TypeAlias = str


@dataclass(frozen=True, slots=True)
class RoundAdded:
    """Chains are added; may come while earlier rounds run."""

    round: Round


@dataclass(frozen=True, slots=True)
class UnitReady:
    """The unit's input exists and it is bound to no worker: for the first time, or again.

    A unit that had been bound and comes back without `UnitReturned` counts as returned.
    """

    unit: Unit


@dataclass(frozen=True, slots=True)
class UnitStarted:
    """The worker has begun to run the unit."""

    unit: Unit
    worker: Worker


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The unit's result exists.

    Parameters
    ----------
    unit
        Which one.
    seconds
        How long it trained; 0 when its stored result was found.
    shard
        The shard that was really visited. It may differ from the bound one when a unit that was
        executed again found its stored result.
    """

    unit: Unit
    seconds: float
    shard: int


@dataclass(frozen=True, slots=True)
class UnitReturned:
    """The unit came back from its worker without failing: preempted, rescheduled or cancelled.

    Said of a unit that is ready but not bound, it takes back `UnitReady`: its input is lost.
    `UnitReady` follows when it is to be bound again.

    Parameters
    ----------
    unit
        Which one.
    shard
        The shard it is partly through and must go on with; None when nothing of it is kept.
    seconds
        How long it trained until it was stopped.
    """

    unit: Unit
    shard: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitLost:
    """A done unit's result went with its worker; `UnitReady` follows when its input exists."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class UnitFailed:
    """The unit raised; it runs no more. `UnitReady` follows if the trial is to try it again."""

    unit: Unit
    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class GangBroke:
    """A gang did not come together, or lost one of its workers; `UnitReturned` follows."""

    unit: Unit
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerAdded:
    """A worker has come.

    Parameters
    ----------
    worker
        Its address.
    shards
        What it holds already.
    speed
        Relative to other workers'; a prior that unit times correct.
    max_shards
        How many shards its memory takes; None for no limit.
    node
        The machine that it is on; a gang takes workers of few nodes.
    """

    worker: Worker
    shards: frozenset[int] = frozenset()
    speed: float = 1.0
    max_shards: int | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """A worker has gone, with what it held and ran.

    Parameters
    ----------
    worker
        Its address.
    expected
        Whether somebody asked it to go; if not, the unit that ran on it gets a strike.
    """

    worker: Worker
    expected: bool = False


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The worker shall get no new unit and hand over its shards; answered by `Drained`."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """The worker holds the shard from now on."""

    worker: Worker
    shard: int


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """The worker cannot hold the shard."""

    worker: Worker
    shard: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrialStopped:
    """The trial trains no more: its waiting units are forgotten, its running one is preempted."""

    trial: int


@dataclass(frozen=True, slots=True)
class TrialAllowed:
    """The trial may train on these terms from now on; one that rests goes on.

    A running unit is preempted if its gang is another one, or if there is a limit, which it was
    bound without. It may come before the trial's first round.

    Parameters
    ----------
    trial
        Which one.
    gang
        Workers that train it together.
    seconds
        Time that it may train from now on before it has to rest; None for no limit.
    number
        Of the terms of this trial; `TrialRests` repeats that of the last ones.
    """

    trial: int
    gang: int = 1
    seconds: float | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class TrialHeld:
    """The trial shall rest: its running unit is preempted; answered by `TrialRests`."""

    trial: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class CheckAdded:
    """A stored state of a trial that rests shall be scored on all validation shards.

    Its units are ``Unit("check", trial, number, shard)``.
    """

    trial: int
    number: int


@dataclass(frozen=True, slots=True)
class HorizonSet:
    """No training unit is begun any more that is expected to end after this moment.

    Parameters
    ----------
    at_s
        The moment, by the clock of the events; infinity for none.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    """Trials of a higher priority are served first; all begin at 0."""

    trial: int
    priority: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Time has passed: `Dispatcher.wake_at` was reached."""


DispatchEvent: TypeAlias = (
    RoundAdded
    | UnitReady
    | UnitStarted
    | UnitDone
    | UnitReturned
    | UnitLost
    | UnitFailed
    | GangBroke
    | WorkerAdded
    | WorkerRemoved
    | DrainRequested
    | ShardLoaded
    | ShardFailed
    | TrialStopped
    | TrialAllowed
    | TrialHeld
    | CheckAdded
    | HorizonSet
    | PriorityChanged
    | TimerFired
)


@dataclass(frozen=True, slots=True)
class Bind:
    """Run the unit on the worker with the shard; after its running unit, if it has one.

    Parameters
    ----------
    unit, worker, shard
        Which unit, where, with what.
    members
        The other workers of a gang; they are idle, and begin together with the worker.
    seconds
        The unit has to stop after so many seconds; None for no limit.
    """

    unit: Unit
    worker: Worker
    shard: int
    members: tuple[Worker, ...] = ()
    seconds: float | None = None

    def __repr__(self) -> str:
        told = f"unit={self.unit!r}, worker={self.worker!r}, shard={self.shard!r}"
        told += f", members={self.members!r}" if self.members else ""
        return f"Bind({told}{'' if self.seconds is None else f', seconds={self.seconds!r}'})"


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Let the worker read the shard; answered by `ShardLoaded` or `ShardFailed`."""

    worker: Worker
    shard: int


@dataclass(frozen=True, slots=True)
class DropShard:
    """Let the worker forget the shard; from now on it counts as not held."""

    worker: Worker
    shard: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop the unit at its next batch, or take it back if it has not begun.

    Answered by `UnitReturned` or `UnitDone`.
    """

    unit: Unit
    worker: Worker


@dataclass(frozen=True, slots=True)
class TrialRests:
    """The trial runs nothing, and all epochs that it has trained are scored.

    It trains no more until `TrialAllowed`.
    """

    trial: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """The worker runs nothing and holds nothing that only it holds: it may go."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class FailTrial:
    """The trial has failed; its waiting units are forgotten."""

    trial: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """The worker's unit hangs past its time limit and does not heed `Preempt`."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run cannot go on, and why, in numbers."""

    reason: str


Instruction: TypeAlias = (
    Bind
    | LoadShard
    | DropShard
    | Preempt
    | TrialRests
    | Drained
    | FailTrial
    | RestartWorker
    | FailRun
)
