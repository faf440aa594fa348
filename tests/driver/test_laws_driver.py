"""Laws of what the driver refuses, of its end, and of clusters whose size is somebody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.events import FailRun
from dagsel.dispatch.units import Unit
from dagsel.driver.consistency import check_settings
from dagsel.driver.idle_workers import IdleWorkers
from dagsel.driver.trial_limits import TrialLimits
from dagsel.errors import ClusterError, RunDirError, SearchError
from dagsel.flow import (
    Ask,
    Asked,
    Context,
    DeadlineReached,
    Decision,
    Event,
    Finish,
    Reported,
    Scale,
    Train,
)
from dagsel.history.record import Record
from dagsel.messages import SessionBegun, Turn, UnitRecord
from dagsel.planning.small_population import RESTART_S

from .hand_engine import HandEngine, epoch_of, search
from .scripted import Scripted

BUSY = settings(deadline=None)
digests = st.sampled_from([None, "a", "b"])


@BUSY
@given(st.lists(digests, max_size=4))
def test_settings_that_no_session_began_with_are_refused(begun_with: list[str | None]) -> None:
    entries = [SessionBegun(0.0, 0.0, about) for about in begun_with]
    if "b" in begun_with:
        with pytest.raises(RunDirError, match="is not the one that the run began with"):
            check_settings(entries, "a", "the run")
    else:
        check_settings(entries, "a", "the run")


@BUSY
@given(
    st.integers(0, 4),
    st.none() | st.integers(0, 8),
    st.lists(st.integers(1, 9), max_size=3),
)
def test_a_gang_is_refused_if_there_can_never_be_so_many_workers(
    n_workers: int, more: int | None, gangs: list[int]
) -> None:
    most = None if more is None else max(1, n_workers) + more
    engine: Any = SimpleNamespace(n_workers=n_workers, most_workers=most)
    limits = TrialLimits(engine, *(None,) * 4)  # type: ignore[arg-type]
    trains = [Train(trial, 1, gang=gang) for trial, gang in enumerate(gangs)]
    if most is not None and any(gang > most for gang in gangs):
        with pytest.raises(SearchError, match=f"never have more than {most}"):
            limits.check_gangs(trains)
    else:
        limits.check_gangs(trains)


def begun(n_trials: int, *decisions: Any) -> Record:
    """Make the record of a run whose trials all train."""
    record = Record("run", n_shards=1, direction="minimize")
    record.add(Turn(None, (Ask(n_trials), *decisions), context=Context(4)))
    trials = tuple(range(n_trials))
    trains = tuple(Train(trial, 9) for trial in trials)
    record.add(Turn(Asked(trials), trains, params={trial: {} for trial in trials}))
    return record


@BUSY
@given(st.integers(1, 6), st.integers(1, 6), st.booleans())
def test_idle_workers_are_released_unless_the_search_scales_the_cluster_itself(
    n_trials: int, n_workers: int, scales: bool
) -> None:
    record = begun(n_trials, *([Scale(n_workers)] if scales else []))
    idle = IdleWorkers("release")
    changes = [c for at in (0.0, 1e6, 2e6) for c in idle.settle(record, n_workers, at)]
    wanted = [change.n_workers for change in changes]
    assert wanted == ([n_trials] if n_trials < n_workers and not scales else [])


@BUSY
@given(st.integers(1, 3), st.integers(1, 8))
def test_few_trials_train_in_gangs_where_all_fit_and_no_gang_is_refused(
    n_trials: int, n_workers: int
) -> None:
    refused: list[int] = []

    def check(config: object, size: int) -> None:
        refused.append(size)
        raise ValueError(f"one process only, not {size}")

    record = begun(n_trials)
    free, bound = IdleWorkers("gang"), IdleWorkers("gang", check=check)
    free.settle(record, n_workers, 0.0)
    notes = [c.note for at in (0.0, 1.0) for c in bound.settle(record, n_workers, at)]
    for trial in range(n_trials):
        assert free.gang_of(trial) == max(1, n_workers // n_trials)
        assert bound.gang_of(trial) == 1
    told = [note for note in notes if "one process only, not 2" in note]
    assert len(told) == (n_workers >= 2 * n_trials)
    assert all(size > 1 for size in refused)


def test_trials_are_looked_at_only_where_something_can_follow() -> None:
    """At thousands of trials and workers looking takes longer than all else."""
    record, asked = begun(3), list[int]()
    unknown = IdleWorkers("auto", profiled=lambda trial: asked.append(trial.number))
    for n_workers in (4, 8, 8):  # with four no gang is possible
        assert unknown.settle(record, n_workers, 0.0) == []
    assert asked == [0]  # one that nobody knows is enough
    record.trials = {0: "not looked at"}  # type: ignore[dict-item]
    assert IdleWorkers("auto").settle(record, 8, 0.0) == []


@pytest.mark.parametrize("n_between", [2, 3, 4])
def test_workers_are_let_go_that_were_idle_all_the_time_that_it_takes_to_get_them_back(
    n_between: int,
) -> None:
    idle, record, wanted = IdleWorkers("gang", costs=True), begun(2), []
    for at, n_workers in ((0.0, 3), (0.9, n_between), (1.1, 3), (2.2, 3)):
        changes = idle.settle(record, n_workers, at * RESTART_S)
        wanted.append([c.n_workers for c in changes if c.n_workers is not None])
    was_idle = n_between == 3  # with four workers both trials have two, with two one each
    assert wanted == ([[], [], [2], []] if was_idle else [[], [], [], [2]])


def test_a_trial_that_has_shown_what_gangs_bring_is_believed() -> None:
    def about(start: float, stop: float, *members: str) -> dict[str, Any]:
        where = {"worker": "a", "shard": 0, "hop": False, "members": members}
        return {**where, "start": start, "stop": stop, "n_samples": 1}

    record, idle = begun(1), IdleWorkers("gang")
    for epoch, spent in enumerate(
        [about(0, 1), about(1, 2), about(2, 9, "b"), about(9, 16, "b")], 1
    ):
        record.add(UnitRecord(Unit("train", 0, epoch, 0), **spent))
    idle.settle(record, 2, 20.0)  # two workers took seven times as long as one
    assert idle.gang_of(0) == 1


def test_a_run_that_the_cluster_cannot_go_on_with_ends_with_its_reason() -> None:
    with pytest.raises(ClusterError, match="shard 0 is nowhere"):
        search(
            [Ask(1)], lambda event: [Train(0, 1)], lambda engine: [FailRun("shard 0 is nowhere")]
        )


class Stubborn(Scripted):
    """A flow that goes on at its deadline."""

    def handle(self, event: Event) -> list[Decision]:
        return [] if isinstance(event, DeadlineReached) else super().handle(event)


@pytest.mark.parametrize("flow", [Scripted, Stubborn])
def test_a_search_ends_at_its_deadline_whatever_its_flow_says(
    flow: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(engine: HandEngine) -> list[Any]:
        engine.seconds = 1e6
        return []

    def answer(event: Event) -> list[Decision]:
        return [Train(0, 9)] if isinstance(event, Asked) else []

    monkeypatch.setattr("tests.driver.hand_engine.Scripted", flow)
    done = search([Ask(1)], answer, lambda e: epoch_of(0, 1, 0.5), late, deadline_s=100.0)
    assert done.record.finished
    assert done.told("submit") == [[(0, range(1, 10))]]
    assert done.told("stop") == [0]
    assert all(t.state.is_finished() for t in done.study.study.trials)


@pytest.mark.parametrize("wanted", [None, 3])
def test_a_session_that_goes_on_asks_for_the_workers_that_were_wanted(wanted: int | None) -> None:
    scales = (Scale(wanted),) if wanted else ()
    record = Record("run", n_shards=1, direction="minimize")
    record.add(SessionBegun(0.0, 0.0))
    record.add(Turn(None, (Ask(1), *scales), context=Context(2)))

    def answer(event: Event) -> list[Decision]:
        return [Train(0, 1)] if isinstance(event, Asked) else [Finish()]

    done = search([], answer, lambda e: epoch_of(0, 1, 0.5), record=record)
    assert set(done.told("scale")) == ({wanted} if wanted else set())


@pytest.mark.parametrize("policy", ["release", "gang"])
def test_what_becomes_of_idle_workers_is_noted_and_nothing_else_is(policy: Any) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1)]
            case Reported():
                return [Finish()]
        return []

    def later(engine: HandEngine) -> list[Any]:
        engine.seconds += 1e6
        return []

    idle = IdleWorkers(policy)
    happens = later, later, lambda engine: epoch_of(0, 1, 0.5)
    done = search([Ask(1)], answer, *happens, idle_workers=idle)
    assert len(done.record.notes) == 1
    assert all(note.strip() for note in done.record.notes)
    assert done.told("scale") == ([1] if policy == "release" else [])
