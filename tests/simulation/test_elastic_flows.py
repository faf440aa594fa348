"""Searches with a deadline and a budget keep to both on a cluster that is late, slow and loses."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Scale,
    Stop,
    Tick,
    Train,
    Wake,
)
from dagsel.flows import SEER, HyperSched, Lookahead, RandomSearch
from dagsel.flows.baselines import ElasticGrid, ElasticHyperband, RandomTrial
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
from tests.driver.scripted import Scripted

DEADLINE_S, BUDGET = 600.0, 4800.0
FLOWS: dict[str, Flow] = {
    "SEER": SEER(DEADLINE_S, BUDGET, max_workers_per_trial=8),
    "SEER, paper": SEER(DEADLINE_S, BUDGET, max_workers_per_trial=8, mode="paper"),
    "HyperSched": HyperSched(DEADLINE_S, BUDGET, max_workers_per_trial=8),
    "Lookahead": Lookahead(DEADLINE_S, BUDGET, max_workers_per_trial=8),
    "E-Hyperband": ElasticHyperband(DEADLINE_S, BUDGET),
    "E-Grid": ElasticGrid(DEADLINE_S, BUDGET, sampling="study"),
    "Random": RandomTrial(DEADLINE_S, BUDGET),
}


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize(
    "trouble",
    [
        {},
        {"startup_s": 15.0, "hop_s": 0.2, "switch_s": 1.0, "load_s": 0.5},
        {"startup_s": 5.0, "failures": ((100.0, 2), (200.0, 5), (300.0, 7))},
    ],
)
def test_deadline_and_budget_hold(name: str, trouble: dict[str, Any]) -> None:
    n_workers, seed = 8, 0
    cluster = SimulatedCluster(n_workers=n_workers, n_shards=4, max_workers=200, **trouble)
    curves = PowerLaw(
        epoch_s=30.0, evaluation_share=0.1, seed=seed, scaling=Scaling({2: 1.85, 4: 3.43, 8: 5.4})
    )
    run = simulate(FLOWS[name], curves, cluster, seed=seed, space=space, deadline=DEADLINE_S)
    assert run.seconds <= DEADLINE_S + 1e-6
    # What there was before the beginning was not the flow's to decide.
    before = n_workers * cluster.startup_s
    assert 0.85 * BUDGET <= run.cost <= 1.002 * BUDGET + before
    assert run.record.best is not None
    assert run.record.best.is_complete
    assert not [trial for trial in run.record.trials.values() if trial.is_live]


@pytest.mark.parametrize("max_epochs", [1, 3])
@pytest.mark.parametrize("n_workers", [1, 4])
def test_complete_trials_make_room_for_others_to_the_end(n_workers: int, max_epochs: int) -> None:
    """What is not complete held a place of the plan, until the end of a stage."""
    flow = SEER(DEADLINE_S, DEADLINE_S * n_workers, max_epochs=max_epochs)
    run = simulate(flow, PowerLaw(epoch_s=5.0), SimulatedCluster(n_workers), space=space)
    (*_, (_, plan)) = run.record.plans
    n_places = sum(plan.stages[0].n_trials)
    n_trained = [len(trial.epochs) for trial in run.record.trials.values()]
    assert n_trained.count(max_epochs) > n_places > 4 * n_workers
    assert max(n_trained) == max_epochs
    assert len(n_trained) - n_trained.count(max_epochs) <= n_places
    busy_s = sum(done.stop - done.start for done in run.record.units)
    assert busy_s > 0.9 * n_workers * run.seconds
    assert run.seconds > 0.99 * DEADLINE_S


def table_1(trial: Any) -> dict[str, Any]:
    """Suggest one of the 144 points of SEER's Table 1."""
    return {
        "lr": trial.suggest_categorical("lr", [1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.1, 0.5, 1.0]),
        "weight_decay": trial.suggest_categorical("weight_decay", [1e-4, 5e-4, 1e-3, 5e-3]),
        "momentum": trial.suggest_categorical("momentum", [0.9, 0.95, 0.99, 0.997]),
    }


@pytest.mark.parametrize("n_shards", [1, 4])
@pytest.mark.parametrize("max_epochs", [None, 40])
@pytest.mark.parametrize(
    ("n_workers", "minutes"), [(4, 15), (16, 15), (16, 30), (16, 60), (8, 30), (32, 30)]
)
def test_hypersched_is_never_idle_while_it_is_billed(
    n_workers: int, minutes: int, max_epochs: int | None, n_shards: int
) -> None:
    """Nor where an epoch has several shards, each on so many workers that each holds one."""
    deadline_s = 60.0 * minutes
    scaling = Scaling({2: 1.85, 4: 3.43, 8: 5.4})
    flow = HyperSched(deadline_s, deadline_s * n_workers, max_epochs=max_epochs, scaling=scaling)
    run = simulate(
        flow,
        PowerLaw(epoch_s=60.0, scaling=scaling),
        SimulatedCluster(n_workers=1, n_shards=n_shards, max_workers=64),
        space=table_1,
        sampler=optuna.samplers.RandomSampler(seed=0),
        deadline=deadline_s,
    )
    ran = (*run.record.units, *run.record.pieces)
    used = sum((done.stop - done.start) * done.gang for done in ran)
    assert 0.97 * run.cost <= used <= run.cost + 1e-6
    assert run.cost <= deadline_s * n_workers + 1e-6
    if max_epochs is None:  # else all trials may be complete before the deadline
        assert run.cost >= 0.99 * deadline_s * n_workers


@pytest.mark.parametrize("share", [0.02, 0.05])
@pytest.mark.parametrize(
    "flow",
    [
        ElasticGrid(DEADLINE_S, 2400, sampling="study"),
        HyperSched(DEADLINE_S, 2400),
        Lookahead(DEADLINE_S, 2400),
        SEER(DEADLINE_S, 2400, min_stage=DEADLINE_S),
        SEER(DEADLINE_S, 2400, min_stage=60),
    ],
)
def test_a_search_in_which_no_epoch_ends_is_scored_before_the_deadline(
    flow: Flow, share: float
) -> None:
    run = simulate(
        flow,
        PowerLaw(epoch_s=900.0, evaluation_share=share),
        SimulatedCluster(n_workers=4, max_workers=50),
        space=space,
        deadline=DEADLINE_S,
        budget=2400,
    )
    assert run.record.best is not None
    assert run.record.best.is_complete
    assert run.cost <= 2400 + 1e-6


@pytest.mark.parametrize("flow", [one(DEADLINE_S, 2400) for one in (HyperSched, Lookahead, SEER)])
def test_units_longer_than_what_is_left_train_until_the_last_pause(flow: Flow) -> None:
    run = simulate(
        flow,
        PowerLaw(epoch_s=0.35 * DEADLINE_S),  # two end in time, and a part of a third is trained
        SimulatedCluster(n_workers=4, n_shards=1, max_workers=4),
        space=space,
        deadline=DEADLINE_S,
        budget=2400,
    )
    assert run.seconds <= DEADLINE_S
    assert max(piece.stop for piece in run.record.pieces) >= 0.99 * DEADLINE_S


def test_an_elastic_cluster_replaces_a_worker_that_dies_for_any_flow() -> None:
    flow = RandomSearch(max_epochs=3, n_trials=4)
    cluster = SimulatedCluster(2, max_workers=2, startup_s=5.0, failures=((10.0, 0),))
    run = simulate(flow, PowerLaw(epoch_s=60.0), cluster, space=space)
    assert set(run.timeline()["worker"]) == {"worker-1", "worker-2"}
    # 720 s of training, the unit that was lost, and the time in which a worker was to come.
    assert run.cost == pytest.approx(2 * run.seconds)
    assert run.seconds < 5.0 + 420.0


def test_a_worker_that_is_given_up_before_it_comes_never_trains() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked(trials):
                return [Train(trial, 2) for trial in trials]
            case Tick():
                return [Scale(1)]
            case Reported(trial, 2):
                left.discard(trial)
                return [Stop(trial, "the end", "complete"), *([] if left else [Finish()])]
        return []

    left = {0, 1, 2, 3}
    flow = Scripted([Scale(4), Wake(130), Ask(4)], answer)
    cluster = SimulatedCluster(n_workers=1, startup_s=80, max_workers=4)
    run = simulate(flow, PowerLaw(epoch_s=60.0), cluster, space=space)
    assert set(run.timeline()["worker"]) == {"worker-0"}
    # One worker all the time, three more from the beginning until they were given up.
    assert run.cost == 80 + 8 * 60 + 3 * 50


def test_a_budget_ends_earlier_where_workers_are_requested_that_have_not_come() -> None:
    cluster = SimulatedCluster(1, n_shards=1, startup_s=600.0, additions=((350.0, 1.0),) * 8)
    flow = RandomSearch(max_epochs=100, n_trials=8)
    run = simulate(flow, PowerLaw(epoch_s=100.0), cluster, space=space, budget=1000.0)
    assert run.cost == pytest.approx(1000.0)
    assert run.seconds == pytest.approx(600.0 + 350.0 + 50.0 / 9)


def test_a_budget_in_money_ends_a_simulation_at_its_price() -> None:
    flow, cluster = RandomSearch(max_epochs=9, n_trials=8), SimulatedCluster(n_workers=4)
    options: dict[str, Any] = {"space": space, "price_per_worker_hour": 3.0}
    run = simulate(flow, PowerLaw(epoch_s=60.0), cluster, budget="1 EUR", **options)
    assert run.cost == pytest.approx(1200.0)
