"""Keeps workers busy, or lets them go, when fewer trials are left than there are workers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import Any

from dagsel.driver.clock import MOMENT_S
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.planning.scaling import fit
from dagsel.planning.small_population import (
    RESTART_S,
    SWITCH_S,
    Efficiency,
    Policy,
    full,
    gang_for,
    is_worth_a_switch,
)


@dataclass(frozen=True, slots=True)
class Change:
    """What is to change."""

    note: str = ""  # what to say of it
    trials: tuple[int, ...] = ()  # trials that go on with another number of workers at once
    n_workers: int | None = None  # workers that are wanted; None leaves them as they are


@dataclass(slots=True)
class IdleWorkers:
    """How few trials are trained on many workers, as `dagsel.planning.small_population` decides.

    A search procedure that sets gangs itself, or a number of workers, is left alone. A trial that
    trains for a stated time keeps its number of workers until that is over. Gangs change their
    size only where that saves more time than stopping the trials costs, or where the trials need
    more workers than there are. Workers are released once they have been idle for as long as it
    takes to get them back.
    """

    policy: Policy = "hop"  # what the user wants
    # e(g) of a trial as it was measured before; None if it was not, or none ever is. What the trial
    # itself has shown counts more, from two units on each of two numbers of workers on.
    profiled: Callable[[TrialRecord], Efficiency | None] | None = None
    # Raises an error if so many workers cannot train a configuration together.
    check: Callable[[Mapping[str, Any], int], None] = lambda config, size: None
    costs: bool = False  # whether there is a budget, and the cluster can shrink
    why_no_gangs: str = ""  # why no trial can be trained in a gang; empty if some can
    why_no_release: str = ""  # why the cluster cannot shrink; empty if it can
    _gang: int = 1
    _members: frozenset[int] = frozenset()  # the trials that train in gangs
    _before: int = 0  # workers before some were let go
    _wanted: int | None = None  # workers, if some were let go
    _idle_since: float | None = None
    _most: int = 0  # trials since then
    _n_read: int = 0
    _times: dict[int, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    _shown: dict[int, tuple[int, Efficiency]] = field(default_factory=dict)
    _profiles: dict[tuple[int, int], Efficiency | None] = field(default_factory=dict)
    _refusals: dict[tuple[int, int, int], str] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def may_widen(self, trial: TrialRecord) -> bool:
        """Whether a trial may be given several workers before it has shown what it gains."""
        is_known = self.policy == "gang" or (self.policy == "auto" and self._profile(trial))
        return bool(is_known) and not self.why_no_gangs

    def gang_of(self, trial: int) -> int:
        """Workers on which a trial is trained."""
        return self._gang if trial in self._members else 1

    @property
    def decides_at(self) -> float | None:
        """When workers that are idle will be let go, unless they are needed; None if none are."""
        return None if self._idle_since is None else self._idle_since + RESTART_S

    def settle(self, record: Record, n_workers: int, seconds: float) -> list[Change]:
        """Decide anew.

        Parameters
        ----------
        record
            What has happened.
        n_workers
            Workers that are there.
        seconds
            Since the run began.
        """
        if self.policy == "hop" or not n_workers or self._has_no_choice:
            return []
        if record.wanted is not None or record.gives_gangs:
            self._gang, self._members = 1, frozenset()
            return []
        is_as_ever = not self._members and self._wanted is None and self._idle_since is None
        if is_as_ever and _are_enough(record, n_workers):
            return []
        trials = [trial for trial in record.trials.values() if _is_busy(trial)]
        if not trials:
            return []
        changes = [
            self._divide(record, trials, n_workers),
            self._scale(len(trials), n_workers, seconds),
        ]
        return [change for change in changes if change is not None]

    @property
    def _has_no_choice(self) -> bool:
        """Whether no gang can be known to be faster, and no worker is to be let go."""
        return self.policy == "auto" and self.profiled is None and not self.costs

    # ---- gangs

    def _divide(
        self, record: Record, trials: Sequence[TrialRecord], n_workers: int
    ) -> Change | None:
        if self.policy == "release" or (self._gang == 1 and n_workers < 2 * len(trials)):
            return None
        if self.policy == "auto" and not self._n_read and not all(map(self._profile, trials)):
            return None  # the times are read once they can tell something
        self._read(record)
        known = {trial.number: self._efficiency(trial) for trial in trials}
        efficiency = _least(list(known.values()))
        gang = gang_for(
            self.policy,
            len(trials),
            n_workers,
            efficiency=efficiency,
            fits=lambda size: self._fits(trials, size),
        )
        is_possible = self._gang * len(trials) <= n_workers and self._fits(trials, self._gang)
        if gang != self._gang and is_possible:
            left = [self._left_s(t, record.n_shards, known[t.number]) for t in trials]
            longest = None if None in left else max(s for s in left if s is not None)
            cost = median(record.switches or [SWITCH_S])
            if not is_worth_a_switch(self._gang, gang, longest, efficiency, switch_s=cost):
                gang = self._gang
        is_new = gang != self._gang
        changed = [trial for trial in trials if self.gang_of(trial.number) != gang]
        self._gang = gang
        self._members = frozenset(known) if gang > 1 else frozenset()
        few = f"{len(trials)} trials for {n_workers} workers"
        note = _say(few, gang, efficiency) if is_new else self._why_none(few, trials, n_workers)
        told = tuple(t.number for t in changed if t.has_work and t.seconds_left is None)
        return Change(note, told) if note or told else None

    def _efficiency(self, trial: TrialRecord) -> Efficiency | None:
        seen = self._times.get(trial.number, [])
        n_of = Counter(gang for gang, _ in seen)
        if sum(n >= 2 for n in n_of.values()) >= 2:
            n, shown = self._shown.get(trial.number, (0, None))
            if shown is None or n != len(seen):
                shown = fit([pair for pair in seen if n_of[pair[0]] >= 2]).model.efficiency
                self._shown[trial.number] = len(seen), shown
            return shown
        return self._profile(trial)

    def _profile(self, trial: TrialRecord) -> Efficiency | None:
        if self.profiled is None:
            return None
        key = (trial.number, len(trial.adoptions))
        if key not in self._profiles:
            self._profiles[key] = self.profiled(trial)
        return self._profiles[key]

    def _left_s(
        self, trial: TrialRecord, n_shards: int, efficiency: Efficiency | None
    ) -> float | None:
        """Seconds on one worker of what a trial was given to train; None if nobody knows."""
        if not trial.has_work:
            return 0.0
        seen = self._times.get(trial.number)
        if not seen:
            return None
        n_units = (trial.n_decided - trial.progress(n_shards)) * n_shards
        return n_units * median(s * gang * (efficiency or full)(gang) for gang, s in seen)

    def _read(self, record: Record) -> None:
        if len(record.units) > self._n_read:
            for done in record.timed(self._n_read):
                self._times[done.unit.trial].append((done.gang, done.stop - done.start))
            self._n_read = len(record.units)

    def _fits(self, trials: Sequence[TrialRecord], gang: int) -> bool:
        return gang == 1 or not any(self._refusal(trial, gang) for trial in trials)

    def _refusal(self, trial: TrialRecord, gang: int) -> str:
        if self.why_no_gangs:
            return self.why_no_gangs
        key = (trial.number, len(trial.adoptions), gang)
        if key not in self._refusals:
            try:
                self.check(trial.config, gang)
                self._refusals[key] = ""
            except Exception as error:  # noqa: BLE001 - the workload's own code may raise anything
                self._refusals[key] = f"{type(error).__name__}: {error}"
        return self._refusals[key]

    def _why_none(self, few: str, trials: Sequence[TrialRecord], n_workers: int) -> str:
        """Say why there are no gangs where the user wants them; once."""
        if self.policy != "gang" or self._gang > 1 or n_workers < 2 * len(trials):
            return ""
        why = next((why for trial in trials if (why := self._refusal(trial, 2))), "")
        return self._once(why, f"{few}: each trains on one worker: {why}")

    # ---- workers

    def _scale(self, n_trials: int, n_workers: int, seconds: float) -> Change | None:
        may_release = self.policy == "release" or (self.costs and self._gang == 1)
        if not may_release and self._wanted is None:
            self._idle_since = None
            return None
        few = f"{n_trials} trials for {n_workers} workers"
        if self.why_no_release:
            return self._complain(few) if n_trials < n_workers else None
        if self._wanted is None:
            self._before = n_workers
        at = n_workers if self._wanted is None else self._wanted
        needed = min(n_trials, self._before)
        if needed > at:
            self._wanted, self._idle_since = needed, None
            return Change(f"{few}: {needed} workers are wanted again", n_workers=needed)
        if needed == at or not may_release:
            self._idle_since = None
            return None
        if self._idle_since is None:
            self._idle_since, self._most = seconds, needed
        self._most = max(self._most, needed)
        if seconds - self._idle_since < RESTART_S - MOMENT_S:  # a clock that jumps rounds
            return None
        self._wanted, self._idle_since = self._most, None
        return Change(f"{few}: {at - self._most} workers are let go", n_workers=self._most)

    def _complain(self, few: str) -> Change | None:
        why = self.why_no_release
        note = self._once(why, f"{few}, and none can be let go: {why}")
        return Change(note) if note else None

    def _once(self, key: str, text: str) -> str:
        if not key or key in self._said:
            return ""
        self._said.add(key)
        return text


def _is_busy(trial: TrialRecord) -> bool:
    # One that is being scored counts: what becomes of it is decided in a moment.
    return trial.is_live and not (trial.is_paused or trial.is_held)


def _are_enough(record: Record, n_workers: int) -> bool:
    """Whether there is a trial for each worker; of many, the last ones are most often busy."""
    busy = filter(_is_busy, reversed(record.trials.values()))
    return len([*islice(busy, n_workers)]) == n_workers


def _least(known: Sequence[Efficiency | None]) -> Efficiency | None:
    """Return the least e(g) of several trials; None if that of one is not known."""
    efficiencies = [efficiency for efficiency in known if efficiency is not None]
    if len(efficiencies) < len(known):
        return None
    return lambda gang: min(efficiency(gang) for efficiency in efficiencies)


def _say(few: str, gang: int, efficiency: Efficiency | None) -> str:
    if gang == 1:
        return f"{few}: each trains on one worker from here on"
    known = "" if efficiency is None else f", at e({gang}) = {efficiency(gang):.2f}"
    return (
        f"{few}: each trains in a gang of {gang} from here on{known}; results differ from those "
        "of one worker in their last bits, or by more where the loss is no mean over samples"
    )
