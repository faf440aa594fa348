"""The order in which a run's trials reported, and the part of its journal without times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import TypeAlias

from dagsel.codec import Json
from dagsel.errors import SearchError
from dagsel.flow import Decision, Event, Paused, Reported, Tick, TrialFailed, WorkersChanged
from dagsel.history.script import read_turns

#: Events that the flow was told together.
Batch: TypeAlias = tuple[Reported | TrialFailed | WorkersChanged, ...]


def read_order(entries: Iterable[Mapping[str, Json]]) -> tuple[Batch, ...]:
    """Read from a journal which events a flow was told, in order, and which of them together.

    Raises
    ------
    SearchError
        If the flow paused trials or was woken: that depends on the clock.
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
    """Read the events of a flow and its decisions from a run's journal, without times.

    Two runs of one flow with the same seed have equal logs if their trials do the same and report
    in the same order: on any cluster, and in virtual time.

    Parameters
    ----------
    entries
        A run's journal.

    Returns
    -------
    list
        Events and the decisions on each. The event is None for the start, and for decisions that
        were not the flow's.

    Examples
    --------
    >>> import dagsel
    >>> from dagsel.flows import RandomSearch
    >>> from dagsel.simulation import PowerLaw, SimulatedCluster
    >>> run = dagsel.simulate(
    ...     RandomSearch(max_epochs=1, n_trials=1),
    ...     PowerLaw(),
    ...     SimulatedCluster(n_workers=1),
    ...     space=lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1)},
    ... )
    >>> [decisions for event, decisions in decision_log(run.journal)][:2]
    [(Ask(n=1, sampling='random'),), (Train(trial=0, epochs=1),)]
    """
    log: list[tuple[Event | None, tuple[Decision, ...]]] = []
    for turn in read_turns(entries):
        event = turn.event
        if isinstance(event, Reported):
            event = replace(event, seconds=0.0, metrics={}, switches=())
        elif isinstance(event, WorkersChanged):
            event = replace(event, seconds=None)
        log.append((event, turn.decisions))
    return log
