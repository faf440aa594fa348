"""A batch's way through a model of transformers: inputs, labels, the loss and how much it counts.

The loss of a batch is a mean over its labels. So the parts of a batch, and the batches of a
validation set, count by the number of their labels, not of their samples.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from dagsel.errors import WorkloadError
from dagsel.state import State, Tensor
from dagsel.workloads.huggingface.collating import IGNORED
from dagsel.workloads.pooled import Pool
from dagsel.workloads.torch.ddp import GangBatches
from dagsel.workloads.torch.loop import Piece, ShardBatches, closure_loop

_SUMS, _LABELS = "sums", "n_labels"  # what a shard keeps of its scores


def core_of(model: Any) -> Any:
    """Return the model of transformers inside a gang's module and a model of PEFT."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def arguments(core: Any) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a model's forward pass that have a name."""
    return _arguments(type(core).forward)


@functools.lru_cache(maxsize=64)
def _arguments(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    its = inspect.signature(forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {p.name: p for p in its if p.kind not in kinds and p.name != "self"}


def is_shifted(core: Any) -> bool:
    """Whether a model predicts the next token, so that the first label of a row does not count."""
    if getattr(core.config, "is_encoder_decoder", False):
        return False
    kind = getattr(core, "loss_type", None)
    if kind is None:
        return "LMHead" in type(core).__name__
    return kind in ("ForCausalLM", "ForConditionalGeneration")


@dataclass(frozen=True)
class OwnLoss:
    """The loss that a model itself has computed."""

    def __call__(self, output: Any, labels: Any) -> torch.Tensor:
        """Return the loss among what a model returns."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if not isinstance(loss, torch.Tensor):
            raise WorkloadError(
                f"the model returns {type(output).__name__} without a loss; give "
                "loss=function, called as loss(output, labels)"
            )
        return loss


@dataclass(frozen=True)
class Passes:
    """Calls a model with a batch.

    Parameters
    ----------
    label_names
        Names of the labels among the batch's arrays.
    loss
        ``loss(output, labels)``.
    fills
        Whether ids are filled up with what the model has for it.
    """

    label_names: tuple[str, ...]
    loss: Callable[[Any, Any], torch.Tensor] = OwnLoss()
    fills: bool = False

    def given(self, model: Any, batch: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what a model is called with, and the labels among it.

        A model that predicts the next token has its ids as labels, if there are no others.
        """
        core = core_of(model)
        parameter = next(core.parameters())
        arrays = {name: _as_given(value, parameter) for name, value in batch.items()}
        ids, mask = arrays.get("input_ids"), arrays.get("attention_mask")
        labels = {name: arrays[name] for name in self.label_names if name in arrays}
        if not labels and ids is not None and is_shifted(core):
            seen = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
            labels = {self.label_names[0]: seen}
        pad_id = getattr(core.config, "pad_token_id", None)
        if self.fills and pad_id and ids is not None and mask is not None:
            arrays["input_ids"] = ids.masked_fill(mask == 0, pad_id)
        known = arguments(core)
        inputs = {name: value for name, value in arrays.items() if not known or name in known}
        if isinstance(self.loss, OwnLoss) or getattr(core.config, "is_encoder_decoder", False):
            inputs |= labels
        else:
            inputs = {name: value for name, value in inputs.items() if name not in labels}
        if "use_cache" in known:
            inputs["use_cache"] = False  # what was computed is for generation alone
        return inputs, labels

    def n_labels(self, model: Any, inputs: dict[str, Any], labels: dict[str, Any]) -> Any:
        """Return how many labels the loss is a mean over: a number, or a tensor on a GPU."""
        if not labels:
            return len(next(iter(inputs.values())))
        first: torch.Tensor = next(iter(labels.values()))
        if first.is_floating_point():
            return len(first)
        if first.dim() > 1 and is_shifted(core_of(model)):
            first = first[..., 1:]
        n = (first != IGNORED).sum()
        return n if n.is_cuda else int(n)

    def loss_of(self, output: Any, labels: dict[str, Any]) -> torch.Tensor:
        """Return the loss of what a model returns."""
        return self.loss(output, next(iter(labels.values())) if len(labels) == 1 else labels)

    def scored(self, model: Any, output: Any, labels: dict[str, Any]) -> tuple[Any, Any]:
        """Return what metrics get: rows of logits, and the label of each.

        Where each token has a label, it is a row; those that do not count are left out.
        """
        if len(labels) != 1 or not isinstance(output.get("logits"), torch.Tensor):
            return {name: v for name, v in output.items() if isinstance(v, torch.Tensor)}, labels
        logits, (its,) = output["logits"], labels.values()
        if its.is_floating_point():
            return logits, its
        if its.dim() > 1:
            logits = logits[:, -its.shape[1] :]  # without the virtual tokens of a prompt
            if is_shifted(core_of(model)):
                logits, its = logits[:, :-1], its[:, 1:]
        counts = its != IGNORED
        return logits[counts], its[counts]


def _as_given(value: Any, parameter: torch.Tensor) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = value.dtype is torch.float64 and parameter.is_floating_point()
    return value.to(parameter.device, parameter.dtype if wide else value.dtype)


def train_on(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: ShardBatches,
    passes: Passes,
    max_norm: float | None,
) -> None:
    """Train on the batches: forward, backward, clip, step."""

    def backward(pieces: list[Piece]) -> torch.Tensor:
        loss = _backward(model, batches, pieces, passes)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return loss

    closure_loop(optimizer, batches, backward)


def _backward(
    model: torch.nn.Module, batches: ShardBatches, pieces: list[Piece], passes: Passes
) -> torch.Tensor:
    """Add up the gradients of a batch's parts, and return its loss: means over its labels."""
    given = [passes.given(model, piece.inputs) for piece in pieces]
    counts = [passes.n_labels(model, *its) for its in given]
    total = sum(counts)
    if isinstance(batches, GangBatches):
        batches.weigh(float(total))
    losses = []
    for n_left, (inputs, labels), n in zip(range(len(pieces))[::-1], given, counts, strict=True):
        waits = n_left and isinstance(model, DistributedDataParallel)
        with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
            loss = passes.loss_of(model(**inputs), labels)
            if len(pieces) > 1:
                loss = loss * (n / (total + (total == 0)))
            loss.backward()  # type: ignore[no-untyped-call]
        losses.append(_counted(loss.detach(), n))
    return torch.stack(losses).sum() if len(losses) > 1 else losses[0]


def _counted(loss: torch.Tensor, n: Any) -> torch.Tensor:
    """Return a loss, or 0 for the mean over no label, whose gradients are 0 too."""
    if isinstance(n, torch.Tensor):
        return torch.where(n > 0, loss, 0)
    return loss if n else torch.zeros_like(loss)


def score(
    model: torch.nn.Module,
    parts: Iterable[tuple[int, Any, Any]],
    passes: Passes,
    metrics: Mapping[str, Callable[[Any, Any], Any]],
    pool: Pool | None,
) -> tuple[int, State]:
    """Score a model on batches; return the number of samples, and what is kept of them.

    Kept are sums over labels, of the loss first and then of the metrics, and what the pool has.
    """
    sums: list[list[float]] = [[] for _ in range(1 + len(metrics))]
    n_samples = n_labels = 0
    for size, batch, _ in parts:
        n_samples += size
        inputs, labels = passes.given(model, batch)
        n = int(passes.n_labels(model, inputs, labels))
        if not n:
            continue
        output = model(**inputs)
        n_labels += n
        values = [passes.loss_of(output, labels)]
        if metrics or pool is not None:
            rows, its = passes.scored(model, output, labels)
            values += [metric(rows, its) for metric in metrics.values()]
            if pool is not None:
                pool.add(rows, its)
        for column, value in zip(sums, values, strict=True):
            column.append(n * float(value))
    packed = State.pack({}, {"lists": {}, "forms": {}}) if pool is None else pool.pack()
    own = {
        _SUMS: Tensor.from_numpy(np.array([math.fsum(column) for column in sums])),
        _LABELS: Tensor.from_numpy(np.array(n_labels, np.int64)),
    }
    return n_samples, State.pack({**packed.tensors, **own}, packed.meta)


def means(kept: Iterable[State], names: Iterable[str]) -> dict[str, float]:
    """Return the loss and the metrics of these names: means over the labels of all shards."""
    found = [{name: tensor.numpy() for name, tensor in of.tensors.items()} for of in kept]
    n_labels = sum(int(of[_LABELS]) for of in found)
    columns = zip(*(of[_SUMS].tolist() for of in found), strict=True)
    sums = dict(zip(("loss", *names), map(math.fsum, columns), strict=True))
    return {name: total / n_labels for name, total in sums.items()}


def has_labels(kept: Iterable[State]) -> bool:
    """Whether any label counted in some shard."""
    return any(int(of.tensors[_LABELS].numpy()) for of in kept)
