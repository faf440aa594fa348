"""What to train.

A workload begins a trial, trains it on one shard, and scores it on one shard. It knows nothing of
Dask, of Optuna, or of other trials. ``input_fn``, ``model_fn`` and ``train_fn`` of Cerebro
(Nakandala et al. 2020) are `TorchWorkload`'s ``input_fn``, ``model`` and ``train_fn``.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from dagsel.flow import Direction, Goal, Losses
from dagsel.state import State
from dagsel.workloads.abilities import (
    CastsData,
    ChecksData,
    Config,
    DataOutline,
    FollowsMetric,
    GivesModels,
    PoolsScores,
    Reconfigurable,
    StepsByBatch,
    outline,
)

if TYPE_CHECKING:
    from dagsel.storage.datasets.manifest import Manifest

__all__ = [
    "CastsData",
    "ChecksData",
    "Config",
    "DataOutline",
    "Evaluated",
    "FollowsMetric",
    "GivesModels",
    "HasNewDefaults",
    "PoolsScores",
    "Reconfigurable",
    "ShouldStop",
    "StepsByBatch",
    "Trained",
    "Visit",
    "Workload",
    "checks",
    "never",
    "outline",
]

#: What trains a model that is given bare, by the classes that models derive from.
TRAINED_BY = {
    "keras.src.models.model.Model": "KerasWorkload(model=build, batch_size=32), with a function "
    "build(config) that returns the compiled model",
    "flax.nnx.module.Module": "FlaxWorkload(model=lambda config, rngs: {}(...), loss=..., "
    "optimizer=..., batch_size=32)",
    "lightning.pytorch.core.module.LightningModule": "LightningWorkload(module=lambda config: "
    '{}(...), metrics=["val_loss"], batch_size=32)',
    "transformers.modeling_utils.PreTrainedModel": "HFWorkload(model=lambda config: "
    "{}.from_pretrained(...), optimizer=torch.optim.AdamW, batch_size=32)",
    "torch.nn.modules.module.Module": "TorchWorkload(model=lambda config: {}(...), loss=..., "
    "optimizer=torch.optim.Adam, batch_size=32)",
}


@dataclass(frozen=True, slots=True)
class Visit:
    """One pass of a trial over a shard. It determines the order of the batches.

    Parameters
    ----------
    seed
        Seed of the run.
    trial
        Number of the trial.
    epoch
        From 1.
    shard
        Index of the training shard.
    ends_epoch
        Whether this is the last shard of the trial's epoch.
    last_value
        The search's metric after the epoch before, on the first shard of an epoch of a workload
        that `FollowsMetric`; None if it is not known.

    Examples
    --------
    >>> visit = Visit(seed=0, trial=3, epoch=1, shard=2)
    >>> visit.order(5)
    array([4, 1, 2, 0, 3])
    """

    seed: int
    trial: int
    epoch: int
    shard: int
    ends_epoch: bool = False
    last_value: float | None = None

    def order(self, n_samples: int) -> NDArray[np.int64]:
        """Return the order in which the visit takes the samples: a permutation.

        Parameters
        ----------
        n_samples
            How many samples the shard has.

        Examples
        --------
        >>> Visit(seed=0, trial=3, epoch=1, shard=2).order(5)
        array([4, 1, 2, 0, 3])
        """
        key = [self.seed, self.trial, self.epoch, self.shard]
        return np.random.default_rng(key).permutation(n_samples)


@dataclass(frozen=True, slots=True)
class Trained:
    """What training on one shard has returned.

    Parameters
    ----------
    state
        The next state. If the unit was stopped, it contains its place inside the shard.
    n_samples
        Samples trained on in this visit so far, over all pieces of a unit cut into pieces.
    loss
        Mean training loss over these samples; None if the workload has none; 0 for no samples. A
        trial whose loss is NaN though its metric is finite gets a warning.
    finished
        False if the unit was stopped at a batch boundary before the end of its shard.
    diverged
        Whether a training loss was NaN. A workload without a loss has not diverged.
    losses
        Range of the mean losses of the batches that this piece of the unit has trained on.

    Examples
    --------
    >>> trained = Trained(State.pack({}, {"step": 4}), n_samples=64, loss=0.25)
    >>> trained.finished, trained.state.meta
    (True, {'step': 4})
    """

    state: State
    n_samples: int
    loss: float | None
    finished: bool = True
    diverged: bool = False
    losses: Losses = field(default_factory=Losses)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """What scoring on one validation shard has returned.

    Parameters
    ----------
    n_samples
        Samples in the shard.
    metrics
        The mean of each metric over these samples; 0 for no samples.
    kept
        What is kept of the shard for metrics of the whole set (`PoolsScores`); None without any.

    Examples
    --------
    >>> Evaluated(n_samples=16, metrics={"accuracy": 0.75}).metrics
    {'accuracy': 0.75}
    """

    n_samples: int
    metrics: dict[str, float]
    kept: State | None = None


def never() -> bool:
    """Return False: nothing asks the training to stop. The default of ``should_stop``.

    Examples
    --------
    >>> never()
    False
    """
    return False


class ShouldStop:
    """Says at each batch boundary whether a unit has to stop there.

    Parameters
    ----------
    stop
        Set when the unit is told to stop.
    max_seconds
        How long it may take; None for no bound.
    """

    __slots__ = ("_deadline", "_stop")

    def __init__(self, stop: threading.Event, max_seconds: float | None) -> None:
        self._stop = stop
        self._deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds

    def __call__(self) -> bool:
        """Say whether to stop; asked once a batch."""
        return self._stop.is_set() or time.monotonic() >= self._deadline


@runtime_checkable
class Workload(Protocol):
    """What `dagsel.optimize` trains.

    `TorchWorkload` and `SklearnWorkload` are two; any object with these members is another. All
    methods are pure: a state that goes in is never changed. One that is large is let go once it is
    copied (`State.let_go`), which frees its memory if nobody else needs it.

    Examples
    --------
    >>> import numpy as np
    >>> from dagsel.state import State, Tensor
    >>> class Mean:
    ...     # Finds the mean of the samples.
    ...     metrics = {"error": "minimize"}
    ...
    ...     def validate(self, config):
    ...         assert config["lr"] > 0
    ...
    ...     def prepare(self, arrays):
    ...         return arrays["x"]
    ...
    ...     def init(self, config, seed):
    ...         return State.pack({"mean": Tensor.from_numpy(np.zeros(1))}, {})
    ...
    ...     def train(self, state, shard, config, *, visit, should_stop=never):
    ...         mean = state.tensors["mean"].numpy().copy()
    ...         for sample in shard[visit.order(len(shard))]:
    ...             mean += config["lr"] * (sample - mean)
    ...         packed = State.pack({"mean": Tensor.from_numpy(mean)}, {})
    ...         return Trained(packed, len(shard), loss=None)
    ...
    ...     def evaluate(self, state, shard, config):
    ...         error = abs(self.restore(state, config) - shard.mean())
    ...         return Evaluated(len(shard), {"error": float(error)})
    ...
    ...     def restore(self, state, config):
    ...         return float(state.tensors["mean"].numpy()[0])
    >>> workload, config = Mean(), {"lr": 0.5}
    >>> workload.validate(config)
    >>> shard, state = workload.prepare({"x": np.full(8, 3.0)}), workload.init(config, seed=0)
    >>> visit = Visit(seed=0, trial=0, epoch=1, shard=0)
    >>> trained = workload.train(state, shard, config, visit=visit)
    >>> round(workload.evaluate(trained.state, shard, config).metrics["error"], 3)
    0.012
    >>> isinstance(workload, Workload)
    True
    """

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Names of the metrics that `evaluate` returns, each with its better direction if known."""
        ...

    def validate(self, config: Config) -> None:
        """Raise a `WorkloadError` if nothing can be trained with this configuration.

        Parameters
        ----------
        config
            The configuration.
        """
        ...

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        """Make what a worker keeps of a shard for all trials.

        The arrays of a shard on the worker's disk cannot be written to, and are read as they are
        used. What copies them here takes as much memory as if the shard was not on the disk.

        Parameters
        ----------
        arrays
            The shard's arrays by name, each of shape ``(n_samples, ...)``, or a
            `dagsel.storage.RaggedArray`.
        """
        ...

    def init(self, config: Config, seed: int) -> State:
        """Begin a trial; the same arguments give the same state.

        Parameters
        ----------
        config
            The configuration.
        seed
            Seed of the trial's first weights.
        """
        ...

    def train(
        self,
        state: State,
        shard: Any,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        """Train on one shard, or on the rest of it if `state` was stopped inside it.

        Parameters
        ----------
        state
            The trial's state. Not changed.
        shard
            What `prepare` made of the shard.
        config
            The trial's configuration.
        visit
            Which pass this is.
        should_stop
            Called at every batch boundary; once it returns true, the unit stops there.
        """
        ...

    def evaluate(self, state: State, shard: Any, config: Config) -> Evaluated:
        """Score a state on one validation shard.

        Parameters
        ----------
        state
            The trial's state. Not changed.
        shard
            What `prepare` made of the shard.
        config
            The trial's configuration.
        """
        ...

    def restore(self, state: State, config: Config) -> Any:
        """Make the trained model of a state: a module on the CPU, an estimator.

        Parameters
        ----------
        state
            A trial's state.
        config
            The trial's configuration.
        """
        ...


def checks(
    workload: Workload, manifest: Manifest, goal: Goal | None = None
) -> Callable[[Config], None]:
    """Return a function that raises an error if nothing can be trained with a configuration.

    `goal` is the metric that training may follow, if it is to be checked too.
    """
    data = outline(manifest)

    def check(config: Config) -> None:
        workload.validate(config)
        if isinstance(workload, ChecksData):
            workload.validate_data(config, data)
        if goal is not None and isinstance(workload, FollowsMetric):
            workload.follows_metric(config, goal)

    return check


@runtime_checkable
class HasNewDefaults(Protocol):
    """A workload of which an option's default is another one than in an earlier version."""

    def as_of(self, description: Mapping[str, str]) -> Workload:
        """Return this workload with the defaults of a run that described its own like this."""
        ...
