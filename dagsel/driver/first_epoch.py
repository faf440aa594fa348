"""Whether an epoch of one trial fits into deadline and budget, as the first units show."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dagsel.dispatch.units import Unit
from dagsel.driver.clock import RunClock
from dagsel.history.record import Record
from dagsel.messages import TooLittleTime, UnitWork

#: The first unit on a worker takes longer than the next ones, by so many seconds at most.
WARM_UP_S = 10.0


@dataclass(slots=True)
class FirstEpoch:
    """Watches whether the first epoch of any trial can end in time.

    It counts with the fastest unit so far, for the trial that has the least left, so that what it
    says is true of all of them.
    """

    record: Record  # what has happened
    clock: RunClock  # time and cost of the run
    _n_units: int = 0  # of the record, that were looked at
    _n_pieces: int = 0
    _warm: set[str] = field(default_factory=set)  # workers that have trained
    _begun: dict[Unit, float] = field(default_factory=dict)  # the share that is done
    _unit_s: float = math.inf  # the fastest

    @property
    def verdict(self) -> TooLittleTime | None:
        """What ends the run; None if it goes on, or has ended otherwise."""
        record, clock = self.record, self.clock
        if clock.end_s == math.inf or record.finished or record.n_epochs or not self._look():
            return None
        live = [trial for trial in record.trials.values() if trial.is_live]
        n_left = min((1.0 - trial.progress(record.n_shards) for trial in live), default=0.0)
        widest = max((gang for _, plan in record.plans[-1:] for gang in plan.workers), default=1)
        epoch_s = self._unit_s * record.n_shards / widest
        time_left = math.inf if clock.deadline_s is None else clock.deadline_s - clock.seconds
        cost_left = math.inf if clock.budget_s is None else clock.budget_s - clock.worker_seconds
        if n_left * epoch_s <= min(time_left, cost_left):
            return None
        return TooLittleTime(self._say(n_left * epoch_s, epoch_s))

    def _look(self) -> bool:
        """Take in what is new of the record; return whether there is anything to go by."""
        record = self.record
        done: list[UnitWork] = [*record.pieces[self._n_pieces :], *record.units[self._n_units :]]
        self._n_units, self._n_pieces = len(record.units), len(record.pieces)
        for work in done:
            if work.unit.kind != "train" or work.recovered or not work.share:
                continue
            begun = self._begun.pop(work.unit, 0.0)  # by the piece before this one
            warm_up_s = 0.0 if work.worker in self._warm else WARM_UP_S
            took_s = max(0.0, work.stop - work.start - warm_up_s)
            if work.share > begun:
                self._unit_s = min(self._unit_s, took_s / (work.share - begun))
            if work.share < 1.0:
                self._begun[work.unit] = work.share
            self._warm.add(work.worker)
        return self._unit_s < math.inf

    def _say(self, need_s: float, epoch_s: float) -> str:
        clock, told = self.clock, []
        if clock.deadline_s is not None and need_s > clock.deadline_s - clock.seconds:
            least = upwards(clock.seconds + need_s)
            told.append(
                f"of the deadline of {clock.deadline_s:g} s {clock.seconds:.3g} s are over: the "
                f"least that would do is about deadline={least}"
            )
        if clock.budget_s is not None and need_s > clock.budget_s - clock.worker_seconds:
            least = upwards(clock.worker_seconds + need_s)
            told.append(
                f"of the budget of {clock.budget_s:g} worker-seconds {clock.worker_seconds:.3g} "
                f"are spent: the least that would do is about budget={least}"
            )
        return f"an epoch of a trial takes about {epoch_s:.3g} s, and {'; '.join(told)}"


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
