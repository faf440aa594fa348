"""How a unit runs on its worker.

A training unit gets a state: the one that comes with it, one from the store, or what an earlier
attempt has left. It trains on a shard, alone or as the leader of a gang, until its end or until it
is stopped. Its state is stored and goes on as the task's result, or waits for the unit's next turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from distributed import Reschedule

from dagsel import messages
from dagsel.dispatch.events import GangBroke, UnitStarted, UnitTrains
from dagsel.dispatch.units import Unit
from dagsel.errors import DivergedError, GangBrokenError
from dagsel.execution.gang_parts import GangParts, How
from dagsel.execution.held_shards import HeldShards
from dagsel.execution.process import use_torch
from dagsel.execution.raising import Raising
from dagsel.execution.run_spec import RunSpec, StoredResult
from dagsel.execution.state_cache import Found, ScoredShard, StateCache, as_stored, until
from dagsel.execution.stops import Stops, own_turn
from dagsel.execution.visits import Recovered, UnitClock, Visited, visit_of, visits_of
from dagsel.messages import Assignment, Notice, PieceRecord, UnitRecord
from dagsel.state import State
from dagsel.workloads.base import ShouldStop, Trained, Workload
from dagsel.workloads.memory import with_halved

logger = logging.getLogger("dagsel")

#: The last state of a task, and records of all that it has done, in order.
Result: TypeAlias = tuple[State | StoredResult, list[UnitRecord | PieceRecord]]


class UnitRunner:
    """Runs a run's units on one worker, and holds the shards that they need.

    Tasks, and the threads of a gang's ranks, call it beside the thread that hears the dispatcher.

    Parameters
    ----------
    spec
        What the run is.
    workload
        Its workload.
    address
        Address of the worker.
    tell
        Tells the dispatcher something of a unit.
    tell_surely
        Likewise; returns when it knows.
    is_short_of_memory
        Whether the worker's states had better wait in the store alone if a unit is to take so many
        bytes.
    shards
        Holds the shards; by default in memory.
    raising
        Tells what units raise; by default to `tell`.
    in_turn
        Calls what trains or scores where units do; by default here.
    """

    def __init__(
        self,
        spec: RunSpec,
        workload: Workload,
        *,
        address: str,
        tell: Callable[[Notice], None],
        tell_surely: Callable[[Notice], None],
        is_short_of_memory: Callable[[int], bool],
        shards: HeldShards | None = None,
        raising: Raising | None = None,
        in_turn: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        self.raising = raising or Raising(workload, tell)
        self.shards = shards or HeldShards(spec.data, workload)
        self.counters = self.shards.counters
        self.states = StateCache(spec.run_dir.states, spec.data.n_shards, is_short_of_memory)
        self._spec, self._workload, self._in_turn = spec, workload, in_turn
        self._n_train = [size.n_train for size in spec.data.shard_sizes]
        self._address, self._tell, self._tell_surely = address, tell, tell_surely
        self._stops = Stops()
        self.gangs = GangParts(spec, workload, self.shards, address, tell, self.raising)

    def load(self, shard: int) -> int:
        """Read a shard and its validation shard from the data set and hold them."""
        return self.shards.load(shard)

    def train(
        self,
        unit: Unit,
        binding: Assignment,
        config: Mapping[str, Any],
        state: State | StoredResult | None,
        value: float | None = None,
        halvings: int = 0,
    ) -> Result:
        """Train a unit, and what follows in its task: return the last state, and records in order.

        `value` is the metric of the epoch before, for `Visit.last_value`. The samples that are
        trained on at once are halved so often.

        Raises
        ------
        Reschedule
            If it was stopped, be it as it waited for another unit, or its gang broke: it waits for
            its turn again.
        DivergedError
            If the loss is not a number.
        """
        how = How(config, value, halvings)
        with self._stops.of(unit, binding.attempt) as stop:
            turn = partial(self._take_turn, unit, binding, how, state, stop)
            store: Callable[[], Result] = self._in_turn(turn)
            return store()

    def _take_turn(
        self,
        unit: Unit,
        binding: Assignment,
        how: How,
        state: State | StoredResult | None,
        stop: threading.Event,
    ) -> Callable[[], Result]:
        """Train what a task trains, and score it; return what stores it.

        Where memory is short it is stored already: no other unit trains until then.
        """
        with own_turn(stop):
            self.raising.begin(alone=binding.alone)
            work, last, piece = self._train_all(unit, binding, how, state, stop)
            if last is None:
                assert piece is not None
                self._tell(piece)
                raise Reschedule
            if not self.states.has_room_beside(last.state):
                done = self._store(work, last, piece, [], binding)
                return lambda: done
            is_whole = len(work) == len(binding.then)
            scores = self._scores(unit, binding, how.config, last.state, stop) if is_whole else ()
            return partial(self._store, work, last, piece, [*scores], binding)

    def _train_all(
        self,
        unit: Unit,
        binding: Assignment,
        how: How,
        state: State | StoredResult | None,
        stop: threading.Event,
    ) -> tuple[list[UnitRecord], Visited | Recovered | None, PieceRecord | None]:
        """Train the units of a task one after the other, until one is stopped or raises.

        What raises after the first is left out: it raises again in a task of its own, which can
        say so. So is what would begin late, where they take longer than the dispatcher believed.

        Returns
        -------
        work, last, piece
            Records of the units before the last one that is done; that one; what was trained of the
            one that was stopped.
        """
        work = list[UnitRecord]()
        last: Visited | Recovered | None = None
        no_later = time.monotonic() + binding.at_once_s
        for each, bound in visits_of(unit, binding):
            try:
                next_ = self._train_next(each, bound, how, state, stop, is_told=last is None)
            except Exception:
                if last is None:
                    raise
                logger.debug("%s, in the task of %s", each, unit, exc_info=True)
                break
            if isinstance(next_, PieceRecord):
                return work, last, next_
            if last is not None:
                work.append(last.done)
            last = next_
            # While the next one trains there are three states: Dask has what the task began with.
            if last.shard != bound.shard or stop.is_set() or time.monotonic() >= no_later:
                break
            if not self.states.has_room_beside(last.state):
                break
            state, how = last.state, how._replace(value=None)
        return work, last, None

    def _train_next(
        self,
        unit: Unit,
        binding: Assignment,
        how: How,
        state: State | StoredResult | None,
        stop: threading.Event,
        *,
        is_told: bool,
    ) -> Visited | Recovered | PieceRecord:
        """Train a unit to its end, or until it is stopped; or find its result."""
        is_first = state is None and (unit.epoch, unit.position) == (1, 0)
        is_told = is_told and binding.gang == 1  # a gang's has not begun until all have come
        if is_told and (binding.attempt > 1 or not (is_first or isinstance(state, State))):
            self._tell(UnitStarted(unit, self._address))  # else it trains at once, and tells that
        self.counters.units_started += 1
        use_torch(self._spec.threads, self._spec.dtype)
        clock = UnitClock()
        found = self.states.recover(unit, binding) if binding.attempt > 1 else None
        if isinstance(found, Found):
            about = (unit, self._address, binding.shard, clock.start, clock.now())
            done = UnitRecord(*about, hop=False, recovered=True)
            return Recovered(found.state, as_stored(done, found.stored) if found.stored else done)
        begin = found or self.states.input(unit, state)
        if is_told:
            self._tell_of_begin(UnitTrains(unit, self._address), binding)
        if begin is None:
            seed = np.random.SeedSequence([self._spec.seed, unit.trial]).generate_state(1)[0]
            begin = State(self._workload.init(how.config, int(seed)).buffer, is_spare=True)
        trained, began = self._train(unit, begin, how, binding, stop, clock)
        visited = Visited(unit, self._address, binding, trained, clock, began, clock.now())
        if not trained.finished:
            return self._suspend(visited)
        if trained.diverged:
            raise DivergedError(
                f"the training loss of epoch {unit.epoch} is NaN; lower the learning rate, clip "
                "gradients, or look for NaN in the data"
            )
        visited.check_consumed(self._n_train[binding.shard])
        return visited

    def _tell_of_begin(self, notice: UnitStarted | UnitTrains, binding: Assignment) -> None:
        # If a suspect ends this process at once, the dispatcher has to know that it had begun.
        (self._tell_surely if binding.is_suspect else self._tell)(notice)

    def _train(
        self,
        unit: Unit,
        state: State,
        how: How,
        binding: Assignment,
        stop: threading.Event,
        clock: UnitClock,
    ) -> tuple[Trained, float]:
        """Train on a shard, alone or as the leader of a gang; also return when that began."""
        visit = visit_of(self._spec, unit, binding.shard, how.value)
        train = with_halved(self._workload, how.halvings).train
        shards = self.shards.use(binding.shard, "train")
        if binding.gang == 1:
            with shards as shard:
                began, should_stop = clock.now(), ShouldStop(stop, binding.max_seconds)
                alone = train(state, shard, how.config, visit=visit, should_stop=should_stop)
            return alone, began
        try:
            with shards as shard, self.gangs.lead(unit, binding, how, stop) as gang:
                self._tell_of_begin(UnitTrains(unit, self._address), binding)
                began, should_stop = clock.now(), ShouldStop(stop, binding.max_seconds)
                together = self.gangs.workload(how).train_gang(
                    state, shard, how.config, visit=visit, should_stop=should_stop, gang=gang
                )
                return together, began
        except GangBrokenError as error:
            if not stop.is_set():  # else the wait for the others was ended
                self._tell(GangBroke(unit, str(error)))
            raise Reschedule from error

    def _suspend(self, visited: Visited) -> PieceRecord:
        """Keep what was trained until the unit's next turn; return how far it came."""
        unit, binding, trained = visited.unit, visited.binding, visited.trained
        share = trained.n_samples / self._n_train[binding.shard]
        self.states.suspend(unit, trained.state, binding, replace(visited.to_store, share=share))
        return replace(visited.piece, share=share)

    def _store(
        self,
        work: list[UnitRecord],
        last: Visited | Recovered,
        piece: PieceRecord | None,
        scored: Sequence[ScoredShard],
        binding: Assignment,
    ) -> Result:
        """Store the last state of a task, unless it comes from there, and what it has scored.

        Return it, and all records: `work` has those of the units before the last one; a piece or
        scores followed.
        """
        then = [piece] if piece else []
        if isinstance(last, Recovered):
            return last.state, [*work, last.done, *then, *self.states.keep_scores(scored)]
        mine = replace(last.to_store, losses=tuple((done.n_samples, done.loss) for done in work))
        began = time.monotonic()
        kept, is_own = self.states.save(last.unit, last.state, mine, binding)
        done = [*work, replace(last.done, save_seconds=time.monotonic() - began)]
        if is_own:
            state = self.states.keep(last.unit, last.state)
            scores = self.states.keep_scores(scored)
            return state, [*work, as_stored(done[-1], kept), *then, *scores]
        # Another attempt, believed lost, was first, and this state's scores are not its own.
        found = StoredResult(last.unit.trial, last.unit.epoch, last.unit.position)
        done = [as_stored(each, until(kept, each.unit.position)) for each in done]
        return found, [*done, *then]

    def evaluate(
        self,
        unit: Unit,
        binding: Assignment,
        config: Mapping[str, Any],
        state: State | StoredResult,
        halvings: int = 0,
    ) -> UnitRecord:
        """Score a state on one validation shard: return a record of it, with its metrics.

        The samples that are scored at once are halved so often.

        Raises
        ------
        Reschedule
            If it was told to stop before its turn.
        CheckpointNotFoundError
            If only a later state is left of the end of the epoch that is to be scored.
        """
        how = How(config, halvings=halvings)
        with self._stops.of(unit, binding.attempt) as stop:
            score = partial(self._score, unit, binding, how, state, stop)
            scored: UnitRecord = self._in_turn(score)
            return scored

    def _score(
        self,
        unit: Unit,
        binding: Assignment,
        how: How,
        state: State | StoredResult,
        stop: threading.Event,
    ) -> UnitRecord:
        with own_turn(stop):
            self.raising.begin(alone=binding.alone)
            self._tell_of_begin(UnitStarted(unit, self._address), binding)
            clock = UnitClock()
            use_torch(self._spec.threads, self._spec.dtype)
            if isinstance(state, StoredResult) and unit.kind == "evaluate":
                self.states.check_end(unit, state)
            loaded = self.states.load(state) if isinstance(state, StoredResult) else state
            scored = self._evaluate(unit, how.config, loaded, clock, how.halvings)
            return self.states.save_scores(scored)

    def _scores(
        self,
        unit: Unit,
        binding: Assignment,
        config: Mapping[str, Any],
        state: State | StoredResult,
        stop: threading.Event,
    ) -> Iterator[ScoredShard]:
        """Score what a unit has trained, until it is told to stop, or memory is short.

        What raises here is left out: it raises again in a unit of its own, which can say so.
        """
        if isinstance(state, StoredResult):
            return
        for shard in binding.scores:
            if stop.is_set():
                return
            evaluation = unit._replace(kind="evaluate", position=shard)
            try:
                scored = self._evaluate(evaluation, config, state, UnitClock())
            except Exception:
                logger.debug("scoring %s on shard %d", unit, shard, exc_info=True)
                return
            yield scored
            if scored.kept is not None and not self.states.has_room_beside(scored.kept):
                return

    def _evaluate(
        self,
        unit: Unit,
        config: Mapping[str, Any],
        state: State,
        clock: UnitClock,
        halvings: int = 0,
    ) -> ScoredShard:
        workload = with_halved(self._workload, halvings)
        with self.shards.use(unit.position, "validation") as shard:
            scores = workload.evaluate(state, shard, config)
        times = (clock.start, clock.now())
        done = UnitRecord(unit, self._address, unit.position, *times, hop=False)
        told = {"n_samples": scores.n_samples, "metrics": scores.metrics, "halved": halvings}
        return ScoredShard(replace(done, **told), scores.kept)

    def is_idle(self) -> bool:
        """Whether no training unit runs, nor a part of a gang's."""
        return not self._stops.are_training() and not self.gangs.joined

    def stop(self, order: messages.StopUnit) -> None:
        """Stop a unit at its next batch, or before its first."""
        self._stops.tell(order.unit, order.attempt)
        self.gangs.abandon(order.unit, order.attempt)

    def stop_all(self) -> None:
        """Stop what trains at its next batch, and let nothing begin any more."""
        self._stops.tell_all()
        self.gangs.abandon_all()

    def drop(self, shard: int) -> None:
        """Forget a shard."""
        self.shards.drop(shard)

    def forget(self, unit: Unit) -> None:
        """Forget the state that a stopped unit has left in memory."""
        self.states.warm.pop(unit, None)

    def clear(self) -> None:
        """Forget shards and states, once what was told to stop has stored where it stopped."""
        self._stops.wait()
        self.shards.clear()
        self.states.warm.clear()
