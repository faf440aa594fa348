"""What a run has done: trials, epochs and units, folded from the entries of its journal.

A run writes its journal entry by entry and takes each one in with `Record.add` at once; a resumed
run reads the journal and takes the same entries in. So what a process knows after its death and
rebirth is what it knew before.

Entries are JSON objects. ``is`` says which:

- ``session``: a driver has begun ``at`` (seconds since the epoch), after ``seconds`` of others;
- ``turn``: an event, or the ``context`` of the start, and what the flow decided; with neither, what
  was decided over its head; ``flow``: its state at this moment;
- ``unit``: a unit is done;
- ``stored``: what a session that goes on found in the store of a trial's unreported epochs;
- ``round``: chains were sent; ``load``: a worker holds a shard; ``note``: something to know.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, TypeAlias

import pandas as pd

from dagsel.codec import Json
from dagsel.errors import SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Context,
    DeadlineReached,
    Decision,
    Direction,
    Event,
    Finish,
    Outcome,
    Reported,
    Stop,
    Train,
    TrialFailed,
    WorkersChanged,
    decode_decision,
    decode_event,
)
from dagsel.planning.rounds import Unit
from dagsel.tally import EpochTally

Entry: TypeAlias = dict[str, Json]
TrialState: TypeAlias = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What an epoch of a trial came to.

    Parameters
    ----------
    epoch
        From 1.
    value
        The metric that the search is about.
    metrics
        Mean of each validation metric.
    train_loss
        Mean training loss.
    seconds
        Since the run began.
    digest
        Checksum of the state after it; empty if unknown.
    """

    epoch: int
    value: float
    metrics: Mapping[str, float]
    train_loss: float
    seconds: float
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Adoption:
    """From which trial's state a trial went on, and with what configuration.

    Parameters
    ----------
    after
        The trial's epoch after which it did.
    source, source_epoch
        Whose state it took, as of which epoch.
    root
        The trial whose drawn configuration lies under it.
    config
        All that differs from that.
    """

    after: int
    source: int
    source_epoch: int
    root: int
    config: Mapping[str, Any]


@dataclass(slots=True)
class TrialRecord:
    """What became of a trial.

    Attributes
    ----------
    config
        Its present configuration.
    params
        The parameters that were drawn for it.
    state, reason, traceback
        How it ended, and why.
    epochs
        What its epochs came to.
    n_decided
        Epochs that it was given to train, from its first one on.
    adoptions
        The states of other trials that it went on from.
    tallies
        What is known of epochs that are under way.
    """

    number: int
    config: Mapping[str, Any]
    params: Mapping[str, Any]
    state: TrialState = "running"
    reason: str = ""
    traceback: str = ""
    epochs: list[EpochRecord] = field(default_factory=list)
    n_decided: int = 0
    adoptions: list[Adoption] = field(default_factory=list)
    tallies: dict[int, EpochTally] = field(default_factory=dict)

    @property
    def is_live(self) -> bool:
        """Whether it may still train."""
        return self.state == "running"

    @property
    def is_paused(self) -> bool:
        """Whether it lives and has nothing to train."""
        return self.is_live and self.n_decided == len(self.epochs)

    def follow(self, states: Sequence[Mapping[str, Any]], n_shards: int) -> None:
        """Bring its tallies in line with the store, whose word counts for what was trained.

        Parameters
        ----------
        states
            Of the newest readable state, and of the ends of unreported epochs before it, the epoch,
            the position and what was stored with it; in order.
        n_shards
            Training shards of the data set.
        """
        stored = {state["epoch"]: state for state in states}
        newest = max(stored, default=0)
        for epoch in range(len(self.epochs) + 1, self.n_decided + 1):
            tally = self.tallies.pop(epoch, EpochTally(n_shards))
            if epoch in stored:
                state = stored[epoch]
                tally.follow(state["visits"])
                tally.update(Unit("train", self.number, epoch, state["position"]), state)
            elif epoch < newest:  # it is over; of what was not heard any order will do
                visits = tally.begun.visits
                tally.follow([*visits, *(s for s in range(n_shards) if s not in visits)])
            else:
                tally.follow([])
            if tally.trained or tally.scored:
                self.tallies[epoch] = tally


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """One unit as it ran.

    Parameters
    ----------
    unit
        Which one.
    worker
        Address of the worker.
    shard
        The shard it visited.
    start, stop
        Seconds since the epoch, by the worker's clock.
    hop
        Whether the state came from another worker.
    recovered
        Whether a stored result was found instead of training again.
    state_bytes
        Size of the state that it gave; 0 for an evaluating unit.
    save_seconds
        How long storing that state took; the time before `stop` holds it.
    """

    unit: Unit
    worker: str
    shard: int
    start: float
    stop: float
    hop: bool
    recovered: bool
    state_bytes: int
    save_seconds: float = 0.0

    @classmethod
    def from_entry(cls, entry: Mapping[str, Any]) -> UnitRecord:
        """Read what the journal holds of a unit that is done."""
        return cls(
            Unit(*entry["unit"]),
            entry["worker"],
            entry["shard"],
            entry["start"],
            entry["stop"],
            entry["hop"],
            entry.get("recovered", False),
            entry.get("state_bytes", 0),
            entry.get("save_seconds", 0.0),
        )


@dataclass(frozen=True, slots=True)
class Best:
    """The best trial so far, and where its state is: a completed one if there is one."""

    trial: int
    epoch: int
    position: int
    value: float
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """Chains that were decided together.

    Parameters
    ----------
    number
        Number of the round in its run.
    epochs
        Trials and their epochs that are in it.
    start
        When it was sent: seconds since the epoch, by the driver's clock.
    """

    number: int
    epochs: frozenset[tuple[int, int]]
    start: float


@dataclass(slots=True)
class Record:
    """All that a run has done.

    Parameters
    ----------
    run
        Identifier of the run.
    n_shards
        Training shards of the data set.
    direction
        Whether smaller or larger values are better.

    Attributes
    ----------
    seconds
        Time since the run began when the last turn was taken, without the time that it lay dead.
    awaited
        `Ask` decisions that no `Asked` has answered.
    context
        What the flow was told at its start; None before.
    n_workers
        What the flow was last told of workers.
    visited
        Of each trial and epoch the shard at each position.
    """

    run: str
    n_shards: int = 1
    direction: Direction = "minimize"
    trials: dict[int, TrialRecord] = field(default_factory=dict)
    units: list[UnitRecord] = field(default_factory=list)
    rounds: list[RoundRecord] = field(default_factory=list)
    loads: list[tuple[str, int]] = field(default_factory=list)  # worker and shard
    visited: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    best: Best | None = None
    notes: list[str] = field(default_factory=list)
    context: Context | None = None
    awaited: deque[Ask] = field(default_factory=deque)
    n_sessions: int = 0
    n_epochs_decided: int = 0
    n_workers: int = 0
    seconds: float = 0.0
    finished: bool = False

    @classmethod
    def read(
        cls, run: str, n_shards: int, direction: Direction, entries: Iterable[Entry]
    ) -> Record:
        """Make the record of a run from its journal."""
        record = cls(run, n_shards, direction)
        for entry in entries:
            record.add(entry)
        return record

    def add(self, entry: Entry) -> None:
        """Take in an entry of the journal."""
        match entry["is"]:
            case "session":
                self.n_sessions += 1
            case "unit":
                self._add_unit(entry)
            case "turn":
                self._add_turn(entry)
            case "stored":
                self._add_stored(entry)
            case "round":
                epochs = frozenset((t, e) for t, a, b in entry["epochs"] for e in range(a, b))
                self.rounds.append(RoundRecord(entry["number"], epochs, entry["start"]))
            case "load":
                self.loads.append((entry["worker"], entry["shard"]))
            case "note":
                self.notes.append(entry["text"])

    def _add_unit(self, entry: Entry) -> None:
        done = UnitRecord.from_entry(entry)
        self.units.append(done)
        unit, trial = done.unit, self.trials.get(done.unit.trial)
        if unit.kind == "train":
            self.visited.setdefault((unit.trial, unit.epoch), {})[unit.position] = done.shard
        if trial is not None and trial.is_live and unit.epoch > len(trial.epochs):
            trial.tallies.setdefault(unit.epoch, EpochTally(self.n_shards)).add(unit, entry)

    def _add_stored(self, entry: Entry) -> None:
        trial, states = self.trials[entry["trial"]], entry["states"]
        for state in states:
            if state["epoch"] > len(trial.epochs):  # before, it may be another trial's state
                seen = self.visited.setdefault((trial.number, state["epoch"]), {})
                seen.update(enumerate(state["visits"]))
        trial.follow(states, self.n_shards)

    def _add_turn(self, entry: Entry) -> None:
        self.seconds = entry["seconds"]
        if "event" in entry:
            self._hear(decode_event(entry["event"]), entry)
        elif "context" in entry:
            self.context = Context(**entry["context"])
            self.n_workers = self.context.n_workers
        self.decide([decode_decision(decision) for decision in entry["decisions"]])

    def _hear(self, event: Event, entry: Entry) -> None:
        match event:
            case Asked(trials):
                if self.awaited:
                    self.awaited.popleft()
                params = dict(entry["params"])
                for trial in trials:
                    self.trials[trial] = TrialRecord(trial, {}, params[trial])
            case Reported(trial, epoch, value, metrics, seconds):
                tally = self.trials[trial].tallies.pop(epoch, None)
                loss, digest = (tally.train_loss, tally.digest) if tally else (float("nan"), "")
                done = EpochRecord(epoch, value, metrics, loss, seconds, digest)
                self.trials[trial].epochs.append(done)
            case TrialFailed(trial, reason):
                self._end(trial, "failed", reason, entry.get("traceback", ""))
            case WorkersChanged(n_workers):
                self.n_workers = n_workers
            case DeadlineReached():
                pass

    def decide(self, decisions: Iterable[Decision]) -> None:
        """Take in what a flow has decided.

        Raises
        ------
        SearchError
            If a decision cannot be taken; nothing of it is.
        """
        for decision in decisions:
            match decision:
                case Ask():
                    self.awaited.append(decision)
                case Train(trial, epochs):
                    self._live(trial, "trains").n_decided += epochs
                    self.n_epochs_decided += epochs
                case Stop(trial, reason, outcome):
                    self._stop(trial, reason, outcome)
                case Clone(source, target, config):
                    self._clone(source, target, config)
                case Finish():
                    for trial in [t.number for t in self.trials.values() if t.is_live]:
                        self._stop(trial, "the search has ended", "pruned")
                    self.finished = True

    def _live(self, number: int, what: str) -> TrialRecord:
        trial = self.trials.get(number)
        if trial is None or not trial.is_live:
            state = "unknown" if trial is None else trial.state
            raise SearchError(f"the flow {what} trial {number}, which is {state}")
        return trial

    def _clone(self, source: int, target: int, config: Mapping[str, Any]) -> None:
        origin, taker = self._live(source, "clones"), self._live(target, "clones onto")
        if not origin.epochs or not taker.epochs or not taker.is_paused:
            raise SearchError(
                f"the flow clones trial {source} onto trial {target}: both must have reported an "
                "epoch, and the target must be paused"
            )
        root, changes = source, dict[str, Any]()
        if origin.adoptions:
            root, changes = origin.adoptions[-1].root, dict(origin.adoptions[-1].config)
        changes |= config
        adoption = Adoption(len(taker.epochs), source, len(origin.epochs), root, changes)
        taker.adoptions.append(adoption)
        taker.config = {**origin.config, **config}

    def _stop(self, number: int, reason: str, outcome: Outcome) -> None:
        trial = self._live(number, "stops")
        is_complete = outcome == "complete" and bool(trial.epochs)
        self._end(number, "complete" if is_complete else "pruned", reason)

    def _end(self, number: int, state: TrialState, reason: str, traceback: str = "") -> None:
        trial = self.trials[number]
        trial.state, trial.reason, trial.traceback = state, reason, traceback
        trial.tallies.clear()
        self.n_epochs_decided -= trial.n_decided - len(trial.epochs)
        if state != "failed" and trial.epochs:
            last, is_complete = trial.epochs[-1], state == "complete"
            best = Best(number, last.epoch, self.n_shards - 1, last.value, is_complete)
            if self.best is None or self._rank(best) > self._rank(self.best):
                self.best = best

    def _rank(self, best: Best) -> tuple[bool, float, int]:
        # Of equal ones the first drawn, as in Optuna, whichever ended first.
        return best.is_complete, -Context(1, self.direction).loss(best.value), -best.trial

    def configure(self, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Give trials that were read from a journal the configurations that it cannot hold."""
        for number, config in configs.items():
            trial = self.trials[number]
            last = trial.adoptions[-1] if trial.adoptions else None
            trial.config = config if last is None else {**configs[last.root], **last.config}

    def order(self, trial: int, epoch: int) -> tuple[int, ...] | None:
        """Give the order of visits of an epoch that was trained to its end; None of another."""
        order = tuple(shard for _, shard in sorted(self.visited.get((trial, epoch), {}).items()))
        return order if sorted(order) == list(range(self.n_shards)) else None

    def visits(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Give the order of visits of each epoch of a trial that was trained to its end."""
        orders = {place: self.order(*place) for place in self.visited}
        return {place: order for place, order in orders.items() if order is not None}

    def differences(self, other: Record) -> list[str]:
        """Say in which epochs another record, of the same run repeated, has other results."""
        found = []
        for trial in self.trials.values():
            again = other.trials[trial.number].epochs if trial.number in other.trials else []
            for then, now in zip_longest(trial.epochs, again):
                name = f"trial {trial.number}, epoch {(then or now).epoch}"
                if then is None or now is None:
                    found.append(f"{name}: only one of the runs has it")
                elif not _same(then.metrics, now.metrics):
                    found.append(f"{name}: {dict(then.metrics)} then, {dict(now.metrics)} now")
                elif then.digest and now.digest and then.digest != now.digest:
                    found.append(f"{name}: the same metrics, another state")
        return found

    @property
    def n_live(self) -> int:
        """Trials that are neither complete nor pruned nor failed."""
        return sum(trial.is_live for trial in self.trials.values())

    @property
    def n_epochs(self) -> int:
        """Epochs that trials have ended."""
        return sum(len(trial.epochs) for trial in self.trials.values())

    @property
    def failures(self) -> list[TrialRecord]:
        """Trials that have failed."""
        return [trial for trial in self.trials.values() if trial.state == "failed"]

    def metrics(self) -> pd.DataFrame:
        """Give a row for each trial, epoch, split and metric."""
        rows = [
            (trial.number, epoch.epoch, split, name, value, epoch.seconds)
            for trial in self.trials.values()
            for epoch in trial.epochs
            for split, name, value in [
                ("train", "loss", epoch.train_loss),
                *(("validation", name, value) for name, value in epoch.metrics.items()),
            ]
        ]
        return pd.DataFrame(rows, columns=["trial", "epoch", "split", "name", "value", "seconds"])

    def timeline(self) -> pd.DataFrame:
        """Give a row for each unit that ran, in the order in which they ended."""
        rows = [
            (*u.unit, u.shard, u.worker, u.start, u.stop, u.hop, u.recovered, u.save_seconds)
            for u in self.units
        ]
        columns = ["kind", "trial", "epoch", "position", "shard", "worker", "start", "stop"]
        return pd.DataFrame(rows, columns=[*columns, "hop", "recovered", "save_seconds"])


def _same(these: Mapping[str, float], those: Mapping[str, float]) -> bool:
    """Whether metrics are the same numbers; NaN is the same as NaN."""
    return these.keys() == those.keys() and all(
        these[name] == those[name] or (these[name] != these[name] and those[name] != those[name])
        for name in these
    )
