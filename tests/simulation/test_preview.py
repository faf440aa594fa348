"""A preview's rows tile the search, add up to what it costs, and end where the run would."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any
from xml.etree import ElementTree

import pytest

import dagsel
from dagsel.arguments import limits_of
from dagsel.errors import SearchError, TooLittleTimeError
from dagsel.flow import Flow
from dagsel.flows import (
    ASHA,
    PBT,
    SEER,
    ByConvergence,
    Grid,
    HyperSched,
    Lookahead,
    Marble,
    RandomSearch,
    Range,
)
from dagsel.flows.baselines import ElasticGrid, ElasticHyperband
from dagsel.planning.budget import Budget
from dagsel.planning.prices import Price
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
from dagsel.views.preview import Preview

EXAMPLE: dict[str, Any] = {
    "reduction_factor": 2,
    "parallelism_factor": 2,
    "min_stage": "1 min",
}
PLANNED: dict[str, Flow] = {
    "SEER": SEER("30 min", "480 worker-minutes", max_workers_per_trial=8),
    "E-Hyperband": ElasticHyperband("16 min", "160 worker-minutes"),
    "E-Grid": ElasticGrid("10 min", "80 worker-minutes", sampling="study"),
}
SMALL = SEER("10 min", "60 worker-minutes", max_workers_per_trial=4)
ELASTIC = SimulatedCluster(n_workers=2, max_workers=200, startup_s=20.0)
TROUBLED = SimulatedCluster(4, startup_s=30.0, failures=((100.0, 1),), additions=((200.0, 1.0),))
SIMULATED: dict[str, tuple[Flow, SimulatedCluster]] = {
    "random": (RandomSearch(max_epochs=3, n_trials=8), SimulatedCluster(n_workers=4)),
    "random, troubled": (RandomSearch(max_epochs=3, n_trials=8), TROUBLED),
    "ASHA": (ASHA(max_epochs=9, n_trials=32), SimulatedCluster(n_workers=3)),
    "SEER, simulated": (SMALL, ELASTIC),
    "HyperSched": (HyperSched("10 min", "40 worker-minutes"), ELASTIC),
    "Lookahead": (Lookahead("10 min", "40 worker-minutes"), ELASTIC),
}


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}


def drawn(told: Preview) -> list[int]:
    """How high each column of the drawing is."""
    lines = [line.partition("|")[2] for line in repr(told).splitlines() if "|" in line]
    width = max(map(len, lines))
    return [sum(line.ljust(width)[column] == "#" for line in lines) for column in range(width)]


def test_the_worked_example() -> None:
    flow = SEER("10 min", "80 worker-minutes", **EXAMPLE, mode="paper")
    told = dagsel.preview(flow)
    assert told.source == "arithmetic"
    assert [row.n_workers for row in told.rows] == [16, 8, 4]
    assert [row.gangs for row in told.rows] == [
        ((1, 8), (2, 4)),
        ((1, 4), (2, 2)),
        ((1, 2), (2, 1)),
    ]
    assert [round(row.lasts_s / 60, 3) for row in told.rows] == [1.429, 2.857, 5.714]
    assert (round(told.seconds), round(told.worker_minutes, 2), told.n_trials) == (600, 68.57, 12)
    assert (told.money, told.ends_early) == (None, False)
    assert "     1       0 s    85.7 s      12   8 on 1, 4 on 2       16            22.9\n" in repr(
        told
    )
    assert " total              10 min      12                        16            68.6\n" in repr(
        told
    )


def test_what_the_rounding_leaves_over_is_in_the_preview_too() -> None:
    told = dagsel.preview(SEER("10 min", "80 worker-minutes", **EXAMPLE))
    assert [row.n_workers for row in told.rows] == [19, 9, 4]
    assert 68.58 < told.worker_minutes <= 80


def test_a_fixed_cluster() -> None:
    flow = RandomSearch(max_epochs=3, n_trials=8)
    told = dagsel.preview(
        flow, epoch_seconds="1 min", n_workers=4, price_per_worker_hour="2.50 USD"
    )
    assert told.source == "simulation"
    assert (told.seconds, told.worker_minutes, told.n_workers) == (360.0, 24.0, 4)
    assert (told.n_trials, told.money) == (8, 1.0)
    assert [row.lasts_s for row in told.rows] == [90.0] * 4
    assert flow == RandomSearch(max_epochs=3, n_trials=8)
    assert not flow.state.drawing.n_asked


@pytest.mark.parametrize("name", PLANNED)
def test_a_plan_is_shown_as_it_is(name: str) -> None:
    flow: Any = PLANNED[name]
    told = dagsel.preview(flow)
    assert [row.n_workers for row in told.rows] == [s.n_workers for s in flow.plan.stages]
    assert [row.n_trials for row in told.rows] == [sum(s.n_trials) for s in flow.plan.stages]
    ends = [row.begins_s + row.lasts_s for row in told.rows]
    assert ends == pytest.approx(flow.plan.ends)
    assert told.worker_seconds == pytest.approx(float(flow.plan.cost))


@pytest.mark.parametrize("name", SIMULATED)
def test_a_simulation_is_shown_whole(name: str) -> None:
    flow, cluster = SIMULATED[name]
    told = dagsel.preview(flow, epoch_seconds=30, cluster=cluster, space=space)
    run = simulate(flow, PowerLaw(epoch_s=30.0), cluster, space=space)
    assert told.seconds == pytest.approx(run.seconds)
    assert told.worker_seconds == pytest.approx(run.cost)
    ends = [0.0, *(row.begins_s + row.lasts_s for row in told.rows)]
    assert [row.begins_s for row in told.rows] == pytest.approx(ends[:-1])
    assert 1 < len(told.rows) <= 12
    for row in told.rows:
        assert row.worker_seconds <= row.n_workers * row.lasts_s + 1e-6
    units = [unit for unit in run.record.units if unit.unit.kind == "train"]
    assert told.n_trials == len({unit.unit.trial for unit in units})
    last = told.rows[-1]
    since = last.begins_s - cluster.startup_s
    assert last.n_trials == len({u.unit.trial for u in units if u.stop > since + 1e-6})


def test_a_stage_of_a_simulation_is_a_span_with_as_many_workers() -> None:
    flow, cluster = SIMULATED["SEER, simulated"]
    told = dagsel.preview(flow, epoch_seconds=30, cluster=cluster)
    run = simulate(flow, PowerLaw(epoch_s=30), cluster, space=space)
    ((_, plan),) = run.record.plans
    assert [row.n_workers for row in told.rows[1:]] == [stage.n_workers for stage in plan.stages]
    assert [row.n_trials for row in told.rows[1:]] == [sum(s.n_trials) for s in plan.stages]
    assert (told.rows[0].n_workers, told.rows[0].n_trials, told.rows[0].lasts_s) == (2, 0, 20.0)
    told = dagsel.preview(SIMULATED["random, troubled"][0], epoch_seconds=60, cluster=TROUBLED)
    begins = [row.begins_s for row in told.rows]
    assert [row.n_workers for row in told.rows] == [4, 3, 4]
    assert begins[:2] == pytest.approx([0, 130])
    assert 230 - 60 <= begins[2] <= 230, "it is known from one epoch's end to the next"


@pytest.mark.parametrize("budget", ["10 worker-minutes", "60 worker-minutes", "1.25 USD"])
@pytest.mark.parametrize("name", [*SIMULATED, *PLANNED])
def test_a_run_that_costs_too_much_is_ended(name: str, budget: str) -> None:
    flow, cluster = SIMULATED.get(name, (PLANNED.get(name), None))
    assert flow is not None
    known: dict[str, Any] = {"price_per_worker_hour": "2.50 USD"}
    if cluster is not None:
        known |= {"epoch_seconds": 30, "cluster": cluster}
    limit = {"10 worker-minutes": 600.0, "60 worker-minutes": 3600.0, "1.25 USD": 1800.0}[budget]
    whole = dagsel.preview(flow, **known, budget="1000 worker-h")  # else the flow's own ends it
    if (name, budget) == ("SEER, simulated", "10 worker-minutes"):
        with pytest.raises(TooLittleTimeError):  # nothing is scored until then
            dagsel.preview(flow, **known, budget=budget)
        return
    told = dagsel.preview(flow, **known, budget=budget)
    assert told.ends_early == (whole.worker_seconds > limit)
    assert told.worker_seconds == pytest.approx(min(limit, whole.worker_seconds), rel=0.01)
    assert told.worker_seconds <= limit * (1 + 1e-9)
    assert told.price == Price(2.5, "USD")


@pytest.mark.parametrize("name", PLANNED)
def test_what_ends_with_a_stage_has_no_row_for_the_next_one(name: str) -> None:
    flow: Any = PLANNED[name]
    whole = dagsel.preview(flow)
    for n, row in enumerate(whole.rows, 1):
        cost = sum(row.worker_seconds for row in whole.rows[:n])
        for end in ({"deadline": row.begins_s + row.lasts_s}, {"budget": cost}):
            told = dagsel.preview(flow, **end)
            assert len(told.rows) == n
            assert told.ends_early == (n < len(whole.rows))


@pytest.mark.parametrize("known", [{}, {"epoch_seconds": 30, "cluster": SimulatedCluster(1)}])
def test_a_deadline_ends_it(known: dict[str, Any]) -> None:
    told = dagsel.preview(PLANNED["SEER"], **known, deadline="10 min")
    assert (round(told.seconds, 6), told.ends_early) == (600.0, True)
    assert "ended by deadline or budget" in repr(told)


def test_money_is_shown_with_a_price_only() -> None:
    flow = PLANNED["SEER"]
    assert "USD" not in repr(dagsel.preview(flow))
    told = dagsel.preview(flow, price_per_worker_hour="3 USD")
    assert told.money == pytest.approx(told.worker_minutes / 20)
    head, *rows = repr(told).splitlines()[1:5]
    assert head.endswith("USD")
    amounts = [float(row.split()[-1]) for row in rows]
    assert sum(amounts) == pytest.approx(told.money, abs=0.02)
    assert "EUR" in repr(dagsel.preview(flow, price_per_worker_hour=3.0, budget="5 EUR"))


def test_the_price_and_the_currency_may_be_the_flows() -> None:
    told = dagsel.preview(SEER("10 min", "12 USD", price_per_worker_hour=2.5))
    assert told.money == pytest.approx(told.worker_minutes / 60 * 2.5)
    assert (told.price, round(told.money or 0)) == (Price(2.5, "USD"), 12)
    assert dagsel.preview(PLANNED["SEER"]).money is None


def test_a_flow_around_a_flow_keeps_its_price() -> None:
    flow = SEER("10 min", "12.50 USD", price_per_worker_hour=2.5)
    told, around = dagsel.preview(flow), dagsel.preview(ByConvergence(ByConvergence(flow)))
    assert (around.money, around.price) == (told.money, Price(2.5, "USD"))
    assert told.money == pytest.approx(12.5, rel=0.05)
    assert limits_of(ByConvergence(flow).traits, None, None, None) == (
        600.0,
        Budget(12.5 / 2.5 * 3600, Price(2.5, "USD"), 12.5),
    )


def test_trials_that_ended_no_unit_are_shown() -> None:
    flow = SEER("10 min", "80 worker-minutes", **EXAMPLE, mode="paper")
    told = dagsel.preview(flow, epoch_seconds=1200, cluster=SimulatedCluster(1, max_workers=50))
    assert told.n_trials == 12
    assert [row.n_trials for row in told.rows][:2] == [12, 6]


def test_a_flows_own_deadline_and_budget_end_a_simulation() -> None:
    flow = ASHA(max_epochs=9, n_trials=32)
    slow = SimulatedCluster(n_workers=4, startup_s=60.0, max_workers=64)
    for limited in (SMALL, ByConvergence(SMALL)):
        told = dagsel.preview(limited, epoch_seconds=30, cluster=slow)
        assert not told.ends_early  # it has planned for the start of its workers
        assert 50 < told.worker_minutes <= 60
    assert not dagsel.preview(flow, epoch_seconds=30, cluster=slow).ends_early


def test_the_drawing_is_as_high_as_the_workers_are_many() -> None:
    told = dagsel.preview(SEER("10 min", "80 worker-minutes", **EXAMPLE, mode="paper"))
    heights = drawn(told)
    assert len(heights) == 60
    assert sorted(set(heights)) == [2, 4, 8]
    assert [heights.count(height) for height in (8, 4, 2)] == [9, 17, 34]
    assert max(map(len, repr(told).splitlines())) <= 80


def test_a_notebook_shows_table_and_drawing() -> None:
    told = dagsel.preview(SEER("10 min", "80 worker-minutes", **EXAMPLE, mode="paper"))
    page = ElementTree.fromstring(f"<div>{told._repr_html_()}</div>")
    assert [cell.text for cell in page.findall(".//tr[2]/td")] == [
        *("1", "0 s", "85.7 s", "12", "8 on 1, 4 on 2", "16", "22.9")
    ]
    bars = page.findall(".//{*}rect")
    assert [float(bar.attrib["height"]) for bar in bars] == [96.0, 48.0, 24.0]
    assert sum(float(bar.attrib["width"]) for bar in bars) == pytest.approx(480, abs=0.2)


def test_nothing_is_started() -> None:
    code = """if True:
        import sys, threading
        from dagsel import preview
        from dagsel.flows import RandomSearch
        preview(RandomSearch(max_epochs=3, n_trials=8), epoch_seconds=60, n_workers=4)
        print(threading.active_count(), *sorted({"distributed", "torch"} & set(sys.modules)))
    """
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1"]


@pytest.mark.parametrize(
    ("flow", "given", "told"),
    [
        ("ASHA", {}, "flow must be a search procedure such as RandomSearch, got 'ASHA'"),
        (RandomSearch(3, 8), {}, "n_workers is missing"),
        (RandomSearch(3, 8), {"n_workers": 4}, "epoch_seconds is missing"),
        (PLANNED["SEER"], {"n_workers": 4}, "epoch_seconds is missing"),
        (PLANNED["SEER"], {"epoch_seconds": 60}, "n_workers is missing"),
        (RandomSearch(3, 8), {"n_workers": 0}, "n_workers must be a whole number of 1"),
        (RandomSearch(3, 8), {"n_workers": 4, "cluster": ELASTIC}, "cluster and n_workers"),
        (RandomSearch(3, 8), {"cluster": "tcp://host:1"}, "cluster must be a SimulatedCluster"),
        (
            RandomSearch(3, 8),
            {"n_workers": 4, "epoch_seconds": 1, "curves": PowerLaw()},
            "curves and epoch_seconds",
        ),
        (RandomSearch(3, 8), {"n_workers": 4, "curves": PowerLaw()}, "space is missing"),
        (Grid(3), {"n_workers": 4, "epoch_seconds": 1}, "space is missing, and how many trials"),
        (
            PBT(max_epochs=9, n_trials=4, mutations={"lr": Range(1e-4, 1.0)}),
            {"n_workers": 4, "epoch_seconds": 1},
            "space is missing, and the flow changes",
        ),
        (
            Marble(RandomSearch(3, 8), {"resnet": Scaling({2: 1.7})}),
            {"n_workers": 4, "epoch_seconds": 1},
            "space is missing, and the flow reads the architecture off configurations",
        ),
        (PLANNED["SEER"], {"deadline": 1e-12}, "there is nothing to show"),
        (
            RandomSearch(3, 8),
            {"epoch_seconds": 1e-6, "n_workers": 4},
            "as the search ends within a millisecond; let the flow start a trial, and let an epoch",
        ),
        (RandomSearch(3, 8), {"n_workers": 4, "epoch_seconds": "soon"}, "epoch_seconds='soon'"),
        (PLANNED["SEER"], {"deadline": 0}, "deadline must be above 0 and finite, got 0"),
        (PLANNED["SEER"], {"budget": "5 USD"}, "what a worker costs is not known"),
        (PLANNED["SEER"], {"price_per_worker_hour": -1.0}, "price_per_worker_hour must be"),
        (PLANNED["SEER"], {"price_per_worker_hour": 2.5}, 'has no currency: write "2.5 USD"'),
        (
            SEER("10 min", "12 USD", price_per_worker_hour=2.5),
            {"price_per_worker_hour": "3 USD"},
            "planned its budget at 2.5 USD an hour of a worker, and price_per_worker_hour is 3 USD",
        ),
        (
            RandomSearch(3, 8),
            {"epoch_seconds": 60, "cluster": TROUBLED, "budget": 100},
            "a budget of 100 worker-seconds is used up before the 4 workers are there, 30 s after",
        ),
    ],
)
def test_what_cannot_be_previewed(flow: Any, given: dict[str, Any], told: str) -> None:
    with pytest.raises(SearchError, match="^.*" + re.escape(told)):
        dagsel.preview(flow, **given)


def test_a_plan_is_shown_for_the_cluster_that_there_can_be() -> None:
    flow = SEER("60 s", "2 worker-minutes")
    for around in (flow, ByConvergence(flow)):
        told = dagsel.preview(around, max_cluster_workers=2, worker_startup="5 s")
        start, *stages = told.rows
        assert (start.lasts_s, start.n_workers, start.n_trials) == (5.0, 2, 0)
        assert [stage.n_workers for stage in stages] == [2, 2, 1]
        assert told.n_trials == stages[0].n_trials > 0
        assert told.seconds == pytest.approx(60.0)
        assert told.worker_seconds <= 120.0
    assert max(row.n_workers for row in dagsel.preview(flow).rows) == 16


def test_what_no_worker_can_be_there_for_is_refused_before_anything_is_started() -> None:
    with pytest.raises(SearchError, match="takes 90 s to come, and 60 s are left"):
        dagsel.preview(SEER("60 s", "2 worker-minutes"), worker_startup="90 s")
    with pytest.raises(SearchError, match="costs 20 worker-seconds, and the budget is 15"):
        dagsel.preview(SEER("60 s", 15), worker_startup=20)
    with pytest.raises(SearchError, match="the cluster can have 2 workers"):
        dagsel.preview(SEER("60 s", 600, min_workers_per_trial=4), max_cluster_workers=2)
