"""The visits of a task: its own unit's, and those of the units that follow it in the epoch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dagsel.dispatch.units import Unit
from dagsel.errors import NothingTrainedError
from dagsel.execution.run_spec import RunSpec, StoredResult
from dagsel.messages import Assignment, PieceRecord, StoredState, UnitRecord
from dagsel.state import State
from dagsel.workloads.base import Trained, Visit

Work = TypeVar("Work", UnitRecord, PieceRecord)


class UnitClock:
    """The time of day since a unit began, whatever becomes of the machine's clock meanwhile.

    That may be set, and a laptop may sleep: neither is time in which the unit trains.
    """

    __slots__ = ("_began", "start")

    def __init__(self) -> None:
        self.start = time.time()  # seconds since the epoch
        self._began = time.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self.start + (time.monotonic() - self._began)


def visit_of(spec: RunSpec, unit: Unit, shard: int, value: float | None) -> Visit:
    """Return a unit's visit of a shard; `value` is the metric of the epoch before."""
    ends_epoch = unit.position == spec.data.n_shards - 1
    return Visit(spec.seed, unit.trial, unit.epoch, shard, ends_epoch, value)


@dataclass(frozen=True, slots=True)
class Visited:
    """A training unit as it has come to its end, or to where it was stopped."""

    unit: Unit
    worker: str  # its address
    binding: Assignment
    trained: Trained
    clock: UnitClock
    # By that clock.
    began: float  # with its state there, and its gang formed
    ended: float

    @property
    def to_store(self) -> StoredState:
        """What is stored with its state."""
        trained, binding = self.trained, self.binding
        return StoredState(
            self.unit.epoch,
            self.unit.position,
            binding.shard,
            (*binding.visits, binding.shard),
            trained.n_samples,
            trained.loss,
            trained.state.nbytes,
        )

    @property
    def shard(self) -> int:
        """The shard that it visited."""
        return self.binding.shard

    @property
    def state(self) -> State:
        """The state after it."""
        return self.trained.state

    @property
    def done(self) -> UnitRecord:
        """The record of its end."""
        n_bytes = self.trained.state.nbytes
        return self._record(UnitRecord, self.ended, recovered=False, state_bytes=n_bytes)

    @property
    def piece(self) -> PieceRecord:
        """The record of what was trained until it was stopped, and stored until now."""
        return self._record(PieceRecord, self.clock.now())

    def check_consumed(self, n_there: int) -> None:
        """Raise an error if the unit has trained on none of the shard's samples."""
        if n_there and not self.trained.n_samples:
            raise NothingTrainedError(
                f"trial {self.unit.trial} trained on none of the {n_there} samples of shard "
                f"{self.shard}: see that train consumes the shard's batches and returns their "
                "n_samples (of TorchWorkload, that train_fn loops over batches)"
            )

    def _record(self, kind: type[Work], stop: float, **more: Any) -> Work:
        losses = self.trained.losses
        return kind(
            self.unit,
            self.worker,
            self.shard,
            self.clock.start,
            stop,
            hop=False,
            save_seconds=stop - self.ended,
            ready_seconds=self.began - self.clock.start,
            n_samples=self.trained.n_samples,
            loss=self.trained.loss,
            losses=(losses.n, losses.low, losses.high),
            **more,
        )


@dataclass(frozen=True, slots=True)
class Recovered:
    """A training unit whose result was found in the store."""

    state: State | StoredResult
    done: UnitRecord

    @property
    def shard(self) -> int:
        """The shard that it visited."""
        return self.done.shard


def visits_of(unit: Unit, binding: Assignment) -> Iterator[tuple[Unit, Assignment]]:
    """Yield the units of a task, and how each is bound.

    Examples
    --------
    >>> bound = Assignment(shard=2, visits=(0,), then=(3, 1))
    >>> for following, each in visits_of(Unit("train", 7, epoch=1, position=1), bound):
    ...     print(following.position, each.shard, each.visits)
    1 2 (0,)
    2 3 (0, 2)
    3 1 (0, 2, 3)
    """
    yield unit, binding
    for position, shard in enumerate(binding.then, unit.position + 1):
        visits = (*binding.visits, binding.shard)
        binding = replace(binding, shard=shard, visits=visits, n_pieces=0)
        yield unit._replace(position=position), binding
