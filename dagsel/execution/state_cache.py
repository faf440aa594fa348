"""Where the states of a worker's units come from and go: to its memory, the store, or both."""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from dagsel.dispatch.units import Unit
from dagsel.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from dagsel.execution.allocator import give_back_memory
from dagsel.execution.raising import asking_store, is_of_store
from dagsel.execution.run_spec import StoredResult
from dagsel.messages import Assignment, StoredState, UnitRecord
from dagsel.state import State
from dagsel.storage import CheckpointStore
from dagsel.storage.disk import retry_while, retry_while_full
from dagsel.storage.runs.checkpoints import Scoring

logger = logging.getLogger("dagsel")
T = TypeVar("T")

#: So long a store that fails is tried again, before its worker is held to be at fault.
PATIENCE_S = 10.0
#: What is waited for elsewhere: a full disk, and a store that nobody can reach.
_WAITED_FOR = {errno.ENOSPC, errno.EDQUOT}
_SCORING: dict[str, Scoring] = {"evaluate": "epoch", "check": "check"}
#: One more state of that size never makes a worker short of memory. To ask costs it 0.15 ms.
_LITTLE = 1_000_000
#: What the next unit takes, in states of that size: parameters, gradients and moments are 2 to 2.3
#: with common optimizers, and the state that it ends with is one more.
_OF_A_UNIT = 3


@dataclass(frozen=True, slots=True)
class Warm:
    """The state of a unit that was stopped, kept where it was."""

    state: State
    shard: int
    n_pieces: int


@dataclass(frozen=True, slots=True)
class Found:
    """A unit's result that was in the store."""

    state: State | StoredResult
    stored: StoredState | None  # None where a later state of the trial was found


class ScoredShard(NamedTuple):
    """A shard as it was scored, before that is stored or told."""

    done: UnitRecord
    kept: State | None  # for metrics of the whole set


class StateCache:
    """Keeps the states of a run's units on one worker.

    Parameters
    ----------
    store
        Where states are stored.
    n_shards
        Shards of the data set, which are the training units of an epoch.
    is_short_of_memory
        Whether states had better wait in the store alone if a unit is to take so many bytes.
    sleep
        Waits so many seconds.

    All that asks the store raises a `StoreFailedError` where that fails and does not recover soon.
    """

    def __init__(
        self,
        store: CheckpointStore,
        n_shards: int,
        is_short_of_memory: Callable[[int], bool],
        *,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.warm: dict[Unit, Warm] = {}
        self._store, self._n_shards = store, n_shards
        self._is_short_of_memory, self._sleep = is_short_of_memory, sleep

    def load(self, stored: StoredResult) -> State:
        """Read a state from the store, which has it."""
        place = (stored.trial, stored.epoch, stored.position)
        blob, _ = self._ask(lambda: self._store.load(*place, partial=stored.is_partial))
        return State(blob, is_spare=True)

    def input(self, unit: Unit, state: State | StoredResult | None) -> State | None:
        """Return the state that a unit begins with; None if its trial begins with it."""
        match state:
            case State():
                return state
            case StoredResult():
                return self.load(state)
            case None if unit.epoch == 1 and unit.position == 0:
                return None
            case None:
                return self.load(StoredResult(unit.trial, *before(unit, self._n_shards)))

    def check_end(self, unit: Unit, stored: StoredResult) -> None:
        """Raise an error if a state is not the one at the end of the epoch that a unit scores."""
        if (stored.epoch, stored.position) != (unit.epoch, self._n_shards - 1):
            raise CheckpointNotFoundError(
                f"{self._store.url}: the state at the end of epoch {unit.epoch} of trial "
                f"{unit.trial} is lost before it was scored on shard {unit.position}"
            )

    def recover(self, unit: Unit, binding: Assignment) -> State | Found | None:
        """Find what an earlier attempt at a unit has left here or in the store.

        Returns
        -------
        State or Found or None
            A state to go on from, the unit's result, or nothing. A later state of the trial says
            that the unit is done, and that its own was removed when it was not needed any more.

        Raises
        ------
        CheckpointCorruptError
            If the end of an epoch is damaged and the trial went on from it. It may still have to be
            scored, so a later state is no substitute: the driver has to go on from before it.
        """
        warm = self.warm.pop(unit, None)
        if warm is not None and (warm.shard, warm.n_pieces) == (binding.shard, binding.n_pieces):
            return warm.state
        return self._ask(lambda: self._find(unit, binding))

    def _find(self, unit: Unit, binding: Assignment) -> State | Found | None:
        """Find in the store what `recover` returns."""
        store, place, shard = self._store, (unit.epoch, unit.position), binding.shard
        damage: CheckpointCorruptError | None = None
        try:
            blob, meta = store.load(unit.trial, *place)
            stored = StoredState.read(place, meta)
            if goes_on(stored, binding):
                return Found(self.keep(unit, State(blob)), stored)
        except CheckpointNotFoundError:
            pass
        except CheckpointCorruptError as error:
            damage = error
        latest = store.latest(unit.trial)
        if latest is not None and latest > place:
            if damage is not None and unit.position == self._n_shards - 1:
                raise damage
            later = StoredResult(unit.trial, *latest)
            if latest[0] > unit.epoch:
                return Found(later, None)
            with contextlib.suppress(CheckpointError):
                _, meta = store.load(unit.trial, *latest)
                if goes_on(stored := StoredState.read(latest, meta), binding):
                    return Found(later, until(stored, unit.position))
        with contextlib.suppress(CheckpointError):
            blob, meta = store.load(unit.trial, *place, partial=True)
            stored = StoredState.read(place, meta)
            if goes_on(stored, binding) and stored.shard == shard:
                return State(blob, is_spare=True)
        return None

    def suspend(self, unit: Unit, state: State, binding: Assignment, stored: StoredState) -> None:
        """Store the state of a unit that was stopped, and keep it warm where memory allows."""
        store, buffer, meta = self._store, state.buffer, stored.meta
        place = (unit.trial, unit.epoch, unit.position)
        self._ask(lambda: store.save(*place, buffer, meta, partial=True))
        self.warm.pop(unit, None)
        if not self._is_short_beside(state):
            self.warm[unit] = Warm(state, binding.shard, binding.n_pieces + 1)

    def save(
        self, unit: Unit, state: State, stored: StoredState, binding: Assignment
    ) -> tuple[StoredState, bool]:
        """Store the last state of a task, unless another attempt at it was first.

        Parameters
        ----------
        unit, state, stored
            The task's last unit, the state after it, and what is stored with it.
        binding
            That of the task.

        Returns
        -------
        kept, is_own
            What is stored with the state that is kept, and whether that is this one: the same
            visits may give other bits elsewhere, as on a GPU.
        """
        store, meta = self._store, stored.meta
        place = (unit.trial, unit.epoch, unit.position)
        first = self._ask(lambda: store.save_first(*place, state.buffer, meta))
        digest, found = first[0], StoredState.read(place[1:], first[1])
        if not goes_on(found, binding):  # of an attempt that was lost, and then left behind
            self._ask(lambda: store.save(*place, state.buffer, meta))
            found = replace(stored, digest=digest)
        spare = binding.spare
        if spare is not None and spare[1] != self._n_shards - 1:
            self._ask(lambda: store.delete(unit.trial, *spare))  # the driver deletes ends of epochs
        return found, (found.visits, found.digest) == (stored.visits, digest)

    def save_scores(self, scored: ScoredShard) -> UnitRecord:
        """Store what a scored shard keeps for metrics of the whole set; return its record."""
        if scored.kept is not None:
            store, unit = self._store, scored.done.unit
            place = (unit.trial, _SCORING[unit.kind], unit.epoch, unit.position)
            buffer = scored.kept.buffer
            self._ask(lambda: store.save_scores(*place, buffer))
        return scored.done

    def keep_scores(self, scored: Iterable[ScoredShard]) -> Iterator[UnitRecord]:
        """Store what a task has scored, and yield its records, until one cannot be stored.

        A shard that is left out is scored again in a unit of its own, which can say why.
        """
        for each in scored:
            try:
                yield self.save_scores(each)
            except Exception:
                logger.debug("what %s keeps", each.done.unit, exc_info=True)
                return

    def has_room_beside(self, state: State | StoredResult) -> bool:
        """Whether there is memory for the next unit while this state stays."""
        is_little = isinstance(state, State) and state.nbytes <= _LITTLE
        return is_little or not self._is_short_beside(state)

    def keep(self, unit: Unit, state: State) -> State | StoredResult:
        """Keep a state in memory, or in the store alone when memory is short."""
        if self._is_short_beside(state):
            give_back_memory()
            if self._is_short_beside(state):
                return StoredResult(unit.trial, unit.epoch, unit.position)
        return state

    def _is_short_beside(self, state: State | StoredResult) -> bool:
        n_bytes = state.nbytes if isinstance(state, State) else 0
        return self._is_short_of_memory(_OF_A_UNIT * n_bytes)

    def _ask(self, call: Callable[[], T]) -> T:
        """Ask the store; wait while its disk is full, and shortly for whatever else fails there."""
        where = self._store.url
        with asking_store(where):
            return retry_while(
                _may_pass,
                lambda: retry_while_full(call, where),
                lambda error: f"{where} fails ({error}); trying again for {PATIENCE_S:g} s",
                f"{where} works again",
                patience_s=PATIENCE_S,
                sleep=self._sleep,
            )


def _may_pass(error: OSError) -> bool:
    is_waited_for = isinstance(error, ConnectionError) or error.errno in _WAITED_FOR
    return is_of_store(error) and not is_waited_for


def goes_on(stored: StoredState, binding: Assignment) -> bool:
    """Whether a state comes from the visits that its trial is known to have made before."""
    return stored.visits[: len(binding.visits)] == binding.visits


def before(unit: Unit, n_shards: int) -> tuple[int, int]:
    """Epoch and position of the unit that comes before in its trial's chain.

    Examples
    --------
    >>> before(Unit("train", trial=0, epoch=2, position=0), n_shards=4)
    (1, 3)
    """
    epoch, position = divmod((unit.epoch - 1) * n_shards + unit.position - 1, n_shards)
    return epoch + 1, position


def until(stored: StoredState, position: int) -> StoredState:
    """Return what is stored with a state as far as it is about an earlier unit of its epoch.

    Examples
    --------
    >>> stored = StoredState(1, 2, 0, (1, 2, 0), n_samples=4, loss=0.1, losses=((8, 0.5),))
    >>> [until(stored, at).shard for at in range(3)]
    [1, 2, 0]
    >>> [until(stored, at).loss for at in range(3)]
    [None, 0.5, 0.1]
    """
    if position == stored.position:
        return stored
    known = dict(enumerate(stored.losses, stored.position - len(stored.losses)))
    n_samples, loss = known.get(position, (None, None))
    visits = stored.visits[: position + 1]
    return StoredState(stored.epoch, position, visits[-1], visits, n_samples, loss)


def as_stored(done: UnitRecord, stored: StoredState) -> UnitRecord:
    """Return the record of a unit with what is stored with its state."""
    return replace(
        done,
        shard=stored.shard,
        state_bytes=stored.state_bytes,
        n_samples=stored.n_samples,
        loss=stored.loss,
        digest=stored.digest,
    )
