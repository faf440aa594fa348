"""`TorchWorkload`: PyTorch models, from a six-line factory to a user's own training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from dagsel.checks import check_takes_config, whole
from dagsel.errors import WorkloadError
from dagsel.flow import Direction
from dagsel.state import State
from dagsel.workloads.argument_names import TORCH, named_arguments
from dagsel.workloads.base import (
    Config,
    DataOutline,
    Evaluated,
    Trained,
    Visit,
    never,
)
from dagsel.workloads.batches import batch_size_of, check_batches
from dagsel.workloads.gang.gang import Gang
from dagsel.workloads.named_metrics import Metrics, directions, metric_functions
from dagsel.workloads.pooled import PoolsMetrics
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.torch import factories
from dagsel.workloads.torch.batches import evaluation_batches, tensors_of
from dagsel.workloads.torch.build import beside_state, check_alike
from dagsel.workloads.torch.ddp import check_shares
from dagsel.workloads.torch.device import Shard, accelerator, device_of, place_shard
from dagsel.workloads.torch.fit import Casting, FitsData, check_dtypes, is_mapped
from dagsel.workloads.torch.frozen import say_frozen
from dagsel.workloads.torch.layout import ChannelsLast
from dagsel.workloads.torch.live import LiveTrials
from dagsel.workloads.torch.loop import (
    ShardBatches,
    following,
    mean_metrics,
)
from dagsel.workloads.torch.memory import Counts, Memory
from dagsel.workloads.torch.models import GivesModules
from dagsel.workloads.torch.needless import TriesWithout, say_untried
from dagsel.workloads.torch.pretrained import Base, as_base
from dagsel.workloads.torch.reconfigure import Reconfigures
from dagsel.workloads.torch.speed import (
    Fused,
    Precision,
    check_options,
    multiplying,
)
from dagsel.workloads.torch.state import (
    StateReader,
    as_torch,
    capture,
    check,
    check_names,
)


class TorchWorkload(TriesWithout, GivesModules, Reconfigures, FitsData, PoolsMetrics):
    """Train PyTorch models.

    The state dicts of model, optimizer and learning-rate schedule travel with a trial, bit for bit,
    and so do the random streams of PyTorch, NumPy and Python. Model and optimizer are built anew
    for every unit, so keep anything else that training changes in a persistent buffer or in
    ``get_extra_state``; a trial fails whose next batch depends on a number or a tensor in an
    attribute that is not. Functions are called in workers.

    Parameters
    ----------
    model
        ``model(config)`` builds the module; with a `base`, ``model(config, base)``.
    loss
        ``loss(output, target)`` returns the mean loss of a batch. Weights of classes that a module
        holds follow the model, to its device and its type.
    optimizer
        ``optimizer(parameters, config)`` builds the optimizer. Or a class such as
        ``torch.optim.Adam``: of the configuration it gets what has the name of one of its
        arguments, such as ``lr`` or ``weight_decay``. Without ``lr`` its own default is used.
    batch_size
        Samples in a batch, or a function of the configuration that returns it.
    metrics
        Functions of output and target by name; each returns the mean over a batch, unless it is an
        `dagsel.metrics.over_set` or an object of torchmetrics. A function may have a ``direction``.
        Names of `dagsel.metrics` will do: ``["accuracy"]``. The validation ``"loss"`` is always in.
    lr_scheduler
        ``lr_scheduler(optimizer, config)`` builds the learning-rate schedule. One that steps by a
        metric, such as ``ReduceLROnPlateau``, gets that of the search after each epoch.
    input_fn
        ``input_fn(batch, config)`` makes inputs and targets of a batch, given as tensors by name.
        By default the first array is the input and the last one the target. Inputs may be a mapping
        or a tuple: the model is called as ``model(**inputs)`` or ``model(*inputs)``. If the input
        is float64 and the model of the first configuration float32, workers cast it to float32
        once, and log it; targets too if `loss` is PyTorch's own and refuses them. With an
        `input_fn` nothing is cast.
    collate
        ``collate(batch)`` makes tensors of arrays whose samples differ in shape, before `input_fn`:
        each is a list of tensors in the batch. `dagsel.collate.pad` fills them up.
    augment
        ``augment(sample, config)`` changes a sample, tensors by name, in training alone. What it
        draws from Python's, NumPy's or PyTorch's streams depends on the run's seed, the trial, the
        epoch and the sample, so a replay sees the same. Called before `collate`, but after
        `dagsel.collate.images` has decoded.
    bucket_by
        Name of an array whose samples differ in shape: a training batch has samples of similar
        size. Each is still taken once an epoch.
    train_fn
        ``train_fn(model, optimizer, batches, config)`` is your own training loop over
        ``for inputs, targets in batches:``; ``batches.log(loss)`` reports a loss. The iterator
        ends early when the unit has to stop, and the next unit continues at that sample; local
        variables of the loop are lost. Gradients may be accumulated over batches if
        ``optimizer.step()`` follows before the shard ends.
    lr_scheduler_interval
        When the schedule steps: after each ``"epoch"`` or after each batch (``"step"``).
    drop_last
        Leave out the last batch of a shard if it is smaller.
    eval_batch_size
        Samples in a batch of an evaluation.
    precision
        ``"bf16"`` runs the model's forward pass under bfloat16 autocast, on the CPU too; outputs
        are float32, and weights and moments keep their dtype. With ``"tf32"`` a GPU multiplies
        float32 in TF32. ``"fp32"`` changes nothing.
    compile
        Compile the model with ``torch.compile``; a name chooses its backend.
    channels_last
        Store four-dimensional weights with their channels last: ``"auto"`` on the CPU, for networks
        that are faster so. It rounds otherwise, and dropout between convolutions draws its numbers
        in another order. These networks have `torch.nn.Conv2d` with eight channels
        or more between them and no ``InstanceNorm2d``, and must bear it: a copy is tried. Not with
        a ``train_fn``, `compile`, `collate`, a `base` or a `state` of what is ``"trainable"``.
    fused
        Step Adam, AdamW and SGD by one kernel for all parameters, which rounds otherwise:
        ``"auto"`` where PyTorch has it and the optimizer has no ``foreach`` or ``fused`` of its
        own. Never for parameters in half precision on the CPU.
    cuda_graphs
        Record a training step as a CUDA graph and repeat it. No effect on the CPU, in a gang, with
        a ``train_fn`` or a ``max_batch``, with a schedule that steps after each batch, and with an
        optimizer that cannot be recorded. The model must neither draw from Python's or NumPy's
        streams nor look at numbers that are on the GPU.
    device_memory
        GPU memory for shards, as a share (a float) or in bytes (an int). Others stay in pinned
        memory of the host, and their batches are sent ahead.
    max_batch
        Samples that a worker trains on at once: of a larger share of a batch the gradients are
        accumulated piece by piece, which changes them by rounding alone. The loss must be a mean
        over samples; dropout and batch normalisation see the pieces. Not with a ``train_fn``.
        A trial that runs out of memory gets half of it, or of its batch.
    memory
        Bytes that a training unit takes of its device beside the shard, or a function of the
        configuration that returns them: no worker that has less trains the trial. By default what
        `dagsel.profile` has measured, or else parameters, gradients and moments. With
        ``"estimate"`` also what a batch keeps for its backward pass: in the process that calls
        dagsel, a few samples of zeros go through the model.
    base
        A pretrained model that trials adapt: a function that returns it, a module, or a
        `dagsel.Base`. Its weights are once on each worker, and in no state.
    state
        What a state holds: ``"all"`` of the module, or what is ``"trainable"``: the parameters with
        ``requires_grad`` and the buffers. The function ``model`` then makes the others the same
        each time, or a trial fails. By default ``"all"`` without a `base`.

    Notes
    -----
    Several workers may train a trial together (`GangWorkload`): by PyTorch's
    ``DistributedDataParallel``, each on its share of every batch, its gradients weighted by the
    share. Their number changes a result by rounding alone, with four exceptions. Random numbers
    drawn in training are the trial's own on rank 0 and derived ones on the others. Batch
    normalisation in training mode sees each rank's share, and rank 0's running statistics are kept;
    with its statistics fixed it changes nothing. A loss must be a mean over samples: one with class
    weights or an ``ignore_index`` divides by something else. And a ``train_fn`` must do the same on
    all ranks whatever the numbers of its own share are.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> import dagsel.metrics
    >>> from dagsel.workloads import Visit
    >>> workload = TorchWorkload(
    ...     model=lambda config: torch.nn.Linear(4, 2),
    ...     loss=torch.nn.functional.cross_entropy,
    ...     optimizer=lambda parameters, config: torch.optim.SGD(parameters, lr=config["lr"]),
    ...     batch_size=8,
    ...     metrics={"accuracy": dagsel.metrics.accuracy},
    ... )
    >>> workload.metrics
    {'loss': 'minimize', 'accuracy': 'maximize'}
    >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    >>> shard = workload.prepare({"x": x, "y": (x[:, 0] > 0).astype("int64")})
    >>> config = {"lr": 0.5}
    >>> state = workload.init(config, seed=0)
    >>> for epoch in range(1, 9):
    ...     visit = Visit(seed=0, trial=0, epoch=epoch, shard=0, ends_epoch=True)
    ...     state = workload.train(state, shard, config, visit=visit).state
    >>> workload.evaluate(state, shard, config).metrics["accuracy"] > 0.9
    True
    """

    _as_tensor = staticmethod(as_torch)

    @named_arguments(TORCH)
    def __init__(
        self,
        model: Callable[..., torch.nn.Module],
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: Callable[[Any, Any], torch.optim.Optimizer] | type[torch.optim.Optimizer],
        *,
        batch_size: int | Callable[[Any], int],
        metrics: Metrics | None = None,
        lr_scheduler: Callable[[Any, Any], Any] | None = None,
        input_fn: Callable[[dict[str, Any], Any], tuple[Any, Any]] | None = None,
        collate: Callable[[Any], Mapping[str, Any]] | None = None,
        augment: Callable[[dict[str, torch.Tensor], Any], Mapping[str, Any]] | None = None,
        bucket_by: str | None = None,
        train_fn: Callable[[Any, Any, ShardBatches, Any], object] | None = None,
        lr_scheduler_interval: Literal["epoch", "step"] = "epoch",
        drop_last: bool = False,
        eval_batch_size: int = 512,
        precision: Precision = "fp32",
        compile: bool | str = False,  # noqa: A002 - PyTorch's own word
        channels_last: ChannelsLast = "auto",
        fused: Fused = "auto",
        cuda_graphs: bool = False,
        device_memory: int | float = 0.5,
        max_batch: int | None = None,
        base: Base | Callable[[], torch.nn.Module] | torch.nn.Module | None = None,
        state: Literal["all", "trainable"] | None = None,
        memory: Memory = None,
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.lr_scheduler, self.input_fn, self.train_fn = lr_scheduler, input_fn, train_fn
        self.collate, self.augment = collate, augment
        self.base = as_base(base)
        factories.check_functions(**vars(self))
        if state not in (None, "all", "trainable"):
            raise WorkloadError(f"state is {state!r}, not 'all' or 'trainable'")
        if base is not None and state == "all":
            raise WorkloadError("state='all' would store the base with each trial; leave it out")
        self.state = state
        self.bucket_by = bucket_by
        self._metrics = metric_functions(metrics, loss)
        if "loss" in self._metrics:
            raise WorkloadError("the metric 'loss' is always there; give yours another name")
        if lr_scheduler_interval not in ("epoch", "step"):
            raise WorkloadError(f"lr_scheduler_interval is {lr_scheduler_interval!r}, not "
                                "'epoch' or 'step'")  # fmt: skip
        whole("eval_batch_size", eval_batch_size, error=WorkloadError)
        if max_batch is not None:
            whole("max_batch", max_batch, error=WorkloadError)
        if not (memory is None or memory == "estimate" or callable(memory)):
            whole("memory", memory, error=WorkloadError)
        if max_batch is not None and train_fn is not None:
            raise WorkloadError("max_batch is for the standard loop; accumulate gradients in your "
                                "train_fn, or leave max_batch out")  # fmt: skip
        if not callable(batch_size):
            whole("batch_size", batch_size, error=WorkloadError)
        check_options(
            precision=precision, compile=compile, fused=fused, channels_last=channels_last,
            device_memory=device_memory,
            flags={"cuda_graphs": cuda_graphs, "drop_last": drop_last},
        )  # fmt: skip
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.drop_last, self.lr_scheduler_interval = drop_last, lr_scheduler_interval
        self.precision, self.compile, self.channels_last = precision, compile, channels_last
        self.fused, self.cuda_graphs = fused, cuda_graphs
        self.device_memory, self.max_batch, self._memory = device_memory, max_batch, memory
        self._casting = Casting(loss)
        self._live, self._has_made_two = LiveTrials(), False
        self._borne: dict[str, bool] = {}
        self._counts = Counts()

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics, each with its better direction if known."""
        return {"loss": "minimize", **directions(self._metrics)}

    def as_of(self, description: Mapping[str, str]) -> TorchWorkload:
        """Return this workload with the kernels that a run of an earlier dagsel began with."""
        chosen = {"fused": self.fused, "channels_last": self.channels_last}
        before = [
            name
            for name, value in chosen.items()
            if value == "auto" and description.get(name, "False") == "False"
        ]
        if not before:
            return self
        then = copy.copy(self)
        vars(then).update(dict.fromkeys(before, False))
        return then

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration.

        Examples
        --------
        >>> import torch
        >>> model = lambda config: torch.nn.Linear(config["n"], 1)
        >>> loss, adam = torch.nn.functional.mse_loss, torch.optim.Adam
        >>> batch_size = lambda config: config["n"] // 2
        >>> TorchWorkload(model, loss, adam, batch_size=batch_size).validate({"n": 1, "lr": 0.1})
        Traceback (most recent call last):
        ...
        dagsel.errors.WorkloadError: batch_size must be a whole number of 1 or more, got 0
        """
        self._batch_size(config)
        check_takes_config("model", self.model, config, error=WorkloadError)
        self._said(config)
        with preserved_streams(torch=True):
            module = self._build(config, seed=0, large=True)
            factories.check_options_of(self.optimizer, config)
            optimizer, schedule = self._build_optimizer(module, config)
            check(module, optimizer, schedule, without=self._frozen(module).left_out())
            if self._memory is None:
                self._counts.note(config, self._count(module, optimizer))
            if not (self._has_made_two or self._leaves_out):
                say_frozen(module)
            once = {} if self._has_made_two else beside_state(module)
            del module, optimizer, schedule
            if not self._has_made_two:  # the other one must have parameters of its own
                check_alike(once, beside_state(self._build(config, seed=0, large=True)))
                self._has_made_two = True

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on a data set."""
        check_dtypes(data)
        self._making.check(data)
        if self.input_fn is None:
            self._casting.say(data, all_used=self._making.uses_all)
        check_batches(self._batch_size(config), data, drop_last=self.drop_last)

    def prepare(self, arrays: Mapping[str, Any]) -> Shard:
        """Copy a shard as tensors to the worker's device, or to where it is sent from."""
        if self.input_fn is None:
            arrays = self._casting.cast(arrays)
        shard = tensors_of(arrays)
        room = 0 if self.augment else self.device_memory  # samples are changed on the host
        return place_shard(shard, accelerator(), room, stays=is_mapped(arrays))

    def init(self, config: Config, seed: int) -> State:
        """Begin a trial as a script does: seed all streams, build the model, the optimizer."""
        with preserved_streams(torch=True):
            module = self._build(config, seed)
            optimizer, schedule = self._build_optimizer(module, config)
            frozen = self._frozen(module)
            meta = {"seed": seed, **self._about_frozen(frozen)}
            return capture(module, optimizer, schedule, meta, without=frozen.left_out()).state

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
        return self._train(state, shard, config, visit, should_stop, None)

    def validate_gang(self, config: Config, size: int) -> None:
        """Raise a `WorkloadError` if a batch has no sample for some rank."""
        check_shares(self._batch_size(config), size)

    def train_gang(
        self,
        state: State | None,
        shard: Shard,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
        gang: Gang,
    ) -> Trained:
        """Train as ``train`` does, on this rank's share of every batch."""
        self.validate_gang(config, gang.size)
        with gang.exchange():
            gang.group.reach(device_of(shard))
        return self._train(gang.broadcast(state), shard, config, visit, should_stop, gang)

    def _train(
        self,
        state: State,
        shard: Shard,
        config: Config,
        visit: Visit,
        should_stop: Callable[[], bool],
        gang: Gang | None,
    ) -> Trained:
        device = device_of(shard)
        with preserved_streams(torch=True, gang=None if gang is None else gang.name):
            trial = self._trial(state, config, shard, lives=gang is None)
            module, optimizer, schedule = trial.module, trial.optimizer, trial.schedule
            beside = self._beside(trial)
            batches = self._pass(trial, shard, config, visit, should_stop, gang)
            changed = beside.changed()
            meta = {"seed": trial.seed, **batches.place(), **trial.unfrozen()}
            if self._leaves_out:
                self._check_frozen(trial.frozen, state.meta, config)
                meta.update({name: state.meta.get(name) for name in ("base", "frozen")})
            if gang is None or gang.rank == 0:
                left_out = trial.frozen.left_out()
                captured = capture(module, optimizer, schedule, meta, device.type, without=left_out)
                check_names(state, captured, module, trial.frozen.may_lack())
                state = captured.state
            if gang is not None:
                counted = beside.now()
                say_untried(*(str(error) for key, error in changed.items() if key in counted))
            elif self._tried_without(changed, beside, trial, captured, shard, config, visit):
                pass  # the trial has gone on from where its state is
            elif not (changed or batches.stopped):
                self._live.keep(trial, captured)
        return batches.trained(state)

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        """Score a state on one validation shard, its samples in order."""
        device = device_of(shard)
        with preserved_streams(torch=True), self._scored(state, config, shard) as scored:
            module, set_streams = scored
            with torch.no_grad(), multiplying(self.precision, device):
                set_streams(device)
                pool, means = self._parted()
                size = self.at_once(config, "evaluate") or self.eval_batch_size
                parts = evaluation_batches(shard, config, size, self._making)
                of_batch = {"loss": following(self.loss, module.parameters()), **means}
                n_samples, found = mean_metrics(module.eval(), parts, of_batch, pool)
        return Evaluated(n_samples, found, None if pool is None else pool.pack())

    def restore(self, state: State, config: Config) -> torch.nn.Module:
        """Make the trained module of a state, on the CPU and in evaluation mode."""
        with preserved_streams(torch=True):
            if self.base is not None and not self.base.is_intact():  # somebody has a model of it
                self.base.forget()
            return self._restore(StateReader(state), config, torch.device("cpu")).eval()

    def _batch_size(self, config: Config) -> int:
        return batch_size_of(self.batch_size, config)
