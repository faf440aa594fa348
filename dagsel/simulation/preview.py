"""`preview`: what a search will take, before anything is started."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dagsel.arguments import checked, limits_of
from dagsel.checks import named_arguments, short_traceback
from dagsel.errors import SearchError
from dagsel.flow import Context, Direction, Flow
from dagsel.history.course import billed_spans
from dagsel.messages import UnitWork
from dagsel.planning.brackets import Stage, StagePlan
from dagsel.planning.budget import price_for, to_seconds
from dagsel.planning.capacity import ClusterCapacity, Plan, PlannedStage
from dagsel.planning.small_population import Policy
from dagsel.simulation import Curves, PowerLaw, SimulatedCluster, SimulatedRun, simulate
from dagsel.simulation.run import NOT_TRAINED, OF_TRAINING, check_curves, check_simulated
from dagsel.study import Space
from dagsel.views.preview import Interval, Preview, Row

#: So often a search is simulated whose workers are taken back, each time with other draws.
N_DRAWS = 10
_ELSEWHERE = {
    **OF_TRAINING,
    **dict.fromkeys(("metric", "sampler"), NOT_TRAINED),
    **dict.fromkeys(("epoch_s", "seconds_per_epoch"), "write epoch_seconds="),
    **dict.fromkeys(("num_workers", "workers"), "write n_workers="),
}


@named_arguments("dagsel.preview", _ELSEWHERE, error=SearchError)
def preview(
    flow: Flow,
    *,
    cluster: SimulatedCluster | None = None,
    curves: Curves | None = None,
    epoch_seconds: float | str | None = None,
    n_workers: int | None = None,
    max_cluster_workers: int | None = None,
    worker_startup: float | str | None = None,
    space: Space | None = None,
    direction: Direction = "minimize",
    deadline: float | str | None = None,
    budget: float | str | None = None,
    price_per_worker_hour: float | str | None = None,
    small_population: Policy = "auto",
    seed: int = 0,
) -> Preview:
    """Return what a search will take: trials, workers, time and cost. Nothing is trained.

    A search in stages (`SEER`, `ElasticHyperband`, `ElasticGrid`) has a plan of its own and needs
    nothing but the flow; it plans for a given cluster if `max_cluster_workers` or `worker_startup`
    say what that can have. Any other search is simulated, which needs the time of an epoch and the
    number of workers. If one of these is given, a search in stages is simulated too.

    Parameters
    ----------
    flow
        The search procedure, from `dagsel.flows` or your own; left as it is.
    cluster
        The cluster, if `n_workers` does not say enough: workers that start slowly, or a cluster
        that may grow.
    curves
        What trials do and what they cost, if `epoch_seconds` does not say enough. By default a
        `PowerLaw` with linear speed-up on several workers.
    epoch_seconds
        Time of a trial's epoch on one worker: seconds, or a text like ``"2 min"``.
    n_workers
        Number of workers of a cluster, at its beginning if it can have more. Each holds all shards;
        for data that is too large for that give `cluster`.
    max_cluster_workers, worker_startup
        As for `dagsel.optimize`. None for a cluster that does not change, or for one of which a
        search in stages may have as many workers as it wants, at once.
    space
        As for `dagsel.optimize`. It may be left out if `epoch_seconds` is given and the flow does
        not read parameters.
    direction
        Whether smaller or larger values of the curves are better.
    deadline, budget, price_per_worker_hour
        As for `dagsel.optimize`: the preview ends where the run would be ended. Without a price,
        here or in the flow, no money is shown.
    small_population
        As for `dagsel.simulate`. By default idle workers are released if there is a budget and the
        cluster can change its size: give `max_cluster_workers`, or a `cluster` with
        ``max_workers``.
    seed
        Seeds the flow, the draws of configurations, and those of interruptions.

    Returns
    -------
    Preview
        A table and a drawing of the workers over time. If the cluster's workers are taken back
        (`SimulatedCluster.interruptions_per_hour`), with the least and the most time and cost of
        10 simulations, of which the table has the first.

    Raises
    ------
    SearchError
        If an argument is missing or wrong.

    Examples
    --------
    >>> from dagsel.flows import SEER, RandomSearch
    >>> preview(
    ...     SEER("10 min", "80 worker-minutes", reduction_factor=2, min_stage="1 min", mode="paper")
    ... )
    <Preview of SEER, from its own plan
     stage    begins     lasts  trials  workers a trial  workers  worker-minutes
         1       0 s    85.7 s      12   8 on 1, 4 on 2       16            22.9
         2    85.7 s  2.86 min       6   4 on 1, 2 on 2        8            22.9
         3  4.29 min  5.71 min       3   2 on 1, 1 on 2        4            22.9
     total              10 min      12                        16            68.6
    ...
    >>> flow = RandomSearch(max_epochs=3, n_trials=8)
    >>> told = preview(flow, epoch_seconds=60, n_workers=4, price_per_worker_hour="2.50 USD")
    >>> told.seconds, told.worker_minutes, told.money
    (360.0, 24.0, 1.0)
    """
    given = checked(
        "space",
        "n_workers",
        "max_cluster_workers",
        "worker_startup",
        "epoch_seconds",
        flow=flow,
        seed=seed,
        space=space,
        n_workers=n_workers,
        max_cluster_workers=max_cluster_workers,
        worker_startup=worker_startup,
        direction=direction,
        epoch_seconds=epoch_seconds,
    )
    seed, n_workers = given.seed, given.n_workers
    deadline_s = math.inf if deadline is None else to_seconds("deadline", deadline)
    pools = cluster.workers if isinstance(cluster, SimulatedCluster) else ()
    _, limit = limits_of(flow.traits, None, budget, price_per_worker_hour, pools)
    budget_s = math.inf
    if budget is not None and limit is not None and not limit.is_money_for(pools):
        budget_s = limit.worker_seconds
    price = limit.price if limit else price_for(price_per_worker_hour, pools)
    name, plan = type(flow).__name__, flow.traits.plan
    told = (cluster, curves, epoch_seconds, n_workers)
    if plan is not None and all(value is None for value in told):
        most, startup_s = given.max_cluster_workers, given.worker_startup
        if most is not None or startup_s is not None:
            capacity = ClusterCapacity(most, startup_s or 0.0)
            dated = flow.plan_for(Context(0, direction, capacity=capacity))
            assert dated is not None, "a flow with a plan has one for each cluster"
            spans = [Row(0.0, dated.startup_s, (), dated.stages[0].n_workers, 0.0)]
            spans += [_row(dated, stage) for stage in dated.stages]
        else:
            spans = _rows(plan)
        rows, ends_early = _until(spans, deadline_s, budget_s)
        _check_any(rows)
        n_trials = max(row.n_trials for row in rows)  # the first row may be the workers' start
        return Preview(name, "arithmetic", rows, n_trials, ends_early, price)
    cluster = _cluster(cluster, n_workers, given.max_cluster_workers, given.worker_startup)
    space = _space(flow, curves, space)
    curves = _curves(curves, given.epoch_seconds)
    if cluster.n_workers * cluster.startup_s >= budget_s:
        raise SearchError(
            f"a budget of {budget_s:g} worker-seconds is used up before the {cluster.n_workers} "
            f"workers are there, {cluster.startup_s:g} s after they are asked for; raise it"
        )
    given = {"seed": seed, "space": space, "direction": direction, "deadline": deadline}
    given |= {"budget": budget, "price_per_worker_hour": price_per_worker_hour}
    given |= {"small_population": small_population}
    run = simulate(flow, curves, cluster, **given)
    interval = None
    if cluster.interruptions_per_hour:
        others = [replace(cluster, draw=cluster.draw + k) for k in range(1, N_DRAWS)]
        interval = _interval([run, *(simulate(flow, curves, other, **given) for other in others)])
    rows = _spans(run)
    _check_any(rows)
    ends_early = any(turn.get("event", {}).get("is") == "DeadlineReached" for turn in _turns(run))
    n_trials = len({unit.unit.trial for unit in _trained(run)})
    return Preview(name, "simulation", rows, n_trials, ends_early, price, interval)


def _interval(runs: Sequence[SimulatedRun]) -> Interval:
    """Return from where to where the same search goes, with its workers taken back otherwise."""
    seconds = sorted(run.seconds for run in runs)
    costs = sorted(run.cost for run in runs)
    money = sorted(run.money for run in runs if run.money is not None)
    ends = (money[0], money[-1]) if money else None
    return Interval(len(runs), (seconds[0], seconds[-1]), (costs[0], costs[-1]), ends)


def _check_any(rows: Sequence[Row]) -> None:
    if not rows:
        raise SearchError(
            "there is nothing to show, as the search ends within a millisecond; let the flow start "
            "a trial, and let an epoch take longer"
        )


def _rows(plan: StagePlan) -> list[Row]:
    """Return the stages of a plan for any cluster."""
    return [_row(plan, stage) for stage in plan.stages]


def _row(plan: StagePlan | Plan, stage: Stage | PlannedStage) -> Row:
    gangs = [(gang, n) for gang, n in zip(plan.workers, stage.n_trials, strict=True) if n]
    return Row(0.0, float(stage.seconds), tuple(gangs), max(1, stage.n_workers), 0.0)


def _until(
    stages: Sequence[Row], deadline_s: float, budget_s: float
) -> tuple[tuple[Row, ...], bool]:
    """Return stages until deadline or budget end them, with their times and costs."""
    rows: list[Row] = []
    seconds = cost = 0.0
    whole_s = sum(stage.lasts_s for stage in stages)
    nothing_s = 1e-9 * whole_s  # what rounding may leave over
    for stage in stages:
        left = min(deadline_s - seconds, (budget_s - cost) / stage.n_workers)
        lasts_s = min(stage.lasts_s, left)
        if lasts_s <= nothing_s:
            continue
        paid = lasts_s * stage.n_workers
        rows.append(replace(stage, begins_s=seconds, lasts_s=lasts_s, worker_seconds=paid))
        seconds += lasts_s
        cost += paid
    return tuple(rows), seconds < whole_s - nothing_s


# ---- what a simulation needs


@short_traceback
def _cluster(
    cluster: SimulatedCluster | None,
    n_workers: int | None,
    max_workers: int | None,
    startup_s: float | None,
) -> SimulatedCluster:
    given = {
        "n_workers": n_workers,
        "max_cluster_workers": max_workers,
        "worker_startup": startup_s,
    }
    named = [name for name, value in given.items() if value is not None]
    if cluster is not None and named:
        raise SearchError(
            f"cluster and {named[0]} were both given; leave {named[0]} out, the cluster says it"
        )
    if n_workers is not None:
        return SimulatedCluster(
            n_workers,
            # Of small data each worker has all, as in a search that is not told otherwise.
            replicas=max_workers or n_workers,
            max_workers=max_workers,
            startup_s=startup_s or 0.0,
        )
    if cluster is None:
        raise SearchError(
            "n_workers is missing: say on how many workers the search is to run, or give cluster= "
            "a SimulatedCluster, with max_workers if the flow may let it grow"
        )
    check_simulated(cluster)
    return cluster


@short_traceback
def _curves(curves: Curves | None, epoch_seconds: float | None) -> Curves:
    if curves is not None and epoch_seconds is not None:
        raise SearchError(
            "curves and epoch_seconds were both given; leave the second out, the curves say it"
        )
    if epoch_seconds is not None:
        return PowerLaw(epoch_s=epoch_seconds)
    if curves is None:
        raise SearchError(
            "epoch_seconds is missing: say how long an epoch of a trial takes on one worker, such "
            'as "2 min", or give curves='
        )
    check_curves(curves)
    return curves


@short_traceback
def _space(flow: Flow, curves: Curves | None, space: Space | None) -> Space | None:
    """Return the space, or one of a single parameter if none is needed."""
    if space is not None or curves is not None:  # curves may ask for parameters, or bring them
        return space
    if flow.traits.reads_configs:
        raise SearchError(
            f"space is missing, and the flow {flow.traits.reads_configs}; give space="
        )
    if flow.traits.sampling == "grid":
        raise SearchError(
            "space is missing, and how many trials a grid has depends on it; give space="
        )
    return lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)}


# ---- what a simulation tells


def _turns(run: SimulatedRun) -> list[Any]:
    return [entry for entry in run.journal if entry["is"] == "turn"]


def _costs(run: SimulatedRun, what: str = "worker_seconds") -> list[tuple[float, float]]:
    """Return pairs of time and cost until then, from the first request on."""
    turns = [(turn["seconds"], turn.get(what, 0.0)) for turn in _turns(run)]
    end = run.cost if what == "worker_seconds" else run.money or 0.0
    return [(0.0, 0.0), *turns, (run.seconds, end)]


def _trained(run: SimulatedRun) -> list[UnitWork]:
    ran = (*run.record.units, *run.record.pieces)  # many a trial is stopped in its first unit
    return [unit for unit in ran if unit.unit.kind == "train"]


def _spans(run: SimulatedRun) -> tuple[Row, ...]:
    """Return the spans of a search in each of which the same number of workers is billed."""
    startup_s, units = run.cluster.startup_s, _trained(run)
    spans = billed_spans(_costs(run))
    paid = _costs(run, "money") if run.bill.prices else []
    return tuple(
        Row(
            span.start,
            span.stop - span.start,
            _gangs(
                unit
                for unit in units
                if unit.start < span.stop - startup_s and unit.stop > span.start - startup_s
            ),
            span.n_workers,
            span.cost,
            _cost_until(paid, span.stop) - _cost_until(paid, span.start) if paid else None,
        )
        for span in spans
    )


def _cost_until(costs: Sequence[tuple[float, float]], seconds: float) -> float:
    """Return what is billed until a time; between two times, as if all the time the same."""
    at = max(1, min(bisect_right(costs, seconds, key=lambda cost: cost[0]), len(costs) - 1))
    (start, before), (stop, after) = costs[at - 1 : at + 1]
    share = (seconds - start) / (stop - start) if stop > start else 1.0
    return before + share * (after - before)


def _gangs(units: Iterable[UnitWork]) -> tuple[tuple[int, int], ...]:
    """Count the trials by the most workers that each was on."""
    gangs: dict[int, int] = {}
    for unit in units:
        gangs[unit.unit.trial] = max(unit.gang, gangs.get(unit.unit.trial, 0))
    return tuple(sorted(Counter(gangs.values()).items()))
