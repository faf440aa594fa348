"""What every worker of a run is given, and the names under which its processes meet."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast, get_args

from dagsel.dispatch.units import Kind, Unit
from dagsel.messages import WORK, PieceRecord, UnitRecord
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.shard_cache import Hold

#: The resource of which a worker has one, and a unit takes half: one trains, while the state of the
#: one before is stored or the next one waits for its turn.
RESOURCE = "TRAIN"
PER_UNIT = 0.5
#: Name of the executor of a worker in which units train; tasks wait for it in the default one.
EXECUTOR = "dagsel"
#: Under this name a worker's stream handler gets the orders of all runs, and the scheduler's the
#: commands of their drivers.
CHANNEL = "dagsel"
#: Topic of Dask's nannies where one restarts its worker, as that has filled its memory.
FILLED = "worker-restart-memory"


def plugin_name(run: str) -> str:
    """Name of a run's plugins on scheduler and workers."""
    return f"dagsel-{run}"


def worker_topic(run: str) -> str:
    """Topic of `dagsel.messages.NOTICES`, each text the entry ``"notice"`` of a mapping."""
    return f"dagsel-{run}-workers"


def command_topic(run: str) -> str:
    """Topic of `dagsel.messages.COMMANDS`."""
    return f"dagsel-{run}-commands"


def report_topic(run: str) -> str:
    """Topic of `dagsel.messages.REPORTS`."""
    return f"dagsel-{run}-reports"


#: Any of these topics, and in it the name of the plugins of its run.
RUN_TOPIC = re.compile(r"(dagsel-.+)-(?:workers|commands|reports)")


#: A key names its unit, so that Dask's dashboard groups tasks by kind, and reads well.
Key: TypeAlias = tuple[str, int, int, int]


def unit_key(run: str, unit: Unit) -> Key:
    """Return the Dask key of a unit.

    Examples
    --------
    >>> unit_key("3f9a", Unit("train", trial=0, epoch=1, position=2))
    ('train-3f9a', 0, 1, 2)
    """
    return (f"{unit.kind}-{run}", unit.trial, unit.epoch, unit.position)


def key_unit(run: str, key: Any) -> Unit | None:
    """Return the unit of a Dask key; None if the key is none of this run's.

    Examples
    --------
    >>> key_unit("3f9a", ("evaluate-3f9a", 0, 1, 2))
    Unit(kind='evaluate', trial=0, epoch=1, position=2)
    >>> key_unit("3f9a", "sum-3f9a")
    """
    if type(key) is not tuple or len(key) != 4 or type(key[0]) is not str:
        return None
    kind, _, owner = key[0].partition("-")
    if owner != run or kind not in get_args(Kind):
        return None
    return Unit(cast(Kind, kind), *key[1:])


def write_records(metadata: dict[str, Any], *done: UnitRecord | PieceRecord) -> None:
    """Write the records of what a task has done, its own unit's first.

    A task's metadata travels in the message that the task is done: none is lost or early.
    """
    metadata["dagsel"] = WORK.to_text(*done)


def read_records(metadata: Mapping[str, Any]) -> list[UnitRecord | PieceRecord]:
    """Return the records that a task has written."""
    return WORK.from_text(metadata["dagsel"])


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What every worker of a run is given, once."""

    run: str  # identifier of the run; what follows a dot tells its sessions apart: ``3f9a.77aa``
    workload: bytes  # the workload, pickled by cloudpickle
    data: ShardedDataset  # the data set
    run_dir: RunDir  # where states are stored
    seed: int  # seed of the run
    # Versions that a worker must have, by package.
    versions: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)  # digests of the user's, by name
    # Threads that PyTorch trains with; None leaves them as they are. Sums of another number of
    # threads differ in their last bits.
    threads: int | None = None
    dtype: str | None = None  # PyTorch's default one; None leaves it as it is
    shard_share: float = 0.5  # share of a worker's memory limit that its shards may take
    copy_share: float = 0.1  # likewise, where each shard would have a holder without this worker
    # Share of a worker's memory limit past which states wait in the store alone; the next unit
    # counts.
    state_share: float = 0.65
    hold: Hold = "auto"  # where workers hold shards
    # Folder on each worker's machine for shards on its disk; None for one beside Dask's own.
    cache_dir: str | None = None
    # A gang breaks when one of its workers is not heard of for so long.
    gang_timeout_s: float = 60.0
    # Known to the run's workers alone: who does not know it cannot join a gang.
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
