"""Which hooks of a module are called, and which are refused before anything trains.

A hook that dagsel does not call would be left out in silence. So each is either called where
Lightning calls it, or its name is in `REFUSED` with the reason and the cure, or it has no part in
training and validation (`test_step`, `predict_step` and the like).
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from dagsel.errors import WorkloadError

#: Called each time a module is built: its attributes are there in every unit.
BUILDING = ("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start")
#: Called in training and scoring.
CALLED = (
    "training_step", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_start",
    "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "backward", "optimizer_step", "optimizer_zero_grad",
    "configure_gradient_clipping", "lr_scheduler_step", "on_before_batch_transfer",
    "transfer_batch_to_device", "on_after_batch_transfer", "validation_step",
    "on_validation_start", "on_validation_epoch_start", "on_validation_batch_start",
    "on_validation_batch_end", "on_validation_model_eval", "on_validation_model_zero_grad",
    "on_save_checkpoint", "on_load_checkpoint",
)  # fmt: skip
_SHARDS = "batches are made of dagsel's shards; write the data with ShardedDataset.write"
_ENDS = "nobody knows beforehand which epoch of a trial is its last; do it with run.best_model()"
_SCORES = (
    "each validation shard is scored by itself, and none sees the whole set; log a value or an "
    "object of torchmetrics in validation_step, and what is swapped in for validation need not be "
    "swapped back"
)
#: Why a hook cannot be called, and what to do instead.
REFUSED = {
    "train_dataloader": _SHARDS,
    "val_dataloader": _SHARDS,
    "prepare_data": _SHARDS,
    "configure_callbacks": "callbacks need the Trainer; a flow stops trials, an observer logs them",
    "configure_sharded_model": "a trial trains on one device; build layers in configure_model",
    "on_fit_end": _ENDS,
    "on_train_end": _ENDS,
    "teardown": _ENDS,
    "on_validation_epoch_end": _SCORES,
    "on_validation_end": _SCORES,
    "on_validation_model_train": _SCORES,
}


def check_module(module: Any) -> LightningModule:
    """Return what a factory has made, or raise a `WorkloadError` that names what is wrong.

    Examples
    --------
    >>> class Net(LightningModule):
    ...     def configure_callbacks(self):
    ...         return []
    >>> check_module(Net())
    Traceback (most recent call last):
    ...
    dagsel.errors.WorkloadError: Net.configure_callbacks cannot be called: callbacks need the \
Trainer; a flow stops trials, an observer logs them
    """
    if not isinstance(module, LightningModule):
        kind = type(module).__name__
        packages = {base.__module__.partition(".")[0] for base in type(module).__mro__}
        cure = "return one"
        if "pytorch_lightning" in packages:
            cure = "derive it from lightning.pytorch, not from pytorch_lightning"
        raise WorkloadError(f"module gave a {kind}, not a LightningModule; {cure}")
    name = type(module).__name__
    for hook, reason in REFUSED.items():
        if is_overridden(hook, module):
            raise WorkloadError(f"{name}.{hook} cannot be called: {reason}")
    for hook in ("training_step", "validation_step", "configure_optimizers"):
        if not is_overridden(hook, module):
            raise WorkloadError(f"{name} has no {hook}; write one")
    for hook in ("training_step", "validation_step"):
        if is_param_in_hook_signature(getattr(module, hook), "dataloader_iter", explicit=True):
            raise WorkloadError(
                f"{name}.{hook} takes a dataloader_iter, and there is no DataLoader; let it take "
                "batch and batch_idx"
            )
        if not takes_batch(getattr(module, hook)):
            raise WorkloadError(
                f"{name}.{hook} must take batch and batch_idx; give other arguments a default"
            )
    if not any(True for _ in module.parameters()) and not is_overridden("configure_model", module):
        raise WorkloadError("module gave a module without parameters; give it layers that train")
    return module


def takes_batch(step: Any) -> bool:
    """Whether a step can be called with what dagsel gives it."""
    try:
        inspect.signature(step).bind(*step_arguments(step, None, 0))
    except TypeError:
        return False
    return True


def step_arguments(step: Any, batch: Any, batch_idx: int) -> tuple[Any, ...]:
    """Return what a step is called with: as Lightning does, a step may leave out the number."""
    wants = is_param_in_hook_signature(step, "batch_idx", min_args=2)
    return (batch, batch_idx) if wants else (batch,)


def call_hook(module: LightningModule, hook: str, *arguments: Any) -> Any:
    """Call a hook; what it logs is logged under its name."""
    before = module._current_fx_name
    module._current_fx_name = hook
    try:
        return getattr(module, hook)(*arguments)
    finally:
        module._current_fx_name = before


def asked_of_trainer(module: LightningModule) -> Iterator[tuple[str, str]]:
    """Yield what hooks of training and scoring ask of ``self.trainer``, as their code shows it.

    Those of `BUILDING` are called before anything trains, and the trainer itself answers them.

    Examples
    --------
    >>> class Net(LightningModule):
    ...     def on_train_epoch_start(self):
    ...         self.trainer.datamodule.set_epoch(self.trainer.current_epoch)
    >>> list(asked_of_trainer(Net()))
    [('on_train_epoch_start', 'datamodule'), ('on_train_epoch_start', 'current_epoch')]
    """
    for hook in CALLED:
        code = getattr(inspect.unwrap(getattr(module, hook)), "__code__", None)
        if is_overridden(hook, module) and isinstance(code, CodeType):
            yield from ((hook, name) for name in _of_trainer(code))


def _of_trainer(code: CodeType) -> Iterator[str]:
    steps = list(dis.get_instructions(code))
    for step, after in pairwise(steps):
        of_trainer = step.argval == "trainer" and step.opname.startswith(("LOAD_ATTR", "LOAD_FAST"))
        if of_trainer and after.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            yield str(after.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_trainer(constant)
