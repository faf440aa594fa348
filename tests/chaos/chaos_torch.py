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
        collate=dagsel.collate.pad(ids=0),
        augment=augment,
        input_fn=inputs,
    )


def augment(sample: dict[str, torch.Tensor], config: Config) -> dict[str, torch.Tensor]:
    """Add noise, and drop some of the tokens."""
    kept = torch.rand(len(sample["ids"])) > 0.2
    return {**sample, "x": sample["x"] + 0.1 * torch.randn(8), "ids": sample["ids"][kept]}


def inputs(batch: dict[str, torch.Tensor], config: Config) -> Any:
    return {"x": batch["x"], "ids": batch["ids"], "mask": batch["ids_mask"]}, batch["y"]


class Model(torch.nn.Module):
    """Numbers and token lists in, three classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(9, 4)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(12, 16),
            torch.nn.BatchNorm1d(16),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(16, 3),
        )

    def forward(self, x: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = (self.table(ids) * mask[..., None]).sum(1)
        output: torch.Tensor = self.layers(torch.cat([x, seen], 1))
        return output


def build_model(config: Config) -> torch.nn.Module:
    return Model()


def build_optimizer(parameters: Any, config: Config) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=config["lr"])


def build_schedule(optimizer: torch.optim.Optimizer, config: Config) -> Any:
    if config["lr"] < 1e-3:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, 0, threshold=0.1)


def plain_pytorch(
    job: Job,
    trial: int,
    config: Mapping[str, Any],
    visits: list[tuple[int, ...]],
    values: list[float],
) -> dict[str, torch.Tensor]:
    """Train as a script does, on one core, visiting the shards in the given orders.

    `values` are the metrics after each epoch.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = ShardedDataset.open(f"{job.folder}/data.zarr")
    shards = [data.shard(index) for index in range(N_SHARDS)]
    seed = int(np.random.SeedSequence([job.seed, trial]).generate_state(1)[0])
    try:
        torch.manual_seed(seed)
        model = build_model(config)
        optimizer = build_optimizer(model.parameters(), config)
        for group in optimizer.param_groups:
            group["fused"] = True  # as the workload has it by default
        schedule = build_schedule(optimizer, config)
        for epoch, order in enumerate(visits, start=1):
            for index in order:
                key = [job.seed, trial, epoch, index]
                n_samples = len(shards[index]["y"])
                seeds = np.random.default_rng([*key, 2]).integers(2**63, size=n_samples).tolist()
                places = np.random.default_rng(key).permutation(n_samples)
                for batch in torch.from_numpy(places).split(32):
                    samples = [changed(shards[index], k, seeds[k]) for k in batch.tolist()]
                    optimizer.zero_grad()
                    output, target = scored(model, samples)
                    torch.nn.functional.cross_entropy(output, target).backward()
                    optimizer.step()
            follows = isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau)
            schedule.step(values[epoch - 1]) if follows else schedule.step()
    finally:
        torch.set_num_threads(threads)
    return model.state_dict()


def changed(shard: Mapping[str, Any], place: int, seed: int) -> dict[str, torch.Tensor]:
    """Change a sample as `augment` does, with random numbers of its own."""
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` keeps the stack of its call
        return augment({name: torch.as_tensor(rows[place]) for name, rows in shard.items()}, {})


def scored(model: torch.nn.Module, samples: list[dict[str, torch.Tensor]]) -> Any:
    """Pad the samples by hand; return the model's output, and the targets."""
    ids = torch.nn.utils.rnn.pad_sequence([s["ids"] for s in samples], batch_first=True)
    lengths = torch.tensor([len(s["ids"]) for s in samples])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    x, y = (torch.stack([s[name] for s in samples]) for name in ("x", "y"))
    return model(x, ids, mask), y
