"""One flow, one seed, one completion order: the same decisions on a cluster and in virtual time."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from distributed import Client

import dagsel
from dagsel.flow import Flow
from dagsel.flows import ASHA, Hyperband, OptunaPruner, SamplerSearch
from dagsel.simulation import Recorded, SimulatedCluster, decision_log
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

FLOWS = {
    "ASHA": ASHA(max_epochs=9, n_trials=12),
    "stopping": ASHA(max_epochs=9, n_trials=12, mode="stopping", semantics="ray"),
    "Hyperband": Hyperband(max_epochs=4, reduction_factor=2),
    "TPE": SamplerSearch(max_epochs=2, n_trials=14),
    "pruner": OptunaPruner(4, 8, optuna.pruners.MedianPruner(n_startup_trials=2)),
}


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0, 1), "kind": trial.suggest_categorical("kind", "ab")}


def value(config: Any, epoch: int) -> float:
    return float(1 - (config["x"] - 0.3) ** 2 - (config["kind"] == "b") / (1 + epoch))


@pytest.mark.parametrize("name", FLOWS)
def test_the_decision_logs_are_equal(
    name: str, client: Client, digits: ShardedDataset, run_dir: str
) -> None:
    flow: Flow = FLOWS[name]
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=3))
    run = dagsel.optimize(
        study, SyntheticWorkload(value=value), digits, space=space, flow=flow, metric="value",
        client=client, run_dir=run_dir, seed=5,
    )  # fmt: skip
    journal = run.run_dir.journal.read()
    simulated = dagsel.simulate(
        flow, Recorded.from_run(run), SimulatedCluster(n_workers=2), seed=5, space=space,
        sampler=optuna.samplers.TPESampler(seed=3), direction="maximize", metric="value",
        order=journal,
    )  # fmt: skip
    log = decision_log(journal)
    assert len(log) > run.record.n_epochs
    assert log == decision_log(simulated.journal)
    assert simulated.best_params == run.best_params
