"""Every error that dagsel raises on purpose.

::

    DagselError
    ├── DatasetError              something is wrong with a data set
    │   ├── DatasetInputError     (ValueError) arrays that cannot become a data set
    │   ├── DatasetExistsError    (FileExistsError) the URL is taken
    │   ├── DatasetNotFoundError  (FileNotFoundError) nothing is there, or a write did not end
    │   ├── DatasetFormatError    (ValueError) not a data set, damaged, or from a newer version
    │   └── ShardCorruptError     a shard's bytes are not what was written
    ├── RunDirError               (OSError) a run's folder is taken or out of reach
    │   ├── RunDirLockedError     another driver holds it
    │   └── JournalCorruptError   the run's journal is damaged in the middle
    ├── LinkError                 (OSError) a symbolic link stands where dagsel writes
    ├── CheckpointError           something is wrong with a stored state
    │   ├── CheckpointNotFoundError  (FileNotFoundError)
    │   └── CheckpointCorruptError
    ├── SearchError               (ValueError) study, space, flow and metric do not fit together
    │   ├── StudyStorageError     the study's storage is gone, damaged, or on an unknown host
    │   └── TooLittleTimeError    not one epoch ends within deadline and budget
    ├── WorkloadError             (ValueError) the workload cannot do what is asked
    │   ├── WorkloadTransportError   a part of it cannot be sent to a worker
    │   └── AllTrialsFailedError  all trials failed in one way before any was scored
    ├── TrainingError             a unit's training went wrong
    │   ├── DivergedError         a loss or a metric became NaN: the trial is at fault
    │   ├── NothingTrainedError   a unit consumed no sample of its shard
    │   ├── OutOfMemoryError      (MemoryError) a unit needs more memory than its worker has
    │   └── GangBrokenError       a worker of a gang was lost or did not come: nobody is at fault
    ├── ClusterError              (RuntimeError) the cluster cannot do what is asked
    │   ├── NoWorkersError        (TimeoutError) no worker came in time
    │   ├── WorkerMemoryError     (MemoryError) a worker cannot hold its shards
    │   └── VersionMismatchError  client, scheduler and workers differ in what matters
    ├── SearchCancelledError      the search was told to end at once
    └── NoCompletedTrialError     the run has no completed trial

All arguments of an error are in its ``args``, so it survives pickling between processes.
"""


class DagselError(Exception):
    """The root of all errors that dagsel raises on purpose."""


class DatasetError(DagselError):
    """Something is wrong with a data set."""


class DatasetInputError(DatasetError, ValueError):
    """The arrays that were given cannot become a data set."""


class DatasetExistsError(DatasetError, FileExistsError):
    """The URL is taken."""


class DatasetNotFoundError(DatasetError, FileNotFoundError):
    """Nothing is at the URL, or the write of a data set there did not end."""


class DatasetFormatError(DatasetError, ValueError):
    """What is at the URL is not a data set of dagsel, is damaged, or is from a newer version."""


class ShardCorruptError(DatasetError):
    """A shard's bytes are not what was written.

    Parameters
    ----------
    shard
        Index of the shard.
    array
        Name of the array.
    url
        URL of the data set, without credentials.
    reason
        What was found.
    split
        ``"train"`` or ``"validation"``.
    """

    def __init__(self, shard: int, array: str, url: str, reason: str, split: str = "train") -> None:
        super().__init__(shard, array, url, reason, split)
        self.shard, self.array, self.url, self.reason, self.split = shard, array, url, reason, split

    def __str__(self) -> str:
        kind = "shard" if self.split == "train" else f"{self.split} shard"
        return (
            f"{kind} {self.shard} of {self.url}: {self.reason} in {self.array!r}; "
            "write the data set again or restore the shard from a copy"
        )


class RunDirError(DagselError, OSError):
    """A run's folder is taken, or out of reach."""


class RunDirLockedError(RunDirError):
    """Another driver holds the run's folder."""


class JournalCorruptError(RunDirError):
    """The run's journal is damaged, and not only at its end, where a crash cuts it off."""


class LinkError(DagselError, OSError):
    """A symbolic link stands where dagsel would write or delete."""


class CheckpointError(DagselError):
    """Something is wrong with a stored state."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No state is stored under the key."""


class CheckpointCorruptError(CheckpointError):
    """A stored state's bytes are not what was written."""


class SearchError(DagselError, ValueError):
    """Study, space, flow and metric do not fit together."""


class StudyStorageError(SearchError):
    """The study's storage is gone, damaged, without the study, or on an unknown host."""


class TooLittleTimeError(SearchError):
    """Not one epoch of one trial ends within deadline and budget, as the first units show."""


class WorkloadError(DagselError, ValueError):
    """The workload cannot do what is asked of it."""


class WorkloadTransportError(WorkloadError):
    """A part of the workload cannot be sent to a worker."""


class AllTrialsFailedError(WorkloadError):
    """All trials failed in one way before any was scored.

    Its cause is the first trial's error.
    """


class TrainingError(DagselError):
    """The training of a unit went wrong."""


class DivergedError(TrainingError):
    """A loss or a metric became NaN."""


class NothingTrainedError(TrainingError):
    """A training unit has consumed no sample of its shard."""


class OutOfMemoryError(TrainingError, MemoryError):
    """A unit needs more memory than its worker has."""


class GangBrokenError(TrainingError):
    """A worker of a gang was lost or did not come; the unit can be started again."""


class ClusterError(DagselError, RuntimeError):
    """The cluster cannot do what is asked of it."""


class NoWorkersError(ClusterError, TimeoutError):
    """No worker came in time."""


class WorkerMemoryError(ClusterError, MemoryError):
    """A worker cannot hold the shards that it would have to hold."""


class VersionMismatchError(ClusterError):
    """Client, scheduler and workers differ in what matters."""


class SearchCancelledError(DagselError):
    """The search was told to end at once; its run is kept."""


class NoCompletedTrialError(DagselError):
    """The run has no completed trial to return."""
