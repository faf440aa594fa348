"""What the runner needs of the world: somewhere to run units, to store states, to write entries.

On a cluster these are `dagsel.execution.engine.DaskEngine`, `dagsel.storage.CheckpointStore` and
`dagsel.session.LockedJournal`; in virtual time, those of `dagsel.simulation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from dagsel.dispatch.events import PriorityChanged, TrialAllowed, TrialHeld
from dagsel.dispatch.units import Round
from dagsel.messages import Entry, Message, StatePlace
from dagsel.planning.bill import Bill
from dagsel.planning.capacity import ClusterCapacity
from dagsel.storage.runs.checkpoints import Scoring


class Engine(Protocol):
    """Where units run: a cluster, or a model of one in virtual time."""

    @property
    def n_workers(self) -> int:
        """Workers that can run units."""
        ...

    @property
    def most_workers(self) -> int | None:
        """Workers that there can ever be; None if nobody knows."""
        ...

    @property
    def why_fixed(self) -> str:
        """Why the number of workers cannot be changed; empty if it can."""
        ...

    @property
    def stall_s(self) -> float:
        """How long nothing may be under way while the flow waits for nothing, in seconds."""
        ...

    @property
    def capacity(self) -> ClusterCapacity:
        """What the cluster can have, as far as it is known now."""
        ...

    @property
    def bill(self) -> Bill:
        """What the workers have cost since this session began, by the clock of `now`."""
        ...

    def now(self) -> float:
        """Seconds since any fixed moment, by the clock of deadline and budget."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, by the clock of the workers' times."""
        ...

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Send a round; earlier rounds go on."""
        ...

    def stop(self, trial: int) -> None:
        """Stop a trial for good."""
        ...

    def raised(self, trial: int) -> BaseException | None:
        """Return the error of a trial that has failed and is not stopped, if it came here."""
        ...

    def release(self, trial: int, epoch: int) -> None:
        """Forget an epoch's results; the driver has them."""
        ...

    def tell(self, command: TrialAllowed | TrialHeld | PriorityChanged) -> None:
        """Change what a trial may do; `TrialRests` with the same number says that it rests."""
        ...

    def check(
        self,
        trial: int,
        number: int,
        place: StatePlace,
        configs: Mapping[int, Mapping[str, Any]],
        *,
        halvings: int = 0,
    ) -> None:
        """Score a stored state of a trial; a `UnitRecord` answers for each validation shard.

        The samples that are scored at once are halved so often.
        """
        ...

    def limit(self, at: float) -> None:
        """Begin no unit that is expected to end after this time of `now`."""
        ...

    def scale(self, n_workers: int) -> None:
        """Scale the cluster to so many workers, if that is possible."""
        ...

    def messages(self, *, timeout_s: float) -> Iterator[Message]:
        """Yield what came in; wait at most so long for the first one."""
        ...

    def check_alive(self) -> None:
        """Raise a `ClusterError` if no message can come any more."""
        ...


class States(Protocol):
    """Where states are stored; `dagsel.storage.CheckpointStore` is one."""

    def load_latest(
        self, trial: int, at_most: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], bytes, dict[str, Any]] | None:
        """Return the newest readable state of a trial: its place, its bytes, its metadata."""
        ...

    def load(
        self, trial: int, epoch: int, position: int, *, partial: bool = False
    ) -> tuple[bytes, dict[str, Any]]:
        """Return a state: its bytes and its metadata."""
        ...

    def save(
        self, trial: int, epoch: int, position: int, blob: bytes, meta: Mapping[str, Any]
    ) -> Any:
        """Keep a state."""
        ...

    def keep_check(
        self, trial: int, number: int, epoch: int, position: int, *, partial: bool
    ) -> None:
        """Keep a copy of the state that was scored by a trial's check of this number."""
        ...

    def load_check(self, trial: int, number: int) -> tuple[bytes, dict[str, Any]]:
        """Return such a copy: its bytes and its metadata."""
        ...

    def load_scores(self, trial: int, kind: Scoring, number: int, shard: int) -> bytes:
        """Return what a shard has kept of the scores of an epoch, or of a check."""
        ...

    def drop_scores(self, trial: int, kind: Scoring, number: int) -> None:
        """Remove what all shards have kept of these."""
        ...

    def trials(self) -> Sequence[int]:
        """Return the trials that have anything stored."""
        ...

    def list(self, trial: int, *, partial: bool = False) -> tuple[tuple[int, int], ...]:
        """Return the places of a trial's complete states, or of partial ones."""
        ...

    def delete(
        self, trial: int, epoch: int, position: int, *, partial: bool = False, digest: str = ""
    ) -> None:
        """Remove a state; where its checksum is known its record need not be read."""
        ...

    def drop(self, trial: int) -> None:
        """Remove all states of a trial."""
        ...


class EntryLog(Protocol):
    """Where entries are written; `dagsel.session.LockedJournal` is one."""

    def append(self, entries: Sequence[Entry]) -> None:
        """Write entries, all or none; they outlive this process when it returns."""
        ...
