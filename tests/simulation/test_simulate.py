"""A search in virtual time: every flow ends, all is trained once, nothing beats the bound."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import optuna
import pytest

from dagsel import preview
from dagsel.errors import NoWorkersError, SearchError, TrainingError
from dagsel.flow import Flow, WorkersChanged
from dagsel.flows import (
    ASHA,
    MOASHA,
    PBT,
    SEER,
    ByConvergence,
    EarlyStopping,
    Grid,
    Hermes,
    Hyperband,
    HyperSched,
    JobQueue,
    Lookahead,
    Marble,
    MedianStopping,
    OptunaPruner,
    RandomSearch,
    Range,
    RoundRobin,
    SamplerSearch,
    SuccessiveHalving,
)
from dagsel.flows.baselines import (
    FIFO,
    LSF,
    SLAQ,
    ElasticGrid,
    ElasticHyperband,
    MarginalGain,
    Optimus,
    RandomTrial,
)
from dagsel.flows.baselines.optimus import over_nodes
from dagsel.history.makespans import bound_of
from dagsel.history.script import read_turns
from dagsel.planning.scaling import Scaling
from dagsel.simulation import PowerLaw, SimulatedCluster, SimulatedRun, decision_log, simulate

optuna.logging.set_verbosity(optuna.logging.WARNING)

FLOWS: dict[str, Callable[[], Flow]] = {
    "random": lambda: RandomSearch(max_epochs=4, n_trials=12),
    "grid": lambda: Grid(max_epochs=3),
    "halving": lambda: SuccessiveHalving(max_epochs=9, n_trials=18),
    "hyperband": lambda: Hyperband(max_epochs=9),
    "asha": lambda: ASHA(max_epochs=9, n_trials=24, n_concurrent=8),
    "mo-asha": lambda: MOASHA(max_epochs=9, n_trials=24, n_concurrent=8),
    "sampler_search": lambda: SamplerSearch(max_epochs=3, n_trials=16),
    "pbt": lambda: PBT(max_epochs=5, n_trials=8, mutations={"lr": Range(1e-4, 1.0, log=True)}),
    "median": lambda: MedianStopping(max_epochs=6, n_trials=16, n_concurrent=8),
    "pruner": lambda: OptunaPruner(
        max_epochs=6, n_trials=16, pruner=optuna.pruners.MedianPruner(4, 1)
    ),
    "early stopping": lambda: EarlyStopping(
        ASHA(max_epochs=9, n_trials=24, n_concurrent=8), patience=2
    ),
    "convergence": lambda: ByConvergence(ASHA(max_epochs=9, n_trials=24, n_concurrent=8)),
    "fifo": lambda: FIFO(max_epochs=3, n_trials=12),
    "robin": lambda: RoundRobin(max_epochs=3, n_trials=12, quantum=20),
    "slaq": lambda: SLAQ(max_epochs=3, n_trials=12, quantum=20),
    "hermes": lambda: Hermes(max_epochs=3, n_trials=12, quantum=20),
    "queue": lambda: JobQueue(n_trials=6, epochs_by="depth"),
    "lsf": lambda: LSF(RandomSearch(max_epochs=3, n_trials=6)),
    "marble": lambda: Marble(RandomSearch(max_epochs=3, n_trials=6), SCALING, by="kind"),
    "marginal gain": lambda: MarginalGain(
        RandomSearch(max_epochs=3, n_trials=6), SCALING, by="kind", interval_s=40
    ),
    "optimus": lambda: Optimus(
        RandomSearch(max_epochs=3, n_trials=6),
        dict.fromkeys(SCALING, over_nodes(4)),
        by="kind",
        interval_s=40,
    ),
    "seer": lambda: SEER("20 min", 4 * 1200.0, min_stage=60),
    "hypersched": lambda: HyperSched("20 min", 4 * 1200.0),
    "lookahead": lambda: Lookahead("20 min", 4 * 1200.0),
    "elastic hyperband": lambda: ElasticHyperband("20 min", 4 * 1200.0, min_stage=60),
    "elastic grid": lambda: ElasticGrid("20 min", 4 * 1200.0, sampling="study"),
    "random trial": lambda: RandomTrial("20 min", 4 * 1200.0),
}
SCALING: dict[Any, Scaling] = {
    "small": Scaling({2: 1.5, 3: 1.6}),
    "large": Scaling({2: 1.9, 4: 3.4}),
}
CURVES = PowerLaw(epoch_s=lambda config: 30.0 + 60.0 * config["width"])
CLUSTER = SimulatedCluster(n_workers=4)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1.0, log=True),
        "width": trial.suggest_float("width", 0.0, 1.0),
        "depth": trial.suggest_int("depth", 1, 4),
        "kind": trial.suggest_categorical("kind", ["small", "large"]),
    }


def small_space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_categorical("lr", [0.1, 0.2, 0.3]),
        "depth": trial.suggest_int("depth", 1, 2),
        "width": trial.suggest_float("width", 0.0, 1.0, step=0.25),
    }


def search(name: str, **options: Any) -> SimulatedRun:
    options = {"curves": CURVES, "cluster": CLUSTER, "space": space, **options}
    if name in ("grid", "queue"):
        options["space"] = small_space
    curves, cluster = options.pop("curves"), options.pop("cluster")
    return simulate(FLOWS[name](), curves, cluster, **options)


def test_the_timeline_has_the_gang_of_each_unit() -> None:
    run = search("marble")
    gangs = list(run.timeline()["gang"])
    assert gangs == [unit.gang for unit in run.record.units]
    assert max(gangs) > 1


def units_of(run: SimulatedRun) -> Counter[tuple[int, int, int]]:
    timeline = run.timeline()
    trained = timeline[timeline["kind"] == "train"]
    return Counter(zip(trained["trial"], trained["epoch"], trained["shard"], strict=True))


def test_every_flow_has_its_test() -> None:
    from dagsel import flows
    from dagsel.flows import baselines

    names = {*flows.__all__, *baselines.__all__} - {"Range"}
    assert {type(make()).__name__ for make in FLOWS.values()} == names


@pytest.mark.parametrize("name", FLOWS)
def test_every_flow_ends_and_trains_each_shard_once_an_epoch(name: str) -> None:
    run = search(name)
    assert run.record.finished
    assert not run.failures
    assert all(not trial.is_live for trial in run.record.trials.values())
    units = units_of(run)
    assert set(units.values()) == {1}
    for trial in run.record.trials.values():
        for epoch in trial.epochs:
            assert all(units[trial.number, epoch.epoch, s] == 1 for s in range(4))
    assert len(run.trials_dataframe()) == len(run.record.trials)
    assert run.best_value == run.leaderboard().iloc[0][run.metric]


@pytest.mark.parametrize("name", FLOWS)
def test_the_same_arguments_give_the_same_journal(name: str) -> None:
    hetero = replace(CLUSTER, speeds=(1.0, 2.0, 0.7, 1.3), failures=((200.0, 1),))
    one, other = (search(name, cluster=hetero, seed=3).journal for _ in range(2))
    assert one == other
    if name not in ("grid", "queue"):
        assert search(name, cluster=hetero, seed=4).journal != one


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_the_time_is_near_the_bound_and_never_below(share: float) -> None:
    hetero = SimulatedCluster(n_workers=5, speeds=(1.0, 2.0, 1.0, 0.5, 1.0), n_shards=10)
    flow = RandomSearch(max_epochs=4, n_trials=20, n_concurrent=20)
    run = simulate(flow, replace(CURVES, evaluation_share=share), hetero, space=space)
    work = sum(
        4 * (1.0 + share) * CURVES.seconds(trial.config, trial=0)
        for trial in run.record.trials.values()
    )
    assert bound_of(run.record.units) <= run.seconds * (1 + 1e-9)
    assert work / sum(hetero.worker_speeds.values()) <= run.seconds * (1 + 1e-9)
    rows: Any = run.makespans()
    (makespan,) = rows.itertuples()
    assert makespan.makespan == pytest.approx(run.seconds)
    assert 1.0 <= makespan.ratio < 1.3


def test_workers_run_one_unit_at_a_time_and_a_trial_one_unit_at_a_time() -> None:
    timeline = search("asha", cluster=replace(CLUSTER, hop_s=2.0)).timeline()
    trained = timeline[timeline["kind"] == "train"]
    assert trained["hop"].any()
    for by in ("worker", "trial"):
        for _, rows in trained.sort_values("start").groupby(by):
            assert (rows["start"].iloc[1:].to_numpy() >= rows["stop"].iloc[:-1].to_numpy()).all()


@pytest.mark.parametrize("n_shards", [1, 3, 7])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_what_is_reported_is_the_curves_value_to_the_last_bit(n_shards: int, share: float) -> None:
    curves = replace(CURVES, evaluation_share=share)
    run = search("random", curves=curves, cluster=replace(CLUSTER, n_shards=n_shards))
    for trial in run.record.trials.values():
        for epoch in trial.epochs:
            assert epoch.value == curves.value(trial.config, epoch.epoch, trial=trial.number)
    metrics = run.metrics
    assert len(metrics[metrics["split"] == "validation"]) == 12 * 4


def test_validation_takes_its_share_of_time_and_changes_no_value() -> None:
    without = search("random")
    run = search("random", curves=replace(CURVES, evaluation_share=0.5))
    timeline = run.timeline().assign(seconds=lambda frame: frame["stop"] - frame["start"])
    times = timeline.groupby("kind")["seconds"].sum()
    assert times["evaluate"] == pytest.approx(0.5 * times["train"])
    assert run.leaderboard(99).equals(without.leaderboard(99))
    assert run.seconds > 1.2 * without.seconds


def test_a_worker_that_dies_loses_its_unit_and_no_other() -> None:
    whole = search("random")
    run = search("random", cluster=replace(CLUSTER, failures=((100.0, 2),)))
    assert set(units_of(run).values()) == {1}
    assert len(units_of(run)) == len(units_of(whole)) == 12 * 4 * 4
    assert run.timeline().query("worker == 'worker-2'")["stop"].max() <= 100.0
    assert run.seconds > whole.seconds
    told = [turn.event for turn in read_turns(run.journal)]
    assert [event for event in told if isinstance(event, WorkersChanged)] == [
        WorkersChanged(3, seconds=100.0)
    ]
    assert run.leaderboard(99).equals(whole.leaderboard(99))


def test_workers_are_paid_from_request_to_release() -> None:
    run = search("random", cluster=replace(CLUSTER, startup_s=30.0, additions=((10.0, 1.0),)))
    assert run.timeline().query("worker == 'worker-4'")["start"].min() >= 40.0
    assert run.cost == pytest.approx(4 * run.seconds + run.seconds - 30.0 - 10.0)
    assert run.seconds < 30.0 + search("random").seconds


@pytest.mark.parametrize("startup_s", [2.3, 2.8, 48.1])
def test_what_it_cost_is_known_if_it_ends_as_a_worker_goes(startup_s: float) -> None:
    cluster = SimulatedCluster(2, n_shards=1, startup_s=startup_s, failures=((30.0, 1),))
    flow = RandomSearch(max_epochs=1, n_trials=1)
    run = simulate(flow, PowerLaw(epoch_s=30.0), cluster, space=space)
    assert run.cost == pytest.approx(2 * (startup_s + 30.0))


@pytest.mark.parametrize("startup_s", [0.0, 48.1])
@pytest.mark.parametrize(
    ("changes", "released_s"),
    [
        ({}, 125.0),
        ({"budget": None}, 240.0),
        ({"small_population": "hop"}, 240.0),
        ({"small_population": "release", "budget": None}, 125.0),
        ({"max_workers": None}, 240.0),
    ],
)
def test_idle_workers_are_released_when_a_run_on_a_cluster_releases_them(
    changes: dict[str, Any], released_s: float, startup_s: float
) -> None:
    given: dict[str, Any] = {"budget": 1000.0, "max_workers": 2, **changes}
    cluster = SimulatedCluster(
        2, n_shards=1, max_workers=given.pop("max_workers"), startup_s=startup_s
    )
    flow = RandomSearch(max_epochs=2, n_trials=3, n_concurrent=2)
    run = simulate(flow, PowerLaw(epoch_s=60.0), cluster, space=space, **given)
    assert run.seconds == pytest.approx(startup_s + 240.0)
    assert run.cost == pytest.approx(2 * startup_s + 240.0 + released_s)
    told = preview(flow, curves=PowerLaw(epoch_s=60.0), cluster=cluster, space=space, **given)
    assert told.worker_seconds == pytest.approx(run.cost)


def test_loads_and_hops_take_their_time() -> None:
    run = search("random", cluster=replace(CLUSTER, load_s=15.0, hop_s=5.0))
    timeline = run.timeline()
    assert timeline["start"].min() == 15.0
    assert sorted(run.record.loads) == [
        (f"worker-{k}", shard) for k, shard in enumerate([*_held(run)])
    ]
    took = timeline[timeline["kind"] == "train"]
    took = took.assign(seconds=took["stop"] - took["start"])
    for trial, rows in took.groupby("trial"):
        config = run.record.trials[int(str(trial))].config
        expected = CURVES.seconds(config, trial=0) / 4 + 5.0 * rows["hop"]
        assert rows["seconds"].to_numpy() == pytest.approx(expected.to_numpy())


def _held(run: SimulatedRun) -> list[int]:
    return [shard for _, shard in sorted(run.record.loads)]


def test_a_worker_is_as_fast_as_it_is_said_to_be() -> None:
    hetero = replace(CLUSTER, speeds=(1.0, 4.0, 0.5, 1.0))
    run = search("random", cluster=hetero)
    for unit in run.record.units:
        if unit.unit.kind == "train":
            config = run.record.trials[unit.unit.trial].config
            expected = CURVES.seconds(config, trial=0) / 4 / hetero.worker_speeds[unit.worker]
            assert unit.stop - unit.start == pytest.approx(expected)


def test_a_deadline_ends_the_search_at_that_moment() -> None:
    run = search("asha", deadline=333.0)
    assert run.record.finished
    assert run.seconds == 333.0
    assert run.timeline()["stop"].max() <= 333.0
    assert search("asha").seconds > 333.0


def test_a_stopped_trial_runs_no_more() -> None:
    run = search("median")
    pruned = [t for t in run.record.trials.values() if t.state == "pruned"]
    assert pruned
    for trial in pruned:
        timeline = run.timeline()
        last = timeline[timeline["trial"] == trial.number]["start"].max()
        assert last <= trial.epochs[-1].seconds


class Fragile:
    """Trial 3 fails in its second epoch."""

    evaluation_share = 0.0

    def value(self, config: Any, epoch: int, *, trial: int) -> float:
        if trial == 3 and epoch == 2:
            raise TrainingError("ValueError: no")
        return CURVES.value(config, epoch, trial=trial)

    def seconds(self, config: Any, *, trial: int) -> float:
        return 60.0


def test_a_trial_that_fails_ends_alone() -> None:
    run = search("random", curves=Fragile())
    assert [(trial.number, trial.reason) for trial in run.failures] == [(3, "ValueError: no")]
    assert sum(trial.state == "complete" for trial in run.record.trials.values()) == 11


def test_a_clone_goes_on_with_its_new_configuration() -> None:
    run = search("pbt")
    cloned = [trial for trial in run.record.trials.values() if trial.adoptions]
    assert cloned
    for trial in cloned:
        last = trial.epochs[-1]
        assert last.value == CURVES.value(trial.config, last.epoch, trial=trial.number)


def test_the_flow_and_the_sampler_are_left_as_they_were() -> None:
    flow, sampler = FLOWS["sampler_search"](), optuna.samplers.TPESampler(seed=1)
    options: dict[str, Any] = {"space": space, "sampler": sampler}
    one = simulate(flow, CURVES, CLUSTER, **options)
    other = simulate(flow, CURVES, CLUSTER, **options)
    assert one.journal == other.journal
    assert decision_log(search("sampler_search").journal) != decision_log(one.journal)


def test_what_cannot_be_simulated_is_named() -> None:
    with pytest.raises(SearchError, match="space is missing"):
        simulate(RandomSearch(max_epochs=1), CURVES, CLUSTER)
    with pytest.raises(SearchError, match="worker 4 cannot fail: there are 4"):
        SimulatedCluster(n_workers=4, failures=((1.0, 4),))
    with pytest.raises(SearchError, match="2 speeds were given for 4 workers"):
        SimulatedCluster(n_workers=4, speeds=(1.0, 1.0))
    dying = replace(CLUSTER, failures=tuple((10.0, worker) for worker in range(4)))
    with pytest.raises(NoWorkersError, match="have failed"):
        search("random", cluster=dying)


def test_dask_is_not_imported() -> None:
    code = "import sys, dagsel; dagsel.simulate; print({'dask', 'distributed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_a_large_search_trains_all_and_keeps_its_workers_busy() -> None:
    flow = RandomSearch(max_epochs=12, n_trials=256)
    run = simulate(flow, CURVES, SimulatedCluster(n_workers=16), space=space)
    timeline = run.timeline()
    assert run.record.n_epochs == 256 * 12
    assert len(timeline) == 2 * 256 * 12 * 4
    assert (timeline["stop"] - timeline["start"]).sum() > 0.9 * run.cost


@pytest.mark.parametrize(("n_trials", "n_switches"), [(1, 0), (2, 6)])
def test_a_worker_switches_only_where_another_trial_has_trained(
    n_trials: int, n_switches: int
) -> None:
    cluster = SimulatedCluster(n_workers=1, n_shards=1, switch_s=7.0)
    flow = RoundRobin(max_epochs=1, n_trials=n_trials, quantum=10.0)
    run = simulate(flow, PowerLaw(epoch_s=40.0), cluster, space=space)
    assert run.seconds == pytest.approx(40.0 * n_trials + 7.0 * n_switches)


def test_a_switch_is_measured_at_what_the_cluster_says_that_it_costs() -> None:
    switching = SimulatedCluster(n_workers=4, switch_s=7.0)
    run = search("marble", cluster=switching)
    assert run.record.switches
    assert run.record.switches == pytest.approx([7.0] * len(run.record.switches))


def test_promotions_are_not_made_where_they_were_found_too_dear() -> None:
    cheap, dear = SimulatedCluster(n_workers=4), SimulatedCluster(n_workers=4, switch_s=1e4)
    n_cheap = len(search("marble", cluster=cheap).record.switches)
    assert len(search("marble", cluster=dear).record.switches) < n_cheap


# ---- Several metrics.

TWO = {"error": CURVES, "ms": PowerLaw(asymptote=lambda config: 1 - config["width"], seed=5)}
GOALS: dict[str, Any] = {"metric": ["error", "ms"], "direction": ["minimize", "maximize"]}


def test_flows_that_do_not_rank_by_one_metric_take_several() -> None:
    names = {type(make()).__name__ for make in FLOWS.values() if make().traits.takes_several}
    assert names == {"MOASHA", "SamplerSearch", "RandomSearch", "Grid"} | {
        # around one of these
        "LSF", "Marble", "MarginalGain", "Optimus",
    }  # fmt: skip


@pytest.mark.parametrize(
    "flow",
    [
        *(FLOWS[name] for name in ("mo-asha", "sampler_search", "random")),
        lambda: EarlyStopping(RandomSearch(max_epochs=5, n_trials=9), patience=1),
        lambda: ByConvergence(MOASHA(max_epochs=4, n_trials=9)),
    ],
)
def test_a_search_for_several_metrics_comes_to_the_front_of_the_study(flow: Any) -> None:
    sampler = optuna.samplers.NSGAIISampler(population_size=4, seed=0)
    run = simulate(flow(), TWO, CLUSTER, space=space, sampler=sampler, **GOALS)
    front = run.pareto()
    assert {trial.number for trial in run.study.best_trials} == set(front["trial"])
    assert list(front["error"]) == sorted(front["error"])
    assert list(front["ms"]) == sorted(front["ms"])  # the larger, the better
    assert set(run.metrics.query("split == 'validation'")["name"]) == {"error", "ms"}
    assert len(run.leaderboard(100)) == len(run.record.trials)
    again = simulate(flow(), TWO, CLUSTER, space=space, sampler=sampler, **GOALS)
    assert again.journal == run.journal


def test_the_front_of_mo_asha_holds_what_trains_long_and_what_is_extreme() -> None:
    run = simulate(FLOWS["mo-asha"](), TWO, CLUSTER, space=space, **GOALS)
    epochs = [len(trial.epochs) for trial in run.record.trials.values()]
    assert max(epochs) == 9
    assert sum(epochs) < 9 * 24 / 2
    best = min(run.record.trials.values(), key=lambda trial: trial.values[0])
    assert best.number == run.pareto()["trial"][0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"metric": "error"}, "metric names error, direction has 2, .* of error, ms: give each"),
        ({"direction": "minimize"}, "direction has 1, .*in one order"),
        ({"metric": ["ms", "error"]}, "in one order"),
        ({"direction": ["up", "down"]}, "direction must be one of 'minimize', 'maximize'"),
        ({"flow": ASHA(max_epochs=9, n_trials=9)}, "ASHA ranks trials by one metric"),
        ({"curves": {"error": CURVES, "ms": 3}}, "curves must say what trials cost, got 3"),
        ({"curves": CURVES}, "the curves are of error"),
    ],
)
def test_metrics_directions_and_curves_have_to_fit(changes: dict[str, Any], text: str) -> None:
    given = {"flow": FLOWS["random"](), "curves": TWO, **GOALS, **changes}
    with pytest.raises(SearchError, match=text):
        simulate(given.pop("flow"), given.pop("curves"), CLUSTER, space=space, **given)


@pytest.mark.parametrize("n_frozen_before", [0, 1])
def test_a_search_leaves_the_garbage_collector_as_it_was(
    n_frozen_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagsel.simulation.run.FREEZE_EACH", 8)
    monkeypatch.setattr("dagsel.garbage._n_set_apart", 0)  # by a search of another test
    frozen: list[int] = []

    def space(trial: optuna.Trial) -> dict[str, Any]:
        frozen.append(gc.get_freeze_count())
        return {"x": trial.suggest_float("x", 0.0, 1.0)}

    if n_frozen_before:  # the user's own
        gc.freeze()
    before = gc.get_freeze_count()
    try:
        simulate(
            ASHA(max_epochs=4, n_trials=12, n_concurrent=2),
            PowerLaw(epoch_s=1.0),
            SimulatedCluster(n_workers=2),
            space=space,
        )
        assert gc.get_freeze_count() <= before
        assert bool(gc.get_freeze_count()) == bool(n_frozen_before)
        assert (max(frozen) > before) == (not n_frozen_before)
    finally:
        gc.unfreeze()
