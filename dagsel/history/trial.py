"""What a run knows of one trial: its configuration, its epochs, how far it is and where it rests.

`dagsel.history.record` makes and changes these as it takes in the journal's entries. What is known
of an epoch before it is reported is a `dagsel.history.tally.EpochTally`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from dagsel.dispatch.units import Unit
from dagsel.flow import Losses, Pause, Paused, Train
from dagsel.history.tally import EpochTally
from dagsel.messages import PieceRecord, StatePlace, StoredState, UnitRecord, UnitWork
from dagsel.workloads.raised import Raised, RanOut

TrialState: TypeAlias = Literal["running", "complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """What an epoch of a trial came to."""

    epoch: int  # from 1
    value: float  # the metric that the search is about
    metrics: Mapping[str, float]  # mean of each validation metric
    train_loss: float  # mean training loss
    seconds: float  # since the run began
    digest: str = ""  # checksum of the state after it; empty if unknown


@dataclass(frozen=True, slots=True)
class Adoption:
    """From which trial's state a trial went on, and with what configuration."""

    after: int  # the trial's epoch after which it did
    # Whose state it took, as of which epoch.
    source: int
    source_epoch: int
    root: int  # the trial whose drawn configuration lies under it
    config: Mapping[str, Any]  # all that differs from that
    value: float  # the metric of that state
    # The parameters that were drawn for that trial.
    drawn_params: Mapping[str, Any] = field(default_factory=dict)


class Lineage(NamedTuple):
    """A configuration: that which was drawn for a trial, and what a search has changed in it."""

    root: int  # the trial
    changes: Mapping[str, Any]
    drawn_params: Mapping[str, Any]  # the parameters that were drawn for it

    @property
    def params(self) -> dict[str, Any]:
        """The parameters: those that were drawn, as far as they were not changed."""
        return {name: self.changes.get(name, value) for name, value in self.drawn_params.items()}


@dataclass(frozen=True, slots=True)
class Scored:
    """A state of a trial that was scored: at the end of an epoch, or where the trial was paused."""

    values: tuple[float, ...]  # of each metric that the search is about
    epochs: float  # how far the trial had trained
    place: StatePlace  # where its state is
    check: int = 0  # the number of the check that has scored it, from 1; 0 at the end of an epoch
    # What it was trained with, if that is not the trial's own: a copy is scored as its source was.
    lineage: Lineage | None = None

    @property
    def value(self) -> float:
        """The metric that the search is about, of several the first one."""
        return self.values[0]


@dataclass(frozen=True, slots=True)
class Best:
    """The best trial that has ended so far, and where its state is.

    Parameters
    ----------
    trial
        Number of the trial.
    epoch
        Number of the epoch after which it was scored.
    position
        Shards of that epoch that it had trained on.
    value
        Its value: the metric of the search.
    is_complete
        Whether the trial has trained to its end.
    is_partial
        Whether the state is one in the middle of a shard.
    check
        Number of the check whose state was copied, if the trial has trained on since; else 0.

    Examples
    --------
    >>> Best(trial=3, epoch=5, position=0, value=0.97)
    Best(trial=3, epoch=5, position=0, value=0.97, is_complete=True, is_partial=False, check=0)
    """

    trial: int
    epoch: int
    position: int
    value: float
    is_complete: bool = True
    is_partial: bool = False  # in the middle of the unit at this position
    check: int = 0  # the number of the check whose state was copied, if it was trained on since


@dataclass(slots=True, repr=False)
class TrialRecord:
    """What became of a trial.

    Examples
    --------
    >>> TrialRecord(7, {}, {"lr": 0.1, "width": 64}, state="failed", reason="ValueError: no")
    <trial 7: failed after 0 epochs, lr=0.1, width=64: ValueError: no>
    """

    number: int
    config: Mapping[str, Any]  # its present configuration
    params: Mapping[str, Any]  # the parameters that were drawn for it
    is_feasible: bool = True  # whether it meets the constraints that its space has set
    drawn: Mapping[str, Any] = field(default_factory=dict)  # the configuration that was drawn
    attrs: Mapping[str, Any] = field(default_factory=dict)  # what it was enqueued with, for a space
    # How it ended, and why.
    state: TrialState = "running"
    reason: str = ""
    traceback: str = ""
    raised: Raised | None = None  # the error of its workload that it failed by, if it was that
    warning: str = ""  # what is odd about its results, if anything is
    epochs: list[EpochRecord] = field(default_factory=list)  # what its epochs came to
    n_decided: int = 0  # epochs that it was given to train, from its first one on
    # The states of other trials that it went on from.
    adoptions: list[Adoption] = field(default_factory=list)
    # What is known of epochs that are under way.
    tallies: dict[int, EpochTally] = field(default_factory=dict)
    # On how many workers it trains, before which others, and for how long it may.
    gang: int = 1
    priority: float = 0.0
    seconds_left: float | None = None
    is_held: bool = False  # whether it was told to rest, and not to go on
    paused_by_user: bool = False  # whether a command has paused it; the flow does not notice
    pausing: Pause | None = None  # what asked it to rest, until the flow was told that it does
    share: float = 0.0  # how much is trained of the unit in which it was stopped
    # Seconds of training and training losses since it was last told to train.
    trained_s: float = 0.0
    losses: Losses = field(default_factory=Losses)
    kept: Scored | None = None  # the state that it is worth: the best one, or the last
    # What its state at the end of its last epoch is worth; it may be another trial's since then.
    last_values: tuple[float, ...] = (math.nan,)
    last_lineage: Lineage | None = None  # whose merit that is, if it is another trial's
    n_checks: int = 0  # how often it was scored where it was paused
    is_scored: bool = False  # whether it rests where it was scored
    lacks_kept: bool = False  # its kept state was deleted, and is made again as it trains on
    former: tuple[TrialState, str] | None = None  # how it had ended, and why, before it trained on
    n_told: int = 0  # how often it was told to train or to rest
    # On how many workers it was when it was stopped to go on at once, and when it ceased to train;
    # None if it was not.
    cut: tuple[int, float] | None = None
    # What each change of its number of workers has cost: seconds in which it did not train.
    switches: list[float] = field(default_factory=list)
    n_switches_told: int = 0  # of how many of these the flow has heard
    ran_out: list[RanOut] = field(default_factory=list)  # units that had too little memory

    def __repr__(self) -> str:
        n = len(self.epochs)
        told = [f"{self.state} after {n} epoch{'s' * (n != 1)}"]
        told += [] if self.value is None else [f"value {self.value:.4g}"]
        told += [f"{name}={value!r}" for name, value in self.params_kept.items()]
        why = f": {self.why}" if self.why and self.state != "complete" else ""
        return f"<trial {self.number}: {', '.join(told)}{why}>"

    @property
    def why(self) -> str:
        """Why it ended, in one line, and where its workload has raised."""
        return self._why(self.raised.place if self.raised is not None else "")

    @property
    def why_short(self) -> str:
        """Why it ended, with the name of the file alone."""
        return self._why(Path(self.raised.place).name if self.raised is not None else "")

    def _why(self, place: str) -> str:
        where = f" ({' in '.join(place.rsplit(' ', 1))})" if place else ""
        return f"{' '.join(self.reason.split())}{where}"

    @property
    def is_live(self) -> bool:
        """Whether it may still train."""
        return self.state == "running"

    @property
    def is_paused(self) -> bool:
        """Whether it lives and has nothing to train."""
        return self.is_live and self.n_decided == len(self.epochs)

    @property
    def has_work(self) -> bool:
        """Whether it has epochs that are not trained to their end."""
        last = self.tallies.get(self.n_decided)
        return self.n_decided > len(self.epochs) and (last is None or not last.is_trained)

    def progress(self, n_shards: int) -> float:
        """How far it has trained, in epochs."""
        done = self._n_trained
        return done + (self._n_units(done + 1) + self.share) / n_shards

    def place(self, n_shards: int) -> StatePlace | None:
        """Where its newest state is in the store; None before there is one."""
        done = self._n_trained
        n_units = self._n_units(done + 1)
        if self.share:
            return StatePlace(done + 1, n_units, is_partial=True)
        if n_units:
            return StatePlace(done + 1, n_units - 1)
        return StatePlace(done, n_shards - 1) if done else None

    def _n_units(self, epoch: int) -> int:
        return len(self.tallies[epoch].trained) if epoch in self.tallies else 0

    @property
    def _n_trained(self) -> int:
        trained = [epoch for epoch, tally in self.tallies.items() if tally.is_trained]
        return max(trained, default=len(self.epochs))

    @property
    def value(self) -> float | None:
        """The metric that the search is about, of several the first, of the state that is kept."""
        return None if self.kept is None else self.kept.value

    @property
    def values(self) -> tuple[float, ...]:
        """The metrics that the search is about, of the state that is kept; empty if none is."""
        return () if self.kept is None else self.kept.values

    def value_before(self, epoch: int) -> float | None:
        """Return the metric of the state that an epoch begins with; None if it is not known."""
        for adoption in reversed(self.adoptions):
            if adoption.after == epoch - 1:
                return adoption.value
        return self.epochs[epoch - 2].value if 2 <= epoch <= len(self.epochs) + 1 else None

    @property
    def copied_check(self) -> int:
        """The number of the check whose copy is its kept state; 0 if it is in its own place."""
        if self.kept is None or (self.is_scored and self.kept.check == self.n_checks):
            return 0
        return self.kept.check

    def allow(self, train: Train) -> None:
        """Take in that it may train on."""
        self.n_decided += train.epochs
        self.gang, self.priority, self.seconds_left = train.gang, train.priority, train.seconds
        self.is_held, self.pausing, self.is_scored = False, None, False
        self.n_told += 1
        self.trained_s, self.losses = 0.0, Losses()

    def reopen(self, *, has_kept: bool) -> None:
        """Take in that it trains on after its end, and whether its kept state is stored."""
        self.former = (self.state, self.reason)
        self.state, self.reason = "running", ""
        self.n_decided, self.share, self.cut = len(self.epochs), 0.0, None
        self.paused_by_user = False  # that was before it ended
        self.lacks_kept = not has_kept

    def rest(
        self, event: Paused, place: StatePlace | None, values: tuple[float, ...]
    ) -> Scored | None:
        """Take in that it rests, and where its state is; return what that is worth, if known."""
        self.is_held, self.pausing = True, None
        if not values or place is None:
            return None
        self.n_checks += 1
        self.is_scored = True
        if event.epochs == len(self.epochs):
            return None  # that is known from the end of its epoch
        return Scored(values, event.epochs, place, self.n_checks)

    def run_out(self, told: RanOut) -> None:
        """Take in that a unit had too little memory: it is done again, with fewer samples at once.

        An evaluation is done again on all shards, so that one epoch is scored in one way.
        """
        self.ran_out.append(told)
        if told.unit.kind == "evaluate":
            for epoch in self.tallies.keys() & set(range(told.unit.epoch, self.n_decided + 1)):
                self.tallies[epoch].scored.clear()

    def counts(self, done: UnitRecord) -> bool:
        """Whether a unit's result counts; not if it was scored otherwise than its epoch is now."""
        unit = done.unit
        return unit.kind == "train" or done.halved == self.n_halvings(unit)

    def n_halvings(self, unit: Unit) -> int:
        """Return how often the samples are halved that a unit computes at once."""
        noted = [told.unit for told in self.ran_out]
        return sum(it.kind == unit.kind and it[2:] <= unit[2:] for it in noted)

    def had_run_out(self, unit: Unit) -> RanOut | None:
        """Return how this unit had run out of memory before; None if it had not."""
        return next((told for told in self.ran_out if told.unit == unit), None)

    def warn(self, text: str) -> None:
        """Take in that something is odd about it; the first time counts."""
        self.warning = self.warning or text

    def adopt(self, origin: TrialRecord, config: Mapping[str, Any]) -> None:
        """Take in that it goes on from another trial's state, with a changed configuration.

        From there it is worth what that state is, whatever it was worth before.
        """
        # One without epochs was drawn for that, with a configuration of its own.
        under = origin if self.epochs else self
        root, before, drawn = origin.lineage if self.epochs else self._own
        source = (origin.number, len(origin.epochs), root)
        changes, value = {**before, **config}, origin.last_values[0]
        self.adoptions.append(Adoption(len(self.epochs), *source, changes, value, drawn))
        if self.epochs:
            self.is_scored, self.last_values = False, origin.last_values
            self.last_lineage = origin.last_lineage or origin.lineage
            self.is_feasible = origin.is_feasible
        self.config = {**under.config, **config}

    @property
    def lineage(self) -> Lineage:
        """What it trains with now."""
        return self._lineage(self.adoptions)

    @property
    def _own(self) -> Lineage:
        return Lineage(self.number, {}, self.params)

    def _lineage(self, adoptions: Sequence[Adoption]) -> Lineage:
        last = adoptions[-1] if adoptions else None
        return self._own if last is None else Lineage(last.root, last.config, last.drawn_params)

    def params_at(self, epoch: int) -> dict[str, Any]:
        """Return the parameters that an epoch was trained with."""
        return self._lineage([it for it in self.adoptions if it.after < epoch]).params

    @property
    def kept_lineage(self) -> Lineage:
        """What the state was trained with that it is worth."""
        return self.lineage if self.kept is None else self.kept.lineage or self.lineage

    @property
    def params_now(self) -> dict[str, Any]:
        """The parameters that it has now: some searches change those that were drawn."""
        return self.lineage.params

    @property
    def params_kept(self) -> dict[str, Any]:
        """The parameters that the state was trained with that it is worth."""
        return self.kept_lineage.params

    @property
    def worth_is_copied(self) -> bool:
        """Whether what it is worth is another trial's merit, of which it has gone on."""
        return self.kept is not None and self.kept.lineage is not None

    def spend(self, work: UnitWork) -> None:
        """Count what a training unit, or a piece of one, has taken."""
        self._note_switch(work)
        self.share = work.share if isinstance(work, PieceRecord) else 0.0
        self.trained_s += work.stop - work.start
        if work.losses is not None:
            self.losses += Losses(*work.losses)

    def _note_switch(self, work: UnitWork) -> None:
        if self.cut is not None and work.gang != self.cut[0] and not work.recovered:
            self.switches.append(max(0.0, work.start + work.ready_seconds - self.cut[1]))
        is_cut = isinstance(work, PieceRecord) and work.share > 0
        goes_on = is_cut and not self.is_held and self.seconds_left is None
        self.cut = (work.gang, work.stop - work.save_seconds) if goes_on else None

    def follow(self, states: Sequence[StoredState], n_shards: int) -> None:
        """Bring its tallies in line with the store, which is right about what was trained.

        Parameters
        ----------
        states
            The newest readable state, and before it the ends of unreported epochs, in order.
        n_shards
            Training shards of the data set.
        """
        self.share = 0.0  # where the store holds a partial state, it is trained on from there
        stored = {state.epoch: state for state in states}
        newest = max(stored, default=0)
        for epoch in range(len(self.epochs) + 1, self.n_decided + 1):
            tally = self.tallies.pop(epoch, EpochTally(n_shards))
            if epoch in stored:
                tally.follow(stored[epoch].visits)
                tally.update(stored[epoch].position, stored[epoch])
            elif epoch < newest:  # it is over; of what was not heard any order will do
                visits = tally.begun.visits
                tally.follow([*visits, *(s for s in range(n_shards) if s not in visits)])
            else:
                tally.follow([])
            if tally.trained or tally.scored:
                self.tallies[epoch] = tally

    def differences(self, other: TrialRecord | None) -> list[str]:
        """List in what this trial has other results in a repeated run."""
        found = []
        value = None if other is None else other.value
        if self.kept is not None and self.kept.place.is_partial and value != self.value:
            found.append(
                f"trial {self.number}: worth {self.value} then, in the middle of an epoch, where "
                f"nothing is repeated, and {value} now"
            )
        for then, now in zip_longest(self.epochs, [] if other is None else other.epochs):
            name = f"trial {self.number}, epoch {(then or now).epoch}"
            if then is None or now is None:
                found.append(f"{name}: only one of the runs has it")
            elif not _same(then.metrics, now.metrics):
                found.append(f"{name}: {dict(then.metrics)} then, {dict(now.metrics)} now")
            elif then.digest and now.digest and then.digest != now.digest:
                found.append(f"{name}: the same metrics, another state")
        return found


def _same(these: Mapping[str, float], those: Mapping[str, float]) -> bool:
    """Whether metrics are the same numbers; NaN is the same as NaN."""
    return these.keys() == those.keys() and all(
        these[name] == those[name] or (these[name] != these[name] and those[name] != those[name])
        for name in these
    )
