"""`FlaxWorkload`: modules of Flax NNX, trained by optax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dagsel.checks import as_called, check_call, imported, takes
from dagsel.codec import from_json
from dagsel.errors import WorkloadError
from dagsel.flow import Direction
from dagsel.state import State, reading_state
from dagsel.workloads.argument_names import FLAX, named_arguments
from dagsel.workloads.arrays import (
    InputFn,
    Kept,
    Shard,
    TakesArrays,
    new_beginning,
    settle_jax,
)
from dagsel.workloads.base import (
    Config,
    DataOutline,
    Evaluated,
    Trained,
    Visit,
    never,
)
from dagsel.workloads.batches import number_of, weighted_means
from dagsel.workloads.named_metrics import Metrics, directions, metric_functions
from dagsel.workloads.pooled import PoolsMetrics, accumulates
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.unread import unread_by

if TYPE_CHECKING:
    from dagsel.workloads.flax.programs import FlaxParts, FlaxPrograms

#: How each is called, and what could be written.
_CALLS = {
    "model": ("config, rngs", "lambda config, rngs: flax.nnx.Linear(4, 2, rngs=rngs)"),
    "loss": ("output, target", "lambda output, target: optax.l2_loss(output, target).mean()"),
    "optimizer": ("config", 'lambda config: optax.adam(config["lr"])'),
    "train_step": (
        "model, optimizer, inputs, targets, config",
        "step, with def step(model, optimizer, inputs, targets, config): ...",
    ),
}
#: How many configurations' compiled programs a worker keeps.
_MOST_KEPT = 256


class FlaxWorkload(TakesArrays, PoolsMetrics):
    """Train modules of Flax NNX with optax.

    Parameters, batch statistics, the generators of ``nnx.Rngs`` and all other variables of the
    model travel with a trial, bit for bit, and so does the state of the optimizer. Functions are
    called in worker processes. A training step is compiled once in each worker for a configuration
    and a shape; a shard's last, smaller batch has a shape of its own.

    Parameters
    ----------
    model
        ``model(config, rngs)`` builds the module; ``rngs`` is an ``nnx.Rngs`` of the trial's seed.
        Anything that training changes must be an ``nnx.Variable``.
    loss
        ``loss(output, target)`` returns the mean loss of a batch.
    optimizer
        ``optimizer(config)`` returns a transformation of optax. A schedule follows the optimizer's
        count of steps.
    batch_size
        Samples in a batch, or a function of the configuration that returns it.
    metrics
        Functions of output and target, NumPy arrays, by name; each returns the mean over a batch,
        unless it is a `dagsel.metrics.over_set`. A function may have a ``direction``. Names of
        `dagsel.metrics` will do: ``["accuracy"]``. The validation ``"loss"`` is always in.
    input_fn
        ``input_fn(batch, config)`` makes inputs and targets of a batch, given as NumPy arrays by
        name; an array whose samples differ in shape is a list of arrays. By default the first array
        is the input and the last one the target. Inputs may be a mapping or a tuple: the model is
        called as ``model(**inputs)`` or ``model(*inputs)``. What it draws from Python's and NumPy's
        streams depends on the run's seed, the trial, the epoch, the shard and the batch.
    train_step
        ``train_step(model, optimizer, inputs, targets, config)`` is your own training step. It
        changes the model and the ``nnx.Optimizer`` in place and returns the loss. It is compiled.
    drop_last
        Leave out the last batch of a shard if it is smaller.
    eval_batch_size
        Samples in a batch of an evaluation.

    Examples
    --------
    >>> import numpy as np, optax
    >>> from flax import nnx
    >>> from dagsel.workloads import Visit
    >>> workload = FlaxWorkload(
    ...     model=lambda config, rngs: nnx.Linear(4, 2, rngs=rngs),
    ...     loss=lambda output, target: optax.softmax_cross_entropy_with_integer_labels(
    ...         output, target).mean(),
    ...     optimizer=lambda config: optax.adam(config["lr"]),
    ...     batch_size=16, metrics=["accuracy"],
    ... )
    >>> workload.metrics
    {'loss': 'minimize', 'accuracy': 'maximize'}
    >>> x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    >>> shard, config = workload.prepare({"x": x, "y": (x[:, 0] > 0).astype(int)}), {"lr": 0.1}
    >>> state = workload.init(config, seed=0)
    >>> for epoch in range(1, 6):
    ...     visit = Visit(seed=0, trial=0, epoch=epoch, shard=0, ends_epoch=True)
    ...     state = workload.train(state, shard, config, visit=visit).state
    >>> workload.evaluate(state, shard, config).metrics["accuracy"] > 0.9
    True
    """

    @named_arguments(FLAX)
    def __init__(
        self,
        model: Callable[[Any, Any], Any],
        loss: Callable[[Any, Any], Any],
        optimizer: Callable[[Any], Any],
        *,
        batch_size: int | Callable[[Any], int],
        metrics: Metrics | None = None,
        input_fn: InputFn | None = None,
        train_step: Callable[..., Any] | None = None,
        drop_last: bool = False,
        eval_batch_size: int = 256,
    ) -> None:
        _library()
        functions = {"model": model, "loss": loss, "optimizer": optimizer, "train_step": train_step}
        for name, function in functions.items():
            if not (name == "train_step" and function is None):
                _check_function(name, function)
        self._set_batches(batch_size, input_fn, drop_last, eval_batch_size)
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.train_step = train_step
        self._metrics = metric_functions(metrics)
        for name, metric in self._metrics.items():
            if accumulates(metric):
                raise WorkloadError(
                    f"metric {name!r} is a {type(metric).__name__}, which takes PyTorch's tensors, "
                    "and outputs are NumPy arrays: write a function and mark it by "
                    "dagsel.metrics.over_set"
                )
        self._programs: Kept[FlaxPrograms] = Kept(_MOST_KEPT)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a worker, before anything of JAX is used there."""
        settle_jax()
        self.__dict__.update(state)

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics, each with its better direction if known."""
        return {"loss": "minimize", **directions(self._metrics)}

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration.

        Examples
        --------
        >>> from flax import nnx
        >>> dropout = lambda config, rngs: nnx.Dropout(config["rate"], rngs=rngs)
        >>> workload = FlaxWorkload(dropout, lambda o, t: o.mean(), lambda c: None, batch_size=8)
        >>> workload.validate({"rate": 0.5})
        Traceback (most recent call last):
        ...
        dagsel.errors.WorkloadError: the Dropout has no parameters to train: keep its weights as \
nnx.Param
        """
        self._batch_size(config)
        with preserved_streams():
            self._programs_of(config, 0)

    def unread(self, config: Config) -> frozenset[str]:
        """Return the parameters that training with this configuration does not read.

        Examples
        --------
        >>> import optax
        >>> from flax import nnx
        >>> workload = FlaxWorkload(
        ...     model=lambda config, rngs: nnx.Linear(4, config["width"], rngs=rngs),
        ...     loss=lambda output, target: optax.l2_loss(output, target).mean(),
        ...     optimizer=lambda config: optax.adam(0.1), batch_size=8,
        ... )
        >>> sorted(workload.unread({"lr": 0.1, "width": 2, "batch_size": 32}))
        ['batch_size', 'lr']
        """
        if not (self.train_step is self.input_fn is None):
            return frozenset()  # they read it while a trial trains

        def build(config: Config) -> object:
            self._batch_size(config)
            return self._parts.outlined(config)

        with preserved_streams():
            return unread_by(build, config)

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on a data set."""
        super().validate_data(config, data)
        if self.input_fn is not None:
            return  # what it makes of the arrays is seen when there are some
        size = min(self._batch_size(config), *data.n_train)
        batch = [(name, (size, *shape), kind) for name, (kind, shape) in data.arrays.items()]
        with preserved_streams():
            self._programs_of(config, 0).check(batch[0], batch[-1])

    def init(self, config: Config, seed: int) -> State:
        """Begin a trial: build the model with the generators of the seed, and the optimizer."""
        with preserved_streams():
            programs = self._programs_of(config, seed)
            tensors = programs.tensors(programs.begin())
        return State.pack(tensors, {"kind": "flax", "seed": seed})

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
        meta = state.meta
        with preserved_streams():
            programs, leaves = self._read(state, config)
            batches = self._training_batches(shard, config, visit, meta.get("cursor"), should_stop)
            for inputs, targets in batches:
                self._check_inputs(inputs, visit)
                loss, leaves = programs.train(leaves, inputs, targets)
                batches.log(loss)
            if batches.diverged:
                self._check_classes(programs, leaves, shard, config)
            after = {"kind": "flax", "seed": meta["seed"], **batches.place()}
            return batches.trained(State.pack(programs.tensors(leaves), after))

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        """Score a state on one validation shard, its samples in order."""
        pool, means = self._parted()
        sizes: list[int] = []
        columns: dict[str, list[float]] = {name: [] for name in ("loss", *means)}
        with preserved_streams():
            programs, leaves = self._read(state, config)
            for size, (inputs, targets) in self._evaluation_batches(shard, config):
                loss, output, target = programs.scored(leaves, inputs, targets)
                sizes.append(size)
                columns["loss"].append(loss)
                for name, metric in means.items():
                    columns[name].append(number_of(name, metric(output, target)))
                if pool is not None:
                    pool.add(output, target)
        n_samples, found = weighted_means(sizes, columns)
        return Evaluated(n_samples, found, None if pool is None else pool.pack())

    def restore(self, state: State, config: Config) -> Any:
        """Make the trained module of a state, in evaluation mode."""
        with preserved_streams():
            programs, leaves = self._read(state, config)
            model = programs.objects(leaves)["model"]
        model.eval()
        return model

    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        """Make a state continue with another configuration, which must give arrays of equal shape.

        What the optimizer keeps of its configuration, as ``optax.inject_hyperparams`` does, is the
        new one's.
        """
        with preserved_streams():
            programs, leaves = self._read(state, config)
            after = self._programs_of(new_config, state.meta["seed"])
            before = programs.tensors(programs.new_optimizer(leaves))
            if after.expected == programs.expected:
                begun = after.tensors(after.new_optimizer(leaves))
            else:
                begun = after.tensors(after.begin())  # the error names the array
            return State.pack(new_beginning(state.tensors, before, begun), state.meta)

    @property
    def _parts(self) -> FlaxParts:
        made: FlaxParts = _library().FlaxParts(
            self.model, self.loss, self.optimizer, self.train_step
        )
        return made

    def _programs_of(self, config: Config, seed: int) -> FlaxPrograms:
        make = _library().FlaxPrograms
        return self._programs.get(config, seed, lambda: make(self._parts, config, seed))

    def _check_classes(
        self, programs: FlaxPrograms, leaves: list[Any], shard: Shard, config: Config
    ) -> None:
        """Raise a `WorkloadError` if a loss is NaN as JAX's is of a class without an output."""
        for _, (inputs, targets) in self._evaluation_batches(shard, config):
            is_classes = getattr(getattr(targets, "dtype", None), "kind", "") in "iu"
            if is_classes and (stray := programs.stray_class(leaves, inputs, targets)) is not None:
                raise WorkloadError(
                    f"the training loss is NaN, and the target has the class {stray}, which is not "
                    "among the model's outputs: give the model an output for each class; numbers "
                    "count from 0, as in  classes, y = np.unique(y, return_inverse=True)"
                )

    def _read(self, state: State, config: Config) -> tuple[FlaxPrograms, list[Any]]:
        with reading_state():
            seed: int = from_json(int, state.meta["seed"])
        programs = self._programs_of(config, seed)
        return programs, programs.read(state)


def _check_function(name: str, function: Any) -> None:
    """Raise a `WorkloadError` if a function is not called as this workload calls it."""
    arguments, write = _CALLS[name]
    is_taken = takes(as_called(function), arguments.count(",") + 1)
    instead = _instead(name, function, is_taken=is_taken) or (None if is_taken else write)
    check_call(name, function, arguments, instead)


def _instead(name: str, given: Any, *, is_taken: bool) -> str:
    """Return what to write in place of something that is not what is asked; empty if it may be."""
    kind = given if isinstance(given, type) else type(given)
    bases = {base.__module__ for base in kind.__mro__}
    if name == "model" and "flax.linen.module" in bases:
        return (
            f"lambda config, rngs: flax.nnx.bridge.lazy_init(flax.nnx.bridge.ToNNX("
            f"{kind.__name__}(...), rngs=rngs), jax.numpy.zeros((1, 8))), for samples of shape (8,)"
        )
    is_made = kind is not given and "flax.nnx.module" in bases
    if name == "model" and (is_made or (kind is given and not is_taken)):
        return f"lambda config, rngs: {kind.__name__}(..., rngs=rngs)"
    if str(getattr(given, "__module__", "")).startswith("optax"):
        theirs = getattr(given, "__name__", "adam")
        if name == "loss":
            return f"lambda output, target: optax.{theirs}(output, target).mean()"
        return f'lambda {_CALLS[name][0]}: optax.{theirs}(config["lr"])'
    return _CALLS[name][1] if name != "model" and kind is given else ""


def _library() -> Any:
    settle_jax()
    for module in ("jax", "flax", "optax"):
        imported(module, "jax", by="FlaxWorkload", error=WorkloadError)
    return import_module("dagsel.workloads.flax.programs")
