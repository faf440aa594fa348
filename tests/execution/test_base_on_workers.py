"""Sixteen adapters of one base on real workers: the base stays, the adapters hop.

- A worker loads the base once, also one that comes in the place of a killed one.
- What hops and what is stored is a hundredth of the whole model's; losses are a plain loop's.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import torch
from distributed import Client
from torch import nn
from torch.nn import functional as F

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.workloads import Visit
from tests.fused import fused

from .helpers import own_cluster

N_TRIALS, N_EPOCHS, WIDTH = 16, 2, 512
N_WORDS = 16_000  # the base is large, and quick to use


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.dense = nn.Embedding(N_WORDS, WIDTH), nn.Linear(64, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(x)) + self.words((x.sum(1) * 17).long() % N_WORDS)


class Adapted(nn.Module):
    def __init__(self, base: nn.Module, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(64, config["rank"], bias=False)
        self.up = nn.Linear(config["rank"], WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x) + self.up(self.down(x)))


def space(trial: Any) -> dict[str, Any]:
    return {"lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True), "rank": 14 + trial.number % 3}


def pretrained() -> nn.Module:
    torch.manual_seed(5)
    return Body()


def workload(folder: Path) -> dagsel.TorchWorkload:
    loads, killed, driver = folder / "loads", folder / "killed", os.getpid()

    def load() -> nn.Module:
        with loads.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return pretrained()

    def model(config: Mapping[str, Any], base: Any) -> nn.Module:
        if config["rank"] == 16 and os.getpid() != driver and not killed.exists():
            killed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return Adapted(base, config)

    return dagsel.TorchWorkload(
        model, F.cross_entropy, torch.optim.Adam, batch_size=64, base=load, metrics=["accuracy"]
    )


def incoming(dask_worker: Any) -> list[int]:
    """List the bytes of each state that a worker has fetched."""
    return [
        n_bytes
        for entry in dask_worker.transfer_incoming_log
        for key, n_bytes in entry["keys"].items()
        if str(key[0]).startswith("train-")
    ]


def plain_pytorch(run: dagsel.Run, data: ShardedDataset, trial: int) -> list[float]:
    """Give the validation loss of each epoch of a trial that this process alone trains."""
    config, units = run.record.trials[trial].config, run.timeline()
    base = pretrained().requires_grad_(requires_grad=False)
    torch.manual_seed(int(np.random.SeedSequence([0, trial]).generate_state(1)[0]))
    model = Adapted(base, config)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = fused(torch.optim.Adam(trained, lr=config["lr"]))
    losses = []
    for epoch in range(1, N_EPOCHS + 1):
        its = units[(units.kind == "train") & (units.trial == trial) & (units.epoch == epoch)]
        for shard in map(int, its.sort_values("position")["shard"]):
            x, y = map(torch.from_numpy, data.shard(shard).values())
            visit = Visit(seed=0, trial=trial, epoch=epoch, shard=shard)
            for batch in torch.from_numpy(visit.order(len(x))).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        sums, n_samples = 0.0, 0
        for shard in range(data.n_shards):
            x, y = map(torch.from_numpy, data.validation_shard(shard).values())
            with torch.inference_mode():
                sums += len(x) * F.cross_entropy(model(x), y).item()
            n_samples += len(x)
        losses.append(sums / n_samples)
    return losses


def test_the_base_stays_and_the_adapters_hop(
    digits: ShardedDataset, tmp_path: Path, run_dir: str
) -> None:
    with own_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        before = set(client.run(os.getpid).values())
        run = dagsel.optimize(
            optuna.create_study(direction="maximize"), workload(tmp_path), digits, space=space,
            flow=RandomSearch(max_epochs=N_EPOCHS, n_trials=N_TRIALS), metric="accuracy",
            client=client, run_dir=run_dir, replicas=1,
        )  # fmt: skip
        hopped = [n_bytes for log in client.run(incoming).values() for n_bytes in log]
        after = set(client.run(os.getpid).values())
    killed = int((tmp_path / "killed").read_text())
    assert killed in before - after
    loads = Counter(map(int, (tmp_path / "loads").read_text().split()))
    assert loads == dict.fromkeys({os.getpid(), *before, *after}, 1)
    assert [*run.trials_dataframe()["state"]] == ["COMPLETE"] * N_TRIALS

    n_base = sum(parameter.numel() for parameter in pretrained().parameters())
    n_trained = 64 * 16 + 16 * WIDTH + WIDTH * 10 + 10  # of the largest trial
    stored = [path.stat().st_size for path in Path(run_dir).rglob("*.safetensors")]
    assert hopped
    assert stored
    assert max(*hopped, *stored) <= 1.1 * 4 * 3 * n_trained, "the weights and Adam's two moments"
    assert max(*hopped, *stored) <= 4 * (n_base + 3 * n_trained) / 100

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for trial in range(0, N_TRIALS, 5):
            found = [epoch.metrics["loss"] for epoch in run.record.trials[trial].epochs]
            assert found == plain_pytorch(run, digits, trial)
    finally:
        torch.set_num_threads(threads)
