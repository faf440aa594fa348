"""The way of a unit on its worker.

A training unit gets a state: the one that comes with it, one from the store, or what an earlier
attempt has left. It trains on a shard, alone or as the leader of a gang, until its end or until it
is stopped. Its state is stored and goes on as the task's result, or waits for the unit's next turn.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from distributed import Reschedule

from dagsel.dispatch.units import Unit
from dagsel.errors import DivergedError, GangBrokenError
from dagsel.execution.messages import Assignment, RunSpec, StoredResult
from dagsel.execution.process import use_torch_threads
from dagsel.execution.state_cache import Found, StateKeeper, before
from dagsel.state import State
from dagsel.workloads.base import Trained, Visit, Workload, never
from dagsel.workloads.gang.gang import Gang, GangWorkload, join_gang, lead_gang

logger = logging.getLogger("dagsel")


@dataclass(slots=True)
class Held:
    """A shard as a worker holds it: ready for training and for scoring."""

    train: Any
    validation: Any
    n_bytes: int


@dataclass(slots=True)
class Counters:
    """What a worker has read and run."""

    shard_bytes_read: int = 0
    units_started: int = 0


class UnitRunner:
    """Runs a run's units on one worker, and holds the shards that they need.

    Tasks, and the threads of a gang's ranks, call it beside the thread that hears the dispatcher.

    Parameters
    ----------
    spec
        What the run is.
    workload
        Its workload.
    host
        Where other machines reach this one.
    tell
        Tells the dispatcher something of a unit.
    is_short_of_memory
        Whether the worker's states had better wait in the store alone.
    """

    def __init__(
        self,
        spec: RunSpec,
        workload: Workload,
        *,
        host: str,
        tell: Callable[..., None],
        is_short_of_memory: Callable[[], bool],
    ) -> None:
        self.shards: dict[int, Held] = {}
        self.counters = Counters()
        self.keeper = StateKeeper(spec.run_dir.states, spec.data.n_shards, is_short_of_memory)
        self._spec, self._workload = spec, workload
        self._host, self._tell = host, tell
        self._training = threading.Lock()  # a worker trains one unit at a time, in a gang or not
        self._stops: dict[Unit, threading.Event] = {}
        self._stop_early: set[tuple[Unit, int]] = set()  # told to stop before they began
        self._gathering: dict[tuple[Unit, int], Callable[[], None]] = {}  # ends the wait for others
        self._assists: set[tuple[Unit, int]] = set()  # parts in gangs that others lead

    def load(self, shard: int) -> int:
        """Read a shard and its validation shard from the data set and hold them."""
        if shard not in self.shards:
            data, prepare = self._spec.data, self._workload.prepare
            train, validation = data.shard(shard), data.validation_shard(shard)
            n_bytes = sum(array.nbytes for array in (*train.values(), *validation.values()))
            self.shards[shard] = Held(prepare(train), prepare(validation), n_bytes)
            self.counters.shard_bytes_read += n_bytes
        return self.shards[shard].n_bytes

    def train(
        self,
        unit: Unit,
        binding: Assignment,
        config: Mapping[str, Any],
        state: State | StoredResult | None,
    ) -> tuple[State | StoredResult, dict[str, Any]]:
        """Run a training unit: a state in, the next one out, and a report of it.

        Raises
        ------
        Reschedule
            If it was stopped, or its gang broke: it waits for its turn again.
        DivergedError
            If the loss is not a number.
        """
        stop = self._stops[unit] = threading.Event()
        if (unit, binding.attempt) in self._stop_early:
            stop.set()
        self._tell("started", unit=list(unit))
        self.counters.units_started += 1
        use_torch_threads(self._spec.threads)
        start = time.time()
        try:
            found = self.keeper.recover(unit, binding) if binding.attempt > 1 else None
            if isinstance(found, Found):
                times = {"start": start, "stop": time.time()}
                return found.state, found.meta | {"recovered": True} | times
            begin = found or self._input(unit, config, state)
            self._tell("trains", unit=list(unit))
            leash = Leash(stop, binding.max_seconds, binding.max_batches)
            trained, began = self._train(unit, begin, config, binding, leash)
            times = {"start": start, "ready_seconds": began - start}
            if not trained.finished:
                self._suspend(unit, binding, trained, times)
                raise Reschedule
            if trained.diverged:
                raise DivergedError(
                    f"trial {unit.trial}: the training loss of epoch {unit.epoch} is NaN"
                )
            return self._finish(unit, binding, trained, times)
        finally:
            self._stops.pop(unit, None)
            self._stop_early.discard((unit, binding.attempt))

    def _input(
        self, unit: Unit, config: Mapping[str, Any], state: State | StoredResult | None
    ) -> State:
        match state:
            case State():
                return state
            case StoredResult():
                return self.keeper.load(state)
            case None if unit.epoch == 1 and unit.position == 0:
                seeds = np.random.SeedSequence([self._spec.seed, unit.trial])
                return self._workload.init(config, int(seeds.generate_state(1)[0]))
            case None:
                epoch, position = before(unit, self._spec.data.n_shards)
                return self.keeper.load(StoredResult(unit.trial, epoch, position))

    def _train(
        self, unit: Unit, state: State, config: Mapping[str, Any], binding: Assignment, leash: Leash
    ) -> tuple[Trained, float]:
        """Train on a shard, alone or as the leader of a gang; also gives when that began."""
        shard, visit = self.shards[binding.shard].train, self._visit(unit, binding.shard)
        with self._training:
            if binding.gang == 1:
                began = time.time()
                alone = self._workload.train(state, shard, config, visit=visit, should_stop=leash)
                return alone, began
            try:
                with self._lead(unit, binding) as gang:
                    gang.send(cloudpickle.dumps(config))
                    began = time.time()
                    together = self._gang_workload.train_gang(
                        state, shard, config, visit=visit, should_stop=leash, gang=gang
                    )
                    return together, began
            except GangBrokenError as error:
                self._tell("broke", unit=list(unit), reason=str(error))
                raise Reschedule from error
            finally:
                self._gathering.pop((unit, binding.attempt), None)

    def _suspend(
        self, unit: Unit, binding: Assignment, trained: Trained, times: Mapping[str, float]
    ) -> None:
        """Keep what was trained until the unit's next turn, and tell how far it came."""
        trained_at = time.time()
        share = trained.n_samples / self._spec.data.shard_sizes[binding.shard].n_train
        about = _about(binding, trained) | {"share": share}
        self.keeper.suspend(unit, trained.state, binding, about)
        so_far = {"n_samples": trained.n_samples, "loss": trained.loss, "losses": _losses(trained)}
        so_far |= {"share": share, "shard": binding.shard}
        self._tell("preempted", unit=list(unit), **so_far, **_stopped(times, trained_at))

    def _finish(
        self, unit: Unit, binding: Assignment, trained: Trained, times: Mapping[str, float]
    ) -> tuple[State | StoredResult, dict[str, Any]]:
        """Store the unit's state and give it on."""
        trained_at = time.time()
        kept = self.keeper.save(unit, trained.state, _about(binding, trained))
        told = _stopped(times, trained_at) | {"losses": _losses(trained)}
        report = {"recovered": False} | kept | told
        if kept["shard"] != binding.shard:  # another attempt, believed lost, was first
            return StoredResult(unit.trial, unit.epoch, unit.position), report
        return self.keeper.keep(unit, trained.state), report

    def evaluate(
        self, unit: Unit, config: Mapping[str, Any], state: State | StoredResult
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Run an evaluating unit: a state's metrics on one validation shard, and a report of it."""
        start = time.time()
        self._tell("started", unit=list(unit))
        use_torch_threads(self._spec.threads)
        loaded = self.keeper.load(state) if isinstance(state, StoredResult) else state
        scores = self._workload.evaluate(loaded, self.shards[unit.position].validation, config)
        report = {"start": start, "shard": unit.position, "n_samples": scores.n_samples}
        return scores.metrics, report | {"metrics": scores.metrics, "stop": time.time()}

    def _visit(self, unit: Unit, shard: int) -> Visit:
        ends_epoch = unit.position == self._spec.data.n_shards - 1
        return Visit(self._spec.seed, unit.trial, unit.epoch, shard, ends_epoch)

    def _lead(self, unit: Unit, binding: Assignment) -> AbstractContextManager[Gang]:
        """Form a gang: the dispatcher sends the others here."""
        attempt = binding.attempt
        return lead_gang(
            self._host,
            size=binding.gang,
            gather=lambda port: self._tell("gathers", unit=list(unit), attempt=attempt, port=port),
            waits=partial(self._gathering.__setitem__, (unit, attempt)),
            **self._gang(unit, attempt),
        )

    def assist(self, **call: Any) -> None:
        """Train in a gang that another worker leads, in a thread of its own."""
        self._assists.add((call["unit"], call["attempt"]))
        threading.Thread(target=self._assist, kwargs=call, name="dagsel-gang", daemon=True).start()

    def _assist(
        self, unit: Unit, attempt: int, shard: int, rank: int, size: int, host: str, port: int
    ) -> None:
        """Train in a gang that another worker leads. What goes wrong, the leader is told."""
        use_torch_threads(self._spec.threads)
        about = self._gang(unit, attempt)
        try:
            with (
                self._training,
                join_gang(host, port, rank=rank, size=size, **about) as gang,
            ):
                config = cloudpickle.loads(gang.receive())
                visit = self._visit(unit, shard)
                self._gang_workload.train_gang(
                    None,
                    self.shards[shard].train,
                    config,
                    visit=visit,
                    should_stop=never,
                    gang=gang,
                )
        except Exception:  # the leader has it too, and says what became of the unit
            logger.debug("rank %d of the gang of %s", rank, unit, exc_info=True)
        finally:
            self._assists.discard((unit, attempt))

    def abandon(self, unit: Unit, attempt: int) -> None:
        """End the wait of a gang's leader: one of the others will not come."""
        give_up = self._gathering.get((unit, attempt))
        if give_up is not None:
            threading.Thread(target=give_up, name="dagsel-gang", daemon=True).start()

    def _gang(self, unit: Unit, attempt: int) -> dict[str, Any]:
        name = f"{unit.trial}-{unit.epoch}-{unit.position}-{attempt}"
        timeout_s, secret = self._spec.gang_timeout_s, self._spec.secret
        return {"name": name, "timeout_s": timeout_s, "secret": secret}

    @property
    def _gang_workload(self) -> GangWorkload:
        assert isinstance(self._workload, GangWorkload), "checked before the trial began"
        return self._workload

    def is_idle(self) -> bool:
        """Whether no training unit runs, nor a part of a gang's."""
        return not self._stops and not self._assists

    def stop(self, unit: Unit, attempt: int) -> None:
        """Tell a unit to stop at its next batch, or before its first."""
        self._stop_early.add((unit, attempt))
        stop = self._stops.get(unit)
        if stop is not None:
            stop.set()

    def stop_all(self) -> None:
        """Tell what trains to stop at its next batch."""
        for stop in list(self._stops.values()):
            stop.set()

    def drop(self, shard: int) -> None:
        """Let go of a shard."""
        self.shards.pop(shard, None)

    def cool(self, unit: Unit) -> None:
        """Let go of the state that a stopped unit has left in memory."""
        self.keeper.warm.pop(unit, None)

    def clear(self) -> None:
        """Let go of shards and states."""
        self.shards.clear()
        self.keeper.warm.clear()


def _about(binding: Assignment, trained: Trained) -> dict[str, Any]:
    """Give what is stored with a state."""
    return {
        "shard": binding.shard,
        "visits": [*binding.visits, binding.shard],
        "n_samples": trained.n_samples,
        "loss": trained.loss,
        "state_bytes": trained.state.nbytes,
    }


def _stopped(times: Mapping[str, float], trained_at: float) -> dict[str, float]:
    """Add to a unit's times when it was over, and how long its state took to be stored."""
    stop = time.time()
    return {**times, "stop": stop, "save_seconds": stop - trained_at}


def _losses(trained: Trained) -> list[float]:
    return [trained.losses.n, trained.losses.low, trained.losses.high]


class Leash:
    """Says at each batch boundary whether a unit has to stop there.

    Parameters
    ----------
    stop
        Set when the unit is told to stop.
    max_seconds, max_batches
        What it may take; None for no bound.
    """

    __slots__ = ("_batches_left", "_deadline", "_stop")

    def __init__(
        self, stop: threading.Event, max_seconds: float | None, max_batches: int | None
    ) -> None:
        self._stop = stop
        self._deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
        self._batches_left = math.inf if max_batches is None else max_batches

    def __call__(self) -> bool:
        """Say whether to stop; asked once a batch."""
        self._batches_left -= 1
        return self._stop.is_set() or self._batches_left <= 0 or time.monotonic() >= self._deadline
