"""What is wrong with a run: its trials fail alike, a result is odd, or nothing happens any more."""

from __future__ import annotations

import linecache
import logging
import math
import re
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from dagsel.dispatch.events import FailRun
from dagsel.driver.protocols import Engine
from dagsel.errors import ClusterError, DatasetError, SearchError
from dagsel.flow import Event, Reported
from dagsel.history.record import Record
from dagsel.history.trial import TrialRecord
from dagsel.messages import FailedAlike
from dagsel.steering import Commanded, PauseTrial

#: So many trials, if none that has begun did otherwise, are enough to know.
ENOUGH = 5
_FRAME = re.compile(r'  File "(.+)", line (\d+), ')


logger = logging.getLogger("dagsel")


def end_by(failure: FailRun) -> NoReturn:
    """Raise a `DatasetError` if the data is why the run cannot go on, else a `ClusterError`."""
    if failure.is_of_data:
        raise DatasetError(failure.reason)
    raise ClusterError(failure.reason)


@dataclass(slots=True)
class Troubles:
    """Watches how a run's trials fail, what is odd about the others, and whether any gets on.

    A run ends if its first trials fail alike and none was scored. Only errors of the workload
    count, told apart by class and by the innermost line of the user's code. A trial that has begun
    before enough have failed counts against the verdict while it trains; a later one does not, as
    there is always one. Configurations that are refused before they are sent end only a search of
    which there is nothing else.
    """

    record: Record  # what has happened
    cause: BaseException | None = None  # the first error itself, if it is here
    # Trials that have begun to train, until one was scored or enough have failed.
    _begun: set[int] = field(default_factory=set)
    _warned: set[int] = field(default_factory=set)  # trials whose warning is logged
    _paused_by_user: list[TrialRecord] = field(default_factory=list)  # that may still rest
    _told_to_rest: str = ""  # those of which was said that nothing else is left
    _idle_since: float | None = None  # when it was first seen that nothing is under way

    def __post_init__(self) -> None:
        # Of those that lived when the driver before this one was lost, any may have begun.
        live = [trial for trial in self.record.trials.values() if trial.is_live]
        self._begun |= {trial.number for trial in live}
        self._paused_by_user = [trial for trial in live if trial.paused_by_user]

    def begins(self, trial: int) -> None:
        """Take in that a trial begins to train."""
        if not self.record.has_scored and len(self.record.failures) < ENOUGH:
            self._begun.add(trial)

    def warn_of_rest(self) -> None:
        """Log that the search waits for the user alone, once for the trials that they paused."""
        live = [trial for trial in self._paused_by_user if trial.is_live and trial.paused_by_user]
        self._paused_by_user = live
        if not live or self.record.finished:
            return
        others = (t for t in self.record.trials.values() if t.is_live and not t.paused_by_user)
        told = ", ".join(str(trial.number) for trial in live)
        if told != self._told_to_rest and all(t.is_paused or t.is_held for t in others):
            self._told_to_rest = told
            logger.warning(
                "nothing is left to train but what a command has paused (trial %s): resume or stop "
                "it, or finish the search",
                told,
            )

    def check_stall(self, now_s: float, engine: Engine) -> None:
        """Raise a `SearchError` if nothing is under way and the flow waits for nothing.

        Its next decision would never come. It is asked where nothing was heard for a while.
        """
        if engine.stall_s == math.inf:
            return
        record, n_workers = self.record, engine.n_workers
        waits = record.finished or record.awaited or record.wake_at is not None
        is_scaled = 0 < n_workers >= (record.wanted or 0)
        if waits or not is_scaled or any(map(_is_under_way, record.trials.values())):
            self._idle_since = None
            return
        self._idle_since = now_s if self._idle_since is None else self._idle_since
        if now_s - self._idle_since >= engine.stall_s:
            raise SearchError(
                f"for {engine.stall_s:g} s no trial has trained, and the flow waits for nothing: "
                "let it answer the last event with Train, Ask, Wake or Finish"
            )

    def fails(self, error: BaseException | None) -> None:
        """Take in the error of a trial."""
        self.cause = self.cause or error

    def warn_of(self, event: Event | None) -> None:
        """Log what is odd about a trial's results, once a trial."""
        if isinstance(event, Commanded) and isinstance(event.command, PauseTrial):
            self._paused_by_user.append(self.record.trials[event.command.trial])
        if isinstance(event, Reported) and event.trial not in self._warned:
            warning = self.record.trials[event.trial].warning
            if warning:
                self._warned.add(event.trial)
                logger.warning("trial %d: %s", event.trial, warning)

    @property
    def verdict(self) -> FailedAlike | None:
        """What ends the run; None if it goes on, or has ended otherwise."""
        record = self.record
        if record.has_scored or record.failed_alike:
            return None
        failed = record.failures
        first = failed[0].raised if failed else None
        if first is None or any(t.raised is None for t in failed):
            return None
        if len({t.raised.signature for t in failed if t.raised is not None}) > 1:
            return None
        if record.finished:
            is_over = len(failed) == len(record.trials)
        else:  # before the run began, a configuration has passed the check
            others = {n for n in self._begun if record.trials[n].state != "failed"}
            is_over = len(failed) >= ENOUGH and not others and not first.by_check
        return FailedAlike(say(failed)) if is_over else None


def _is_under_way(trial: TrialRecord) -> bool:
    """Whether something may yet be heard of a trial without a decision of the flow."""
    trains = trial.n_decided > len(trial.epochs) and not trial.is_held
    return trial.is_live and (trains or trial.pausing is not None or trial.paused_by_user)


def say(failed: list[TrialRecord]) -> str:
    """Say how trials have failed: the user's frames, then the error and its cure in the last line.

    Examples
    --------
    >>> from dagsel.workloads.raised import Raised
    >>> frame = '  File "train.py", line 3, in loss'
    >>> error = Raised("ValueError", "no", "train.py:3 loss", frame)
    >>> print(say([TrialRecord(0, {}, {}, raised=error)]))
    all trials that have ended (1) failed alike, before any was scored:
      File "train.py", line 3, in loss
    ValueError: no
    """
    error = failed[0].raised
    assert error is not None, "only such trials are counted"
    lines = []
    last = f"{error.reason}: {error.cure}" if error.cure else error.reason
    frames = error.frames.splitlines()
    for line, following in pairwise([*frames, ""]):
        lines.append(line)
        found = _FRAME.match(line)
        if found and not following.startswith("    "):  # of a notebook: only here it can be read
            text = linecache.getline(found[1], int(found[2])).strip()
            lines += [f"    {text}"] if text else []
    told = "\n".join([*lines, last])
    return (
        f"all trials that have ended ({len(failed)}) failed alike, before any was scored:\n{told}"
    )
