"""Searches for several metrics: fronts with their models; killed, resumed and repeated alike."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, LocalCluster
from optuna.trial import TrialState

import dagsel
from dagsel.errors import SearchError
from dagsel.storage import ShardedDataset
from tests.conftest import Optimize

from .interrupted import (
    METRICS,
    SEVERAL,
    interrupt,
    open_several,
    space,
    stopping_after,
    twofold,
    value,
)


@pytest.fixture
def begin(optimize: Optimize, client: Client) -> Optimize:
    def call(flow: str, **given: Any) -> dagsel.Run:
        default = {"study": open_several(None), "workload": twofold(), "space": space}
        default |= {"client": client, "metric": METRICS}
        return optimize(SEVERAL[flow], **(default | given))

    return call


def go_on(client: Client, run_dir: str, home: str | None) -> dagsel.Run:
    study = open_several(home)
    return dagsel.resume(run_dir, client, workload=twofold(), space=space, study=study)


def brute_front(run: dagsel.Run) -> set[int]:
    """Return what no other ended trial is better than in its last epoch, from the run's metrics."""
    frame = run.metrics.query("split == 'validation'")
    found = {}
    for trial in run.record.trials.values():
        if trial.state == "failed" or not trial.epochs or not trial.is_feasible:
            continue
        last = frame[(frame.trial == trial.number) & (frame.epoch == len(trial.epochs))]
        told = last.set_index("name")["value"]
        found[trial.number] = (-told["value"], told["cost"])
    return {
        number
        for number, mine in found.items()
        if not any(
            all(a <= b for a, b in zip(theirs, mine, strict=True)) and theirs != mine
            for theirs in found.values()
        )
    }


def stored(run: dagsel.Run) -> set[int]:
    return {number for number in run.record.trials if run.run_dir.states.list(number)}


def check(client: Client, run: dagsel.Run, flow: str) -> None:
    assert len(run.record.trials) == SEVERAL[flow].n_trials
    front = set(run.pareto()["trial"])
    assert front == brute_front(run)
    assert stored(run) == front
    names = {"complete": "COMPLETE", "pruned": "PRUNED"}
    alive = [trial for trial in run.study.trials if trial.state != TrialState.FAIL]
    stands = {trial.user_attrs.get("dagsel:trial", trial.number): trial for trial in alive}
    assert {n: t.state.name for n, t in stands.items()} == {
        trial.number: names[trial.state] for trial in run.record.trials.values()
    }
    best = {trial.user_attrs.get("dagsel:trial", trial.number) for trial in run.study.best_trials}
    assert best == front
    for number, trial in stands.items():
        assert trial.intermediate_values == {}
        if trial.state == TrialState.COMPLETE:
            n_epochs = len(run.record.trials[number].epochs)
            config = run.record.trials[number].config
            expected = [value(config, n_epochs), config["x"] + 0.01 * n_epochs]
            assert trial.values == pytest.approx(expected)
    for row in run.pareto().to_dict("records"):
        model = run.best_model(trial=row["trial"])
        assert max(epoch for epoch, _, _ in model) == row["epoch"]
    assert len(run.models()) == len(front)
    told = json.loads((Path(run.run_dir.url) / "best.json").read_text())
    assert {one["trial"] for one in told["front"]} == front
    again = dagsel.replay(
        run.run_dir.url, client, workload=twofold(), space=space, into=f"{run.run_dir.url}-again"
    )
    assert again.record.notes == []
    assert again.pareto().equals(run.pareto())
    assert again.models() == run.models()
    assert {t.number for t in again.study.best_trials} == front
    seen = dagsel.load(run.run_dir.url, workload=twofold())
    assert seen.leaderboard().equals(run.leaderboard())
    assert seen.models() == run.models()


@pytest.mark.parametrize("flow", SEVERAL)
def test_a_search_for_several_metrics_ends_with_its_front_and_its_models(
    flow: str, begin: Optimize, client: Client
) -> None:
    run = begin(flow)
    check(client, run, flow)
    assert len(run.pareto()) > 1
    with pytest.raises(SearchError, match=r"run.pareto\(\)"):
        run.best_model()
    for left in set(run.record.trials) - set(run.pareto()["trial"]):
        with pytest.raises(SearchError, match=f"the model of trial {left} is not kept"):
            run.best_model(trial=left)


@pytest.mark.parametrize(("flow", "seed"), [("mo-asha", 0), ("nsga-ii", 1), ("mo-asha", 2)])
def test_a_driver_that_is_killed_costs_nothing_of_the_front(
    flow: str,
    seed: int,
    client: Client,
    cluster: LocalCluster,
    digits: ShardedDataset,
    run_dir: str,
    tmp_path: Path,
) -> None:
    chance = random.Random(seed)
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    command = [
        sys.executable, "-m", "tests.execution.interrupted", flow, str(chance.randint(10, 60)),
        digits.url, cluster.scheduler_address, run_dir, storage,
    ]  # fmt: skip
    driver = subprocess.run(command, capture_output=True, text=True, check=False)
    assert driver.returncode == -signal.SIGKILL, driver.stderr
    steps = chance.randint(5, 30)
    with contextlib.suppress(KeyboardInterrupt), stopping_after(steps, interrupt):
        go_on(client, run_dir, storage)
    check(client, go_on(client, run_dir, storage), flow)


def test_a_study_in_memory_is_filled_again_with_lists_of_values(
    begin: Optimize, client: Client, run_dir: str
) -> None:
    with pytest.raises(KeyboardInterrupt), stopping_after(30, interrupt):
        begin("nsga-ii")
    check(client, go_on(client, run_dir, None), "nsga-ii")


def test_a_run_that_is_given_up_tells_the_study_and_keeps_its_front(
    begin: Optimize, client: Client, run_dir: str, tmp_path: Path
) -> None:
    home = f"sqlite:///{tmp_path / 'study.db'}"
    with pytest.raises(KeyboardInterrupt), stopping_after(60, interrupt):
        begin("random", study=open_several(home))
    dagsel.abandon(run_dir)
    study = open_several(home)
    assert {trial.state.is_finished() for trial in study.trials} == {True}
    run = dagsel.load(run_dir, workload=twofold())
    told = {t.number: t.values for t in study.trials if t.state == TrialState.COMPLETE}
    done = [trial for trial in run.record.trials.values() if trial.state == "complete"]
    assert told == {trial.number: list(trial.values) for trial in done}
    assert len(run.models()) == len(run.pareto()) == len(stored(run)) > 0


def test_what_breaks_a_constraint_or_is_nan_is_not_on_the_front(
    optimize: Optimize, client: Client
) -> None:
    def constrained(trial: Any) -> dict[str, Any]:
        x = trial.suggest_float("x", 0.0, 1.0)
        trial.set_constraint("x", 0.5 - x)
        return {"x": x}

    def sometimes(config: Any, epoch: int) -> float:
        return float("nan") if config["x"] > 0.9 else float(config["x"] > 0.7)

    run = optimize(
        dagsel.flows.RandomSearch(max_epochs=1, n_trials=16),
        study=open_several(None),
        workload=type(twofold())(value=sometimes),
        space=constrained,
        metric=METRICS,
        client=client,
    )
    params = {n: trial.params["x"] for n, trial in run.record.trials.items()}
    assert min(params.values()) < 0.5
    assert max(params.values()) > 0.9
    assert {t.number for t in run.failures} == {n for n, x in params.items() if x > 0.9}
    assert "value is NaN after epoch 1" in run.failures[0].reason
    front = set(run.pareto()["trial"])
    assert front == brute_front(run) == {t.number for t in run.study.best_trials}
    assert all(0.5 <= params[number] <= 0.9 for number in front)
    assert list(run.leaderboard(20)["feasible"]) == sorted(
        run.leaderboard(20)["feasible"], reverse=True
    )
