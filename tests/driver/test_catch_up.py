"""A flow that catches up is where it was, from the beginning or from a kept state."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import optuna
import pytest

import dagsel
from dagsel.driver.consistency import read_entries
from dagsel.driver.recovery import catch_up
from dagsel.errors import RunDirError
from dagsel.flow import Asked, Context, Event, Reported, Train, WorkersChanged, save_state
from dagsel.flows import PBT, Range
from dagsel.messages import (
    ENTRIES,
    Entry,
    FlowState,
    Note,
    SessionBegun,
    Turn,
)
from dagsel.simulation import PowerLaw, SimulatedCluster
from tests.execution.interrupted import FLOWS


def drive(flow: Any, snapshot_every: int) -> list[Entry]:
    """Run a flow for some turns, and write a journal of it."""
    entries: list[Entry] = [SessionBegun(0.0, 0.0)]
    context = Context(2, "maximize", 1)
    decisions = flow.start(context)
    entries.append(turn(None, decisions, context=context))
    n_asked = decisions[0].n
    events: list[Event] = [
        Asked(tuple(range(n_asked)), configs=tuple({"x": n / 9} for n in range(n_asked)))
    ]
    epochs: dict[int, int] = {}
    for number in range(9):
        if not events:
            break
        decisions = flow.handle(events[0])
        entries += [turn(events.pop(0), decisions), Note("between")]
        for decision in decisions:
            if isinstance(decision, Train):
                trial = decision.trial
                for _ in range(decision.epochs):
                    epochs[trial] = epochs.get(trial, 0) + 1
                    value = (trial * 7 % 5) + epochs[trial] / 10
                    events.append(Reported(trial, epochs[trial], value, {}, 1.0))
        if (number + 1) % snapshot_every == 0:
            entries.append(FlowState(save_state(flow)))
    entries.append(turn(WorkersChanged(3), flow.handle(WorkersChanged(3))))
    written = json.loads(json.dumps([ENTRIES.encode(entry) for entry in entries]))
    return read_entries(written, "/r", "0.1.0")


def turn(event: Event | None, decisions: list[Any], **about: Any) -> Turn:
    return Turn(event, tuple(decisions), seconds=1.0, **about)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("snapshot_every", [1, 4, 100])
def test_it_is_where_it_was(name: str, snapshot_every: int) -> None:
    flow = copy.deepcopy(FLOWS[name])
    entries = drive(flow, snapshot_every)
    again = copy.deepcopy(FLOWS[name])
    catch_up(again, entries, "/r")
    assert save_state(again) == save_state(flow)
    assert again.state == flow.state


def test_nothing_has_happened_to_a_run_that_never_began() -> None:
    flow = copy.deepcopy(FLOWS["asha"])
    catch_up(flow, [], "/r")
    assert flow.state == FLOWS["asha"].state


def test_a_kept_state_counts_and_what_was_before_it_is_not_repeated() -> None:
    flow = copy.deepcopy(FLOWS["asha"])
    entries = drive(flow, 4)
    kept = next(i for i, entry in enumerate(entries) if isinstance(entry, FlowState))
    unlike = [replace(e, event=None, context=None) for e in entries[:kept] if isinstance(e, Turn)]
    again = copy.deepcopy(FLOWS["asha"])
    catch_up(again, [*unlike, *entries[kept:]], "/r")
    assert again.state == flow.state


@pytest.mark.parametrize("snapshot_every", [1, 4])
def test_a_kept_state_of_another_shape_is_ignored_and_all_events_are_repeated(
    snapshot_every: int,
) -> None:
    flow = copy.deepcopy(FLOWS["asha"])
    entries = [
        FlowState({"of another version": [1]}) if isinstance(entry, FlowState) else entry
        for entry in drive(flow, snapshot_every)[1:]  # the first turn counts, too
    ]
    again = copy.deepcopy(FLOWS["asha"])
    catch_up(again, entries, "/r")
    assert again.state == flow.state


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("snapshot_at", [None, 12])
def test_a_clone_breaks_the_constraints_that_its_source_breaks(
    seed: int, snapshot_at: int | None
) -> None:
    def space(trial: optuna.Trial) -> dict[str, float]:
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_constraint("c", x - 0.5)
        return {"x": x}

    flow = PBT(max_epochs=6, n_trials=6, mutations={"x": Range(0.0, 1.0)})
    cluster = SimulatedCluster(n_workers=3)
    run = dagsel.simulate(flow, PowerLaw(), cluster, space=space, seed=seed)
    entries = [ENTRIES.decode(entry) for entry in run.journal]
    if snapshot_at is not None:  # of a flow that has heard all before it
        before = flow.fresh()
        catch_up(before, entries[:snapshot_at], "/r")
        entries.insert(snapshot_at, FlowState(save_state(before)))
    catch_up(flow.fresh(), entries, "/r")


def test_a_flow_that_decides_otherwise_is_refused() -> None:
    entries = drive(copy.deepcopy(FLOWS["asha"]), 100)
    (place, second) = [(i, e) for i, e in enumerate(entries) if isinstance(e, Turn)][1]
    first, *rest = second.decisions
    assert isinstance(first, Train)
    entries[place] = replace(second, decisions=(replace(first, epochs=77), *rest))
    with pytest.raises(RunDirError, match=r"^/r: the flow decides .* where it decided .*77"):
        catch_up(copy.deepcopy(FLOWS["asha"]), entries, "/r")


def test_a_flow_goes_on_that_gives_trials_another_priority_now() -> None:
    """It says which one trains first, and is none of what the flow knows."""

    def earlier(entry: Entry) -> Entry:
        if not isinstance(entry, Turn):
            return entry
        told = entry.decisions
        told = tuple(replace(it, priority=7.0) if isinstance(it, Train) else it for it in told)
        return replace(entry, decisions=told)

    flow = copy.deepcopy(FLOWS["asha"])
    entries = [earlier(entry) for entry in drive(flow, 100)]
    again = copy.deepcopy(FLOWS["asha"])
    catch_up(again, entries, "/r")
    assert again.state == flow.state


def test_what_was_decided_over_its_head_is_not_asked_again() -> None:
    entries = drive(copy.deepcopy(FLOWS["asha"]), 100)
    flow, other = copy.deepcopy(FLOWS["asha"]), copy.deepcopy(FLOWS["asha"])
    catch_up(flow, entries, "/r")
    catch_up(other, [*entries, turn(None, [])], "/r")
    assert flow.state == other.state


def test_each_entry_of_a_journal_without_a_kept_state_counts() -> None:
    flow = copy.deepcopy(FLOWS["asha"])
    turns = [entry for entry in drive(flow, 100) if isinstance(entry, Turn)]
    again = copy.deepcopy(FLOWS["asha"])
    catch_up(again, turns, "/r")
    assert again.state == flow.state
