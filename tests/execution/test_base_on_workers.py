"""Sixteen adapters of one base on real workers: the base stays, the adapters hop.

- A worker loads the base once, also one that comes in the place of a killed one.
- What hops and what is stored is a hundredth of the whole model's; losses are a plain loop's.

With ``LIBRARIES=all`` in the environment, as at night, also LoRA of PEFT around a BERT-like model,
whose losses `tests/workloads/test_huggingface.py` holds against a plain loop.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from distributed import Client
from torch import nn
from torch.nn import functional as F

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import RaggedArray, ShardedDataset
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


def by_hand(**parts: Any) -> dagsel.TorchWorkload:
    return dagsel.TorchWorkload(
        loss=F.cross_entropy, optimizer=torch.optim.Adam, batch_size=64, metrics=["accuracy"],
        **parts,
    )  # fmt: skip


def bert() -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    about: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_labels": 10}
    about |= {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=60_000, **about))


def lora(base: Any, config: Mapping[str, Any]) -> Any:
    from peft import LoraConfig, get_peft_model

    about = LoraConfig(task_type="SEQ_CLS", r=config["rank"], target_modules=["query", "value"])
    return get_peft_model(base, about)


def by_peft(**parts: Any) -> dagsel.TorchWorkload:
    return dagsel.HFWorkload(
        optimizer=torch.optim.Adam, batch_size=64, metrics=["accuracy"], **parts
    )


def counted(make: Callable[[], nn.Module], adapt: Any, folder: Path) -> dict[str, Any]:
    """Make a base that writes down who loads it, and a model that kills a worker once."""
    loads, killed, driver = folder / "loads", folder / "killed", os.getpid()

    def base() -> nn.Module:
        with loads.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return make()

    def model(config: Mapping[str, Any], base: Any) -> nn.Module:
        if config["rank"] == 16 and os.getpid() != driver and not killed.exists():
            killed.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return adapt(base, config)

    return {"base": base, "model": model}


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


KINDS: dict[str, tuple[Any, Any, Any]] = {
    "by hand": (by_hand, pretrained, Adapted),
    "of peft": (by_peft, bert, lora),
}
BY_NIGHT = pytest.mark.skipif(os.environ.get("LIBRARIES") != "all", reason="by night")


@pytest.mark.parametrize("kind", ["by hand", pytest.param("of peft", marks=BY_NIGHT)])
def test_the_base_stays_and_the_adapters_hop(
    kind: str, digits: ShardedDataset, tmp_path: Path, run_dir: str
) -> None:
    workload, make, adapt = KINDS[kind]
    data = digits
    if kind == "of peft":
        shards = [digits.shard(number) for number in range(digits.n_shards)]
        x, y = (np.concatenate([shard[name] for shard in shards]) for name in ("x", "y"))
        texts = [np.flatnonzero(row)[:12] * 7 for row in x]  # the places of the ink
        arrays = {"input_ids": RaggedArray.of(texts), "labels": y}
        data = ShardedDataset.write(str(tmp_path / "texts.zarr"), arrays, n_shards=4)
    with own_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        before = set(client.run(os.getpid).values())
        run = dagsel.optimize(
            optuna.create_study(direction="maximize"),
            workload(**counted(make, adapt, tmp_path)), data, space=space,
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

    n_base = sum(parameter.numel() for parameter in make().parameters())
    largest = adapt(make().requires_grad_(requires_grad=False), {"rank": 16})
    n_trained = sum(it.numel() for it in largest.parameters() if it.requires_grad)
    stored = [path.stat().st_size for path in Path(run_dir).rglob("*.safetensors")]
    assert hopped
    assert stored
    assert max(*hopped, *stored) <= 1.1 * 4 * 3 * n_trained, "the weights and Adam's two moments"
    assert max(*hopped, *stored) <= 4 * (n_base + 3 * n_trained) / 100

    if kind == "of peft":
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for trial in range(0, N_TRIALS, 5):
            found = [epoch.metrics["loss"] for epoch in run.record.trials[trial].epochs]
            assert found == plain_pytorch(run, digits, trial)
    finally:
        torch.set_num_threads(threads)
