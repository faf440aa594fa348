"""Workloads of other libraries for the chaos test, and what one process comes to with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from chaos_jobs import METRIC, N_SHARDS, Job

import dagsel
from dagsel.flow import Goal
from dagsel.state import State
from dagsel.storage import ShardedDataset
from dagsel.workloads.base import Config, FollowsMetric, Visit, Workload

Library: TypeAlias = Literal["adapter", "lightning", "flax", "keras"]
#: What a worker of each had better have imported before it is started.
IMPORTS: dict[Library, list[str]] = {
    "adapter": ["dagsel.workloads.huggingface", "peft", "transformers.models.bert.modeling_bert"],
    "lightning": ["dagsel.workloads.lightning.workload"],
    "flax": ["dagsel.workloads.flax.workload", "flax.nnx", "optax"],
    "keras": ["dagsel.workloads.keras.workload", "keras"],
}


def make_library_workload(library: Library) -> Workload:
    """Make a workload of a library, with random numbers in training and more than weights."""
    makes = {"adapter": adapters, "lightning": lightnings, "flax": flaxes, "keras": kerases}
    return makes[library]()


def adapters() -> Workload:
    """LoRA around a BERT-like base: texts of unequal length, a schedule by steps, clipping."""
    return dagsel.HFWorkload(
        adapter,
        base=bert,
        optimizer=torch.optim.AdamW,
        batch_size=32,
        metrics=["accuracy"],
        lr_scheduler=warm_up,
        max_grad_norm=1.0,
    )


def bert() -> Any:
    """Make the base; its weights are those of this seed in every process."""
    from transformers import BertConfig, BertForSequenceClassification

    about: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    about |= {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    return BertForSequenceClassification(BertConfig(vocab_size=9, **about))


def adapter(config: Config, base: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = ["query", "value"]
    return get_peft_model(
        base, LoraConfig(task_type="SEQ_CLS", r=2, lora_dropout=0.1, target_modules=targets)
    )


def warm_up(optimizer: Any, config: Config) -> Any:
    from transformers import get_linear_schedule_with_warmup

    return get_linear_schedule_with_warmup(optimizer, 4, 40)


def lightnings() -> Workload:
    """Gradients accumulate over batches, a buffer follows the weights, a rate decays."""
    return dagsel.LightningWorkload(
        lightning_module, metrics={"accuracy": "maximize"}, batch_size=16, accumulate_grad_batches=2
    )


def lightning_module(config: Config) -> Any:
    import lightning
    from torch import nn

    class Module(lightning.LightningModule):
        average: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)
            )
            self.register_buffer("average", torch.zeros(3, 16))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return nn.functional.cross_entropy(self.layers(x), y)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            last: Any = self.layers[4]
            self.average.lerp_(last.weight.detach(), 0.1)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            x, y = batch
            self.log("accuracy", (self.layers(x).argmax(1) == y).float().mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=config["lr"])
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)]

    return Module()


def flaxes() -> Workload:
    """Dropout and running statistics, a rate that decays by steps."""
    return dagsel.FlaxWorkload(
        model=flax_model, loss=flax_loss, optimizer=flax_optimizer, batch_size=32,
        metrics=["accuracy"],
    )  # fmt: skip


def flax_model(config: Config, rngs: Any) -> Any:
    from flax import nnx

    return nnx.Sequential(
        nnx.Linear(8, 16, rngs=rngs),
        nnx.BatchNorm(16, rngs=rngs),
        nnx.relu,
        nnx.Dropout(0.3, rngs=rngs),
        nnx.Linear(16, 3, rngs=rngs),
    )


def flax_loss(output: Any, target: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()


def flax_optimizer(config: Config) -> Any:
    import optax

    adam = optax.inject_hyperparams(optax.adam)
    return adam(learning_rate=optax.exponential_decay(config["lr"], 10, 0.8))


def kerases() -> Workload:
    """Dropout and running statistics, a rate that decays by steps."""
    return dagsel.KerasWorkload(keras_model, batch_size=32, metrics=["accuracy"])


def keras_model(config: Config) -> Any:
    import keras

    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(config["lr"], 10, 0.8)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(rate), loss=loss, metrics=["accuracy"])
    return model


def alone(
    job: Job,
    workload: Workload,
    trial: int,
    config: Mapping[str, Any],
    visits: Sequence[tuple[int, ...]],
    values: Sequence[float],
) -> State:
    """Train a trial in this process alone, visiting the shards in the given orders.

    `values` are the metrics after each epoch.
    """
    data = ShardedDataset.open(f"{job.folder}/data.zarr")
    shards = [workload.prepare(data.shard(index)) for index in range(N_SHARDS)]
    goal = Goal(METRIC[job.workload], "maximize")
    follows = isinstance(workload, FollowsMetric) and workload.follows_metric(config, goal)
    seed = int(np.random.SeedSequence([job.seed, trial]).generate_state(1)[0])
    torch.set_num_threads(1)  # as the workers do
    state = workload.init(config, seed)
    for epoch, order in enumerate(visits, start=1):
        for position, index in enumerate(order):
            visit = Visit(
                job.seed, trial, epoch, index,
                ends_epoch=position == N_SHARDS - 1,
                last_value=values[epoch - 2] if follows and epoch > 1 and not position else None,
            )  # fmt: skip
            state = workload.train(state, shards[index], config, visit=visit).state
    return state
