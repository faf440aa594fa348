"""What happens in a search as lines of a log."""

from __future__ import annotations

import logging

from dagsel.console import span
from dagsel.flow import Stop, TrialFailed, WorkersChanged
from dagsel.messages import Entry, Note, SessionBegun, Turn, UnitRecord
from dagsel.steering import Commanded
from dagsel.workloads.memory import text_of
from dagsel.workloads.raised import RanOut

logger = logging.getLogger("dagsel.driver")


def log_entry(entry: Entry) -> None:
    """Log an entry of the journal: trials that end, workers and commands; visits to debug."""
    if not logger.isEnabledFor(logging.INFO):
        return
    match entry:
        case UnitRecord(unit, worker, shard):
            told = (
                unit.kind,
                unit.trial,
                unit.epoch,
                shard,
                worker,
                span(entry.stop - entry.start),
            )
            logger.debug("%s of trial %d, epoch %d: shard %d on %s in %s", *told)
        case SessionBegun(_, seconds):
            logger.info("the search %s", f"goes on after {span(seconds)}" if seconds else "begins")
        case Note(text):
            logger.info("%s", text)
        case RanOut(unit):
            what = "trial %d goes on with half the samples at once: %s"
            logger.info(what, unit.trial, text_of(entry))
        case Turn(event, decisions):
            match event:
                case WorkersChanged(n_workers):
                    logger.info("%d workers are there", n_workers)
                case TrialFailed(trial, reason):
                    logger.info("trial %d failed: %s", trial, reason)
                case Commanded(command):
                    logger.info("the user commands %r", command)
            for decision in decisions:
                if isinstance(decision, Stop):
                    logger.info("trial %d ends: %s", decision.trial, decision.reason)
