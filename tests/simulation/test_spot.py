"""Workers that are taken back, in virtual time: nothing is lost, all is billed at its price."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dagsel
from dagsel.errors import SearchError, TooLittleTimeError
from dagsel.flow import Flow
from dagsel.flows import ASHA, SEER, RandomSearch
from dagsel.planning.pools import Workers
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, simulate
from dagsel.simulation.engine import VirtualEngine

DEMAND = Workers("demand", "2.50 USD", most=3)
SPOT = Workers("spot", "0.50 USD", spot=True, most=4)
CURVES = PowerLaw(epoch_s=40.0)  # of four units of 10 s
QUIET = SimulatedCluster(n_workers=4)


def space(trial: Any) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def searched(cluster: SimulatedCluster, flow: Flow | None = None, **options: Any) -> SimulatedRun:
    flow = flow or RandomSearch(max_epochs=3, n_trials=6)
    return simulate(flow, CURVES, cluster, **{"space": space, **options})


CLUSTERS = st.builds(
    SimulatedCluster,
    n_workers=st.integers(1, 6),
    workers=st.sampled_from([(), (DEMAND, SPOT), (SPOT, DEMAND)]),
    interruptions_per_hour=st.sampled_from([1.0, 20.0, 60.0]),
    notice_s=st.sampled_from([0.0, 3.0, 30.0]),
    startup_s=st.sampled_from([0.0, 25.0]),
    replicas=st.sampled_from([1, None]),
    max_workers=st.sampled_from([None, 7]),
    draw=st.integers(0, 3),
)
SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(CLUSTERS, st.integers(0, 3))
def test_what_is_taken_back_changes_no_result(cluster: SimulatedCluster, seed: int) -> None:
    run, quiet = searched(cluster, seed=seed), searched(QUIET, seed=seed)
    for number, trial in quiet.record.trials.items():
        found = run.record.trials[number]
        assert [(e.epoch, e.value) for e in found.epochs] == [
            (e.epoch, e.value) for e in trial.epochs
        ]
        assert found.state == trial.state == "complete"
    trained: dict[Any, float] = defaultdict(float)
    for work in (*run.record.units, *run.record.pieces):
        if work.unit.kind == "train":
            trained[work.unit] += work.stop - work.start - work.ready_seconds
    assert len(trained) == 6 * 3 * 4
    # A unit that was stopped goes on where it stopped; one that was lost begins anew.
    assert all(seconds >= 10.0 - 1e-6 for seconds in trained.values())
    if cluster.notice_s:
        assert all(seconds == pytest.approx(10.0) for seconds in trained.values())


@SLOW
@given(CLUSTERS, st.integers(0, 3), st.sampled_from([0.1, 0.3, 2.0]))
def test_money_is_bounded_and_between_the_prices(
    cluster: SimulatedCluster, seed: int, money: float
) -> None:
    price = {} if cluster.workers else {"price_per_worker_hour": "1 USD"}
    flow = ASHA(max_epochs=9, n_trials=40)
    try:
        run = searched(cluster, flow, seed=seed, budget=f"{money} USD", **price)
    except TooLittleTimeError:
        return  # it is said before an epoch has ended
    assert run.money is not None
    assert run.money <= money * (1 + 1e-9)
    low, high = (0.5, 2.5) if cluster.workers else (1.0, 1.0)
    assert low * run.cost / 3600 <= run.money * (1 + 1e-9)
    assert run.money <= high * run.cost / 3600 * (1 + 1e-9)
    assert run.record.money == (pytest.approx(run.money) if cluster.workers else None)


def test_the_same_seed_is_interrupted_alike_and_another_draw_is_not() -> None:
    options: Any = {"n_workers": 4, "interruptions_per_hour": 20.0, "startup_s": 25.0}
    first, again = (searched(SimulatedCluster(**options)) for _ in range(2))
    assert first.journal == again.journal
    assert first.bill == again.bill
    other = searched(SimulatedCluster(**options, draw=1))
    assert other.journal != first.journal
    assert searched(SimulatedCluster(**options), seed=1).seconds != first.seconds


def test_without_interruptions_pools_of_one_price_are_as_none() -> None:
    flow = SEER("10 min", "60 worker-minutes")
    pools = (Workers("a", "3 USD"), Workers("b", "3 USD", spot=True))
    grows: Any = {"n_workers": 1, "max_workers": 20, "startup_s": 15.0}
    plain = searched(SimulatedCluster(**grows), flow)
    pooled = searched(SimulatedCluster(**grows, workers=pools, notice_s=0.0), flow)
    told = [{k: v for k, v in entry.items() if k != "money"} for entry in pooled.journal]
    assert told == list(plain.journal)
    assert pooled.cost == plain.cost
    assert pooled.money == pytest.approx(plain.cost / 1200)


@SLOW
@given(CLUSTERS.filter(lambda cluster: cluster.workers), st.integers(0, 3))
def test_the_cheapest_pool_comes_first_and_none_has_too_many(
    cluster: SimulatedCluster, seed: int
) -> None:
    seen: list[dict[str, int]] = []

    class Watched(VirtualEngine):
        def _ask(self, n_workers: int, *, at: float) -> None:
            super()._ask(n_workers, at=at)
            hired = ({*self._model.workers, *self._coming} - self._leaving) & self._pool.keys()
            pools = [self._pool[worker] for worker in hired]
            seen.append({pool: pools.count(pool) for pool in ("demand", "spot")})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("dagsel.simulation.run.VirtualEngine", Watched)
        searched(cluster, seed=seed)
    assert seen[0] == {"demand": max(0, cluster.n_workers - 4), "spot": min(4, cluster.n_workers)}
    for now in seen:
        assert now["spot"] <= 4
        assert now["demand"] <= 3
    # One that is taken back is replaced by one of the same pool, which has room then.
    assert seen[-1] == seen[0]


def test_the_dearest_that_have_not_come_are_given_up_first() -> None:
    cluster = SimulatedCluster(n_workers=1, max_workers=9, workers=(DEMAND, SPOT), startup_s=25)
    engine = VirtualEngine(CURVES, cluster, {"value": CURVES})
    engine.scale(9)  # and no more than the pools may have
    assert engine.bill.requests == {"spot": 4, "demand": 3}
    engine.scale(5)
    assert engine.bill.requests == {"spot": 4, "demand": 1}
    engine.scale(2)
    assert engine.bill.requests == {"spot": 2}


def test_one_that_is_taken_back_is_replaced_and_billed() -> None:
    cluster = SimulatedCluster(n_workers=2, interruptions_per_hour=30.0, startup_s=25.0, notice_s=0)
    run = searched(cluster, RandomSearch(max_epochs=9, n_trials=6))
    assert run.timeline()["worker"].nunique() > 2
    # Both are billed all the time, be they there or asked for.
    assert run.cost == pytest.approx(2 * run.seconds)
    quiet = SimulatedCluster(n_workers=2, startup_s=25.0)
    assert run.seconds > searched(quiet, RandomSearch(max_epochs=9, n_trials=6)).seconds


def test_notice_saves_what_a_unit_has_trained() -> None:
    options: Any = {"n_workers": 1, "interruptions_per_hour": 120.0}
    times = []
    for notice_s in (3.0, 0.0):  # a unit lasts 10 s
        run = searched(SimulatedCluster(**options, notice_s=notice_s))
        assert run.timeline()["worker"].nunique() > 3
        times.append(run.seconds)
    assert times[0] <= 6 * 3 * 40.0 + 1e-6  # nothing is trained twice
    assert times[1] > times[0] + 10.0


def test_a_preview_shows_an_interval() -> None:
    pools = (DEMAND, SPOT)
    cluster = SimulatedCluster(n_workers=6, workers=pools, interruptions_per_hour=20, startup_s=25)
    known: Any = {"epoch_seconds": 40, "cluster": cluster}
    told = dagsel.preview(RandomSearch(3, 6), **known)
    assert told.interval is not None
    assert told.interval.money is not None
    assert told.money is not None
    assert told.interval.n == 10
    for (low, high), value in [
        (told.interval.seconds, told.seconds),
        (told.interval.worker_seconds, told.worker_seconds),
        (told.interval.money, told.money),
    ]:
        assert low <= value * (1 + 1e-9)
        assert value <= high * (1 + 1e-9)
        assert low < high
    assert told == dagsel.preview(RandomSearch(3, 6), **known)
    assert f"{told.interval.money[1]:.2f} USD" in repr(told)
    assert "of 10 with workers taken back at other times" in told._repr_html_()
    calm = SimulatedCluster(n_workers=6, workers=pools, startup_s=25)
    assert dagsel.preview(RandomSearch(3, 6), epoch_seconds=40, cluster=calm).interval is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"interruptions_per_hour": -1}, "interruptions_per_hour must be 0 or more, got -1"),
        ({"interruptions_per_hour": "often"}, "interruptions_per_hour must be"),
        ({"notice_s": -1.0}, "times must be 0 or more seconds"),
        ({"draw": -1}, "draw must be a whole number of 0 or more"),
        ({"workers": ("spot",)}, "must be a list of pools"),
        ({"workers": (SPOT,), "n_workers": 5}, r"may have 4 workers \(spot 4\), and 5 are to be"),
    ],
)
def test_bad_clusters_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(SearchError, match=told):
        SimulatedCluster(**{"n_workers": 2, **given})


def test_workers_that_are_taken_back_before_any_unit_ends_are_told_of() -> None:
    cluster = SimulatedCluster(n_workers=2, interruptions_per_hour=1e5, notice_s=0.0)
    with pytest.raises(SearchError, match="at 100000 an hour nothing is trained"):
        searched(cluster)


def test_a_budget_in_money_is_no_number_of_worker_seconds() -> None:
    pools = (replace(DEMAND, most=1), replace(SPOT, most=None))
    cluster = SimulatedCluster(4, n_shards=1, workers=pools, startup_s=100.0)
    flow = RandomSearch(max_epochs=3, n_trials=8)
    options: Any = {"space": space, "budget": "0.25 USD"}
    run = simulate(flow, CURVES, cluster, **options)
    assert run.money is not None
    assert run.cost * 2.5 / 3600 > 0.25 > run.money
    assert not run.plan.differences
    told = dagsel.preview(flow, curves=CURVES, cluster=cluster, **options)
    assert (told.worker_seconds, told.ends_early) == (run.cost, False)


def test_a_price_beside_pools_is_refused() -> None:
    with pytest.raises(SearchError, match="leave out price_per_worker_hour"):
        searched(SimulatedCluster(n_workers=2, workers=(SPOT,)), price_per_worker_hour="1 USD")
