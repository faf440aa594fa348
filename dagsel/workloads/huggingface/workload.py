"""`HFWorkload`: models of transformers, whole or with the adapters of PEFT."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from dagsel.checks import flag, is_number, shown
from dagsel.errors import WorkloadError
from dagsel.flow import Direction
from dagsel.state import State
from dagsel.workloads.argument_names import HUGGINGFACE, named_arguments
from dagsel.workloads.base import Config, DataOutline, Evaluated
from dagsel.workloads.huggingface.collating import Packing, Padding, collating, tokenizer_of
from dagsel.workloads.huggingface.columns import (
    AsItIs,
    MakingTokens,
    ModelCall,
    check_packing,
    columns_of,
)
from dagsel.workloads.huggingface.models import (
    Several,
    check_checkpointing,
    check_model,
    checkpoint_activations,
    files_of,
    keeps_packed_apart,
    made_by,
    needs_transformers,
)
from dagsel.workloads.huggingface.passes import (
    OwnLoss,
    Passes,
    core_of,
    has_labels,
    means,
    score,
    train_on,
)
from dagsel.workloads.named_metrics import Metrics
from dagsel.workloads.pooled import Pool, is_pooled, pooled_values
from dagsel.workloads.random_streams import preserved_streams, seed_streams
from dagsel.workloads.torch.batches import Making, evaluation_batches
from dagsel.workloads.torch.device import Shard, device_of
from dagsel.workloads.torch.loop import ShardBatches
from dagsel.workloads.torch.memory import Memory
from dagsel.workloads.torch.pretrained import Base
from dagsel.workloads.torch.speed import Fused, Precision, multiplying, stepping
from dagsel.workloads.torch.state import StateReader
from dagsel.workloads.torch.workload import TorchWorkload

_PERPLEXITY = "perplexity"


class HFWorkload(TorchWorkload):
    """Train models of Hugging Face's transformers, and adapters of its PEFT.

    A data set has a column for each argument of the model: ``input_ids``, ``labels`` and so on;
    samples may differ in length, and columns that the model does not know are left out. Loss and
    metrics of the validation set are means over its labels, those of -100 left out: the same
    numbers as from one pass over the whole set.

    Parameters
    ----------
    model
        ``model(config)`` builds the model: a ``PreTrainedModel``, or what ``get_peft_model`` makes
        of one. With a `base`, ``model(config, base)``: an adapter around the pretrained model.
    optimizer
        As for `TorchWorkload`: ``optimizer(parameters, config)``, or a class.
    batch_size
        Samples in a batch, or a function of the configuration that returns it.
    collator
        What makes tensors of samples of unequal length: a tokenizer, whose pad token fills them up,
        or a data collator of transformers, or a function of a list of samples. Without one, labels
        are filled up with -100, ids with the pad token of the model's configuration, and anything
        else with 0. A collator that draws random numbers, to mask tokens for example, draws them
        from the trial's in training; for scores it draws the same ones every time.
    loss
        ``loss(output, labels)`` returns the mean over a batch's labels; by default the model's own.
        Several labels are a mapping of their names to them.
    metrics
        As for `TorchWorkload`: functions of logits and labels. Where each token has a label, they
        get a row of logits for each label that counts, moved by one where the next token is
        predicted. ``"perplexity"`` is the exponential of the loss.
    lr_scheduler
        ``lr_scheduler(optimizer, config)`` builds the learning-rate schedule.
    lr_scheduler_interval
        When the schedule steps: after each batch (``"step"``), as those of transformers expect it,
        or after each ``"epoch"``.
    max_grad_norm
        Norm to which the gradients of a batch are clipped, or a function of the configuration that
        returns it; None for no clipping.
    max_batch
        Samples that a worker trains on at once: of a larger batch the gradients are accumulated,
        each part by the number of its labels, which changes a result by rounding alone.
    precision
        ``"bf16"`` runs the forward pass under bfloat16 autocast; weights keep their dtype. With
        ``"tf32"`` a GPU multiplies float32 in TF32. ``"fp32"`` changes nothing.
    gradient_checkpointing
        Compute activations anew in the backward pass, which takes less memory and more time.
    bucket_by
        Column whose samples differ in length: a training batch has samples of similar length. By
        default ``"input_ids"`` where they do, without `packing`. None for batches by chance alone.
    packing
        Put several sequences into one row in place of filling up each. Positions begin anew in
        each sequence, and none sees another; a model for which this does not hold is refused.
    label_names
        Names of the columns that are labels.
    base, state
        As for `TorchWorkload`: the pretrained model that trials adapt, which is once on each worker
        and in no state, such as ``base=lambda: AutoModelForCausalLM.from_pretrained(folder)``; and
        what a state holds.
    drop_last, eval_batch_size, compile, fused, device_memory, memory
        As for `TorchWorkload`.

    Notes
    -----
    A loss must be a mean over labels; one with class weights divides by something else. Dropout
    sees the parts of a batch, or a gang's shares of it, in another order than the whole batch.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> from dagsel.storage import RaggedArray
    >>> from dagsel.workloads import HFWorkload, Visit
    >>> tiny = GPT2Config(
    ...     n_layer=1, n_embd=16, n_head=2, vocab_size=20, n_positions=16,
    ...     bos_token_id=0, eos_token_id=0,
    ... )
    >>> workload = HFWorkload(
    ...     model=lambda config: GPT2LMHeadModel(tiny),
    ...     optimizer=torch.optim.AdamW,
    ...     batch_size=4,
    ...     metrics=["perplexity"],
    ... )
    >>> workload.metrics
    {'loss': 'minimize', 'perplexity': 'minimize'}
    >>> texts = [np.arange(n) % 7 for n in (9, 5, 12, 7, 10, 8, 6, 11)]
    >>> shard = workload.prepare({"input_ids": RaggedArray.of(texts)})
    >>> config = {"lr": 0.01}
    >>> state = first = workload.init(config, seed=0)
    >>> for epoch in range(1, 4):
    ...     state = workload.train(state, shard, config, visit=Visit(0, 0, epoch, 0)).state
    >>> scores = [workload.evaluate(s, shard, config).kept for s in (first, state)]
    >>> before, after = (workload.pool([kept]) for kept in scores)
    >>> after["perplexity"] < before["perplexity"] < 21
    True
    """

    @named_arguments(HUGGINGFACE)
    def __init__(
        self,
        model: Callable[..., torch.nn.Module],
        optimizer: Callable[[Any, Any], torch.optim.Optimizer] | type[torch.optim.Optimizer],
        *,
        batch_size: int | Callable[[Any], int],
        collator: Any = None,
        loss: Callable[[Any, Any], torch.Tensor] | None = None,
        metrics: Metrics | None = None,
        lr_scheduler: Callable[[Any, Any], Any] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "step",
        max_grad_norm: float | Callable[[Any], float] | None = None,
        max_batch: int | None = None,
        precision: Precision = "fp32",
        gradient_checkpointing: bool = False,
        bucket_by: str | None = "input_ids",
        packing: bool = False,
        label_names: Sequence[str] = ("labels",),
        drop_last: bool = False,
        eval_batch_size: int = 32,
        base: Base | Callable[[], torch.nn.Module] | torch.nn.Module | None = None,
        state: Literal["all", "trainable"] | None = None,
        compile: bool | str = False,  # noqa: A002 - PyTorch's own word
        fused: Fused = "auto",
        device_memory: int | float = 0.5,
        memory: Memory = None,
    ) -> None:
        _check_model(model, base)
        names = _checked_names(label_names)
        is_packed = flag("packing", packing, error=WorkloadError)
        has_perplexity, others = _without_perplexity(metrics)
        super().__init__(
            model, OwnLoss() if loss is None else loss, optimizer, batch_size=batch_size,
            metrics=others,
            lr_scheduler=lr_scheduler, lr_scheduler_interval=lr_scheduler_interval,
            input_fn=AsItIs(), collate=collating(collator, names, packing=is_packed),
            bucket_by=None if is_packed else bucket_by, max_batch=max_batch, precision=precision,
            drop_last=drop_last, eval_batch_size=eval_batch_size, compile=compile, fused=fused,
            channels_last=False, device_memory=device_memory, base=base, state=state, memory=memory,
        )  # fmt: skip
        self.collator, self.label_names, self.packing = collator, names, is_packed
        self.gradient_checkpointing = flag(
            "gradient_checkpointing", gradient_checkpointing, error=WorkloadError
        )
        if not (callable(max_grad_norm) or max_grad_norm is None):
            _norm(max_grad_norm)
        self.max_grad_norm = max_grad_norm
        self._has_perplexity = has_perplexity
        self._packs: set[Any] = set()  # models that keep the sequences of a row apart
        self._asked: tuple[dict[str, Any], ModelCall] | None = None  # what the last model is given
        self._left_out: set[str] = set()  # columns that were said to be

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics, each with its better direction if known."""
        loss, *others = super().metrics.items()
        perplexity: list[tuple[str, Direction | None]] = [(_PERPLEXITY, "minimize")]
        return dict([loss, *(perplexity if self._has_perplexity else []), *others])

    @property
    def pooled_metrics(self) -> tuple[str, ...]:
        """Names of all metrics: they are put together by the labels of each shard."""
        return tuple(self.metrics)

    def pool(self, kept: Sequence[State]) -> dict[str, float]:
        """Return the metrics of the whole validation set, of what its shards have kept."""
        if not has_labels(kept):
            raise WorkloadError(
                f"no label of the validation set counts: its {' and '.join(self.label_names)} are "
                "all -100; write the data set with labels for its validation samples"
            )
        over_set, of_labels = self._parts()
        found = self._means(kept, of_labels)
        if over_set:
            found |= pooled_values(over_set, kept, self._as_tensor)
        return found

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration."""
        super().validate(config)
        if callable(self.max_grad_norm):
            _norm(self.max_grad_norm(config))
        if not isinstance(self.collate, Packing):
            return
        with preserved_streams(torch=True):
            model = self._build(config, seed=0)
            core = core_of(model)
            how = type(core), core.config._attn_implementation
            if how not in self._packs and not self._keeps_apart(model):
                raise WorkloadError(
                    f"packing=True, and a {type(core).__name__} lets the sequences of a row see "
                    "each other: it does not tell them apart by position_ids; leave packing out"
                )
            self._packs.add(how)

    def _keeps_apart(self, model: Any) -> bool:
        try:
            return keeps_packed_apart(model, self._passes, self.collate)
        except Exception as error:
            raise WorkloadError(
                f"packing=True, and a {type(core_of(model)).__name__} takes no rows of several "
                f"sequences ({' '.join(str(error).split())[:200]}); leave packing out"
            ) from error

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on a data set."""
        if isinstance(self.collate, Packing):
            check_packing(data)
        super().validate_data(config, data)
        with preserved_streams(torch=True):
            if self._asked is None or self._asked[0] != {**config}:
                self._build(config, seed=0, large=True)
            assert self._asked is not None
            given = columns_of(data, self.collate)
        if given is not None:
            self._asked[1].check(given, self.label_names, self.loss)
            self._asked[1].say_left_out(given, self.label_names, self._left_out)

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        """Score a state on one validation shard; `pool` makes metrics of what is kept of it."""
        over_set, of_labels = self._parts()
        with preserved_streams(torch=True), self._scored(state, config, shard) as scored:
            # Not the trial's numbers: what a collator masks would differ from epoch to epoch.
            seed_streams(0, torch=True)
            with torch.no_grad(), multiplying(self.precision, device_of(shard)):
                size = self.at_once(config, "evaluate") or self.eval_batch_size
                parts = evaluation_batches(shard, config, size, self._making)
                pool = Pool(over_set) if over_set else None
                n_samples, kept = score(scored[0].eval(), parts, self._passes, of_labels, pool)
        return Evaluated(n_samples, {}, kept)

    def ensemble(self, models: Sequence[torch.nn.Module]) -> torch.nn.Module:
        """Make one model of several: it returns the mean of their logits."""
        return Several(models).eval()

    def export(
        self, model: torch.nn.Module, config: Mapping[str, Any], about: str
    ) -> dict[str, bytes]:
        """Return files by name, as ``from_pretrained`` reads them, and ``trial.json``.

        Of a model with an adapter they are the adapter's, without the model around which it is.
        """
        return files_of(model, tokenizer_of(self.collator), config, about)

    def _build(
        self,
        config: Config,
        seed: int,
        *,
        large: bool = False,
        device: torch.device | None = None,
    ) -> torch.nn.Module:
        build = super()._build
        make = partial(build, config, seed, large=large, device=device)
        model: torch.nn.Module = check_model(made_by(make))
        if self.gradient_checkpointing:
            check_checkpointing(model)
        self._asked = {**config}, ModelCall.by(model)
        return model

    def _equipped(self, reader: StateReader, config: Config, shard: Shard) -> torch.nn.Module:
        model = super()._equipped(reader, config, shard)
        if self.gradient_checkpointing:
            checkpoint_activations(model)
        return model

    def _loop(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Any,
        loss: Any,
        batches: ShardBatches,
        config: Config,
    ) -> None:
        self._step_by_batch(schedule, batches, config)
        norm: Any = self.max_grad_norm
        norm = norm(config) if callable(norm) else norm
        with stepping(optimizer, fused=self.fused, capturable=False):
            train_on(module, optimizer, batches, replace(self._passes, loss=loss), norm)

    @property
    def _making(self) -> Making:
        return MakingTokens(AsItIs(), self.collate, None, self.bucket_by)

    @property
    def _passes(self) -> Passes:
        collate = self.collate
        fills = isinstance(collate, Padding) and collate.pad_id is None
        return Passes(self.label_names, self.loss, fills)

    def _parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the metrics that are functions of all predictions, and those that are means."""
        over_set = {name: metric for name, metric in self._metrics.items() if is_pooled(metric)}
        return over_set, {n: metric for n, metric in self._metrics.items() if n not in over_set}

    def _means(self, kept: Sequence[State], of_labels: Mapping[str, Any]) -> dict[str, float]:
        found = means(kept, of_labels)
        if not self._has_perplexity:
            return found
        loss = found.pop("loss")
        return {"loss": loss, _PERPLEXITY: _exponential(loss), **found}


def _check_model(model: Any, base: Any) -> None:
    """Raise a `WorkloadError` for a name or a class of transformers in place of a function."""
    needs_transformers()
    owner = model if isinstance(model, type) else getattr(model, "__self__", None)
    is_theirs = isinstance(owner, type) and owner.__module__.startswith("transformers.")
    if not (is_theirs or isinstance(model, str)):
        return
    kind = getattr(owner, "__name__", "") if is_theirs else "AutoModelForSequenceClassification"
    name = repr(model) if isinstance(model, str) else "..."
    arguments = "config" if base is None else "config, base"
    raise WorkloadError(
        f"model must be a function, called as model({arguments}), got {shown(model)}; write "
        f"model=lambda {arguments}: {kind}.from_pretrained({name})"
    )


def _checked_names(label_names: Any) -> tuple[str, ...]:
    is_list = isinstance(label_names, Sequence) and not isinstance(label_names, str)
    if is_list and label_names and all(isinstance(name, str) for name in label_names):
        return tuple(label_names)
    raise WorkloadError(
        f"label_names must be names of columns in a tuple, got {shown(label_names)}; write "
        'label_names=("labels",)'
    )


def _norm(value: Any) -> float:
    if is_number(value) and value > 0:
        return float(value)
    raise WorkloadError(f"max_grad_norm must be a number above 0, got {shown(value)}")


def _without_perplexity(metrics: Any) -> tuple[bool, Any]:
    """Return whether perplexity is asked for, and the other metrics."""
    if isinstance(metrics, str):
        metrics = [metrics]
    if isinstance(metrics, Mapping):
        rest = {name: it for name, it in metrics.items() if not _is_perplexity(it)}
        return len(rest) < len(metrics), rest
    if isinstance(metrics, list | tuple | set | frozenset):
        others = [it for it in metrics if not _is_perplexity(it)]
        return len(others) < len(metrics), others
    return False, metrics


def _is_perplexity(metric: Any) -> bool:
    return isinstance(metric, str) and metric == _PERPLEXITY


def _exponential(loss: float) -> float:
    return math.exp(loss) if loss < 709 else math.inf
