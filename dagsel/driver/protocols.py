"""What the runner needs of the world: somewhere to run units, to store states, to write entries.

On a cluster these are `dagsel.execution.engine.DaskEngine`, `dagsel.storage.CheckpointStore` and
`dagsel.storage.EntryLog`; in virtual time, those of `dagsel.simulation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from dagsel.dispatch.units import Round
from dagsel.history.record import Entry
from dagsel.history.trial import Place
from dagsel.planning.budget import Bill

Message: TypeAlias = dict[str, Any]


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
    def bill(self) -> Bill:
        """What the workers have cost since this session began, by the clock of `now`."""
        ...

    def now(self) -> float:
        """Seconds, from any moment on, by the clock that the search lives by."""
        ...

    def wall(self) -> float:
        """Seconds since the epoch, by the clock that the workers' times are told by."""
        ...

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Send a round; earlier rounds go on."""
        ...

    def stop(self, trial: int) -> None:
        """Withdraw a trial."""
        ...

    def release(self, trial: int, epoch: int) -> None:
        """Let an epoch's results go: they have been heard."""
        ...

    def prioritize(self, trial: int, priority: float) -> None:
        """Serve trials of a higher priority first."""
        ...

    def allow(self, trial: int, gang: int, seconds: float | None, number: int) -> None:
        """Let a trial train on so many workers, for so long; one that rests goes on.

        With the same ``number`` a message ``rests`` says that its time is over.
        """
        ...

    def hold(self, trial: int, number: int) -> None:
        """Let a trial rest from its next batch on; ``rests`` with this number answers."""
        ...

    def check(
        self, trial: int, number: int, place: Place, configs: Mapping[int, Mapping[str, Any]]
    ) -> None:
        """Score a stored state of a trial; ``done`` answers for each validation shard."""
        ...

    def limit(self, at: float) -> None:
        """Begin no unit that is expected to end after this moment, by the clock of `now`."""
        ...

    def scale(self, n_workers: int) -> None:
        """Let the cluster have so many workers, if it can."""
        ...

    def messages(self, *, timeout_s: float) -> Iterator[Message]:
        """Give what came in, waiting for the first one at most so long."""
        ...

    def check_alive(self) -> None:
        """Raise a `ClusterError` if there is nothing to hear from any more."""
        ...


class States(Protocol):
    """Where states are stored; `dagsel.storage.CheckpointStore` is one."""

    def load_latest(
        self, trial: int, at_most: tuple[int, int] | None = None
    ) -> tuple[tuple[int, int], bytes, dict[str, Any]] | None:
        """Give the newest readable state of a trial: its place, its bytes, what was said of it."""
        ...

    def load(
        self, trial: int, epoch: int, position: int, *, partial: bool = False
    ) -> tuple[bytes, dict[str, Any]]:
        """Give a state: its bytes, and what was said of it."""
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

    def delete(self, trial: int, epoch: int, position: int) -> None:
        """Remove a state."""
        ...

    def drop(self, trial: int) -> None:
        """Remove all states of a trial."""
        ...


class EntryLog(Protocol):
    """Where entries are written; `dagsel.storage.EntryLog` is one."""

    def append(self, records: Sequence[Entry]) -> None:
        """Keep entries, all or none; they outlive this process when it returns."""
        ...
