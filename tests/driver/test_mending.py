"""A unit that has run out of memory, as the driver sees it.

That it is tried once more is written down before it is sent. It begins anew, whatever part of it
was trained. An evaluation is done again on all shards, and what was scored in the other way does
not count, however late it comes. The second time the trial fails; a search whose trials all fail so
ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.errors import AllTrialsFailedError
from dagsel.flow import Ask, Asked, Decision, Event, Finish, Reported, Train, TrialFailed
from dagsel.history.tally import EpochTally
from dagsel.history.trial import TrialRecord
from dagsel.messages import Message, TrialReport, UnitRecord
from dagsel.workloads.raised import Raised, RanOut

from .hand_engine import HandEngine, Search, epoch_of, search

TRAIN, SCORE, CHECK = (Unit(kind, 0, 1, 0) for kind in ("train", "evaluate", "check"))


@dataclass
class Listening(HandEngine):
    """Also writes down the chains that it is sent."""

    chains: list[Chain] = field(default_factory=list)

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        super().submit(round_, configs)
        self.chains += round_.chains


def out_of_memory(unit: Unit, halved: int | None = None) -> TrialReport:
    told = RanOut(unit, "w", "MemoryError", at_once=8, halved=halved)
    error = Raised("OutOfMemoryError", "memory ran out", "model.py:3", ran_out=told)
    return TrialReport(unit.trial, error.reason, raised=error)


def run(*happens: Any, n_trials: int = 1, needs: Any = lambda config, halvings: None) -> Search:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked(trials):
                return [Train(trial, 1) for trial in trials]
            case Reported(0) | TrialFailed(0):
                return [Finish()]
        return []

    engine = Listening(happens)
    return search([Ask(n_trials)], answer, *happens, engine=engine, needs=needs)


def chains(done: Search) -> list[Chain]:
    assert isinstance(done.engine, Listening)
    return done.engine.chains


def test_a_second_attempt_is_written_down_before_it_is_sent_and_begins_anew() -> None:
    done = run(lambda engine: [out_of_memory(TRAIN)], lambda engine: epoch_of(0, 1, 0.5))
    assert [chain.ran_out for chain in chains(done)] == [(), (TRAIN,)]
    (at,) = (n for n, entry in enumerate(done.kept.entries, start=1) if entry["is"] == "ran_out")
    order = [what for what in done.engine.told if what[0] in ("written", "submit", "delete")]
    second = [n for n, (what, _) in enumerate(order) if what == "submit"][1]
    written = [n for n, (what, about) in enumerate(order) if what == "written" and about >= at]
    assert written[0] < second
    assert ("delete", (0, 1, 0)) in order[:second]  # a part of it
    assert done.record.trials[0].state != "failed"


def test_units_are_halved_from_the_one_that_ran_out_on_and_need_less() -> None:
    asked: list[int] = []

    def needs(config: Any, halvings: int) -> int:
        asked.append(halvings)
        return 100 >> halvings

    done = run(
        lambda engine: [out_of_memory(TRAIN)],
        lambda engine: epoch_of(0, 1, 0.5),
        needs=needs,
    )
    assert asked == [0, 1]
    assert [chain.memory_bytes for chain in chains(done)] == [100, 50]


def test_what_was_scored_in_another_way_does_not_count_however_late_it_comes() -> None:
    trained, scored = epoch_of(0, 1, 0.5)
    assert isinstance(scored, UnitRecord)
    late: list[int] = []

    def again(engine: HandEngine) -> list[Message]:
        return [trained, out_of_memory(SCORE)]

    def old(engine: HandEngine) -> list[Message]:
        late.append(len(engine.all_told("release")))
        return [trained, scored]  # in no store, so it was trained again

    def look(engine: HandEngine) -> list[Message]:
        late.append(len(engine.all_told("release")))
        return [trained, replace(scored, halved=1, metrics={"loss": 0.25})]  # was sent once more

    done = run(again, old, look)
    assert late == [0, 0], "the old score has ended the epoch"
    assert [epoch.value for epoch in done.record.trials[0].epochs] == [0.25]


@pytest.mark.parametrize("units", [[TRAIN, TRAIN], [SCORE, SCORE], [CHECK]])
def test_the_trial_fails_the_second_time_and_for_a_check_at_once(units: list[Unit]) -> None:
    happens = [lambda engine, unit=unit: [out_of_memory(unit)] for unit in units]
    done = run(lambda engine: epoch_of(1, 1, 0.5), *happens, n_trials=2)
    trial = done.record.trials[0]
    assert trial.state == "failed"
    assert ("the second time, alone in its worker" in trial.reason) == (len(units) == 2)
    assert trial.reason.startswith("OutOfMemoryError: memory ran out in ")
    assert "the error was MemoryError" in trial.reason


def test_an_evaluation_that_still_ran_as_before_says_nothing_of_the_second_attempt() -> None:
    """Be it of this epoch or of a later one; the second attempt itself does."""
    trained, scored = epoch_of(0, 1, 0.5)
    assert isinstance(scored, UnitRecord)
    first = [trained, out_of_memory(SCORE, 0)]
    later = SCORE._replace(epoch=2)
    done = run(
        lambda engine: first,
        lambda engine: [out_of_memory(SCORE, 0)],
        lambda engine: [out_of_memory(later, 0)],
        lambda engine: [trained, replace(scored, halved=1)],
    )
    trial = done.record.trials[0]
    assert [told.unit for told in trial.ran_out] == [SCORE]
    assert len(trial.epochs) == 1
    with pytest.raises(AllTrialsFailedError, match="memory ran out in the evaluation of epoch 1"):
        run(lambda engine: first, lambda engine: [out_of_memory(SCORE, 1)])


def test_a_result_of_the_old_way_has_the_evaluation_sent_again() -> None:
    trained, scored = epoch_of(0, 1, 0.5)
    assert isinstance(scored, UnitRecord)
    done = run(
        lambda engine: [trained, out_of_memory(SCORE, 0)],
        lambda engine: [trained, scored],
        lambda engine: [trained, replace(scored, halved=1)],
    )
    assert [chain.ran_out for chain in chains(done)] == [(), (SCORE,), (SCORE,)]


def test_a_search_whose_trials_all_run_out_ends_with_the_numbers() -> None:
    with pytest.raises(AllTrialsFailedError, match="memory ran out in unit 1 of epoch 1"):
        run(*[lambda engine: [out_of_memory(TRAIN)]] * 2)


def test_an_evaluation_is_done_again_on_all_shards_of_its_epoch_and_later_ones() -> None:
    tallies = {e: EpochTally(2, scored={0: (4, {"loss": 0.5})}) for e in (1, 2, 3)}
    trial = TrialRecord(0, {}, {}, n_decided=3, tallies=tallies)
    trial.run_out(RanOut(SCORE._replace(epoch=2), "w", "MemoryError"))
    assert [len(tallies[epoch].scored) for epoch in (1, 2, 3)] == [1, 0, 0]
    assert [trial.n_halvings(SCORE._replace(epoch=epoch)) for epoch in (1, 2, 3)] == [0, 1, 1]
