"""A torch model with all that makes a state more than its weights, and the plain loop for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from chaos_jobs import N_SHARDS, Job

import dagsel
from dagsel.storage import ShardedDataset
from dagsel.workloads.base import Config


def make_torch_workload() -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        build_model,
        torch.nn.functional.cross_entropy,
        build_optimizer,
        batch_size=32,
        lr_scheduler=build_schedule,
        metrics={"accuracy": dagsel.metrics.accuracy},
    )


def build_model(config: Config) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16),
        torch.nn.BatchNorm1d(16),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(16, 3),
    )


def build_optimizer(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config["lr"])


def build_schedule(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def plain_pytorch(
    job: Job, trial: int, config: Mapping[str, Any], visits: list[tuple[int, ...]]
) -> dict[str, torch.Tensor]:
    """Train as a script does, on one core, visiting the shards in the given orders."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = ShardedDataset.open(f"{job.folder}/data.zarr")
    shards = [
        {name: torch.from_numpy(array) for name, array in data.shard(index).items()}
        for index in range(N_SHARDS)
    ]
    seed = int(np.random.SeedSequence([job.seed, trial]).generate_state(1)[0])
    try:
        torch.manual_seed(seed)
        model = build_model(config)
        optimizer = build_optimizer(model.parameters(), config)
        schedule = build_schedule(optimizer, config)
        for epoch, order in enumerate(visits, start=1):
            for index in order:
                x, y = shards[index]["x"], shards[index]["y"]
                order_of = np.random.default_rng([job.seed, trial, epoch, index])
                for batch in torch.from_numpy(order_of.permutation(len(x))).split(32):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                    optimizer.step()
            schedule.step()
    finally:
        torch.set_num_threads(threads)
    return model.state_dict()
