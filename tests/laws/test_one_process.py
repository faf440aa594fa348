"""Workers that share a process train what workers of their own processes do: the same bits."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import cloudpickle
import numpy as np
import optuna
import pytest
import torch
from distributed import Client, Nanny, Scheduler, SpecCluster, Worker

import dagsel
from dagsel.dispatch.units import visit_order
from dagsel.execution.cluster import close
from dagsel.flows import Grid
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from tests.fused import fused

EPOCHS = 2
RATES = [0.1, 0.03, 0.01, 0.003]
LOCAL: dict[str, Any] = {"host": "127.0.0.1"}


class Noise(torch.nn.Module):
    """Adds noise from the streams of Python and NumPy, in training and in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.01 * random.gauss(0, 1) + 0.01 * float(np.random.normal())


def build_model(config: Mapping[str, Any]) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.Dropout(0.5), Noise(), torch.nn.ReLU(),
        torch.nn.Linear(32, 10),
    )  # fmt: skip


def sgd(parameters: Any, config: Mapping[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config["lr"], momentum=0.9)


WORKLOAD = dagsel.TorchWorkload(build_model, torch.nn.functional.cross_entropy, sgd, batch_size=32)


def cluster_of(kind: str) -> SpecCluster:
    """A cluster whose workers live in this process, in their own ones, or both."""
    thread = {"cls": Worker, "options": {**LOCAL, "nthreads": 1}}
    process = {"cls": Nanny, "options": {**LOCAL, "nthreads": 1, "silence_logs": logging.WARNING}}
    workers = {
        "threads": {"a": thread, "b": thread, "c": thread},
        "processes": {"a": process, "b": process},
        "mixture": {"a": thread, "b": process, "c": thread},
    }[kind]
    options = {**LOCAL, "dashboard": False, "dashboard_address": ":0", "port": 0}
    return SpecCluster(
        workers, {"cls": Scheduler, "options": options}, silence_logs=logging.WARNING
    )


@contextmanager
def client_of_kind(kind: str) -> Iterator[Client]:
    with ExitStack() as stack:
        cluster: Any = cluster_of(kind)
        stack.callback(close, cluster)
        yield stack.enter_context(Client(cluster, set_as_default=False))


def search(client: Client, data: ShardedDataset, run_dir: str) -> tuple[dagsel.Run, dict[int, Any]]:
    """Train all rates; return the run and the weights of each trial."""
    states = {}

    def keep(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        blob, _ = RunDir(run_dir).states.load(trial.number, EPOCHS, data.n_shards - 1)
        states[trial.number] = State(blob)

    run = dagsel.optimize(
        optuna.create_study(),
        WORKLOAD,
        data,
        space=lambda trial: {"lr": trial.suggest_categorical("lr", RATES)},
        flow=Grid(max_epochs=EPOCHS),
        metric="loss",
        client=client,
        run_dir=run_dir,
        deterministic=True,
        callbacks=[keep],
    )
    return run, states


def plain_pytorch(lr: float, trial: int, data: ShardedDataset) -> torch.nn.Module:
    """Train as a script does, one trial after the other, in the orders of visits of seed 0."""
    seed = int(np.random.SeedSequence([0, trial]).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model = build_model({})
    optimizer = fused(sgd(model.parameters(), {"lr": lr}))
    for epoch in range(1, EPOCHS + 1):
        for index in visit_order(data.n_shards, seed=0, trial=trial, epoch=epoch):
            shard = {name: torch.from_numpy(array) for name, array in data.shard(index).items()}
            key = [0, trial, epoch, index]
            order = np.random.default_rng(key).permutation(len(shard["x"]))
            for batch in torch.from_numpy(order).split(32):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(
                    model(shard["x"][batch]), shard["y"][batch]
                )
                loss.backward()
                optimizer.step()
    return model


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["threads", "processes", "mixture"])
def test_the_weights_are_those_of_sequential_training(
    kind: str, digits: ShardedDataset, run_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "dagsel"), client_of_kind(kind) as client:
        run, states = search(client, digits, run_dir)
    assert not run.failures
    warned = [r.message for r in caplog.records if "Client(processes=True)" in r.message]
    assert len(warned) == (kind != "processes"), "once a run, where workers share a process"
    assert len(states) == len(RATES)
    for trial, state in states.items():
        config = run.record.trials[trial].config
        found = WORKLOAD.restore(state, config).state_dict()
        for name, tensor in plain_pytorch(config["lr"], trial, digits).state_dict().items():
            assert torch.equal(found[name], tensor), (kind, trial, name)
        parts = [
            WORKLOAD.evaluate(state, WORKLOAD.prepare(digits.validation_shard(k)), config)
            for k in range(digits.n_shards)
        ]
        n_samples = sum(part.n_samples for part in parts)
        loss = sum(part.n_samples * part.metrics["loss"] for part in parts) / n_samples
        assert run.record.trials[trial].epochs[-1].metrics["loss"] == loss


cloudpickle.register_pickle_by_value(sys.modules[__name__])
