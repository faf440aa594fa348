"""What a run leaves in its folder when it has ended: the best states, and what they are."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict

from dagsel.errors import CheckpointError
from dagsel.history.live import config_kept
from dagsel.history.record import Record
from dagsel.storage import RunDir

logger = logging.getLogger("dagsel")

#: So many of the trials that failed for one reason are named.
_MOST_NAMED = 12


def tidy(record: Record, folder: RunDir) -> None:
    """Leave the best states alone in the store, and say what is odd about the trials."""
    drop_states(record, folder)
    if record.top:
        winners = [(best, record.trials[best.trial]) for best in record.top]
        about = [
            {**asdict(b), "params": t.params_kept, "config": config_kept(record, t)}
            for b, t in winners
        ]
        if record.goals:
            metrics = [goal.metric for goal in record.goals]
            values = [{"values": dict(zip(metrics, t.values, strict=True))} for _, t in winners]
            fronts = [one | told for one, told in zip(about, values, strict=True)]
            folder.write_best({"front": fronts})
        else:
            others = [asdict(other) for other in record.top[1:]]
            folder.write_best(about[0] | {"others": others})
    if record.best is not None and not record.trials[record.best.trial].is_feasible:
        told = "the best trial, %d, breaks a constraint of the space: all that were scored do"
        logger.warning(told, record.best.trial)
    if record.failures:
        logger.warning("%d of %d trials failed", len(record.failures), len(record.trials))
        by_reason: dict[str, list[str]] = {}
        for failed in record.failures:
            by_reason.setdefault(failed.why, []).append(str(failed.number))
        for why, numbers in by_reason.items():
            n_more = len(numbers) - _MOST_NAMED
            more = f" and {n_more} more" if n_more > 0 else ""
            logger.warning("trial %s%s failed: %s", ", ".join(numbers[:_MOST_NAMED]), more, why)


def drop_states(record: Record, folder: RunDir) -> None:
    """Leave the best states alone in the store, once no worker stores any more.

    Those of a search that Ctrl-C has ended stay where a resume needs them.
    """
    states = folder.states
    others = record.trials.keys() - {best.trial for best in record.top} - record.interrupted
    for trial in others.intersection(states.trials()):  # each that is asked for is a look
        states.drop(trial)
    for best in record.top:
        if best.trial in record.interrupted:
            continue
        if best.check:  # it may have been decided to train on, and not been copied yet
            with suppress(CheckpointError):
                of = (best.trial, best.check, best.epoch, best.position)
                states.keep_check(*of, partial=best.is_partial)
        kept = None if best.check else ((best.epoch, best.position), best.is_partial)
        states.drop_checks(best.trial, but=best.check)
        for partial in (False, True):  # one that the deadline ended has newer ones
            for place in states.list(best.trial, partial=partial):
                if (place, partial) != kept:
                    states.delete(best.trial, *place, partial=partial)
