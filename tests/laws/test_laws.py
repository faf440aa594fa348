"""The laws of a run (docs/explanation/exactness.md), on a real cluster with a real model.

One search of 16 trials (two optimizers, dropout and batch norm, a learning rate that falls by
itself or follows the metric) runs on two worker processes; what it recorded is held against the
laws, and each trial's final state against a plain PyTorch loop that is written here and uses
nothing of dagsel's.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
import torch
from distributed import Client, LocalCluster

import dagsel
from dagsel.flows import Grid
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from tests.fused import fused

EPOCHS = 3
SEED = 7
SPACE: dict[str, list[Any]] = {
    "optimizer": ["sgd", "adam"],
    "layer": ["dropout", "batch norm"],
    "schedule": ["exponential", "plateau"],
    "batch_size": [32, 50],
}
RATES = {"sgd": 0.05, "adam": 0.003}


def build_model(config: Mapping[str, Any]) -> torch.nn.Module:
    layer = torch.nn.Dropout(0.3) if config["layer"] == "dropout" else torch.nn.BatchNorm1d(32)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), layer, torch.nn.ReLU(), torch.nn.Linear(32, 10)
    )


def build_optimizer(parameters: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    if config["optimizer"] == "sgd":
        return torch.optim.SGD(parameters, lr=RATES["sgd"], momentum=0.9)
    return torch.optim.Adam(parameters, lr=RATES["adam"])


def build_schedule(optimizer: torch.optim.Optimizer, config: Mapping[str, Any]) -> Any:
    if config["schedule"] == "exponential":
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    # An epoch that does not improve by a tenth lowers the rate.
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, 0, threshold=0.1)


def suggest(trial: optuna.Trial) -> dict[str, Any]:
    return {name: trial.suggest_categorical(name, values) for name, values in SPACE.items()}


@dataclass
class Search:
    run: dagsel.Run
    states: dict[int, State]


@pytest.fixture(scope="module")
def search(
    cluster: LocalCluster, digits: ShardedDataset, tmp_path_factory: pytest.TempPathFactory
) -> Search:
    run_dir = str(tmp_path_factory.mktemp("laws") / "run")
    states = {}

    def keep(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        blob, _ = RunDir(run_dir).states.load(trial.number, EPOCHS, digits.n_shards - 1)
        states[trial.number] = State(blob)

    workload = dagsel.TorchWorkload(
        build_model,
        torch.nn.functional.cross_entropy,
        build_optimizer,
        batch_size=lambda config: config["batch_size"],
        lr_scheduler=build_schedule,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )
    study = optuna.create_study(study_name="laws", direction="maximize")
    with Client(cluster, set_as_default=False) as client:
        run = dagsel.optimize(
            study,
            workload,
            digits,
            space=suggest,
            flow=Grid(max_epochs=EPOCHS),
            metric="accuracy",
            client=client,
            run_dir=run_dir,
            seed=SEED,
            callbacks=[keep],
        )
    return Search(run, states)


def overlaps(units: pd.DataFrame) -> int:
    """Count the units that begin before the one before them has ended."""
    ordered = units.sort_values("start")
    return int((ordered.start.iloc[1:].to_numpy() < ordered.stop.iloc[:-1].to_numpy()).sum())


def test_completeness(search: Search, digits: ShardedDataset) -> None:
    timeline = search.run.timeline()
    trained = timeline[timeline.kind == "train"]
    n_trials = len(list(itertools.product(*SPACE.values())))
    visits = trained.groupby(["trial", "epoch"]).shard.apply(sorted)
    assert len(visits) == n_trials * EPOCHS
    assert all(shards == list(range(digits.n_shards)) for shards in visits)


def test_isolation(search: Search) -> None:
    timeline = search.run.timeline()
    for _, units in timeline[timeline.kind == "train"].groupby("trial"):
        assert overlaps(units) == 0


def test_exclusivity(search: Search) -> None:
    timeline = search.run.timeline()
    assert timeline.worker.nunique() == 2
    for _, units in timeline.groupby("worker"):
        assert overlaps(units) == 0


def test_locality(search: Search, digits: ShardedDataset) -> None:
    timeline = search.run.timeline()
    loads = search.run.record.loads
    assert len(set(loads)) == len(loads), "a worker read a shard twice"
    assert {shard for _, shard in loads} == set(range(digits.n_shards))
    trained = timeline[timeline.kind == "train"]
    assert set(zip(trained.worker, trained.shard, strict=True)) <= set(loads)
    n_trials = len(search.run.record.trials)
    assert timeline.hop.sum() <= 1.05 * EPOCHS * digits.n_shards * n_trials


def plain_pytorch(
    config: Mapping[str, Any], visits: list[list[int]], trial: int, data: ShardedDataset
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Train as a script does, on one core, visiting the shards in the given orders."""
    seed = int(np.random.SeedSequence([SEED, trial]).generate_state(1)[0])
    torch.manual_seed(seed)
    model = build_model(config)
    optimizer = fused(build_optimizer(model.parameters(), config))
    schedule = build_schedule(optimizer, config)
    shards = [
        {name: torch.from_numpy(array) for name, array in data.shard(index).items()}
        for index in range(data.n_shards)
    ]
    for epoch, order in enumerate(visits, start=1):
        for index in order:
            x, y = shards[index]["x"], shards[index]["y"]
            key = [SEED, trial, epoch, index]
            samples = torch.from_numpy(np.random.default_rng(key).permutation(len(x)))
            for batch in samples.split(config["batch_size"]):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        if epoch == len(visits):  # a rate that follows the metric falls when an epoch begins
            break
        is_told = config["schedule"] == "plateau"
        schedule.step(accuracy(model, data)) if is_told else schedule.step()
    return model, optimizer


def accuracy(model: torch.nn.Module, data: ShardedDataset) -> float:
    hits = total = 0
    model.eval()
    for index in range(data.n_shards):
        shard = data.validation_shard(index)
        with torch.inference_mode():
            output = model(torch.from_numpy(shard["x"]))
        hits += int((output.argmax(1).numpy() == shard["y"]).sum())
        total += len(shard["y"])
    model.train()
    return hits / total


def test_sequential_equivalence(search: Search, digits: ShardedDataset) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    timeline = search.run.timeline()
    trained = timeline[timeline.kind == "train"].sort_values(["trial", "epoch", "position"])
    orders = trained.groupby(["trial", "epoch"]).shard.apply(list)
    rates = set[float]()
    try:
        for trial, state in search.states.items():
            config = search.run.record.trials[trial].config
            model, optimizer = plain_pytorch(config, list(orders[trial]), trial, digits)
            found = search.run.given_workload.restore(state, config).state_dict()
            for name, tensor in model.state_dict().items():
                assert torch.equal(found[name], tensor), (trial, config, name)
            moments = [
                value.numpy().tobytes()
                for slots in optimizer.state_dict()["state"].values()
                for value in slots.values()
                if torch.is_tensor(value) and value.numel() > 1
            ]
            stored = {tensor.data.tobytes() for tensor in state.tensors.values()}
            lowered = [group["lr"] for group in optimizer.param_groups]
            groups = state.meta["tree"]["optimizer"]["param_groups"]
            if config["schedule"] == "plateau":
                rates.add(lowered[0] / RATES[config["optimizer"]])
                assert [group["lr"] for group in groups] == lowered, (trial, config)
            assert moments
            assert all(moment in stored for moment in moments), (trial, config)
    finally:
        torch.set_num_threads(threads)
    assert orders.map(tuple).nunique() > 1
    assert min(rates) < 1, "no rate followed its metric"


def test_the_study_knows_everything(search: Search) -> None:
    study, run = search.run.study, search.run
    assert {trial.state.name for trial in study.trials} == {"COMPLETE"}
    assert all(set(trial.intermediate_values) == set(range(EPOCHS)) for trial in study.trials)
    assert study.best_value == run.best_value > 0.9
    # Of trials that are worth the same Optuna takes the one that ended first.
    best = [trial.params for trial in study.trials if trial.value == study.best_value]
    assert study.best_params in best
    assert run.best_params in best
    assert set(run.metrics.split) == {"train", "validation"}
    frame = run.metrics.query("split == 'validation' and name == 'accuracy'")
    assert frame.value.max() == pytest.approx(
        max(max(trial.intermediate_values.values()) for trial in study.trials)
    )


def test_the_best_model_scores_what_was_reported(search: Search, digits: ShardedDataset) -> None:
    found = accuracy(search.run.best_model(), digits)
    assert found == pytest.approx(search.run.best_value, abs=1e-12)
