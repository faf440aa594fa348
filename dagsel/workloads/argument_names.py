"""Arguments that workloads do not take: other libraries call them so, or they belong elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ParamSpec

from dagsel import checks
from dagsel.checks import short_traceback
from dagsel.errors import WorkloadError
from dagsel.flow.argument_names import PATIENT, RANDOM

P = ParamSpec("P")

_FLOW = f"write {RANDOM} for dagsel.optimize"
_PATIENCE = f"write {PATIENT} for dagsel.optimize"
_DATA = "write data=(x, y) for dagsel.optimize"
_DATASETS = ("data", "dataloader", "dataset", "eval_dataset", "train_dataset", "train_loader")
_VALIDATION = "a fifth of data=(x, y) is held out; write ShardedDataset.write(..., validation=0.2)"
_ORDER = "each epoch takes each sample once, in an order that the run's seed gives; leave it out"
_OBSERVERS = "write observers=[...] for dagsel.optimize"
#: What no workload takes.
_NOWHERE = {
    **dict.fromkeys(("epochs", "max_epochs", "n_epochs", "num_epochs", "n_trials"), _FLOW),
    **dict.fromkeys(("early_stopping", "patience"), _PATIENCE),
    **dict.fromkeys((*_DATASETS, "validation_data"), _DATA),
    **dict.fromkeys(("test_size", "validation_fraction", "validation_split"), _VALIDATION),
    **dict.fromkeys(("sampler", "shuffle", "steps_per_epoch"), _ORDER),
    **dict.fromkeys(("num_workers", "pin_memory"), "workers hold the data; leave it out"),
    **dict.fromkeys(("accelerator", "device", "gpus"), "each worker knows its own; leave it out"),
    **dict.fromkeys(("random_state", "seed"), "write seed= for dagsel.optimize"),
    **dict.fromkeys(("callbacks", "logger"), _OBSERVERS),
    "space": "write space= for dagsel.optimize",
    "verbose": "write progress=False for dagsel.optimize, or leave it out",
}
_METRICS = dict.fromkeys(("metric", "scoring"), "write metrics=")
_LOSS = dict.fromkeys(("criterion", "loss_fn", "loss_function"), "write loss=")
_OPTIMIZER = dict.fromkeys(("optim", "optimizer_class"), "write optimizer=")
_RATES = ("lr", "learning_rate", "momentum", "weight_decay")
_SCHEDULES = ("lr_schedule", "schedule", "scheduler")
_PRECISION = dict.fromkeys(("amp", "bf16", "fp16", "mixed_precision"), 'write precision="bf16"')
_CLIPPING = ("clip_grad_norm", "grad_clip", "gradient_clip_val", "max_grad_norm")
_PIECES = ("accumulate_grad_batches", "gradient_accumulation_steps")
_AUGMENT = dict.fromkeys(("transform", "transforms", "augmentation"), "write augment=")
_COLLATE = dict.fromkeys(("collate_fn", "collator"), "write collate=")

_OF_MODULES = {  # of PyTorch, in a loop of dagsel's
    **_NOWHERE, **_METRICS, **_LOSS, **_OPTIMIZER, **_PRECISION,
    **dict.fromkeys(
        _RATES,
        "write optimizer=torch.optim.Adam, which gets what the space suggests under its names, or "
        "optimizer=lambda parameters, config: torch.optim.Adam(parameters, lr=0.001)",
    ),
    **dict.fromkeys(_SCHEDULES, "write lr_scheduler="),
    **dict.fromkeys(_PIECES, "write max_batch=, the samples that are trained on at once"),
    **dict.fromkeys(
        ("class_weight", "class_weights", "weight"),
        "write loss=torch.nn.CrossEntropyLoss(weight=...)",
    ),
}  # fmt: skip
TORCH = {
    **_OF_MODULES, **_AUGMENT, **_COLLATE,
    **dict.fromkeys(
        _CLIPPING,
        "write train_fn=, a training loop of your own that calls torch.nn.utils.clip_grad_norm_, "
        "as in docs/how-to/your-own.md",
    ),
}  # fmt: skip
HUGGINGFACE = {
    **_OF_MODULES,
    **dict.fromkeys(_CLIPPING, "write max_grad_norm="),
    **dict.fromkeys(
        ("args", "training_args"),
        "what a search needs of TrainingArguments are arguments here; write batch_size= and others",
    ),
    **dict.fromkeys(("model_init", "model_name", "pretrained_model_name_or_path"), "write model="),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "write batch_size="),
    **dict.fromkeys(("collate", "collate_fn", "data_collator"), "write collator="),
    **dict.fromkeys(
        ("processing_class", "tokenizer"),
        "the data has tokens and not texts; write collator=DataCollatorWithPadding(tokenizer)",
    ),
    **dict.fromkeys(("lr_scheduler_type", "warmup_ratio", "warmup_steps"), "write lr_scheduler="),
    "compute_metrics": "write metrics=",
    "group_by_length": "write bucket_by=",
    "num_train_epochs": _FLOW,
    "optimizers": "write optimizer= and lr_scheduler=",
    "per_device_eval_batch_size": "write eval_batch_size=",
}
LIGHTNING = {
    **_NOWHERE, **_METRICS, **_PRECISION, **_AUGMENT, **_COLLATE,
    **dict.fromkeys(("lightning_module", "model", "pl_module"), "write module="),
    **dict.fromkeys(
        (*_RATES, *_SCHEDULES, "lr_scheduler", "optim", "optimizer"),
        "the module's configure_optimizers makes it; write module=lambda config: Net(config['lr'])",
    ),
    **dict.fromkeys((*_LOSS, "loss"), "the module's training_step returns it; leave it out"),
    **dict.fromkeys(_CLIPPING, "write gradient_clip_val="),
    **dict.fromkeys(_PIECES, "write accumulate_grad_batches="),
    **dict.fromkeys(("datamodule", "train_dataloaders", "val_dataloaders"), _DATA),
    **dict.fromkeys(("devices", "strategy"), "each worker knows its own; leave it out"),
    "trainer": "what a search needs of a Trainer are arguments here; write gradient_clip_val= and "
    "others",
}  # fmt: skip
FLAX = {
    **_NOWHERE, **_METRICS, **_LOSS, **_OPTIMIZER,
    **dict.fromkeys((*_RATES, "tx"), "write optimizer=lambda config: optax.adam(config['lr'])"),
    **dict.fromkeys(
        (*_SCHEDULES, "lr_scheduler"),
        "it is a part of the optimizer; write optimizer=lambda config: optax.adam(schedule)",
    ),
    "module": "write model=",
    "rngs": "model gets them, made of the trial's seed; write model=lambda config, rngs: ...",
    "train_fn": "write train_step=",
}  # fmt: skip
KERAS = {
    **_NOWHERE, **_METRICS,
    **dict.fromkeys(
        (*_RATES, *_LOSS, "loss", "optimizer"),
        "the model is compiled with it; write model=build, a function of the configuration",
    ),
    **dict.fromkeys(("build_fn", "build_model", "hypermodel", "model_fn"), "write model="),
    "class_weight": "weigh the samples in the loss that the model is compiled with, one of yours",
}  # fmt: skip
SKLEARN = {
    **_NOWHERE, **_METRICS,
    **dict.fromkeys(("classifier", "clf", "model", "pipeline", "regressor"), "write estimator="),
    **dict.fromkeys(("param_distributions", "param_grid"), "write space= for dagsel.optimize"),
    "cv": "one validation set scores all trials; leave it out",
    "n_iter": _FLOW,
    "n_jobs": "as many trials train as there are workers; leave it out",
}  # fmt: skip


def named_arguments(
    elsewhere: Mapping[str, str],
) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Say what to write instead of an argument that is called otherwise or belongs elsewhere."""

    def checked(init: Callable[P, None]) -> Callable[P, None]:
        """Return the ``__init__`` of a workload that says so."""
        who = f"dagsel.{init.__qualname__.partition('.')[0]}"
        refusing = checks.named_arguments(who, elsewhere, error=WorkloadError)
        return short_traceback(refusing(init))

    return checked
