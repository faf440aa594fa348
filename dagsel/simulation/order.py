"""The order of reports of a run, and what of its journal does not depend on time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from dagsel.codec import Json
from dagsel.errors import SearchError
from dagsel.flow import Decision, Event, Paused, Reported, Tick, TrialFailed, WorkersChanged
from dagsel.history.script import read_turns

#: Events that came to the flow together.
Batch: TypeAlias = tuple[Reported | TrialFailed | WorkersChanged, ...]


def read_order(entries: Iterable[Mapping[str, Json]]) -> tuple[Batch, ...]:
    """Read from a journal in what order, and what at once, a flow was told.

    Raises
    ------
    SearchError
        If the flow paused trials or was woken: where a trial stood then depends on the clock.
    """
    turns = [entry for entry in entries if entry["is"] == "turn"]
    batches = []
    for _, together in groupby(turns, key=lambda turn: turn.get("pass")):
        events = [turn.event for turn in read_turns(together)]
        if any(isinstance(event, Paused | Tick) for event in events):
            raise SearchError(
                "the recorded run paused trials or went by the clock; only the order of one that "
                "goes by its reports alone can be kept"
            )
        told = tuple(
            event for event in events if isinstance(event, Reported | TrialFailed | WorkersChanged)
        )
        if told:
            batches.append(told)
    return tuple(batches)


def decision_log(
    entries: Iterable[Mapping[str, Json]],
) -> list[tuple[Event | None, tuple[Decision, ...]]]:
    """Read what a flow was told and has decided, without the times, and with one metric.

    Two runs of one flow with the same seed, whose trials do the same and report in the same order,
    have equal logs: on any cluster, and in virtual time.

    Parameters
    ----------
    entries
        A run's journal.

    Returns
    -------
    list
        Events and what was decided on each; no event stands for the beginning, or for what was
        decided over the flow's head.
    """
    log: list[tuple[Event | None, tuple[Decision, ...]]] = []
    for turn in read_turns(entries):
        event = turn.event
        if isinstance(event, Reported):
            event = replace(event, seconds=0.0, metrics={}, switches=())
        log.append((event, turn.decisions))
    return log
