"""What worker, scheduler and driver tell each other, and the entries of a run's journal.

Each is a frozen dataclass, and one of a union. `dagsel.dispatch.events` travel as they are.

- `COMMANDS`: driver to scheduler; `REPORTS`: scheduler to driver;
- `ORDERS`: scheduler to worker; `NOTICES`: worker to scheduler;
- `ENTRIES`: the driver to its journal, and to the session that goes on with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, TypeAlias, get_args

from dagsel.codec import LATER, Json, Tagged, from_json, to_json
from dagsel.dispatch import description, events
from dagsel.dispatch.units import Unit
from dagsel.errors import CheckpointCorruptError
from dagsel.flow import DECISIONS, EVENTS, Context, Decision, Event
from dagsel.workloads.raised import Raised, RanOut

# ---- a unit, from the worker to the journal


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the dispatcher has decided for a unit; travels in the task's annotations."""

    shard: int  # the shard to visit
    attempt: int = 1  # from 1; a unit that was begun before looks for its stored result first
    max_seconds: float | None = None  # then it stops at a batch and waits for its turn
    at_once_s: float = float("inf")  # the task begins no other unit once it has run for so long
    visits: tuple[int, ...] = ()  # of its trial in this epoch before it, in order
    spare: tuple[int, int] | None = None  # place of a state that nobody needs once its is stored
    n_pieces: int = 0  # how often the unit was stopped before its end
    is_suspect: bool = False  # workers were lost under it: it begins when the scheduler knows
    gang: int = 1  # workers that train it together, of which this one leads
    then: tuple[int, ...] = ()  # shards that the epoch's next units visit in the same task
    scores: tuple[int, ...] = ()  # validation shards to score in it, if nothing stops it
    alone: bool = False  # it has run out of memory before: nothing else is to take any


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What a worker has done of a unit. Fields that a kind of unit does not have are None."""

    unit: Unit  # which one
    worker: str  # address of the worker
    shard: int  # the shard it visited
    start: float  # seconds since the epoch, by the worker's clock
    stop: float
    hop: bool  # whether the state came from another worker
    recovered: bool | None = None  # whether a stored result was found instead of training again
    state_bytes: int = 0  # size of the state after it
    save_seconds: float = 0.0  # to store that state: after `stop`, of a piece before it
    members: tuple[str, ...] = ()  # the other workers of its gang
    share: float = 1.0  # how much of the unit is done after it: 1, or less where it was stopped
    ready_seconds: float = 0.0  # how long after `start` it had its state and its gang
    n_samples: int | None = None  # trained on or scored; None if a later state was found
    loss: float | None = None  # mean training loss
    losses: tuple[int, float, float] | None = None  # n batches, least and largest loss of one
    digest: str = ""  # checksum of the state after it
    metrics: Mapping[str, Any] | None = None  # mean of each validation metric
    attempts: int = 1  # how often it was begun since its last record
    halved: int = 0  # how often the samples were halved that it computed at once
    lost_seconds: float = 0.0  # of attempts that were lost with a worker
    seconds: float | None = None  # what the run has taken until now; the driver writes it down
    worker_seconds: float | None = None
    money: float | None = field(default=None, metadata={LATER: True})

    @property
    def gang(self) -> int:
        """How many workers it was on."""
        return 1 + len(self.members)

    @property
    def trains_seconds(self) -> float:
        """How long it trained, or scored, once it had its state and its gang."""
        return max(0.0, self.stop - self.start - self.ready_seconds)


@dataclass(frozen=True, slots=True)
class UnitRecord(UnitWork):
    """A unit that is done."""


@dataclass(frozen=True, slots=True)
class PieceRecord(UnitWork):
    """What was trained of a unit until it was stopped."""


WORK: Tagged[UnitRecord | PieceRecord] = Tagged(UnitRecord, PieceRecord, brief=True)


class StatePlace(NamedTuple):
    """Where a state is in the store: after a unit, or in the middle of it."""

    epoch: int
    position: int
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class StoredState:
    """A state in the store: its place, and what is stored with it."""

    epoch: int  # of the unit after which it is
    position: int
    shard: int  # the shard that the unit visited
    visits: tuple[int, ...]  # the shards that were visited in the epoch, in order
    n_samples: int | None = None  # that the unit was trained on
    loss: float | None = None  # their mean
    state_bytes: int = 0  # size of the state
    share: float = 0.0  # how much of the unit is trained; 0 of one that was trained to its end
    # Samples and mean loss of the units before it in its task, whose states were not stored.
    losses: tuple[tuple[int | None, float | None], ...] = ()
    adoptions: int = 0  # how many states of other trials the trial had gone on from
    digest: str = ""  # checksum of the state

    @classmethod
    def read(cls, place: tuple[int, int], meta: Mapping[str, Json]) -> StoredState:
        """Read what is stored with a state; raise `CheckpointCorruptError` if it is not that."""
        epoch, position = place
        try:
            stored: StoredState = from_json(cls, {**meta, "epoch": epoch, "position": position})
        except ValueError as error:
            raise CheckpointCorruptError(
                f"what is stored with the state of epoch {epoch}, position {position} is damaged: "
                f"{error}"
            ) from None
        return stored

    @property
    def meta(self) -> dict[str, Json]:
        """What the store keeps with it."""
        kept = {name: to_json(getattr(self, name)) for name in _META}
        return kept | {name: to_json(more) for name in _SELDOM if (more := getattr(self, name))}


_SELDOM, _META = ("share", "losses"), ("shard", "visits", "n_samples", "loss", "state_bytes")

# ---- driver to scheduler


@dataclass(frozen=True, slots=True)
class PreemptTrial:
    """Stop a trial's running unit at its next batch; it goes on when it is its turn again."""

    trial: int


@dataclass(frozen=True, slots=True)
class LimitTime:
    """Begin no unit that is expected to end in more than so many seconds from now."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Shrink:
    """Release the workers whose loss costs least, until no more than so many stay."""

    n_workers: int  # how many stay
    nodes: Mapping[str, str]  # the node that each worker is on; only whole nodes are released
    prices: Mapping[str, float] = field(default_factory=dict)  # of an hour, if they differ


@dataclass(frozen=True, slots=True)
class EndRun:
    """Leave the scheduler as it was."""


Command: TypeAlias = (
    events.RoundAdded
    | events.TrialStopped
    | events.TrialAllowed
    | events.TrialHeld
    | events.PriorityChanged
    | events.CheckAdded
    | events.DrainRequested
    | PreemptTrial
    | LimitTime
    | Shrink
    | description.DescribeWorkers
    | EndRun
)

# ---- worker to scheduler, and on to the driver


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is ready for units."""

    worker: str  # its address
    name: str
    threads: int | None = None  # threads that PyTorch trains with; None if there is no PyTorch
    max_shards: int | None = None  # how many shards its memory takes; None for no limit
    speed: float = 1.0  # in GFLOP/s
    owns_resource: bool = False  # whether this run has given it the resource that units take
    process: str = ""  # the same for workers that are threads of one process; "" if not known
    copy_room: int | None = None  # how many shards it may hold where copies are spare
    rooms: tuple[int | None, int | None] = (None, None)  # bytes for units; those shards may take
    age_s: float = 0.0  # since the process has begun that started the worker's: its nanny's


@dataclass(frozen=True, slots=True)
class WorkerRefused:
    """A worker cannot be one of the run's, and why."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """A worker was told to end, and stores what it runs; or it cannot store, and stays idle."""

    worker: str
    unfit: str = ""  # why it cannot store


@dataclass(frozen=True, slots=True)
class UnitsDone:
    """A unit's task has done the next ones, too, and its worker has the last one's state."""

    last: Unit
    worker: str
    attempt: int  # at the first one
    state_bytes: int  # size of that state in memory
    work: tuple[Annotated[UnitRecord | PieceRecord, WORK], ...]  # in order


@dataclass(frozen=True, slots=True)
class UnitRaised:
    """A unit has raised an error, which follows with Dask."""

    unit: Unit
    raised: Raised
    is_the_workloads: bool = True  # whether the workload is at fault, and not a loss or a worker


@dataclass(frozen=True, slots=True)
class GangCalls:
    """The leader of a unit's gang waits for another worker of it at a port."""

    unit: Unit
    attempt: int
    rank: int  # of the one that it waits for
    port: int
    how: str = field(repr=False)  # the trial's configuration and more, pickled, in base64


@dataclass(frozen=True, slots=True)
class AbandonGang:
    """The leader of a unit's gang is to wait for the others no longer."""

    unit: Unit
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something to know."""

    text: str


Notice: TypeAlias = (
    WorkerJoined
    | WorkerRefused
    | WorkerLeaves
    | events.UnitStarted
    | events.UnitTrains
    | UnitRaised
    | UnitsDone
    | PieceRecord
    | GangCalls
    | AbandonGang
    | events.GangBroke
    | Note
)

# ---- scheduler to worker


@dataclass(frozen=True, slots=True)
class StopUnit:
    """Stop an attempt at a unit at its next batch, or before its first."""

    unit: Unit
    attempt: int


@dataclass(frozen=True, slots=True)
class ForgetState:
    """Forget the state that a stopped unit has left in memory."""

    unit: Unit


@dataclass(frozen=True, slots=True)
class JoinGang:
    """Train a unit in the gang that another worker leads."""

    unit: Unit
    attempt: int
    shard: int
    rank: int  # the worker's number in the gang
    size: int  # how many workers it has
    host: str  # where the leader waits
    port: int
    how: str = field(repr=False)  # as in `GangCalls`: it comes by Dask, as tasks do


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Another worker is gone; calls to it are to be ended."""

    worker: str


Order: TypeAlias = StopUnit | ForgetState | JoinGang | AbandonGang | WorkerLost | events.DropShard

# ---- scheduler to driver


@dataclass(frozen=True, slots=True)
class WorkerDrains:
    """A worker gets no new units."""

    worker: str  # its address
    retire: bool  # whether the cluster shall close it when it is drained; if not, it ends by itself


@dataclass(frozen=True, slots=True)
class TrialReport:
    """A trial cannot be trained, and why."""

    trial: int
    reason: str
    traceback: str = ""
    raised: Raised | None = None  # the error of its workload, if it was that


Message: TypeAlias = (
    WorkerJoined
    | WorkerRefused
    | WorkerDrains
    | events.Drained
    | events.WorkerRemoved
    | events.RestartWorker
    | events.LoadShard
    | events.ShardLoaded
    | events.UnitTrains
    | UnitRecord
    | PieceRecord
    | events.TrialRests
    | TrialReport
    | events.FailRun
    | Note
    | description.WorkersDescribed
)

# ---- the journal


@dataclass(frozen=True, slots=True)
class SessionBegun:
    """A driver has begun ``at`` (seconds since the epoch), after ``seconds`` of others."""

    at: float
    seconds: float
    about: str | None = None  # checksum of ``run.json``


@dataclass(frozen=True, slots=True)
class Turn:
    """What the flow was told, and what it decided."""

    event: Annotated[Event, EVENTS] | None  # what has happened; None at the start
    decisions: tuple[Annotated[Decision, DECISIONS], ...]  # what the flow decided on it
    pass_: int | None = None  # turns of the same one were taken before any was performed
    seconds: float | None = None  # these three: what the run has taken until now
    worker_seconds: float | None = None
    money: float | None = field(default=None, metadata={LATER: True})
    context: Context | None = None  # what the flow was told at its start
    params: Mapping[int, Mapping[str, Any]] | None = None  # of `Asked`: what was drawn, by trial
    infeasible: tuple[int, ...] = field(default=(), metadata={LATER: True})  # of these, by Optuna
    # Of these, what a space could read of each: the user attributes that it was enqueued with.
    attrs: Mapping[int, Mapping[str, Any]] | None = field(default=None, metadata={LATER: True})
    place: StatePlace | None = None  # of `Paused`: where the trial's state is; None if it has none
    traceback: str | None = None  # of `TrialFailed`: where the error was raised, if that is known
    raised: Raised | None = None  # of `TrialFailed`: the error of its workload, if it was that


@dataclass(frozen=True, slots=True)
class FailedAlike:
    """The run has ended: its trials failed in one way before any was scored."""

    text: str  # the error, with the user's own frames and the cure


@dataclass(frozen=True, slots=True)
class TooLittleTime:
    """The run has ended: not one epoch can end within deadline and budget."""

    text: str  # with the numbers, and what would do


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A driver has ended and its workers are released; what the run has cost with that."""

    at: float  # seconds since the epoch
    seconds: float  # since the run began
    worker_seconds: float
    money: float | None = field(default=None, metadata={LATER: True})


@dataclass(frozen=True, slots=True)
class FlowState:
    """The flow's state at this moment, so that a resume repeats fewer turns."""

    state: Json


@dataclass(frozen=True, slots=True)
class StatesFound:
    """What a session that goes on has found in the store of a trial's unreported epochs."""

    trial: int
    states: tuple[StoredState, ...]


@dataclass(frozen=True, slots=True)
class PartFound:
    """What share of a trial's next unit is trained, as that session has found."""

    trial: int
    share: float


@dataclass(frozen=True, slots=True)
class BestLost:
    """The best state of a trial is damaged: the trial is worth its last epoch, from then on."""

    trial: int


@dataclass(frozen=True, slots=True)
class RoundSent:
    """Chains were sent at a moment: each a trial, its first epoch, and the one after its last."""

    number: int
    start: float
    epochs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The run was given up ``at`` (seconds since the epoch): its live trials have failed."""

    at: float
    reason: str


Entry: TypeAlias = (
    SessionBegun
    | SessionEnded
    | Abandoned
    | Turn
    | FailedAlike
    | TooLittleTime
    | FlowState
    | UnitRecord
    | PieceRecord
    | StatesFound
    | PartFound
    | BestLost
    | RoundSent
    | RanOut
    | events.ShardLoaded
    | Note
)

COMMANDS: Tagged[Command] = Tagged(*get_args(Command), brief=True)
NOTICES: Tagged[Notice] = Tagged(*get_args(Notice), brief=True)
ORDERS: Tagged[Order] = Tagged(*get_args(Order), brief=True)
REPORTS: Tagged[Message] = Tagged(*get_args(Message), brief=True)
ENTRIES: Tagged[Entry] = Tagged(
    session=SessionBegun, ended=SessionEnded, abandoned=Abandoned, turn=Turn, alike=FailedAlike,
    late=TooLittleTime, flow=FlowState, unit=UnitRecord, piece=PieceRecord, stored=StatesFound,
    partial=PartFound, best_lost=BestLost, round=RoundSent, ran_out=RanOut,
    load=events.ShardLoaded, note=Note, brief=True,
)  # fmt: skip
