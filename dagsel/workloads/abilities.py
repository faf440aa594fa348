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
    """

    n_train: tuple[int, ...]
    arrays: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
    ragged: frozenset[str] = frozenset()


@runtime_checkable
class ChecksData(Protocol):
    """A workload that knows beforehand of data on which it cannot train."""

    def validate_data(self, config: Config, data: DataOutline) -> None:
        """Raise a `WorkloadError` if nothing can be trained on this data set."""
        ...


@runtime_checkable
class CastsData(Protocol):
    """A workload whose `prepare` casts arrays: what is held on a disk is cast before it is kept."""

    def cast_dtypes(self, data: DataOutline) -> Mapping[str, np.dtype[Any]]:
        """Return the dtypes of the arrays that are cast, by name."""
        ...


def outline(manifest: Manifest) -> DataOutline:
    """Return what is known of a data set."""
    arrays = {spec.name: (spec.numpy_dtype, spec.shape) for spec in manifest.arrays}
    ragged = frozenset(spec.name for spec in manifest.arrays if spec.is_ragged)
    return DataOutline(manifest.sizes("train"), arrays, ragged)


@runtime_checkable
class FollowsMetric(Protocol):
    """A workload whose training may follow the metric of the search, as ReduceLROnPlateau does.

    An epoch of it begins once that of the epoch before is known: `Visit.last_value` has it.
    """

    def follows_metric(self, config: Config, goal: Goal) -> bool:
        """Return whether training with this configuration follows a metric.

        Raises a `WorkloadError` if it cannot follow this one.
        """
        ...


@runtime_checkable
class PoolsScores(Protocol):
    """A workload with metrics that are functions of all predictions, and no means of shards."""

    @property
    def pooled_metrics(self) -> Sequence[str]:
        """Their names; they are among `Workload.metrics`, and `Evaluated.metrics` lacks them."""
        ...

    def pool(self, kept: Sequence[State]) -> dict[str, float]:
        """Return these metrics of the whole set.

        `kept` has `Evaluated.kept` of each validation shard, in their order. Called in the driver.
        """
        ...


@runtime_checkable
class GivesModels(Protocol):
    """A workload whose models can be joined, and written as files that need no dagsel."""

    def ensemble(self, models: Sequence[Any]) -> Any:
        """Make one model of several."""
        ...

    def export(self, model: Any, config: Config, about: str) -> dict[str, bytes]:
        """Return the files of a model by name; `about` is a sentence on it."""
        ...


@runtime_checkable
class Reconfigurable(Protocol):
    """A workload whose states contain something of the configuration, as optimizers do.

    A flow may continue a trial with another configuration (`dagsel.flow.Clone`). A workload that
    reads all of it anew in each unit needs nothing for that; any other has this method. It may be
    called without a GPU.
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
