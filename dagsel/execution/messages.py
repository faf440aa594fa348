"""What travels between driver, scheduler and workers, and the names that they meet under.

`RunSpec` goes to every worker once, `Assignment` to a worker with each unit, and `StoredResult`
from worker to worker in place of a state.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from dagsel.storage import RunDir, ShardedDataset

#: The one resource that a unit takes, so that a worker runs one unit at a time.
RESOURCE = "TRAIN"
#: Where a worker hears the dispatchers of all runs.
CHANNEL = "dagsel"


def plugin_name(run: str) -> str:
    """Name of a run's plugins on scheduler and workers."""
    return f"dagsel-{run}"


def worker_topic(run: str) -> str:
    """Topic of what workers tell the scheduler."""
    return f"dagsel-{run}-workers"


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What every worker of a run is given, once.

    Parameters
    ----------
    run
        Identifier of the run; what follows a dot tells its sessions apart: ``3f9a.77aa``.
    workload
        The workload, pickled by cloudpickle.
    data
        The data set.
    run_dir
        Where states are stored.
    seed
        Seed of the run.
    threads
        Threads that PyTorch trains with; None leaves them as they are. Sums of another number of
        threads differ in their last bits.
    versions
        Versions that a worker must have, by package.
    shard_share
        Share of a worker's memory limit that its shards may take.
    state_share
        Share of a worker's memory limit past which states wait in the store alone.
    gang_timeout_s
        A gang breaks when one of its workers is not heard of for so long.
    secret
        Known to the run's workers alone: who does not know it cannot join a gang.
    """

    run: str
    workload: bytes
    data: ShardedDataset
    run_dir: RunDir
    seed: int
    versions: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    shard_share: float = 0.5
    state_share: float = 0.65
    gang_timeout_s: float = 60.0
    secret: str = field(default_factory=secrets.token_hex, repr=False)


@dataclass(frozen=True, slots=True)
class StoredResult:
    """Stands for a state that waits in the store: the one after the unit, or a later one.

    A partial one is that of a unit which was stopped before its end.
    """

    trial: int
    epoch: int
    position: int
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the dispatcher has decided for a unit; travels in the task's annotations.

    Parameters
    ----------
    shard
        The shard to visit.
    attempt
        From 1; a unit that was begun before looks for its stored result first.
    max_seconds, max_batches
        What the unit may take before it stops at a batch boundary and waits for its turn again;
        None for no bound.
    visits
        Of a training unit: the shards that its trial has visited before in this epoch, in order.
    n_pieces
        How often the unit was stopped before its end.
    gang
        Workers that train it together, of which this one leads.
    """

    shard: int
    attempt: int = 1
    max_seconds: float | None = None
    max_batches: int | None = None
    visits: tuple[int, ...] = ()
    n_pieces: int = 0
    gang: int = 1
