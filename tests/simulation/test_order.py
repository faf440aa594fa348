"""The same flow, seed and order of reports give the same decisions, whatever the cluster is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dagsel.errors import SearchError
from dagsel.flow import Reported
from dagsel.history.script import read_turns
from dagsel.simulation import PowerLaw, Recorded, SimulatedCluster, decision_log, simulate
from tests.simulation.test_simulate import CURVES, FLOWS, Fragile, search, space

OTHER = SimulatedCluster(
    n_workers=4, n_shards=3, speeds=(0.5, 3.0, 1.0, 0.9), hop_s=4.0, load_s=9.0
)


#: Those that pause trials, or go by the clock.
TIMED = {"robin", "slaq", "hermes", "optimus", "marginal gain", "seer", "hypersched", "lookahead",
         "elastic hyperband", "elastic grid", "random trial"}  # fmt: skip
ORDERED = [name for name in FLOWS if name not in TIMED]


@pytest.mark.parametrize("name", sorted(TIMED))
def test_the_order_of_what_goes_by_the_clock_is_refused(name: str) -> None:
    with pytest.raises(SearchError, match="paused trials or went by the clock"):
        search(name, cluster=OTHER, order=search(name).journal)


@pytest.mark.parametrize("name", ORDERED)
def test_an_order_that_is_kept_gives_the_same_decisions(name: str) -> None:
    told = search(name)
    journal = json.loads(json.dumps(list(told.journal)))  # as a file gives it back
    again = search(name, cluster=OTHER, order=journal)
    assert decision_log(again.journal) == decision_log(told.journal)
    assert again.journal != told.journal


def test_another_order_gives_other_decisions() -> None:
    told = search("asha")
    assert decision_log(search("asha", cluster=OTHER).journal) != decision_log(told.journal)


def test_failures_and_workers_are_told_in_their_order_too() -> None:
    dying = SimulatedCluster(n_workers=4, failures=((150.0, 0),))
    told = search("random", cluster=dying)
    again = search("random", cluster=OTHER, order=told.journal)
    assert decision_log(again.journal) == decision_log(told.journal)
    failing = search("random", curves=Fragile())
    again = search("random", cluster=OTHER, order=failing.journal)
    assert decision_log(again.journal) == decision_log(failing.journal)
    assert [trial.number for trial in again.failures] == [3]


def test_reports_that_came_at_once_come_at_once() -> None:
    even = PowerLaw(epoch_s=60.0)
    told = search("random", curves=even)
    passes = [turn["pass"] for turn in told.journal if turn["is"] == "turn"]
    assert len(set(passes)) < len(passes)
    again = search("random", curves=even, cluster=OTHER, order=told.journal)
    assert [turn["pass"] for turn in again.journal if turn["is"] == "turn"] == passes


def test_an_order_that_cannot_be_is_refused() -> None:
    told = search("asha", seed=1)
    with pytest.raises(SearchError, match="the recorded run was told"):
        search("asha", seed=2, order=told.journal)


@pytest.mark.parametrize("name", ORDERED)
def test_a_recorded_run_repeats_its_decisions(name: str) -> None:
    told = search(name, direction="maximize")
    curves = Recorded.from_run(told)
    again = search(name, curves=curves, cluster=OTHER, order=told.journal, direction="maximize")
    assert decision_log(again.journal) == decision_log(told.journal)
    reports = [t.event for t in read_turns(again.journal) if isinstance(t.event, Reported)]
    assert [r.value for r in reports] == [
        t.event.value for t in read_turns(told.journal) if isinstance(t.event, Reported)
    ]


def test_what_differs_in_one_value_shows() -> None:
    told = search("halving")
    values = dict(Recorded.from_run(told).values)
    best = told.best.trial
    values[best] = (1e9, *values[best][1:])
    curves = replace(Recorded.from_run(told), values=values)
    with pytest.raises(SearchError):
        simulate(FLOWS["halving"](), curves, OTHER, space=space, order=told.journal)


def test_a_log_holds_the_values() -> None:
    told = decision_log(search("random").journal)
    other = decision_log(search("random", curves=replace(CURVES, seed=1)).journal)
    assert [decisions for _, decisions in told] == [decisions for _, decisions in other]
    assert told != other
