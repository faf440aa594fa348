"""What a workload may offer beside the members of `Workload`: each a protocol of a few methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from dagsel.flow import Goal
from dagsel.state import State

if TYPE_CHECKING:
    from dagsel.storage.datasets.manifest import Manifest

Config: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DataOutline:
    """What is known of a data set before any of it is read.

    Parameters
    ----------
    n_train
        Samples in each training shard.
    arrays
        Dtype and shape of a sample, by array.
    ragged
        Arrays whose samples differ in shape; theirs is empty here.

    Examples
    --------
    >>> data = DataOutline((800, 800), {"x": (np.dtype("float32"), (64,))})
    >>> sum(data.n_train), data.arrays["x"]
    (1600, (dtype('float32'), (64,)))
    """

    n_train: tuple[int, ...]
    arrays: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    ragged: frozenset[str] = frozenset()


@runtime_checkable
class ChecksData(Protocol):
    """A workload that knows beforehand of data on which it cannot train.

    Examples
    --------
    >>> from dagsel.errors import WorkloadError
    >>> class Classifier:
    ...     def validate_data(self, config, data):
    ...         if "y" not in data.arrays:
    ...             raise WorkloadError("the data set has no array y")
    >>> isinstance(Classifier(), ChecksData)
    True
    """

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on this data set.

        Parameters
        ----------
        config
            The configuration.
        data
            What is known of the data set.
        """
        ...


@runtime_checkable
class CastsData(Protocol):
    """A workload whose `prepare` casts arrays.

    What is held on a disk is cast before it is written there.

    Examples
    --------
    >>> class InHalf:
    ...     def cast_dtypes(self, data):
    ...         return {"x": np.dtype("float16")}
    >>> isinstance(InHalf(), CastsData)
    True
    """

    def cast_dtypes(self, data: DataOutline) -> Mapping[str, np.dtype[Any]]:
        """Return the dtypes of the arrays that are cast, by name.

        Parameters
        ----------
        data
            What is known of the data set.
        """
        ...


def outline(manifest: Manifest) -> DataOutline:
    """Return what is known of a data set."""
    arrays = {spec.name: (spec.numpy_dtype, spec.shape) for spec in manifest.arrays}
    ragged = frozenset(spec.name for spec in manifest.arrays if spec.is_ragged)
    return DataOutline(manifest.sizes("train"), arrays, ragged)


@runtime_checkable
class FollowsMetric(Protocol):
    """A workload whose training may follow the metric of the search, as ReduceLROnPlateau does.

    Its next epoch begins when the metric of the epoch before is known: `Visit.last_value` has it.

    Examples
    --------
    >>> class Plateau:
    ...     def follows_metric(self, config, goal):
    ...         return config["schedule"] == "plateau"
    >>> isinstance(Plateau(), FollowsMetric)
    True
    """

    def follows_metric(self, config: Config, goal: Goal) -> bool:
        """Return whether training with this configuration follows a metric.

        Parameters
        ----------
        config
            The configuration.
        goal
            The metric, and its better direction.

        Raises
        ------
        WorkloadError
            If it cannot follow this metric.
        """
        ...


@runtime_checkable
class PoolsScores(Protocol):
    """A workload with metrics of the whole validation set, which are no means over shards.

    Examples
    --------
    >>> class Median:
    ...     pooled_metrics = ("median_error",)
    ...
    ...     def pool(self, kept):
    ...         errors = [state.tensors["errors"].numpy() for state in kept]
    ...         return {"median_error": float(np.median(np.concatenate(errors)))}
    >>> isinstance(Median(), PoolsScores)
    True
    """

    @property
    def pooled_metrics(self) -> Sequence[str]:
        """Their names. `Workload.metrics` has them too; `Evaluated.metrics` does not."""
        ...

    def pool(self, kept: Sequence[State]) -> dict[str, float]:
        """Return these metrics of the whole set; called in the process that drives the search.

        Parameters
        ----------
        kept
            `Evaluated.kept` of each validation shard, in their order.
        """
        ...


@runtime_checkable
class GivesModels(Protocol):
    """A workload whose models can be joined, and written as files that need no dagsel.

    Examples
    --------
    >>> class Saves:
    ...     def ensemble(self, models):
    ...         return lambda x: sum(model(x) for model in models) / len(models)
    ...
    ...     def export(self, model, config, about):
    ...         return {"about.txt": about.encode()}
    >>> isinstance(Saves(), GivesModels)
    True
    """

    def ensemble(self, models: Sequence[Any]) -> Any:
        """Make one model of several.

        Parameters
        ----------
        models
            What `Workload.restore` has made.
        """
        ...

    def export(self, model: Any, config: Config, about: str) -> dict[str, bytes]:
        """Return the files of a model: their content by name.

        Parameters
        ----------
        model
            What `Workload.restore` has made.
        config
            Its configuration.
        about
            A sentence on it, for its ``README`` or the like.
        """
        ...


@runtime_checkable
class Reconfigurable(Protocol):
    """A workload whose states contain something of the configuration, as optimizers do.

    A flow may continue a trial with another configuration (`dagsel.flow.Clone`). A workload that
    reads all of it anew in each unit needs nothing for that; any other has this method. It may be
    called without a GPU.

    Examples
    --------
    >>> class Momentum:
    ...     def reconfigure(self, state, config, new_config):
    ...         return State.pack(state.tensors, {**state.meta, "lr": new_config["lr"]})
    >>> isinstance(Momentum(), Reconfigurable)
    True
    """

    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        """Make the state to continue from; with an equal configuration it equals `state`.

        Parameters
        ----------
        state
            A state at the end of an epoch. Not changed.
        config, new_config
            The configuration under which it was trained, and the one for what follows.

        Raises
        ------
        WorkloadError
            If the state cannot continue with it; names the part of the configuration.
        """
        ...


@runtime_checkable
class StepsByBatch(Protocol):
    """A workload whose learning rate may change after each batch.

    A refit trains on more samples than the search did, and so in more batches an epoch: a schedule
    of a fixed length would end before the trial does.

    Examples
    --------
    >>> class Decays:
    ...     steps_by_batch = True
    ...
    ...     def refitting(self, before, now):
    ...         self.batches_a_step = sum(now) / sum(before)
    ...         return self
    >>> workload = Decays()
    >>> isinstance(workload, StepsByBatch), workload.refitting([80], [100]).batches_a_step
    (True, 1.25)
    """

    @property
    def steps_by_batch(self) -> bool:
        """Whether there is a learning-rate schedule that steps after each batch."""
        ...

    def refitting(self, before: Sequence[int], now: Sequence[int]) -> Any:
        """Return this workload for a refit: its schedule steps as often an epoch as in the search.

        Parameters
        ----------
        before, now
            Samples of each shard that the search trained on, and that the refit does.
        """
        ...
