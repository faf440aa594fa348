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
    """The unit's input exists and the unit is bound to no worker: for the first time, or again.

    If the dispatcher still has it as bound, it counts as returned.
    """

    unit: Unit


@dataclass(frozen=True, slots=True)
class UnitStarted:
    """The worker runs the unit from now on; not told where `UnitTrains` follows at once."""

    unit: Unit
    worker: Worker


@dataclass(frozen=True, slots=True)
class UnitTrains:
    """The training unit runs the workload's code from now on. Others do when they have started."""

    unit: Unit
    worker: Worker


@dataclass(frozen=True, slots=True)
class UnitDone:
    """The unit's result exists, after `seconds` of training on `shard`.

    If the unit ran before and its result was found in the store, `seconds` is 0, and `shard` may
    differ from the one that was bound. What else its task has done follows, each a shard and the
    seconds that it took: the epoch's next training units (`then`), evaluating ones (`scored`).
    """

    unit: Unit
    seconds: float
    shard: int
    scored: tuple[tuple[int, float], ...] = ()
    then: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class UnitReturned:
    """The unit came back from its worker without failing: preempted, rescheduled or cancelled.

    It trained for `seconds` and has to go on with `shard`; None if nothing of it is kept. If the
    unit is ready but not bound, this takes back `UnitReady`: its input is lost. `UnitReady` follows
    when it may be bound again.
    """

    unit: Unit
    shard: int | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitLost:
    """The result of a done unit was lost with its worker; `UnitReady` follows."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class UnitFailed:
    """The unit raised; its trial fails."""

    unit: Unit
    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class GangBroke:
    """A gang did not form, or lost one of its workers; `UnitReturned` follows."""

    unit: Unit
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerAdded:
    """A worker has joined."""

    worker: Worker
    shards: frozenset[int] = frozenset()  # that it holds already
    speed: float = 1.0  # relative to the others'; unit times correct it
    max_shards: int | None = None  # how many fit in its memory; None: no limit
    node: str = ""  # a gang prefers workers of few nodes
    process: str = ""  # a gang has one worker of a process; "" for a process of its own
    copy_room: int | None = None  # how many it may hold where copies are spare; None: no limit
    room: int | None = None  # bytes for a unit and, in its memory, shards; None: no limit
    shard_room: int | None = None  # bytes of it that shards may take; None: all


@dataclass(frozen=True, slots=True)
class WorkerRemoved:
    """A worker has gone, with the shards that it held and the units that it ran.

    Unless that was `expected`, the unit that ran on it is suspected (`dagsel.dispatch.suspicion`).
    """

    worker: Worker
    expected: bool = False


@dataclass(frozen=True, slots=True)
class MemoryFilled:
    """The worker has taken so many bytes that it is about to be restarted; it is lost then."""

    worker: Worker
    n_bytes: int
    limit: int | None = None  # bytes that it may take


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """The worker is to get no new unit, and others are to load its shards; answer: `Drained`.

    One that is `unfit` cannot store what it trains: its units are taken back. If there is no other
    worker the answer is `FailRun`.
    """

    worker: Worker
    unfit: str = ""  # why, in words


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
    """The trial is over: its waiting units are forgotten, its running one is preempted."""

    trial: int


@dataclass(frozen=True, slots=True)
class TrialAllowed:
    """The trial may train on `gang` workers, for `seconds` from now on; if it rests, it goes on.

    Its running unit is preempted if it has a gang of another size, or if there is a time limit. The
    event may come before the trial's first round. `number` is the caller's: `TrialRests` repeats
    the last one that was given for the trial.
    """

    trial: int
    gang: int = 1
    seconds: float | None = None
    number: int = 0


@dataclass(frozen=True, slots=True)
class TrialHeld:
    """The trial has to rest: its running unit is preempted; answer: `TrialRests`."""

    trial: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class CheckAdded:
    """The stored state of a resting trial is to be scored on all validation shards.

    The units are ``Unit("check", trial, number, shard)``.
    """

    trial: int
    number: int


@dataclass(frozen=True, slots=True)
class HorizonSet:
    """From now on no training unit starts that is expected to run beyond `at_s`.

    A unit whose trial may train for a time (`TrialAllowed.seconds`) runs no longer than that.
    """

    at_s: float


@dataclass(frozen=True, slots=True)
class PriorityChanged:
    """The trial's priority: trials of a higher one are served first; all begin at 0."""

    trial: int
    priority: float


@dataclass(frozen=True, slots=True)
class TimerFired:
    """`Dispatcher.wake_at` is reached."""


DispatchEvent: TypeAlias = (
    RoundAdded
    | UnitReady
    | UnitStarted
    | UnitTrains
    | UnitDone
    | UnitReturned
    | UnitLost
    | UnitFailed
    | GangBroke
    | WorkerAdded
    | WorkerRemoved
    | MemoryFilled
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
    """Run the unit on the worker with the shard; after the worker's running unit, if it has one.

    In a gang the worker leads the `members`, which are idle. The unit may train for `seconds`.

    Unless it is told to stop before, the same task goes on with the epoch's next units on the
    shards in `then`, and where it ends the epoch it scores the validation shards in `scores`. What
    it leaves out gets a task of its own.
    """

    unit: Unit
    worker: Worker
    shard: int
    members: tuple[Worker, ...] = ()
    seconds: float | None = None
    # Workers were lost under it: it must not begin before the dispatcher knows that it begins.
    is_suspect: bool = False
    scores: tuple[int, ...] = ()
    then: tuple[int, ...] = ()
    alone: bool = False  # it has run out of memory: nothing else is kept there for it


@dataclass(frozen=True, slots=True)
class LoadShard:
    """Load the shard on the worker; answer: `ShardLoaded` or `ShardFailed`."""

    worker: Worker
    shard: int


@dataclass(frozen=True, slots=True)
class DropShard:
    """Drop the shard from the worker's memory; it counts as dropped from now on."""

    worker: Worker
    shard: int


@dataclass(frozen=True, slots=True)
class Preempt:
    """Stop the unit at its next batch, or take it back if it has not started.

    Answer: `UnitReturned` or `UnitDone`.
    """

    unit: Unit
    worker: Worker


@dataclass(frozen=True, slots=True)
class TrialRests:
    """The trial runs nothing, and all its trained epochs are scored.

    It does not train until `TrialAllowed`.
    """

    trial: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class Drained:
    """The worker runs nothing and others hold its shards: it may go."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class FailTrial:
    """The trial fails; its waiting units are forgotten."""

    trial: int
    reason: str
    # Which unit has filled which worker's memory, with how many bytes, of how many.
    filled: tuple[Unit, Worker, int, int | None] | None = None


@dataclass(frozen=True, slots=True)
class RestartWorker:
    """Restart the worker: its unit is past its time limit and does not obey `Preempt`."""

    worker: Worker
    reason: str


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run cannot go on; the reason has the numbers."""

    reason: str
    is_of_data: bool = False  # what the data set lacks, and no worker


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
