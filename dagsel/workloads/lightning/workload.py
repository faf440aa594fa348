"""`LightningWorkload`: a LightningModule trained shard by shard, as its own Trainer would."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType
from torchmetrics import Metric

from dagsel.checks import check_takes_config, choice, number, shown, takes, whole
from dagsel.errors import WorkloadError
from dagsel.flow import Direction, Goal
from dagsel.state import State
from dagsel.workloads.argument_names import LIGHTNING, named_arguments
from dagsel.workloads.base import Config, DataOutline, Evaluated, Trained, Visit, never
from dagsel.workloads.batches import Cursor, batch_size_of, check_batches
from dagsel.workloads.lightning import scores, travel
from dagsel.workloads.lightning.loop import score_shard, train_shard
from dagsel.workloads.lightning.trainer import TrainerOptions
from dagsel.workloads.lightning.trials import MakesLightningTrials, SeveralSchedules
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.torch.batches import (
    Making,
    evaluation_batches,
    tensors_of,
    training_batches,
)
from dagsel.workloads.torch.device import Shard, accelerator, device_of, place_shard
from dagsel.workloads.torch.fit import check_dtypes, is_mapped
from dagsel.workloads.torch.live import LiveTrials
from dagsel.workloads.torch.models import GivesModules
from dagsel.workloads.torch.reconfigure import Outline, Reconfigures, outline
from dagsel.workloads.torch.schedules import check_mode
from dagsel.workloads.torch.speed import Precision, check_options, multiplying
from dagsel.workloads.torch.state import StateReader, as_torch, check
from dagsel.workloads.unread import unread_by

_CPU = torch.device("cpu")


class LightningWorkload(MakesLightningTrials, GivesModules, Reconfigures):
    """Train a ``LightningModule`` without a Trainer.

    Its ``training_step``, ``validation_step``, ``configure_optimizers``, its hooks and what it logs
    count as they do for Lightning's Trainer. Trained in one process over the same batches it has
    the same weights, bit for bit on the CPU. A hook that cannot be called is refused before
    anything trains.

    The module is built anew for every unit, so keep what training changes in a persistent
    buffer, in ``get_extra_state``, or in what ``on_save_checkpoint`` adds. Optimizers, schedules,
    random streams, gradients that wait, objects of torchmetrics, frozen parameters and evaluation
    modes travel too.

    Parameters
    ----------
    module
        ``module(config)`` builds the LightningModule.
    metrics
        What ``validation_step`` logs and a search may ask for, each with its better direction:
        ``{"val_acc": "maximize"}``; None if it has none. Or a list of names. A value is weighted by
        the size of its batch, as Lightning does; an object of torchmetrics is that of the whole
        validation set.
    batch_size
        Samples in a batch, or a function of the configuration that returns it.
    batch_fn
        ``batch_fn(batch, config)`` makes what the steps get of a batch, given as tensors by name.
        By default it is the list of the arrays in their order, as in ``x, y = batch``.
    collate, augment, bucket_by, drop_last, eval_batch_size, device_memory
        As those of `TorchWorkload`.
    gradient_clip_val, gradient_clip_algorithm, accumulate_grad_batches
        As those of Lightning's Trainer. Batches are accumulated over the ends of shards, up to the
        end of an epoch.
    precision
        ``"bf16"`` is Lightning's ``"bf16-mixed"``. With ``"tf32"`` a GPU multiplies float32 in
        TF32. ``"fp32"`` changes nothing.
    max_epochs, shard_sizes
        Epochs of a whole training, and ``data.shard_sizes`` or the samples of each training shard,
        for a module that asks ``self.trainer`` for ``max_epochs``, ``num_training_batches`` or
        ``estimated_stepping_batches``.

    Notes
    -----
    Three things differ from a Trainer. ``on_train_epoch_end`` comes before the trial is scored, not
    after. Each validation shard is scored by itself, so ``batch_idx`` begins anew in it, and
    random numbers that are drawn there do not change the training. And ``on_train_start`` and the
    hooks before it are called each time the module is built.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from lightning.pytorch import LightningModule
    >>> from dagsel.workloads import Visit
    >>> class Net(LightningModule):
    ...     def __init__(self, lr):
    ...         super().__init__()
    ...         self.lr, self.layer = lr, torch.nn.Linear(4, 2)
    ...
    ...     def training_step(self, batch):
    ...         x, y = batch
    ...         return torch.nn.functional.cross_entropy(self.layer(x), y)
    ...
    ...     def validation_step(self, batch):
    ...         x, y = batch
    ...         self.log("val_acc", (self.layer(x).argmax(1) == y).float().mean())
    ...
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
    >>> workload = LightningWorkload(
    ...     lambda config: Net(config["lr"]), metrics={"val_acc": "maximize"}, batch_size=8
    ... )
    >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    >>> shard = workload.prepare({"x": x, "y": (x[:, 0] > 0).astype("int64")})
    >>> config = {"lr": 0.5}
    >>> state = workload.init(config, seed=0)
    >>> for epoch in range(1, 9):
    ...     visit = Visit(seed=0, trial=0, epoch=epoch, shard=0, ends_epoch=True)
    ...     state = workload.train(state, shard, config, visit=visit).state
    >>> workload.pool([workload.evaluate(state, shard, config).kept])["val_acc"] > 0.9
    True
    """

    @named_arguments(LIGHTNING)
    def __init__(
        self,
        module: Callable[[Any], Any],
        *,
        metrics: Mapping[str, Direction | None] | Sequence[str],
        batch_size: int | Callable[[Any], int],
        batch_fn: Callable[[dict[str, Any], Any], Any] | None = None,
        collate: Callable[[Any], Mapping[str, Any]] | None = None,
        augment: Callable[[dict[str, torch.Tensor], Any], Mapping[str, Any]] | None = None,
        bucket_by: str | None = None,
        drop_last: bool = False,
        eval_batch_size: int = 512,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        accumulate_grad_batches: int = 1,
        precision: Precision = "fp32",
        max_epochs: int | None = None,
        shard_sizes: Sequence[Any] | None = None,
        device_memory: int | float = 0.5,
    ) -> None:
        _check_function("module", module, 1, "module(config)", "lambda config: Net(config['lr'])")
        for name, function, n, call, write in (
            ("batch_fn", batch_fn, 2, "batch_fn(batch, config)", "lambda batch, config: batch"),
            ("collate", collate, 1, "collate(batch)", "dagsel.collate.pad(ids=0)"),
            ("augment", augment, 2, "augment(sample, config)", "lambda sample, config: sample"),
        ):
            if function is not None:
                _check_function(name, function, n, call, write)
        self.module, self.batch_fn = module, batch_fn
        self.collate, self.augment, self.bucket_by = collate, augment, bucket_by
        self._metrics = _named(metrics)
        at_least_1 = {"eval_batch_size": eval_batch_size,
                      "accumulate_grad_batches": accumulate_grad_batches}  # fmt: skip
        if max_epochs is not None:
            at_least_1["max_epochs"] = max_epochs
        if not callable(batch_size):
            at_least_1["batch_size"] = batch_size
        for name, value in at_least_1.items():
            whole(name, value, error=WorkloadError)
        if gradient_clip_val is not None:
            what = "a number of 0 or more"
            number("gradient_clip_val", gradient_clip_val, what, lambda value: value >= 0,
                   error=WorkloadError)  # fmt: skip
        if gradient_clip_algorithm is not None:
            known = tuple(GradClipAlgorithmType.supported_types())
            choice("gradient_clip_algorithm", gradient_clip_algorithm, known, error=WorkloadError)
        check_options(
            precision=precision, compile=False, fused=False, device_memory=device_memory,
            flags={"drop_last": drop_last},
        )  # fmt: skip
        self.batch_size, self.drop_last, self.eval_batch_size = (
            batch_size, drop_last, eval_batch_size)  # fmt: skip
        self.gradient_clip_val = gradient_clip_val
        self.gradient_clip_algorithm = gradient_clip_algorithm
        self.accumulate_grad_batches, self.precision = accumulate_grad_batches, precision
        self.max_epochs, self.shard_sizes = max_epochs, _sizes(shard_sizes)
        self.device_memory = device_memory
        self._live = LiveTrials()
        self._has_tried = self._has_made_two = False

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics, each with its better direction if known."""
        return self._metrics

    @property
    def pooled_metrics(self) -> Sequence[str]:
        """All names: each metric is that of the whole validation set."""
        return tuple(self._metrics)

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration.

        Examples
        --------
        >>> from lightning.pytorch import LightningModule
        >>> class Net(LightningModule):
        ...     def on_train_end(self):
        ...         print("done")
        >>> make = lambda config: Net()
        >>> LightningWorkload(make, metrics=["val_loss"], batch_size=8).validate({})
        Traceback (most recent call last):
        ...
        dagsel.errors.WorkloadError: Net.on_train_end cannot be called: nobody knows beforehand \
which epoch of a trial is its last; do it with run.best_model()
        """
        self._batch_size(config)
        check_takes_config("module", self.module, config, error=WorkloadError)
        with preserved_streams(torch=True):
            trial = self._new(config, 0, _CPU)
            loop = travel.packed(trial.trainer)
            check(trial.module, trial.optimizer, trial.schedule, more={"loop": loop})
            trial.close()
            if not self._has_made_two:
                self._new(config, 0, _CPU).close()  # which must have parameters of its own
                self._has_made_two = True

    def unread(self, config: Config) -> frozenset[str]:
        """Return the parameters that training with this configuration does not read.

        None where the module may read them later, as one that calls ``save_hyperparameters``.
        """
        if not (self.batch_fn is self.augment is None):
            return frozenset()  # they read it while a trial trains

        def build(config: Config) -> object:
            self._batch_size(config)
            return self.module(config)

        with preserved_streams(torch=True):
            return unread_by(build, config)

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on a data set.

        The names that ``validation_step`` logs are tried on two samples of zeros, where that can
        be done.
        """
        check_dtypes(data)
        Making(self.batch_fn, self.collate, self.augment, self.bucket_by).check(data)
        check_batches(self._batch_size(config), data, drop_last=self.drop_last)
        if not self._has_tried:
            self._try_scoring(config, data)
            self._has_tried = True  # what fails, fails for all configurations

    def prepare(self, arrays: Mapping[str, Any]) -> Shard:
        """Copy a shard as tensors to the worker's device, or to where it is sent from."""
        shard = tensors_of(arrays)
        room = 0 if self.augment else self.device_memory  # samples are changed on the host
        return place_shard(shard, accelerator(), room, stays=is_mapped(arrays))

    def init(self, config: Config, seed: int) -> State:
        """Begin a trial as a script does: seed all streams, build the module, fit it."""
        with preserved_streams(torch=True):
            trial = self._new(config, seed, _CPU)
            state = trial.captured({"seed": seed}).state
            trial.close()
            return state

    def train(
        self,
        state: State,
        shard: Shard,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        """Train on one shard, or on the rest of it; at least one batch, if one is left."""
        device = device_of(shard)
        with preserved_streams(torch=True):
            trial = self._trial(state, config, shard)
            state.let_go()
            batches = training_batches(
                shard,
                config,
                visit,
                making=self._making,
                gang=None,
                batch_size=self._batch_size(config),
                drop_last=self.drop_last,
                cursor=Cursor.begin(trial.cursor, visit),
                should_stop=should_stop,
            )
            trial.set_streams(device)
            with multiplying(self.precision, device):
                train_shard(trial.trainer, batches, visit, scores=frozenset(self._metrics))
            captured = trial.captured({"seed": trial.seed, **batches.place()}, device.type)
            trial.close()
            if not batches.stopped:
                self._live.keep(trial, captured)
        done, reached = batches.trained(captured.state), batches.cursor
        is_known = reached.n_logged > 0 or reached.n_samples == 0
        return done if is_known else replace(done, loss=None)

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        """Score a state on one validation shard, its samples in order."""
        device = device_of(shard)
        with preserved_streams(torch=True), self._scored(state, config, shard) as trial:
            parts = evaluation_batches(shard, config, self.eval_batch_size, self._making)
            trial.set_streams(device)
            with multiplying(self.precision, device):
                n_samples, logged = score_shard(trial.trainer, parts)
            kept = scores.keep_nothing()
            if n_samples:
                module = trial.trainer.lightning_module
                kept = scores.keep(module, self.pooled_metrics, logged, config)
        return Evaluated(n_samples, {}, kept)

    def pool(self, kept: Sequence[State]) -> dict[str, float]:
        """Return the metrics of the whole set, of what the validation shards have kept."""
        with preserved_streams(torch=True):
            return scores.values_of(self.pooled_metrics, kept, self._metric_of)

    def _metric_of(self, config: Config, attribute: str) -> Metric:
        trial = self._new(config, 0, _CPU)
        metric = trial.module.get_submodule(attribute)
        trial.close()
        assert isinstance(metric, Metric)
        return metric

    def restore(self, state: State, config: Config) -> torch.nn.Module:
        """Make the trained module of a state, on the CPU and in evaluation mode."""
        with preserved_streams(torch=True):
            trial = self._loaded(StateReader(state), config, _CPU)
            trial.close()
            trial.module.zero_grad(set_to_none=True)
            return trial.module.eval()

    def follows_metric(self, config: Config, goal: Goal) -> bool:
        """Return whether a learning-rate schedule follows the search's metric.

        Raises
        ------
        WorkloadError
            If one follows another metric of validation, or takes the worse values for the better.
        """
        with preserved_streams(torch=True):
            trial = self._new(config, 0, _CPU)
            is_automatic = trial.trainer.lightning_module.automatic_optimization
            trial.close()
        found = [held for held in trial.configs if held.reduce_on_plateau and is_automatic]
        found = [held for held in found if held.monitor in self._metrics]
        for held in found:
            kind, name = type(held.scheduler).__name__, held.monitor
            if name != goal.metric:
                raise WorkloadError(
                    f"{kind} monitors {name!r}, and the search is about {goal.metric!r}; monitor "
                    f"{goal.metric!r}, or search by metric={name!r}"
                )
            if held.interval == "step":
                raise WorkloadError(
                    f"{kind} monitors {name!r}, which is known after an epoch, and its interval is "
                    "'step'; leave interval out"
                )
            check_mode(held.scheduler, goal)
        return bool(found)

    def _try_scoring(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if scoring two samples of zeros logs other names."""
        if data.ragged:
            return
        zeros = {name: as_torch(np.zeros((2, *shape), dtype.newbyteorder("=")))
                 for name, (dtype, shape) in data.arrays.items()}  # fmt: skip
        with preserved_streams(torch=True):
            trial = self._new(config, 0, _CPU)
            try:
                parts = evaluation_batches(zeros, config, 2, self._making)
                _, logged = score_shard(trial.trainer, parts)
            except Exception:  # noqa: BLE001 - zeros need not be samples
                return
            scores.check_names(trial.trainer.lightning_module, self.pooled_metrics, logged)
        for held in trial.configs:
            name = held.monitor
            is_logged = name in scores.names_of(logged) and name not in self._metrics
            if held.reduce_on_plateau and is_logged:
                raise WorkloadError(
                    f"{type(held.scheduler).__name__} monitors {name!r} of validation, which is "
                    f"not in metrics=; name it there and search by metric={name!r}"
                )

    @property
    def _making(self) -> Making:
        make = partial(_batch, self.batch_fn)
        return Making(make, self.collate, self.augment, self.bucket_by)

    def _batch_size(self, config: Config) -> int:
        return batch_size_of(self.batch_size, config)

    def _options(self, config: Config) -> TrainerOptions:
        n_batches = None
        if self.shard_sizes is not None:
            size = self._batch_size(config)
            rest = 0 if self.drop_last else size - 1
            n_batches = sum((n + rest) // size for n in self.shard_sizes)
        return TrainerOptions(
            self.gradient_clip_val, self.gradient_clip_algorithm, self.accumulate_grad_batches,
            self.precision, self.max_epochs, n_batches,
        )  # fmt: skip

    def _outline(self, config: Config, schedule: Any) -> Outline:
        trial = self._new(config, 0, _CPU)
        trial.close()
        follows = any(held.reduce_on_plateau for held in trial.configs)
        if follows and isinstance(trial.schedule, SeveralSchedules):
            raise WorkloadError(
                "a trial with several schedules, one of which follows a metric, cannot go on with "
                "another configuration; use one schedule"
            )
        return outline(trial.module, trial.optimizer, trial.schedule, schedule)


def _batch(batch_fn: Any, batch: dict[str, Any], config: Config) -> tuple[Any, None]:
    return (list(batch.values()) if batch_fn is None else batch_fn(batch, config)), None


def _check_function(name: str, function: Any, n: int, call: str, write: str) -> None:
    if not takes(function, n) or isinstance(function, torch.nn.Module):
        raise WorkloadError(
            f"{name} must be a function, called as {call}, got {shown(function)}; write "
            f"{name}={write}"
        )


def _sizes(shards: Any) -> tuple[int, ...] | None:
    if shards is None:
        return None
    if not isinstance(shards, list | tuple):
        raise WorkloadError(
            f"shard_sizes must be the samples of each shard, got {shown(shards)}; write "
            "shard_sizes=data.shard_sizes"
        )
    return tuple(
        whole("shard_sizes", getattr(shard, "n_train", shard), error=WorkloadError)
        for shard in shards
    )


def _named(metrics: Any) -> dict[str, Direction | None]:
    is_list = isinstance(metrics, list | tuple)
    named = dict.fromkeys(metrics) if is_list else metrics
    if not isinstance(named, Mapping) or not named or not all(isinstance(n, str) for n in named):
        is_name = isinstance(metrics, str) and metrics.isidentifier()
        write = f"metrics=[{metrics!r}]" if is_name else 'metrics={"val_loss": "minimize"}'
        raise WorkloadError(
            f"metrics must name what validation_step logs, got {shown(metrics)}; write {write}"
        )
    for name, direction in named.items():
        if direction not in ("minimize", "maximize", None):
            raise WorkloadError(
                f"metrics[{name!r}] must be 'minimize', 'maximize' or None, got {shown(direction)}"
            )
    return dict(named)
