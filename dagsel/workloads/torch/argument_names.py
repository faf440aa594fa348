"""Names of arguments that `TorchWorkload` does not take, of other libraries or in other places."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from dagsel.checks import refuse_elsewhere, short_traceback
from dagsel.errors import WorkloadError

P = ParamSpec("P")
Workload = TypeVar("Workload")

_FACTORY = (
    "write optimizer=torch.optim.Adam, which gets what the space suggests under its names, or "
    "optimizer=lambda parameters, config: torch.optim.Adam(parameters, lr=0.001)"
)
_CLIP = (
    "write train_fn=, a training loop of your own that calls torch.nn.utils.clip_grad_norm_, as in "
    "docs/how-to/your-own.md"
)
_WEIGHTS = "write loss=torch.nn.CrossEntropyLoss(weight=...)"
_FLOW = "write flow=dagsel.flows.RandomSearch(max_epochs=9, n_trials=20) for dagsel.optimize"
_PATIENCE = "write flow=dagsel.flows.EarlyStopping(flow, patience=5) for dagsel.optimize"
_DATA = "write data=(x, y) for dagsel.optimize"
_ORDER = "each epoch takes each sample once, in an order that the run's seed gives; leave it out"
_PIECES = "write max_batch=, the samples that are trained on at once"
_ELSEWHERE = {
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "write loss="),
    **dict.fromkeys(("metric", "scoring"), "write metrics="),
    **dict.fromkeys(("optim", "optimizer_class"), "write optimizer="),
    **dict.fromkeys(("lr", "learning_rate", "momentum", "weight_decay"), _FACTORY),
    **dict.fromkeys(("lr_schedule", "schedule", "scheduler"), "write lr_scheduler="),
    **dict.fromkeys(("collate_fn", "collator"), "write collate="),
    **dict.fromkeys(("transform", "transforms", "augmentation"), "write augment="),
    **dict.fromkeys(("clip_grad_norm", "grad_clip", "gradient_clip_val", "max_grad_norm"), _CLIP),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), _PIECES),
    **dict.fromkeys(("class_weight", "class_weights", "weight"), _WEIGHTS),
    **dict.fromkeys(("epochs", "max_epochs", "n_epochs", "num_epochs", "n_trials"), _FLOW),
    **dict.fromkeys(("early_stopping", "patience"), _PATIENCE),
    **dict.fromkeys(("data", "dataloader", "dataset", "train_dataset", "train_loader"), _DATA),
    **dict.fromkeys(("sampler", "shuffle"), _ORDER),
    **dict.fromkeys(("num_workers", "pin_memory"), "workers hold the data; leave it out"),
    **dict.fromkeys(("amp", "fp16", "mixed_precision"), 'write precision="bf16"'),
    **dict.fromkeys(("accelerator", "device", "gpus"), "each worker knows its own; leave it out"),
    **dict.fromkeys(("random_state", "seed"), "write seed= for dagsel.optimize"),
    "callbacks": "write observers=[...] for dagsel.optimize",
    "space": "write space= for dagsel.optimize",
}


def named_arguments(
    init: Callable[Concatenate[Workload, P], None],
) -> Callable[Concatenate[Workload, P], None]:
    """Say what to write instead of an argument that is called otherwise or belongs elsewhere."""
    known = inspect.signature(init).parameters

    @functools.wraps(init)
    @short_traceback
    def checked_init(self: Workload, /, *args: P.args, **kwargs: P.kwargs) -> None:
        who = "dagsel.TorchWorkload"
        refuse_elsewhere(who, kwargs, known, _ELSEWHERE, error=WorkloadError)
        init(self, *args, **kwargs)

    return checked_init
