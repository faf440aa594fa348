"""`KerasWorkload`: compiled models of Keras 3, on its PyTorch or JAX backend."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dagsel.checks import shown, takes
from dagsel.codec import Json, from_json
from dagsel.errors import WorkloadError
from dagsel.flow import Direction
from dagsel.metrics import over_set
from dagsel.state import State, Tensor, flatten, reading_state, unflatten
from dagsel.workloads.argument_names import KERAS, named_arguments
from dagsel.workloads.arrays import (
    InputFn,
    Kept,
    Shard,
    TakesArrays,
    check_shapes,
    new_beginning,
    to_array,
    to_tensor,
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
from dagsel.workloads.keras.backend import (
    Backend,
    arrived,
    backend_here,
    settings_here,
    settings_of,
)
from dagsel.workloads.named_metrics import directions, metric_functions
from dagsel.workloads.pooled import PoolsMetrics
from dagsel.workloads.random_streams import (
    preserved_streams,
    read_streams,
    seed_streams,
    write_streams,
)
from dagsel.workloads.unread import unread_by

#: What names of Keras's metrics end with.
_UP = frozenset({
    "acc", "accuracy", "auc", "cosine_similarity", "f1", "f1_score", "fbeta_score", "io_u", "iou",
    "precision", "r2_score", "recall", "true_negatives", "true_positives",
    "concordance_correlation", "pearson_correlation",
})  # fmt: skip
_DOWN = frozenset({
    "bce", "crossentropy", "error", "false_negatives", "false_positives", "hinge", "huber",
    "kl_divergence", "logcosh", "log_cosh", "loss", "mae", "mape", "mse", "msle", "poisson", "rmse",
})  # fmt: skip
_DIRECTIONS: tuple[Direction, ...] = ("maximize", "minimize")
#: How many configurations' compiled programs a worker keeps.
_MOST_KEPT = 32
KerasMetrics: TypeAlias = Mapping[str, Any] | Sequence[Any]


class KerasWorkload(TakesArrays, PoolsMetrics):
    """Train compiled models of Keras 3, on its PyTorch or JAX backend.

    Loss, optimizer and metrics are those of ``model.compile``. All variables of the model and of
    the optimizer travel with a trial, bit for bit: weights, statistics, seed generators, moments,
    the learning rate and the count of steps that a schedule follows. A batch is trained by the
    model's own ``train_step``; neither ``fit`` nor callbacks are used. Workers import Keras with
    the backend that it has where the workload is made, and build models under the dtype policy,
    the ``floatx`` and the image data format that it has there.

    Parameters
    ----------
    model
        ``model(config)`` builds and compiles a ``keras.Model`` that has its weights: a
        ``Sequential`` begins with ``keras.Input``.
    batch_size
        Samples in a batch, or a function of the configuration that returns it.
    metrics
        Names of metrics that the model is compiled with, and that are means over samples:
        ``["accuracy"]``. Or a mapping that gives each name its better direction, if it is not
        known. A metric that is no mean, as ``keras.metrics.AUC(name="auc")``, is given as the
        object, or as a function of output and target, NumPy arrays, by name; it may be a
        `dagsel.metrics.over_set`. The validation ``"loss"`` is always in.
    input_fn
        ``input_fn(batch, config)`` makes inputs and targets of a batch, given as NumPy arrays by
        name; an array whose samples differ in shape is a list of arrays. By default the first array
        is the input and the last one the target. What it draws from Python's and NumPy's streams
        depends on the run's seed, the trial, the epoch, the shard and the batch.
    drop_last
        Leave out the last batch of a shard if it is smaller.
    eval_batch_size
        Samples in a batch of an evaluation.

    Examples
    --------
    >>> import os
    >>> os.environ["KERAS_BACKEND"] = "torch"
    >>> import keras
    >>> import numpy as np
    >>> from dagsel.workloads import Visit
    >>> def build(config):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    ...     model.compile(
    ...         optimizer=keras.optimizers.Adam(config["lr"]),
    ...         loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ...         metrics=["accuracy"],
    ...     )
    ...     return model
    >>> workload = KerasWorkload(build, batch_size=16, metrics=["accuracy"])
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

    @named_arguments(KERAS)
    def __init__(
        self,
        model: Callable[[Any], Any],
        *,
        batch_size: int | Callable[[Any], int],
        metrics: KerasMetrics | None = None,
        input_fn: InputFn | None = None,
        drop_last: bool = False,
        eval_batch_size: int = 256,
    ) -> None:
        if isinstance(model, type) or hasattr(model, "compile") or not takes(model, 1):
            raise WorkloadError(
                f"model must be a function, called as model(config), got {shown(model)}; write "
                "model=build, with a function build(config) that returns a compiled model"
            )
        self._set_batches(batch_size, input_fn, drop_last, eval_batch_size)
        self.model = model
        self.backend, self.settings = backend_here(), settings_here()
        self._compiled, self._metrics = _parted(metrics)
        self._programs: Kept[Any] = Kept(_MOST_KEPT)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the backend first: functions may import Keras when they are unpickled."""
        return arrived, (Backend(self.backend), type(self), dict(vars(self)))

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics, each with its better direction if known."""
        return {"loss": "minimize", **self._compiled, **directions(self._metrics)}

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration."""
        self._batch_size(config)
        with self._streams():
            self._shapes(config, 0)

    def unread(self, config: Config) -> frozenset[str]:
        """Return the parameters that training with this configuration does not read."""
        if self.input_fn is not None:
            return frozenset()  # it reads them while a trial trains

        def build(config: Config) -> object:
            self._batch_size(config)
            return self._build(config, 0)

        with self._streams():
            return unread_by(build, config)

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on a data set."""
        super().validate_data(config, data)
        if self.input_fn is not None:
            return  # what it makes of the arrays is seen when there are some
        size = min(self._batch_size(config), *data.n_train)
        batch = [np.zeros((size, *shape), dtype) for dtype, shape in data.arrays.values()]
        with self._streams():
            self._begin(self._fresh(config, 0), batch[0], batch[-1])

    def init(self, config: Config, seed: int) -> State:
        """Begin a trial as a script does: seed all streams, build the model and the optimizer."""
        with self._streams():
            values = _models().read(self._build(config, seed))
            return self._pack(values, {"seed": seed}, self._read_streams())

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
        with self._streams():
            trial = self._trial(state, config)
            batches = self._training_batches(shard, config, visit, meta.get("cursor"), should_stop)
            streams = self._set_streams(state)
            for inputs, targets in map(_models().narrowed, batches):
                self._check_inputs(inputs, visit)
                if trial.go_through(inputs, targets):
                    _models().check_metrics(trial.model, self._compiled)
                    self._write_streams(streams)
                batches.log(trial.train(inputs, targets))
            trial.check()
            after = {"seed": meta["seed"], **batches.place()}
            return batches.trained(self._pack(trial.values(), after, self._read_streams()))

    def evaluate(self, state: State, shard: Shard, config: Config) -> Evaluated:
        """Score a state on one validation shard, its samples in order."""
        pool, means = self._parted()
        sizes: list[int] = []
        columns: dict[str, list[float]] = {name: [] for name in means}
        with self._streams():
            trial = self._trial(state, config)
            for size, pair in self._evaluation_batches(shard, config):
                inputs, targets = _models().narrowed(pair)
                self._begin(trial, inputs, targets)
                sizes.append(size)
                trial.test(inputs, targets)
                if self._metrics:
                    output = trial.predict(inputs)
                    for name, metric in means.items():
                        columns[name].append(number_of(name, metric(output, targets)))
                    if pool is not None:
                        pool.add(output, targets)
            result = trial.result() if sizes else {}
        n_samples, own = weighted_means(sizes, columns)
        found = {name: result.get(name, 0.0) for name in ("loss", *self._compiled)} | own
        return Evaluated(n_samples, found, None if pool is None else pool.pack())

    def restore(self, state: State, config: Config) -> Any:
        """Make the trained model of a state, compiled as `model` compiles it."""
        with self._streams():
            made = self._build(config, self._seed(state))
            _models().write(made, self._values(state, _models().shapes_of(made)))
            return made

    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        """Make a state continue with another configuration, which must give arrays of equal shape.

        What the optimizer keeps of its configuration, as its learning rate, is the new one's.
        """
        with self._streams():
            seed = self._seed(state)
            before, after = (
                {name: to_tensor(x, name) for name, x in _models().read(made).items()}
                for made in (self._build(config, seed), self._build(new_config, seed))
            )
            return State.pack(new_beginning(state.tensors, before, after), state.meta)

    # ---- models

    @property
    def _on_torch(self) -> bool:
        return self.backend == "torch"

    def _build(self, config: Config, seed: int) -> Any:
        seed_streams(seed, torch=self._on_torch)
        return _models().make(self.model, config)

    def _fresh(self, config: Config, seed: int) -> Any:
        """Return a trial that begins."""
        if self._on_torch:
            made = self._build(config, seed)
            return _engine("torch").TorchTrial(made, _models().read(made))
        programs = self._jax_programs(config, seed)
        return programs.trial(_models().read(programs.model))

    def _trial(self, state: State, config: Config) -> Any:
        """Return the trial of a state."""
        seed = self._seed(state)
        if self._on_torch:
            made = self._build(config, seed)
            values = self._values(state, _models().shapes_of(made))
            return _engine("torch").TorchTrial(made, values)
        programs = self._jax_programs(config, seed)
        return programs.trial(self._values(state, programs.shapes))

    def _jax_programs(self, config: Config, seed: int) -> Any:
        make = _engine("jax").JaxPrograms
        return self._programs.get(config, seed, lambda: make(self.model, config, seed))

    def _shapes(self, config: Config, seed: int) -> Any:
        if self._on_torch:
            return _models().shapes_of(self._build(config, seed))
        return self._jax_programs(config, seed).shapes

    def _begin(self, trial: Any, inputs: Any, targets: Any) -> None:
        if trial.go_through(inputs, targets):
            _models().check_metrics(trial.model, self._compiled)

    # ---- states

    @staticmethod
    def _seed(state: State) -> int:
        with reading_state():
            seed: int = from_json(int, state.meta["seed"])
        return seed

    @staticmethod
    def _values(state: State, shapes: Any) -> dict[str, NDArray[Any]]:
        with reading_state():
            tensors = {n: t for n, t in state.tensors.items() if not n.startswith("random.")}
            check_shapes(tensors, shapes)
            return {name: to_array(tensors[name]) for name in shapes}

    def _pack(
        self, values: Mapping[str, NDArray[Any]], meta: dict[str, Json], streams: Any
    ) -> State:
        tensors = {name: to_tensor(array, name) for name, array in values.items()}
        tree, more = flatten(streams, _as_tensor, prefix="random")
        about = {"kind": "keras", "backend": self.backend, "random": tree}
        return State.pack(tensors | more, {**about, **meta})

    # ---- the random streams of the process, which models on PyTorch may draw from

    @contextmanager
    def _streams(self) -> Iterator[None]:
        with preserved_streams(torch=self._on_torch), settings_of(self.settings):
            yield

    def _read_streams(self) -> Any:
        if not self._on_torch:
            return None
        streams = read_streams("cuda" if _cuda_is_used() else "cpu")
        return {name: _host(stream) for name, stream in streams.items()}

    def _set_streams(self, state: State) -> Any:
        """Set the streams to those of a trial, and return them."""
        with reading_state():
            tensors, tree = state.tensors, state.meta["random"]
            streams = unflatten(tree, lambda name: tensors[name].numpy().copy())
            self._write_streams(streams)
        return streams

    def _write_streams(self, streams: Any) -> None:
        if streams is not None:
            import torch

            made = dict(streams)
            for name in ("torch", "cuda"):
                if name in made:
                    made[name] = torch.from_numpy(made[name])
            write_streams(made)


def _models() -> Any:
    return import_module("dagsel.workloads.keras.models")


def _engine(backend: str) -> Any:
    return import_module(f"dagsel.workloads.keras.on_{backend}")


def _cuda_is_used() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _host(stream: Any) -> Any:
    return stream.numpy() if hasattr(stream, "detach") else stream


def _as_tensor(leaf: Any) -> Tensor | None:
    return Tensor.from_numpy(leaf) if isinstance(leaf, np.ndarray) else None


# ---- metrics


class _Computes:
    """Computes a metric of Keras over all outputs and targets."""

    def __init__(self, kind: type, config: dict[str, Any]) -> None:
        self.kind, self.config = kind, config

    def __call__(self, output: Any, target: Any) -> float:
        """Return the metric."""
        metric: Any = self.kind.from_config(self.config)  # type: ignore[attr-defined]
        try:
            metric.update_state(target, output)
        except Exception as error:
            raise WorkloadError(
                f"the metric {self.kind.__name__} does not take outputs of shape "
                f"{np.shape(output)} and targets of shape {np.shape(target)}: "
                f"{' '.join(str(error).split())[:300]}; write a function of both, as in metrics="
                "{'name': dagsel.metrics.over_set(lambda output, target: ...)}"
            ) from error
        result = np.asarray(_models().to_numpy(metric.result()))
        if result.size != 1:
            raise WorkloadError(
                f"{self.kind.__name__} returns {result.size} numbers: let it return one, as with "
                f"average='macro', or write a function of output and target for each"
            )
        return float(result.reshape(()))


def _parted(given: Any) -> tuple[dict[str, Direction], dict[str, Callable[[Any, Any], Any]]]:
    """Return the metrics that models are compiled with, and those of the workload's own."""
    if given is None:
        return {}, {}
    if isinstance(given, str) or callable(given) or _is_metric(given):
        given = [given]
    if not isinstance(given, Mapping | list | tuple | set | frozenset):
        raise WorkloadError(
            "metrics must be names of metrics that the model is compiled with, got "
            f'{shown(given)}; write metrics=["accuracy"]'
        )
    compiled: dict[str, Direction] = {}
    own: dict[str, Any] = {}
    named = isinstance(given, Mapping)
    for name, metric in given.items() if isinstance(given, Mapping) else ((it, it) for it in given):
        if _is_metric(metric):
            known = name if named else metric.name
            computes = _Computes(type(metric), metric.get_config())
            direction = getattr(metric, "direction", None) or _direction_of(metric, known)
            own[known] = over_set(direction=direction)(computes)
        elif isinstance(metric, str):
            compiled[name] = metric if named and metric in _DIRECTIONS else _direction(name)
        else:
            own |= metric_functions({name: metric} if named else [metric])
    for name in {"loss"} & {*compiled, *own}:
        compiled.pop(name, None)
    return compiled, own


def _direction(name: str) -> Direction:
    if (found := _known_direction(name)) is not None:
        return found
    raise WorkloadError(
        f"whether a larger {name!r} is better is not known: write "
        f'metrics={{{name!r}: "maximize"}} or metrics={{{name!r}: "minimize"}}'
    )


def _direction_of(metric: Any, name: str) -> Direction:
    """Return the better direction of an object, by its name or by that of its class."""
    kind = type(metric).__name__
    of_class = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    found = _known_direction(name) or _known_direction(of_class)
    if found is not None:
        return found
    raise WorkloadError(
        f"whether a larger {name!r} is better is not known: give the {kind} the attribute "
        'direction, as in  metric.direction = "maximize", and write  metrics=[metric]'
    )


def _known_direction(name: str) -> Direction | None:
    for ends, direction in ((_UP, "maximize"), (_DOWN, "minimize")):
        if any(name.lower() == end or name.lower().endswith(f"_{end}") for end in ends):
            return direction  # type: ignore[return-value]
    return None


def _is_metric(metric: Any) -> bool:
    return not isinstance(metric, type) and all(
        hasattr(metric, name) for name in ("update_state", "result", "get_config")
    )
