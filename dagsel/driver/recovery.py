"""How trials and the flow go on after an interruption, and which states are stored until then."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from dagsel.dispatch.units import Begun, Chain, Unit
from dagsel.driver.protocols import States
from dagsel.driver.scoring import Scores
from dagsel.errors import CheckpointCorruptError, CheckpointError, RunDirError
from dagsel.flow import DECISIONS, Clone, Decision, Flow, Reported, Stop, Train, load_state
from dagsel.flow.events import as_heard
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import Entry, FlowState, StoredState, Turn
from dagsel.storage.disk import retry_while_full

logger = logging.getLogger("dagsel")

#: Returns the order of visits of a trial and an epoch; None leaves it to the dispatcher.
Orders: TypeAlias = Callable[[int, int], "tuple[int, ...] | None"]


@dataclass(slots=True)
class StoredStates:
    """The states of a run's trials."""

    states: States  # where they are
    record: Record  # what has happened
    # Turns a state of one configuration into one of another (`Clone`).
    adapt: Callable[[bytes, Any, Any], bytes]
    scores: Scores  # what trials are scored with
    _kept: set[int] = field(default_factory=set)  # the best trials, whose states stay at their end
    # Of each live trial the reported epochs whose ends may be stored, with the checksums of these;
    # empty where it is not known.
    _ends: dict[int, dict[int, str]] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)  # trials with ends that may be needed no more
    _copied: dict[int, int] = field(default_factory=dict)  # number of the last check, by trial
    _mended_from: dict[int, object] = field(default_factory=dict)  # the state then, by trial

    # ---- what there is

    def end_of(self, trial: TrialRecord) -> tuple[int, int]:
        """Return epoch and position of the last unit that a trial has reported."""
        return self._end(len(trial.epochs))

    def _end(self, epoch: int) -> tuple[int, int]:
        return epoch, self.record.n_shards - 1

    def look_up(self, trial: TrialRecord) -> list[StoredState]:
        """Return the ends of a trial's unreported epochs, and its newest state that is of use.

        An unreported epoch is still to be scored. So if its end cannot be read, states after it
        are of no use: the trial goes on from before it.
        """
        self.scores.forget_lost(trial)
        newest, ends = self._read(trial), list[StoredState]()
        if newest is None:
            return []
        for epoch in range(len(trial.epochs) + 1, newest.epoch):
            end = (epoch, self.record.n_shards - 1)
            before = self._read(trial, end)
            if before is not None and before not in ends:  # it is, if all of this epoch is lost
                ends.append(before)
            if before is None or (before.epoch, before.position) != end:
                return ends
        return [*ends, newest]

    def _read(
        self, trial: TrialRecord, at_most: tuple[int, int] | None = None
    ) -> StoredState | None:
        """Read a trial's newest state up to a place; None if there is none of its present model."""
        found = self.states.load_latest(trial.number, at_most)
        if found is None:
            return None
        place, _, meta = found
        try:
            state = StoredState.read(place, meta)
            if sorted({*state.visits}) != sorted(state.visits) or len(state.visits) != place[1] + 1:
                raise CheckpointCorruptError(f"{state.visits} are no visits to position {place[1]}")
        except CheckpointCorruptError as error:
            logger.warning("trial %d goes on from an earlier state: %s", trial.number, error)
            return self._read(trial, (place[0], place[1] - 1))
        if trial.adoptions:  # before that, it had another model
            n_adoptions, after = len(trial.adoptions), trial.adoptions[-1].after
            is_old = place <= (after, self.record.n_shards - 1)
            if is_old and state.adoptions != n_adoptions:
                return None
        return state

    def go_on_from(self, trial: TrialRecord, newest: StoredState | None) -> None:
        """Remove the states of a trial that goes on from before them; they are made again."""
        number, n_epochs = trial.number, len(trial.epochs)
        last = (0, 0) if newest is None else (newest.epoch, newest.position)
        stored = self.states.list(number)
        if max(stored, default=last) > last:
            for is_partial in (False, True):
                for place in self.states.list(number, partial=is_partial):
                    if place > last:
                        self.states.delete(number, *place, partial=is_partial)
        ends = {epoch for epoch, position in stored if position == self.record.n_shards - 1}
        made_anew = range(last[0], n_epochs + 1)
        found = (epoch for epoch in (*ends, *made_anew) if 0 < epoch <= n_epochs)
        self._ends[number] = dict.fromkeys(found, "")

    def find_partial(self, plan: Continuation) -> tuple[Continuation, float]:
        """Continue a unit that was stopped in the middle, if its state is in the store.

        Returns
        -------
        plan, share
            The plan, and how much of the unit is trained.
        """
        first = plan.begun[0] if plan.begun else Begun()
        if not plan.epochs or len(first.visits) == self.record.n_shards:
            return plan, 0.0
        place = (plan.epochs.start, len(first.visits))
        try:
            _, meta = self.states.load(plan.trial, *place, partial=True)
            state = StoredState.read(place, meta)
        except CheckpointError:
            return plan, 0.0
        if state.visits[:-1] != first.visits:
            return plan, 0.0
        begun = (replace(first, partial=state.shard), *plan.begun[1:])
        return replace(plan, begun=begun), state.share

    def drop_part(self, unit: Unit) -> None:
        """Remove what is stored of the part of a unit that is trained: it begins anew."""
        if unit.kind == "train":
            self.states.delete(unit.trial, unit.epoch, unit.position, partial=True)

    def is_news(self, trial: TrialRecord) -> bool:
        """Whether a trial would continue from another state than when its state was unreadable.

        The store may read a state that the workload cannot read.
        """
        newest = [(s.epoch, s.position, s.digest) for s in self.look_up(trial)[-1:]]
        is_new = self._mended_from.get(trial.number) != newest
        self._mended_from[trial.number] = newest
        return is_new

    # ---- whose state another trial goes on from

    def adopt(self, trial: TrialRecord) -> str:
        """Store the state of the trial that another one continues from as that one's own.

        Returns
        -------
        str
            Why it cannot have it; empty if it has.
        """
        adoption, n_shards = trial.adoptions[-1], self.record.n_shards
        place = (adoption.source_epoch, n_shards - 1)
        found = self.states.load_latest(adoption.source, place)
        if found is None or found[0] != place:
            return f"the state of trial {adoption.source} that it was to go on from is lost"
        _, blob, meta = found
        try:
            adapted = self.adapt(blob, self.record.trials[adoption.source].config, trial.config)
        except Exception as error:  # noqa: BLE001 - the workload's own code may raise anything
            return f"{type(error).__name__}: {error}"
        kept = {name: value for name, value in meta.items() if name != "digest"}
        meta = {**kept, "adoptions": len(trial.adoptions)}
        goal = (trial.number, *self.end_of(trial))
        ends, n_epochs = self._ends.get(trial.number, {}), len(trial.epochs)
        if n_epochs in ends:  # its own state there is replaced
            ends[n_epochs] = ""
        retry_while_full(lambda: self.states.save(*goal, adapted, meta), "the state of a clone")
        return ""

    def check_clone(self, source: TrialRecord, config: Mapping[str, Any]) -> None:
        """Raise an error if the state of a trial cannot go on with another configuration."""
        found = self.states.load_latest(source.number, self.end_of(source))
        if found is not None:  # else the clone fails, and says why
            self.adapt(found[1], source.config, config)

    def adopt_again(self, trial: TrialRecord) -> str:
        """Call `adopt` if the driver before this one was interrupted before it could."""
        if trial.adoptions and trial.adoptions[-1].after == len(trial.epochs):
            found = self.states.load_latest(trial.number)
            is_old = found is None or found[0] <= self.end_of(trial)
            if is_old and (found is None or found[2].get("adoptions") != len(trial.adoptions)):
                return self.adopt(trial)
        return ""

    # ---- what a trial is worth if it is stopped now

    def is_kept_lost(self, trial: TrialRecord) -> bool:
        """Whether the best state of a trial cannot be read, and its last epoch's is another one."""
        kept, n_epochs = trial.kept, len(trial.epochs)
        if kept is None or not n_epochs or trial.lacks_kept:
            return False
        if not kept.check and kept.place.epoch == n_epochs:
            return False
        epoch, position, is_partial = kept.place
        try:
            if trial.copied_check:
                self.states.load_check(trial.number, trial.copied_check)
            else:
                self.states.load(trial.number, epoch, position, partial=is_partial)
        except CheckpointError as error:
            logger.warning("the best state of trial %d is lost: %s", trial.number, error)
            return True
        return False

    def keep_scored(self, trial: TrialRecord) -> None:
        """Copy the state that a trial was scored with before it is trained on.

        It is the trial's model until a better one is scored, or another one with ``keep="last"``.
        """
        kept, number = trial.kept, trial.n_checks
        is_copied = self._copied.get(trial.number) == number
        # One that an earlier check has scored was copied when it was trained on.
        if kept is None or not number or kept.check != number or trial.is_scored or is_copied:
            return
        epoch, position, is_partial = kept.place
        place = (trial.number, number, epoch, position)
        keep = partial(self.states.keep_check, *place, partial=is_partial)
        try:
            retry_while_full(keep, "the state of a check")
        except CheckpointError as error:
            logger.warning("what trial %d was scored with is lost: %s", trial.number, error)
        self._copied[trial.number] = number

    # ---- what is not needed any more

    def reported(self, trial: int, epoch: int) -> None:
        """Take in that an epoch was reported, whose end is stored."""
        digest = self.record.trials[trial].epochs[epoch - 1].digest
        self._ends.setdefault(trial, {})[epoch] = digest
        self._told.add(trial)
        self.scores.drop(trial, epoch)

    def drop_ends(self) -> None:
        """Drop the ends of reported epochs, but each trial's last one and the one that it keeps."""
        for number in sorted(self._told & self._ends.keys()):
            trial, ends = self.record.trials[number], self._ends[number]
            needed = {len(trial.epochs)}
            if trial.kept is not None and not trial.kept.check:
                needed.add(trial.kept.place.epoch)
            for epoch in sorted(ends.keys() - needed):
                self.states.delete(number, *self._end(epoch), digest=ends.pop(epoch))
        self._told.clear()

    def drop_ended(self) -> None:
        """Drop the states of all trials that have ended but the best ones."""
        self._kept = self._top
        live = {trial.number for trial in self.record.trials.values() if trial.is_live}
        ended = self.record.trials.keys() - live - self._kept - self.record.interrupted
        for number in ended.intersection(self.states.trials()):  # each that is asked for is a look
            self.states.drop(number)

    def ended(self, trial: int) -> None:
        """Drop the states of a trial that has just ended, or of the one whose place it takes."""
        top = self._top
        self._ends.pop(trial, None)
        for number in sorted({trial, *self._kept} - top - self.record.interrupted):
            self.states.drop(number)
        self._kept = top

    @property
    def _top(self) -> set[int]:
        return {best.trial for best in self.record.top}


@dataclass(frozen=True, slots=True)
class Continuation:
    """Epochs that a trial has to train, and what is done of them."""

    trial: int  # its number
    epochs: range  # which; none if nothing is left
    begun: tuple[Begun, ...] = ()  # what is done of the first ones

    def chain(self, record: Record, orders: Orders, values: tuple[float | None, ...] = ()) -> Chain:
        """Return the units to be sent.

        `orders` says in which order shards are visited, `values` what the training of each epoch
        is told of the one before.
        """
        order = tuple(
            # What was scored was scored after these visits in this order.
            orders(self.trial, epoch) or record.order(self.trial, epoch)
            for epoch in self.epochs
        )
        trial = record.trials[self.trial]
        ran_out = tuple(told.unit for told in trial.ran_out)
        how = (order, record.validates, self.begun, values, bool(trial.adoptions), ran_out)
        return Chain(self.trial, self.epochs, record.n_shards, *how)


def reconcile(trial: TrialRecord, n_shards: int, newest: StoredState | None) -> Continuation | None:
    """Plan what is left of a live trial whose record follows the store (`TrialRecord.follow`).

    Parameters
    ----------
    trial
        Its record.
    n_shards
        Training shards of the data set.
    newest
        Its newest readable state; None if there is none.

    Returns
    -------
    plan
        None if states that the trial needs are lost: it has gone on from another trial's.

    Examples
    --------
    >>> trial = TrialRecord(0, {}, {}, n_decided=2)
    >>> state = StoredState(epoch=1, position=1, shard=0, visits=(2, 0))
    >>> trial.follow([state], n_shards=3)
    >>> reconcile(trial, 3, state).begun
    (Begun(visits=(2, 0), scored=frozenset(), partial=None),)
    """
    n_reported = len(trial.epochs)
    first, begun = n_reported + 1, list[Begun]()
    if newest is None and trial.adoptions:
        return None
    if newest is None or (newest.epoch, newest.position) < (n_reported, n_shards - 1):
        # Epochs that were reported are trained once more, and not scored.
        everything = frozenset(range(n_shards))
        first, visits = (1, ()) if newest is None else (newest.epoch, newest.visits)
        begun = [Begun((), everything) for _ in range(first, n_reported + 1)]
        begun[:1] = [Begun(visits, everything)] if n_reported else []
    for epoch in range(n_reported + 1, trial.n_decided + 1):
        if epoch not in trial.tallies:
            break
        begun.append(trial.tallies[epoch].begun)
    return Continuation(trial.number, range(first, trial.n_decided + 1), tuple(begun))


def catch_up(flow: Flow, entries: Sequence[Entry], url: str) -> None:
    """Bring a flow to the state that it had when the last entry was written.

    The last snapshot of its state is read, and the events since are put to the flow once more: it
    must decide as it did then. Without a snapshot that fits the flow, all events are put to it.

    Parameters
    ----------
    flow
        In its initial state.
    entries
        The run's journal.
    url
        Where it is, for the error.

    Raises
    ------
    RunDirError
        If the flow decides otherwise than the journal says.
    """
    infeasible, trained, first = set[int](), set[int](), _after_snapshot(flow, entries)
    for number, turn in enumerate(entries):
        if not isinstance(turn, Turn):
            continue
        if number >= first:
            _decide_again(flow, turn, infeasible, url)
        infeasible.update(turn.infeasible)
        if isinstance(turn.event, Reported):
            trained.add(turn.event.trial)
        for decision in turn.decisions:  # from there on a trial breaks what its source breaks
            if isinstance(decision, Clone) and decision.target in trained:
                told = infeasible.add if decision.source in infeasible else infeasible.discard
                told(decision.target)


def _decide_again(flow: Flow, turn: Turn, infeasible: Set[int], url: str) -> None:
    if turn.context is not None:
        decisions = flow.start(turn.context)
    elif turn.event is not None:
        decisions = flow.handle(as_heard(turn.event, infeasible.__contains__))
    else:
        return
    now, then = (list(map(_decided, these)) for these in (decisions, turn.decisions))
    if json.dumps(now) != json.dumps(then):
        raise RunDirError(
            f"{url}: the flow decides {now} where it decided {then} before; resume with the "
            "version of the flow that the run began with"
        )


def _decided(decision: Decision) -> Any:
    """Return what a decision does: the words and the priorities of a version may be others."""
    match decision:
        case Stop():
            decision = replace(decision, reason="")
        case Train():
            decision = replace(decision, priority=0.0)
    return DECISIONS.encode(decision)


def _after_snapshot(flow: Flow, entries: Sequence[Entry]) -> int:
    """Load the last snapshot of a flow's state; return where the entries after it begin."""
    for index, entry in reversed(list(enumerate(entries))):
        if isinstance(entry, FlowState):
            try:
                load_state(flow, entry.state)
            except ValueError:  # of a version whose flow had another state
                return 0
            return index + 1
    return 0
