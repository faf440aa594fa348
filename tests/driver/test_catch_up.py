"""A flow that catches up is where it was, from the beginning or from a kept state."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from interrupted import FLOWS

from dagsel.codec import to_json
from dagsel.driver.recovery import catch_up
from dagsel.errors import RunDirError
from dagsel.flow import Asked, Context, Event, Reported, Train, WorkersChanged, encode, save_state


def drive(flow: Any, snapshot_every: int) -> list[dict[str, Any]]:
    """Run a flow for some turns, and write a journal of it."""
    entries: list[dict[str, Any]] = [{"is": "session", "at": 0.0, "seconds": 0.0}]
    context = Context(2, "maximize", 1)
    decisions = flow.start(context)
    entries.append(turn(decisions, context=to_json(context)))
    n_asked = decisions[0].n
    events: list[Event] = [
        Asked(tuple(range(n_asked)), configs=tuple({"x": n / 9} for n in range(n_asked)))
    ]
    epochs: dict[int, int] = {}
    for number in range(9):
        if not events:
            break
        decisions = flow.handle(events[0])
        entries += [turn(decisions, event=encode(events.pop(0))), {"is": "unit"}]
        for decision in decisions:
            if isinstance(decision, Train):
                trial = decision.trial
                for _ in range(decision.epochs):
                    epochs[trial] = epochs.get(trial, 0) + 1
                    value = (trial * 7 % 5) + epochs[trial] / 10
                    events.append(Reported(trial, epochs[trial], value, {}, 1.0))
        if (number + 1) % snapshot_every == 0:
            entries.append({"is": "flow", "state": save_state(flow)})
    entries.append(turn(flow.handle(WorkersChanged(3)), event=encode(WorkersChanged(3))))
    return json.loads(json.dumps(entries))  # type: ignore[no-any-return]


def turn(decisions: list[Any], **about: Any) -> dict[str, Any]:
    return {"is": "turn", "seconds": 1.0, "decisions": [encode(d) for d in decisions], **about}


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
    for entry in entries:
        if entry["is"] == "flow":
            break
        entry.pop("decisions", None)
        entry.pop("event", None)
        entry.pop("context", None)
    again = copy.deepcopy(FLOWS["asha"])
    catch_up(again, entries, "/r")
    assert again.state == flow.state


def test_a_flow_that_decides_otherwise_is_refused() -> None:
    entries = drive(copy.deepcopy(FLOWS["asha"]), 100)
    turns = [entry for entry in entries if entry["is"] == "turn"]
    turns[1]["decisions"][0]["epochs"] = 77
    with pytest.raises(RunDirError, match=r"^/r: the flow decides .* where it decided .*77"):
        catch_up(copy.deepcopy(FLOWS["asha"]), entries, "/r")


def test_what_was_decided_over_its_head_is_not_asked_again() -> None:
    entries = drive(copy.deepcopy(FLOWS["asha"]), 100)
    flow, other = copy.deepcopy(FLOWS["asha"]), copy.deepcopy(FLOWS["asha"])
    catch_up(flow, entries, "/r")
    catch_up(other, [*entries, {"is": "turn", "seconds": 2.0, "decisions": []}], "/r")
    assert flow.state == other.state
