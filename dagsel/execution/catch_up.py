"""Brings a flow to where the journal says it was."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from dagsel.codec import Json
from dagsel.errors import RunDirError
from dagsel.flow import Context, Decision, Flow, decode_event, encode, load_state


def catch_up(flow: Flow, entries: Sequence[Mapping[str, Json]], url: str) -> None:
    """Give a flow the state that it had when the last entry was written.

    The last kept state is read, and what happened since is put to the flow once more: it must
    decide as it did then.

    Parameters
    ----------
    flow
        In its initial state.
    entries
        The run's journal.
    url
        Where it lies, for the error.

    Raises
    ------
    RunDirError
        If the flow decides otherwise than the journal says it did.
    """
    kept = [place for place, entry in enumerate(entries) if entry["is"] == "flow"]
    if kept:
        load_state(flow, entries[kept[-1]]["state"])
    for entry in entries[kept[-1] + 1 if kept else 0 :]:
        decisions = _decide(flow, entry)
        if decisions is None:
            continue
        decided = [encode(decision) for decision in decisions]
        if json.dumps(decided) != json.dumps(entry["decisions"]):
            raise RunDirError(
                f"{url}: the flow decides {decided} where it decided {entry['decisions']} before; "
                "resume with the version of the flow that the run began with"
            )


def _decide(flow: Flow, entry: Mapping[str, Json]) -> list[Decision] | None:
    if "context" in entry:
        return flow.start(Context(**entry["context"]))
    if "event" in entry:
        return flow.handle(decode_event(entry["event"]))
    return None
