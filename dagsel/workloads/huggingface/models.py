"""What is asked of a model of transformers or PEFT; its files, and several models as one."""

from __future__ import annotations

import json
import re
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dagsel.checks import imported, shown
from dagsel.codec import plain_part
from dagsel.errors import WorkloadError
from dagsel.workloads.huggingface.passes import Passes, core_of, is_shifted
from dagsel.workloads.torch.models import Ensemble

#: peft 0.21 asks transformers 5.24 by a name that will be gone in transformers 6.
_OLD_NAME = "`is_gradient_checkpointing` is deprecated"
_MOST_NAMES = 12  # of modules, in an error


def needs_transformers() -> Any:
    """Import transformers, or raise a `WorkloadError` that says how to install it."""
    return imported("transformers", "transformers", by="HFWorkload", error=WorkloadError)


def made_by(make: Callable[[], Any]) -> Any:
    """Call a model's factory; targets of an adapter that match nothing become a `WorkloadError`."""
    pattern = re.escape(_OLD_NAME)
    if not any(item[1] is not None and item[1].pattern == pattern for item in warnings.filters):
        warnings.filterwarnings("ignore", pattern, FutureWarning)
    try:
        with no_bars():
            return make()
    except ValueError as error:
        if "Target modules" not in str(error) and "targeted" not in str(error):
            raise
        raise WorkloadError(_unmatched(error)) from error


@contextmanager
def no_bars() -> Iterator[None]:
    """Show no progress bars of files that are read and written: each unit would have some."""
    shown_by = needs_transformers().utils.logging
    was = shown_by.is_progress_bar_enabled()
    shown_by.disable_progress_bar()
    try:
        yield
    finally:
        if was:
            shown_by.enable_progress_bar()


def _unmatched(error: ValueError) -> str:
    frames = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
    models = [held["model"] for held in frames if isinstance(held.get("model"), torch.nn.Module)]
    model = core_of(models[-1]) if models else None
    said = re.search(r"Target modules (.+?) not found", str(error))
    which = f"target_modules {said[1]}" if said else "target_modules"
    if model is None:
        return f"{which} of the adapter match no module of the model; name some that it has"
    leaves = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
    }
    names = sorted(name for name in leaves if not name.isdigit())[:_MOST_NAMES]
    return (
        f"{which} of the adapter match no module of the {type(model).__name__}: it has "
        f"{', '.join(names)}; name some of these in target_modules="
    )


def check_model(model: Any) -> Any:
    """Return what a factory has made, or raise a `WorkloadError`."""
    if not is_model(model):
        raise WorkloadError(
            f"model gave {shown(type(model))}, not a PreTrainedModel of transformers or a model of "
            "PEFT; dagsel.TorchWorkload trains any other module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError(
            f"no parameter of the {type(model).__name__} that model gave has requires_grad, so "
            "nothing would train; leave some of them unfrozen, or add an adapter"
        )
    core = core_of(model)
    if getattr(core, "loss_type", None) is None and is_shifted(core):
        core.loss_type = "ForCausalLM"  # what is taken for GPT-2 anyway, and warned of
    return model


def is_model(model: Any) -> bool:
    """Whether something is a model of transformers, or one of PEFT around it."""
    if not isinstance(model, torch.nn.Module):
        return False
    return isinstance(core_of(model), needs_transformers().PreTrainedModel)


def checkpoint_activations(model: Any) -> None:
    """Let a model compute activations anew in the backward pass, which takes less memory."""
    core = core_of(model)
    enable = getattr(core, "activation_checkpointing_enable", None)  # since transformers 5.20
    (enable or core.gradient_checkpointing_enable)({"use_reentrant": False})


def check_checkpointing(model: Any) -> None:
    """Raise a `WorkloadError` if a model cannot compute its activations anew."""
    core = core_of(model)
    if not core.supports_gradient_checkpointing:
        raise WorkloadError(
            f"a {type(core).__name__} has no gradient checkpointing; leave "
            "gradient_checkpointing=True out, or give max_batch= to take less memory"
        )


@torch.no_grad()
def keeps_packed_apart(model: Any, passes: Passes, packing: Callable[[Any], Any]) -> bool:
    """Whether a model sees each of several sequences in one row as if it was alone."""
    was = model.training
    model.eval()
    n_ids = core_of(model).get_input_embeddings().weight.shape[0]
    rows = [torch.arange(at, at + n) % n_ids for at, n in ((3, 6), (9, 3), (1, 2))]
    inputs, _ = passes.given(model, packing({"input_ids": rows}))
    together = model(**inputs)["logits"]
    alone = [model(**passes.given(model, {"input_ids": row[None]})[0])["logits"][0] for row in rows]
    model.train(was)
    largest = max(float(logits.abs().max()) for logits in alone)
    rounding = 1e-2 if together.dtype in (torch.bfloat16, torch.float16) else 1e-4
    packed = [together[0], together[1][:3], together[1][3:5]]
    apart = max(float((a - b).abs().max()) for a, b in zip(packed, alone, strict=True))
    return apart <= rounding * largest


def files_of(model: Any, tokenizer: Any, config: Mapping[str, Any], about: str) -> dict[str, bytes]:
    """Return what ``from_pretrained`` reads, by name."""
    with tempfile.TemporaryDirectory() as folder, no_bars():
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    told = {"about": about, "config": plain_part(config)}
    return {**files, "trial.json": json.dumps(told, indent=1).encode()}


class Several(Ensemble):
    """The mean of what several models of transformers return."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the mean of each tensor among the models' outputs, as one of their outputs."""
        outputs = [model(*args, **kwargs) for model in self.models]
        names = [name for name, value in outputs[0].items() if isinstance(value, torch.Tensor)]
        return type(outputs[0])(
            **{name: torch.stack([output[name] for output in outputs]).mean(0) for name in names}
        )
