"""Whether an epoch of one trial fits into deadline and budget, as the first units show."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dagsel.dispatch.unit_times import EVALUATION_RATIO
from dagsel.dispatch.units import Unit
from dagsel.driver.clock import RunClock
from dagsel.driver.trial_limits import TrialLimits
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import Note, TooLittleTime, UnitWork

logger = logging.getLogger("dagsel")

#: The first unit on a worker takes longer than the next ones, by so many seconds at most.
WARM_UP_S = 10.0
#: All live trials are to end their first epoch in this share of the time that is left.
IN_TIME = 0.8


@dataclass(slots=True)
class FirstEpoch:
    """Watches whether the first epoch of any trial can end in time.

    A run of which no epoch can end is over, unless its flow scores trials in the middle of one;
    then it is only said. It counts with the fastest unit so far, for the trial that has the least
    left, in the widest gang that there can be, and waits until all workers have come and trained:
    what it says is true of all of them.

    Where one can end and not all, as many train first as there are workers: so the search has a
    model.
    """

    record: Record  # what has happened
    clock: RunClock  # time and cost of the run
    limits: TrialLimits  # which trials train first, and on how many workers
    _first: frozenset[int] = frozenset()  # trials that train before all others
    _is_said: bool = False
    _n_units: int = 0  # of the record, that were looked at
    _n_pieces: int = 0
    _warm: set[str] = field(default_factory=set)  # workers that have trained
    _begun: dict[Unit, float] = field(default_factory=dict)  # the share that is done
    # Worker-seconds of the fastest unit of those that were a worker's first.
    _cold_s: float = math.inf
    _cold_least_s: float = math.inf  # without the warming up that may be in it
    _warm_s: float = math.inf  # the fastest of the others

    def look(self) -> TooLittleTime | Note | None:
        """Return what ends the run, or is to be said of it; None if it goes on, or has ended."""
        record, clock = self.record, self.clock
        has_ended = any(trial.epochs for trial in record.trials.values())
        if clock.end_s == math.inf or has_ended or record.too_little_time:
            self._put_first(frozenset())
            return None
        if len(record.sessions) > 1:  # the time may have passed while the run lay dead
            return None
        if record.finished:
            has_result = record.top or record.failures or not record.trials
            return TooLittleTime(self._say_at_end()) if clock.are_over and not has_result else None
        if self._is_said or not self._measure():
            return None
        live = [trial for trial in record.trials.values() if trial.is_live]
        if self._are_more_to_train(len(live)):
            return None
        n_left = min((1.0 - trial.progress(record.n_shards) for trial in live), default=0.0)
        self._put_first(self._hurried(live))
        unit_s = self._warm_s if self._warm_s < math.inf else self._cold_least_s
        need_s = (n_left * record.n_shards - 1) * unit_s  # the one that runs may be at its end
        if need_s <= clock.left_s or need_s / self._widest <= clock.left_s:
            return None
        self._is_said = True
        told = self._say(n_left)
        if not clock.scores_parts:  # it needs an epoch to end
            return TooLittleTime(told)
        logger.warning("trials are ranked in the middle of their first epoch: %s", told)
        return Note(f"trials are ranked in the middle of their first epoch: {told}")

    def _put_first(self, trials: frozenset[int]) -> None:
        if trials != self._first:
            self._first = trials
            self.limits.put_first(trials)

    def _hurried(self, live: Sequence[TrialRecord]) -> frozenset[int]:
        """Return the trials that train first, as not all can end an epoch in time; none if all can.

        Those stay that were chosen before, and then those that have the least left.
        """
        record, n_workers = self.record, self.clock.engine.n_workers
        if self.clock.scores_parts or record.gives_gangs or self._warm_s == math.inf:
            return frozenset()
        far = {trial.number: trial.progress(record.n_shards) for trial in live}
        need_s = sum(1.0 - share for share in far.values()) * record.n_shards * self._warm_s
        if not self._first and need_s <= IN_TIME * self.clock.left_s * n_workers:
            return frozenset()
        order = sorted(far, key=lambda trial: (trial not in self._first, -far[trial], trial))
        return frozenset(order[:n_workers])

    @property
    def _most(self) -> int | None:
        engine = self.clock.engine
        return engine.capacity.most_in_nodes or engine.most_workers

    def _are_more_to_train(self, n_live: int) -> bool:
        """Whether workers are awaited, or have not trained yet: they may be faster."""
        engine = self.clock.engine
        n_asked = engine.bill.asked * engine.capacity.node_size
        n_expected = engine.most_workers if engine.why_fixed else n_asked
        is_awaited = engine.n_workers < (n_expected or 0)
        return is_awaited or len(self._warm) < min(engine.n_workers, n_live)

    @property
    def _widest(self) -> int:
        """The most workers that may train one trial."""
        record = self.record
        if record.gives_gangs or any(
            map(self.limits.idle_workers.may_widen, record.trials.values())
        ):
            return max(1, self._most or self.clock.engine.n_workers)
        return max((gang for _, plan in record.plans[-1:] for gang in plan.workers), default=1)

    @property
    def _epoch_s(self) -> float:
        return self.record.n_shards * min(self._warm_s, self._cold_s) / self._widest

    def _measure(self) -> bool:
        """Take in what is new of the record; return whether there is anything to go by."""
        record = self.record
        done: list[UnitWork] = [*record.pieces[self._n_pieces :], *record.units[self._n_units :]]
        self._n_units, self._n_pieces = len(record.units), len(record.pieces)
        for work in done:
            if work.unit.kind != "train" or work.recovered or not work.share:
                continue
            begun = self._begun.pop(work.unit, 0.0)  # by the piece before this one
            took_s, share = work.gang * (work.stop - work.start), work.share - begun
            if share > 0 and work.worker in self._warm:
                self._warm_s = min(self._warm_s, took_s / share)
            elif share > 0:
                self._cold_s = min(self._cold_s, took_s / share)
                least_s = max(0.0, took_s - work.gang * WARM_UP_S) / share
                self._cold_least_s = min(self._cold_least_s, least_s)
            if work.share < 1.0:
                self._begun[work.unit] = work.share
            self._warm |= {work.worker, *work.members}
        return bool(self._warm)

    def _say_at_end(self) -> str:
        if self._measure():
            return self._say(1.0)
        return (
            f"after {self.clock.seconds:.3g} s the time is over, and no unit of training has "
            "ended: give it more time, or more budget"
        )

    def _say(self, n_left: float) -> str:
        """Say what would do for a trial that has so many epochs left, with its validation.

        The workers may have begun a unit of other trials.
        """
        clock = self.clock
        share = EVALUATION_RATIO if self.record.validates else 0.0
        need_s = (n_left + share + 1.0 / self.record.n_shards) * self._epoch_s
        told = f"an epoch of a trial takes about {self._epoch_s:.3g} s"
        if clock.deadline_s is not None and clock.end_s >= clock.deadline_s:
            return (
                f"{told}, and of the deadline of {clock.deadline_s:g} s {clock.seconds:.3g} s are "
                f"over: the least that would do is about deadline={upwards(clock.seconds + need_s)}"
            )
        if clock.budget_s is None:
            return f"{told}, and a budget of {clock.budget_money:g} pays for less: give it more"
        least = clock.worker_seconds + max(1, self.record.n_workers) * need_s
        return (
            f"{told}, and of the budget of {clock.budget_s:g} worker-seconds "
            f"{clock.worker_seconds:.3g} are spent: the least that would do is about "
            f"budget={upwards(least)}, or fewer workers"
        )


def upwards(seconds: float) -> int:
    """Round a time up to two digits, and by a tenth more: what is measured varies.

    Examples
    --------
    >>> upwards(312.4), upwards(8.2)
    (350, 10)
    """
    more = 1.1 * seconds
    unit: int = 10 ** max(0, math.floor(math.log10(more)) - 1)
    return math.ceil(more / unit) * unit
