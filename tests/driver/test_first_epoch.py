"""A search of which no epoch can end in time is told so as soon as its units show it."""

from __future__ import annotations

from typing import Any

import pytest

from dagsel import simulate
from dagsel.errors import TooLittleTimeError
from dagsel.flow import Flow
from dagsel.flows import ASHA, SEER, Marble, RandomSearch
from dagsel.history.record import Record
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster
from dagsel.simulation.run import SimulatedRun

TWO = SimulatedCluster(n_workers=2, n_shards=4)
EIGHT = Scaling({n: float(n) for n in (1, 2, 4, 8)})


def search(
    flow: object, epoch_s: float, on: Any = TWO, share: float = 0.0, **limits: Any
) -> SimulatedRun:
    def space(trial: object) -> dict[str, object]:
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)  # type: ignore[attr-defined]
        return {"lr": lr, "net": "net"}

    curves = PowerLaw(epoch_s=epoch_s, evaluation_share=share)
    return simulate(flow, curves, on, space=space, **limits)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"deadline": "60 s"}, "of the deadline of 60 s .* are over.*about deadline=210$"),
        (
            {"budget": 150},
            "of the budget of 150 worker-seconds .* are spent.*about budget=410, or fewer workers$",
        ),
    ],
)
@pytest.mark.parametrize("flow", [RandomSearch(3, 8), ASHA(9, 8)])
def test_an_epoch_that_cannot_end_ends_the_run_with_what_would_do(
    flow: object, limits: dict[str, Any], words: str
) -> None:
    # An epoch takes 100 s, a unit 25 s: both workers have trained one, and some seconds of warming
    # up are taken off the first. The second one shows it.
    with pytest.raises(TooLittleTimeError, match="an epoch of a trial takes about 100 s") as raised:
        search(flow, 100.0, **limits)
    assert raised.match(words)


@pytest.mark.parametrize("limits", [{}, {"deadline": 210}, {"budget": 420}])
def test_an_epoch_that_can_end_ends_nothing(limits: dict[str, Any]) -> None:
    run = search(RandomSearch(1, 4), 100.0, **limits)
    assert run.best.epoch == 1


def test_once_an_epoch_has_ended_the_epochs_of_all_trials_are_counted_in_no_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be thousands of trials, and each turn would take as long as there are many."""
    counted: list[Record] = []
    monkeypatch.setattr(Record, "n_epochs", property(counted.append))
    run = search(RandomSearch(1, 8), 100.0, deadline=1e6)
    assert len(run.trials()) == 8
    assert not counted


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("n_shards", [4, 8])
@pytest.mark.parametrize("n_trials", [2, 9])
def test_what_would_do_does(n_trials: int, n_shards: int, share: float) -> None:
    flow, cluster = RandomSearch(1, n_trials), SimulatedCluster(2, n_shards=n_shards)
    with pytest.raises(TooLittleTimeError) as raised:
        search(flow, 100.0, cluster, share, deadline=57)
    least = float(str(raised.value).rpartition("=")[2])
    assert search(flow, 100.0, cluster, share, deadline=least).best.epoch == 1


def test_a_search_that_ranks_parts_of_epochs_goes_on_and_says_so() -> None:
    run = search(SEER("60 s", 120), 400.0)
    assert run.best.value
    (note,) = [note for note in run.record.notes if "middle of their first epoch" in note]
    assert "about 200 s" in note  # on two workers


@pytest.mark.parametrize(
    ("flow", "later", "deadline_s"),
    [
        # A worker that is 16 times as fast is to come: from then on an epoch takes 200 s.
        pytest.param(RandomSearch(1, 2), ((60.0, 16.0),), 1500.0, id="faster"),
        # All eight together take 400 s.
        pytest.param(
            Marble(RandomSearch(1, 1), {"net": EIGHT}, by="net", switch_s=0.0),
            tuple((60.0, 1.0) for _ in range(7)),
            1000.0,
            id="wider",
        ),
    ],
)
def test_workers_that_are_to_come_count(
    flow: Flow, later: tuple[tuple[float, float], ...], deadline_s: float
) -> None:
    cluster = SimulatedCluster(n_workers=1, n_shards=64, additions=later)
    run = search(flow, 3200.0, cluster, deadline=deadline_s)
    assert run.best.epoch == 1


def test_an_epoch_that_cannot_end_on_all_workers_ends_the_run_once_they_are_there() -> None:
    cluster = SimulatedCluster(n_workers=1, n_shards=64, additions=((60.0, 1.0),))
    with pytest.raises(TooLittleTimeError, match="of the deadline of 1500 s") as raised:
        search(RandomSearch(1, 2), 3200.0, cluster, deadline=1500.0)
    spent_s = float(str(raised.value).partition("1500 s ")[2].partition(" s")[0])
    assert 60.0 <= spent_s < 200.0


@pytest.mark.parametrize("n_workers", [1, 2])
@pytest.mark.parametrize("flow", [RandomSearch(2, 4), ASHA(9, 100)])
def test_where_an_epoch_of_one_trial_can_end_one_does(flow: Flow, n_workers: int) -> None:
    # An epoch takes 160 s: all four trials in turn would end it after the deadline.
    cluster = SimulatedCluster(n_workers=n_workers, n_shards=8)
    run = search(flow, 160.0, cluster, deadline=260.0)
    assert run.best.epoch == 1
    (ended, *_) = (trial.epochs[0].seconds for trial in run.record.trials.values() if trial.epochs)
    assert ended < 260.0


def test_trials_take_turns_again_once_an_epoch_has_ended() -> None:
    run = search(RandomSearch(3, 4), 160.0, SimulatedCluster(n_workers=1, n_shards=8), deadline=750)
    assert [len(trial.epochs) for trial in run.record.trials.values()] != [3, 1, 0, 0]
    assert sum(len(trial.epochs) > 0 for trial in run.record.trials.values()) == 4
