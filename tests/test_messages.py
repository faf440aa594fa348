"""Messages and entries survive their encoding; old journals are read and written as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from distributed.protocol import dumps, loads
from hypothesis import given
from hypothesis import strategies as st

from dagsel.codec import Tagged
from dagsel.dispatch.units import Begun, Chain, Round, Unit
from dagsel.driver.consistency import read_entries
from dagsel.errors import RunDirError
from dagsel.flow import Clone
from dagsel.history.settings import Settings
from dagsel.messages import (
    COMMANDS,
    ENTRIES,
    NOTICES,
    ORDERS,
    REPORTS,
    FlowState,
    StoredState,
    Turn,
    UnitRecord,
)
from dagsel.storage import RunDir

RUNS = Path(__file__).parent / "data" / "runs_of_163b1ee"
OVER_DASK: dict[str, Tagged[Any]] = {
    "commands": COMMANDS, "notices": NOTICES, "orders": ORDERS, "reports": REPORTS,
}  # fmt: skip

naturals = st.integers(0, 2**40)
plain = st.none() | st.booleans() | naturals | st.floats() | st.text(max_size=3)
configs = st.dictionaries(st.text(max_size=3), plain, max_size=3)
shards = st.integers(0, 2)
chains = st.builds(
    Chain,
    trial=naturals,
    epochs=st.builds(lambda first, n: range(first, first + n), st.integers(1, 9), st.just(2)),
    n_shards=st.just(3),
    order=st.none() | st.tuples(st.none(), st.permutations(range(3)).map(tuple)),
    begun=st.lists(
        st.builds(
            Begun,
            st.lists(shards, max_size=3).map(tuple),
            st.frozensets(shards),
            st.none() | shards,
        ),
        max_size=2,
    ).map(tuple),
)
units = st.builds(Unit, st.sampled_from(["train", "evaluate", "check"]), *[naturals] * 3)
st.register_type_strategy(int, naturals)
st.register_type_strategy(float, st.floats())
st.register_type_strategy(Unit, units)


def mappings(kind: Any) -> st.SearchStrategy[Any]:
    key, value = get_args(kind)
    made = plain if value is Any else st.from_type(value)
    return st.dictionaries(st.from_type(key), made, max_size=2)


st.register_type_strategy(Mapping, mappings)
st.register_type_strategy(Round, st.builds(Round, naturals, chains.map(lambda chain: (chain,))))
st.register_type_strategy(Clone, st.builds(Clone, naturals, naturals, configs))


def values(union: Tagged[Any]) -> st.SearchStrategy[Any]:
    """Draw any value of a union, with its optional fields or without."""
    made = []
    for kind in union.kinds:
        free: dict[str, Any] = {}
        if kind is FlowState:
            free["state"] = configs
        if "metrics" in kind.__dataclass_fields__:
            free["metrics"] = st.none() | configs
        if kind is Turn:
            free["params"] = st.none() | st.dictionaries(naturals, configs, max_size=2)
        made.append(st.builds(kind, **free))
    return st.one_of(made)


@given(st.data())
@pytest.mark.parametrize("name", OVER_DASK)
def test_a_message_comes_back_from_dasks_channels(name: str, data: st.DataObject) -> None:
    union = OVER_DASK[name]
    sent = data.draw(st.lists(values(union), max_size=3))
    again = union.from_text(loads(dumps(union.to_text(*sent))))
    assert repr(again) == repr(sent)  # NaN is NaN, and every float is the same to the bit


@given(values(ENTRIES))
def test_an_entry_comes_back_from_the_journal(entry: Any) -> None:
    assert repr(ENTRIES.decode(json.loads(json.dumps(ENTRIES.encode(entry))))) == repr(entry)


@given(st.builds(StoredState, adoptions=st.just(0), digest=st.just("")))
def test_what_is_stored_with_a_state_comes_back(state: StoredState) -> None:
    meta = json.loads(json.dumps(state.meta))
    assert repr(StoredState.read((state.epoch, state.position), meta)) == repr(state)


def old_entries(name: str) -> list[dict[str, Any]]:
    return RunDir(str(RUNS / name)).journal.read()


@pytest.mark.parametrize("name", sorted(path.parent.name for path in RUNS.glob("*/run.json")))
def test_an_old_journal_is_read_and_would_be_written_as_it_was(name: str) -> None:
    for entry in old_entries(name):
        assert ENTRIES.encode(ENTRIES.decode(entry)) == entry


def test_the_old_journals_have_each_kind_of_entry_that_one_session_writes() -> None:
    entries = [e for path in RUNS.glob("*/run.json") for e in old_entries(path.parent.name)]
    kinds = {"session", "turn", "unit", "piece", "round", "load", "note"}
    assert {entry["is"] for entry in entries} == kinds
    done = [entry for entry in map(ENTRIES.decode, entries) if isinstance(entry, UnitRecord)]
    assert {record.unit.kind for record in done} == {"train", "evaluate"}
    assert {record.gang for record in done} == {1, 2}


@pytest.mark.parametrize(
    "entry",
    [
        {"is": "merge", "trials": [1, 2]},
        {"is": "note", "text": "look", "level": 3},
        {"is": "load", "worker": "w", "shard": "first"},
        {"text": "an entry says what it is"},
    ],
)
def test_a_journal_that_is_not_understood_is_refused_in_one_sentence(entry: dict[str, Any]) -> None:
    entries = [*old_entries("asha-killed")[:3], entry]
    with pytest.raises(RunDirError) as refused:
        read_entries(entries, "/r", "7.1")
    (line,) = str(refused.value).splitlines()
    assert "/r" in line
    assert "entry 3" in line
    assert "the run began with dagsel 7.1" in line
    assert "install" in line


def test_an_old_unit_says_of_whom_its_state_was() -> None:
    unit = next(e for e in old_entries("asha-killed") if e["is"] == "unit")
    assert read_entries([unit | {"adoptions": 2}], "/r", "0.1.0") == read_entries([unit], "/r", "")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"version": 2, "dagsel": "7.1"},
            "newer dagsel .*: install dagsel 7.1 or newer",
        ),
        ({"format": "other.run"}, "is not the run_dir of a run of dagsel"),
    ],
)
def test_a_run_of_another_format_is_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    about = json.loads((RUNS / "asha-killed" / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(about | change))
    with pytest.raises(RunDirError, match=says) as refused:
        Settings.from_json(RunDir(str(tmp_path)).about(), str(tmp_path))
    assert len(str(refused.value).splitlines()) == 1
