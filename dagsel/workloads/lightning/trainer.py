"""What a module is told where it asks for its Trainer.

Lightning's parts that do the steps ask it too: its strategy, its precision plugins, its loops of
optimization, its connector of loggers. Those without a promise to stay are imported here alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers, _MockOptimizer
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization
from lightning.pytorch.loops.optimization.manual import _ManualOptimization
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.plugins.precision import Precision as FullPrecision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultCollection,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus
from lightning.pytorch.utilities import GradClipAlgorithmType

from dagsel.errors import WorkloadError
from dagsel.workloads.lightning.hooks import asked_of_trainer, call_hook, step_arguments
from dagsel.workloads.torch.speed import Precision

_SIZES = "give LightningWorkload max_epochs= and shard_sizes=data.shard_sizes"
#: What to do where a module asks for something that there is not.
_CURES = {
    "datamodule": "let batch_fn make the batches of dagsel's shards",
    "should_stop": "let a flow stop trials, as dagsel.flows.ASHA does",
    "max_epochs": _SIZES,
    "num_training_batches": _SIZES,
    "estimated_stepping_batches": _SIZES,
    "save_checkpoint": "states are kept in the run's folder",
}

#: How logged values of batches become one, by name: a module may name PyTorch's or Python's.
REDUCES = {
    **{name: getattr(torch, name) for name in ("mean", "sum", "max", "min")},
    **{f"builtins.{function.__name__}": function for function in (sum, max, min)},
}


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What a Trainer would have been made with."""

    gradient_clip_val: float | None = None
    gradient_clip_algorithm: str | None = None
    accumulate_grad_batches: int = 1
    precision: Precision = "fp32"
    max_epochs: int | None = None
    n_batches: int | None = None  # in an epoch


@dataclass(slots=True)
class Progress:
    """How far a trial is; Lightning counts its epochs from 0."""

    epoch: int = 0
    is_open: bool = False  # whether the epoch has begun and has not ended
    n_batches: int = 0  # of the epoch that were begun
    n_steps: int = 0  # of optimizers


class Logged(_ResultCollection):
    """What a module logs; it may keep every value, with the number of samples that it is of."""

    def __init__(self, *, training: bool) -> None:
        super().__init__(training)
        self.rows: dict[str, list[tuple[Any, int]]] | None = None if training else {}

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Take in a value."""
        super().update_metrics(key, value, batch_size)
        if self.rows is not None:
            self.rows.setdefault(key, []).append((value, batch_size))

    def put(self, key: str, about: Mapping[str, Any], value: Any, reduce: Any) -> _ResultMetric:
        """Put in what was logged before: a sum, or an object of torchmetrics."""
        meta = _Metadata(**{**about, "reduce_fx": REDUCES[about["reduce_fx"]]})
        meta.sync = _Sync(fn=reduce, _should=False)
        result = _ResultMetric(meta, isinstance(value, torch.Tensor))
        result.value, result._update_count, result.has_reset = value, 1, False
        self[key] = result
        return result


class _Shown(dict[str, Any]):
    # Metrics by name, as `Trainer.callback_metrics`; those of validation are not known to a unit.
    def __init__(self, known: Mapping[str, Any], scores: frozenset[str]) -> None:
        super().__init__(known)
        self._scores = scores

    def __missing__(self, name: str) -> Any:
        raise WorkloadError(
            f"self.trainer has no metric {name!r}, it has {', '.join(self) or 'none'}: a trial is "
            "scored after its epoch, so training cannot read what validation logs"
        )

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self or name in self._scores else default


class ShardTrainer:
    """Answers for a Trainer: what it says is true of the trial, and anything else is refused.

    Parameters
    ----------
    module
        The module, which asks it as ``self.trainer`` until `close`.
    options
        What the Trainer would have been made with.
    device
        Where the module is.
    scores
        Names of the metrics of validation.
    """

    callbacks: tuple[Any, ...] = ()
    checkpoint_callback = early_stopping_callback = progress_bar_callback = logger = None
    world_size = num_nodes = num_devices = 1
    global_rank = local_rank = node_rank = 0
    is_global_zero = True
    sanity_checking = testing = predicting = barebones = received_sigterm = interrupted = False
    fast_dev_run = False
    min_epochs = min_steps = scaler = None
    max_steps = -1
    overfit_batches = 0.0
    check_val_every_n_epoch = 1

    def __init__(
        self,
        module: LightningModule,
        options: TrainerOptions,
        device: torch.device,
        scores: frozenset[str] = frozenset(),
    ) -> None:
        put = self.__dict__.update  # the module must not set anything: see `__setattr__`
        plugin: Any = FullPrecision()
        if options.precision == "bf16":
            plugin = MixedPrecision("bf16-mixed", device.type)
        strategy = SingleDeviceStrategy(device, precision_plugin=plugin)
        algorithm = options.gradient_clip_algorithm
        put(
            lightning_module=module,
            strategy=strategy,
            progress=Progress(),
            profiler=PassThroughProfiler(),
            state=TrainerState(TrainerStatus.RUNNING, TrainerFn.FITTING, RunningStage.TRAINING),
            is_last_batch=False,
            gradient_clip_val=options.gradient_clip_val,
            gradient_clip_algorithm=algorithm and GradClipAlgorithmType(algorithm),
            accumulate_grad_batches=options.accumulate_grad_batches,
            loggers=[],
            fit_loop=_FitLoop(self),
            _options=options,
            _scores=scores,
            _results=Logged(training=True),
            _accelerator_connector=SimpleNamespace(is_distributed=False),
        )
        put(_logger_connector=_LoggerConnector(self))  # type: ignore[arg-type]
        put(_automatic=_AutomaticOptimization(self))  # type: ignore[arg-type]
        put(_manual=_ManualOptimization(self))  # type: ignore[arg-type]
        module.trainer = self  # type: ignore[assignment]
        strategy.connect(module)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if not vars(self):
            raise WorkloadError(
                f"{name} is asked of the trainer of an earlier unit; ask self.trainer each time"
            )
        raise self._refused(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._refused(name, f" = {value!r}")

    def _refused(self, name: str, to: str = "") -> WorkloadError:
        module = self.lightning_module
        hook = module._current_fx_name or "__init__"
        return refused(type(module).__name__, hook, name, to)

    def close(self) -> None:
        """Leave the module without a trainer."""
        module = self.lightning_module
        module.trainer = None
        module._metric_attributes = module._current_fx_name = None
        self.__dict__.clear()  # its parts refer to it and would keep the module alive

    def check_asked(self) -> None:
        """Raise a `WorkloadError` if a hook's code asks for something that there is not."""
        lacks = {
            "max_epochs": self._options.max_epochs is None,
            "num_training_batches": self._options.n_batches is None,
        }
        lacks["estimated_stepping_batches"] = any(lacks.values())
        for hook, name in asked_of_trainer(self.lightning_module):
            is_there = name in vars(self) or name in vars(type(self)) or name.startswith("_")
            if lacks.get(name, not is_there):
                raise refused(type(self.lightning_module).__name__, hook, name)

    def hook(self, name: str, *arguments: Any) -> Any:
        """Call a hook of the module."""
        return call_hook(self.lightning_module, name, *arguments)

    # What is asked for by modules ------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        return self.progress.epoch  # type: ignore[no-any-return]

    @property
    def global_step(self) -> int:
        """Steps of optimizers so far."""
        if self.lightning_module.automatic_optimization:
            return self._automatic.optim_progress.optimizer_steps  # type: ignore[no-any-return]
        return self._manual.optim_step_progress.total.completed  # type: ignore[no-any-return]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers."""
        return self.strategy.optimizers  # type: ignore[no-any-return]

    @property
    def lr_scheduler_configs(self) -> list[Any]:
        """The schedules, each with what ``configure_optimizers`` says of it."""
        return self.strategy.lr_scheduler_configs  # type: ignore[no-any-return]

    @property
    def model(self) -> LightningModule:
        """The module."""
        return self.lightning_module  # type: ignore[no-any-return]

    @property
    def precision_plugin(self) -> Any:
        """Lightning's part that runs steps in a precision."""
        return self.strategy.precision_plugin

    @property
    def precision(self) -> str:
        """The precision, as Lightning calls it."""
        return str(self.precision_plugin.precision)

    @property
    def device_ids(self) -> list[int]:
        """Number of the device."""
        return [self.strategy.root_device.index or 0]

    @property
    def max_epochs(self) -> int:
        """Epochs of a whole training, if the workload was told them."""
        return self._told("max_epochs", self._options.max_epochs)

    @property
    def num_training_batches(self) -> int:
        """Batches of an epoch, if the workload was told the sizes of the shards."""
        return self._told("num_training_batches", self._options.n_batches)

    @property
    def estimated_stepping_batches(self) -> int:
        """Steps of a whole training, if the workload was told both."""
        name = "estimated_stepping_batches"
        options: TrainerOptions = self._options
        n_batches = self._told(name, options.n_batches)
        n_steps = math.ceil(n_batches / options.accumulate_grad_batches)
        return n_steps * self._told(name, options.max_epochs)

    def _told(self, name: str, value: int | None) -> int:
        if value is None:
            raise self._refused(name)
        return value

    @property
    def training(self) -> bool:
        """Whether the trial trains."""
        return bool(self.state.stage == RunningStage.TRAINING)

    @property
    def validating(self) -> bool:
        """Whether the trial is scored."""
        return not self.training

    evaluating = validating

    @property
    def callback_metrics(self) -> Mapping[str, Any]:
        """What training has logged, by name."""
        return _Shown(self._logger_connector.callback_metrics, self._scores)

    @property
    def logged_metrics(self) -> Mapping[str, Any]:
        """What training has logged, by the names that loggers would get."""
        return _Shown(self._logger_connector.logged_metrics, self._scores)

    @property
    def progress_bar_metrics(self) -> Mapping[str, Any]:
        """What training has logged for the progress bar."""
        return _Shown(self._logger_connector.progress_bar_metrics, self._scores)

    # What is asked for by the loop -----------------------------------------------------------

    def configure_optimizers(self) -> None:
        """Let the module make its optimizers and schedules."""
        name = type(self.lightning_module).__name__
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*configure_optimizers. returned .None.")
                optimizers, configs = _init_optimizers_and_lr_schedulers(self.lightning_module)
        except Exception as error:
            if _is_lightnings(error):
                raise WorkloadError(f"{name}.configure_optimizers: {error}") from error
            raise
        if any(isinstance(optimizer, _MockOptimizer) for optimizer in optimizers):
            raise WorkloadError(f"{name}.configure_optimizers returns None; return an optimizer")
        self.strategy.optimizers, self.strategy.lr_scheduler_configs = optimizers, configs

    def begin(self, progress: Progress) -> None:
        """Set how far the trial is."""
        vars(self).update(progress=progress)
        self._automatic.optim_progress.optimizer.step.total.completed = progress.n_steps
        self._manual.optim_step_progress.total.completed = progress.n_steps
        # Else the first batch of a unit would be taken for that of the epoch, and reset its sums.
        self._logger_connector._first_loop_iter = True if progress.n_batches else None

    def begin_scoring(self) -> Logged:
        """Score from now on; return what is logged."""
        self.state.stage = RunningStage.VALIDATING
        vars(self).update(_results=Logged(training=False))
        self._logger_connector._first_loop_iter = None
        return self._results  # type: ignore[no-any-return]

    def begin_batch(self, *, is_last: bool) -> int:
        """Count a batch of training; return its number in the epoch."""
        vars(self).update(is_last_batch=is_last)
        self.progress.n_batches += 1
        return self.progress.n_batches - 1  # type: ignore[no-any-return]

    def optimize(self, batch: Any, batch_idx: int) -> Mapping[str, Any]:
        """Train on a batch as Lightning does; return what the module's step gave."""
        step = self.lightning_module.training_step
        arguments: Any = dict(enumerate(step_arguments(step, batch, batch_idx)))
        if self.lightning_module.automatic_optimization:
            output = self._automatic.run(self.optimizers[0], batch_idx, arguments)
        else:
            output = self._manual.run(arguments)
        self.progress.n_steps = self.global_step
        return output  # type: ignore[no-any-return]

    @property
    def accumulates(self) -> bool:
        """Whether gradients wait for more batches."""
        is_done = self.progress.n_batches % self.accumulate_grad_batches == 0
        return not is_done and not self.is_last_batch

    @property
    def logs(self) -> Any:
        """Lightning's part that keeps what is logged."""
        return self._logger_connector

    @property
    def results(self) -> Logged:
        """What is logged."""
        return self._results  # type: ignore[no-any-return]


class _FitLoop:
    # All that Lightning's loops of optimization ask of the loop around them.
    def __init__(self, trainer: ShardTrainer) -> None:
        self._trainer = trainer

    def _should_accumulate(self) -> bool:
        return self._trainer.accumulates

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise self._trainer._refused(f"fit_loop.{name}")


def refused(module: str, hook: str, name: str, to: str = "") -> WorkloadError:
    """Return the error for something that a module asks of its Trainer in vain."""
    cure = _CURES.get(name, f"leave it out of {hook}")
    article = "sets" if to else "asks for"
    return WorkloadError(
        f"{module}.{hook} {article} self.trainer.{name}{to}, and dagsel trains without a Trainer: "
        f"{cure}"
    )


def _is_lightnings(error: BaseException) -> bool:
    """Whether Lightning has raised an error itself, and not what it has called."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    name = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.startswith("lightning.")
