"""The stored states of a run's trials: what there is, what may go, and who goes on from what.

What is left of a trial that is taken up again is decided by `dagsel.driver.recovery`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any

from dagsel.codec import Json
from dagsel.dispatch.units import Begun
from dagsel.driver.protocols import States
from dagsel.errors import CheckpointError, RunDirError
from dagsel.flow import Context, Decision, Flow, decode_event, encode, load_state
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.storage.disk import retry_while_full

logger = logging.getLogger("dagsel")


@dataclass(slots=True)
class StoredStates:
    """The states of a run's trials.

    Parameters
    ----------
    states
        Where they are.
    record
        What has happened.
    adapt
        Turns a state of one configuration into one of another (`Clone`).
    """

    states: States
    record: Record
    adapt: Callable[[bytes, Any, Any], bytes]
    _kept: int | None = None  # the best trial, whose states stay though it has ended
    _copied: dict[int, int] = field(default_factory=dict)  # number of the last check, by trial
    _mended_from: dict[int, object] = field(default_factory=dict)  # the state then, by trial

    # ---- what there is

    def end_of(self, trial: TrialRecord) -> tuple[int, int]:
        """Give epoch and position of the last unit that a trial has reported."""
        return len(trial.epochs), self.record.n_shards - 1

    def look_up(self, trial: TrialRecord) -> list[dict[str, Json]]:
        """Look up a trial's newest state, and the ends of its unreported epochs before that."""
        found = self.states.load_latest(trial.number)
        if found is None:
            return []
        newest, _, meta = found
        states = [{**meta, "epoch": newest[0], "position": newest[1]}]
        for epoch in reversed(range(len(trial.epochs) + 1, newest[0])):
            end = (epoch, self.record.n_shards - 1)
            before = self.states.load_latest(trial.number, end)
            if before is not None and before[0] == end:
                states.insert(0, {**before[2], "epoch": end[0], "position": end[1]})
        return states

    def find_partial(self, plan: Continuation) -> tuple[Continuation, float]:
        """Let a unit that was stopped in the middle go on there, if its state is in the store.

        Returns
        -------
        plan, share
            The plan, and how much of the unit is trained.
        """
        first = plan.begun[0] if plan.begun else Begun()
        if not plan.epochs or len(first.visits) == self.record.n_shards:
            return plan, 0.0
        place = (plan.trial, plan.epochs.start, len(first.visits))
        try:
            _, meta = self.states.load(*place, partial=True)
        except CheckpointError:
            return plan, 0.0
        if tuple(meta["visits"][:-1]) != first.visits:
            return plan, 0.0
        begun = (replace(first, partial=meta["shard"]), *plan.begun[1:])
        return replace(plan, begun=begun), meta.get("share", 0.0)

    def is_news(self, trial: TrialRecord) -> bool:
        """Whether a trial would go on from another state than when its state was last unreadable.

        A state may be what was saved, and still nothing that the workload can read.
        """
        newest = [(s["epoch"], s["position"], s["digest"]) for s in self.look_up(trial)[-1:]]
        is_new = self._mended_from.get(trial.number) != newest
        self._mended_from[trial.number] = newest
        return is_new

    # ---- whose state another trial goes on from

    def adopt(self, trial: TrialRecord) -> str:
        """Give a trial the state of the one that it goes on from.

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
        retry_while_full(lambda: self.states.save(*goal, adapted, meta), "the state of a clone")
        return ""

    def adopt_again(self, trial: TrialRecord) -> str:
        """Make up for a driver that died between deciding and adopting; as `adopt` otherwise."""
        if trial.adoptions and trial.adoptions[-1].after == len(trial.epochs):
            found = self.states.load_latest(trial.number)
            is_old = found is None or found[0] <= self.end_of(trial)
            if is_old and (found is None or found[2].get("adoptions") != len(trial.adoptions)):
                return self.adopt(trial)
        return ""

    # ---- what a trial is worth if it is stopped now

    def keep_scored(self, trial: TrialRecord) -> None:
        """Copy the state that a trial was scored with before it is trained on.

        It is the trial's model until another one is scored.
        """
        number, check = len(trial.checks), trial.check
        if check is None or trial.is_scored or self._copied.get(trial.number) == number:
            return
        epoch, position, is_partial = astuple(check.place)
        place = (trial.number, number, epoch, position)
        keep = partial(self.states.keep_check, *place, partial=is_partial)
        try:
            retry_while_full(keep, "the state of a check")
        except CheckpointError as error:
            logger.warning("what trial %d was scored with is lost: %s", trial.number, error)
        self._copied[trial.number] = number

    # ---- what is not needed any more

    def drop_end(self, trial: int, epoch: int) -> None:
        """Drop the state at an epoch's end."""
        self.states.delete(trial, epoch, self.record.n_shards - 1)

    def drop_ended(self) -> None:
        """Drop the states of all trials that have ended but the best."""
        self._kept = self._best
        live = {trial.number for trial in self.record.trials.values() if trial.is_live}
        for number in self.record.trials.keys() - live - {self._kept}:
            self.states.drop(number)

    def ended(self, trial: int) -> None:
        """Drop the states of a trial that has just ended, or of the best if it is better."""
        best = self._best
        for number in (trial, self._kept):
            if number is not None and number != best:
                self.states.drop(number)
        self._kept = best

    @property
    def _best(self) -> int | None:
        return None if self.record.best is None else self.record.best.trial


@dataclass(frozen=True, slots=True)
class Continuation:
    """Epochs that a trial has to train, and what is done of them.

    Parameters
    ----------
    trial
        Its number.
    epochs
        Which; none if nothing is left.
    begun
        What is done of the first ones.
    """

    trial: int
    epochs: range
    begun: tuple[Begun, ...] = ()


def reconcile(
    trial: TrialRecord, n_shards: int, newest: Mapping[str, Any] | None
) -> Continuation | None:
    """Plan what is left of a live trial whose record follows the store (`TrialRecord.follow`).

    Parameters
    ----------
    trial
        Its record.
    n_shards
        Training shards of the data set.
    newest
        Epoch, position and visits of its newest readable state; None if there is none.

    Returns
    -------
    plan
        None if states that the trial needs are lost.

    Examples
    --------
    >>> trial = TrialRecord(0, {}, {}, n_decided=2)
    >>> state = {"epoch": 1, "position": 1, "shard": 0, "visits": [2, 0]}
    >>> trial.follow([state], n_shards=3)
    >>> reconcile(trial, 3, state).begun
    (Begun(visits=(2, 0), scored=frozenset(), partial=None),)
    """
    n_reported = len(trial.epochs)
    first, begun = n_reported + 1, list[Begun]()
    if newest is None:
        if n_reported:
            return None
    elif (newest["epoch"], newest["position"]) < (n_reported, n_shards - 1):
        # Epochs that were reported are trained once more, and not scored.
        first, everything = newest["epoch"], frozenset(range(n_shards))
        begun = [Begun((), everything) for _ in range(first, n_reported + 1)]
        begun[0] = Begun(tuple(newest["visits"]), everything)
    for epoch in range(n_reported + 1, trial.n_decided + 1):
        if epoch not in trial.tallies:
            break
        begun.append(trial.tallies[epoch].begun)
    return Continuation(trial.number, range(first, trial.n_decided + 1), tuple(begun))


def catch_up(flow: Flow, entries: Sequence[Mapping[str, Json]], url: str) -> None:
    """Give a flow the state that it had when the last entry was written.

    The last kept state is read, and what happened since is put to the flow once more: it must
    decide as it did then.

    Parameters
    ----------
    flow
        In its initial state.
    entries
        The run's journal.
    url
        Where it lies, for the error.

    Raises
    ------
    RunDirError
        If the flow decides otherwise than the journal says it did.
    """
    kept = [place for place, entry in enumerate(entries) if entry["is"] == "flow"]
    if kept:
        load_state(flow, entries[kept[-1]]["state"])
    for entry in entries[kept[-1] + 1 if kept else 0 :]:
        decisions = _decide(flow, entry)
        if decisions is None:
            continue
        decided = [encode(decision) for decision in decisions]
        if json.dumps(decided) != json.dumps(entry["decisions"]):
            raise RunDirError(
                f"{url}: the flow decides {decided} where it decided {entry['decisions']} before; "
                "resume with the version of the flow that the run began with"
            )


def _decide(flow: Flow, entry: Mapping[str, Json]) -> list[Decision] | None:
    if "context" in entry:
        return flow.start(Context(**entry["context"]))
    if "event" in entry:
        return flow.handle(decode_event(entry["event"]))
    return None
