"""The shards that a worker holds: in its memory, on its disk, or in neither where that is full."""

from __future__ import annotations

import math
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dagsel.console import readable_size
from dagsel.errors import ClusterError, LinkError, ShardCorruptError
from dagsel.execution.mapped_pages import Pages
from dagsel.execution.raising import asking_store
from dagsel.storage import ShardedDataset
from dagsel.storage.datasets.manifest import MANIFEST, SPLITS, Split
from dagsel.storage.mapped_shard import MappedShard
from dagsel.storage.shard_cache import Hold, ShardCache
from dagsel.storage.shared_folder import NoRoomError
from dagsel.workloads.base import CastsData, Workload, outline

#: Past this share of a worker's memory limit it forgets the pages of mapped shards. Dask counts
#: them as the worker's, and pauses it at 80%.
PAGE_SHARE = 0.5
#: A part of a shard takes so much of the limit at most if its pages come at once.
AT_ONCE_SHARE = 0.25
#: What a process with PyTorch takes before it has any data, rounded up. In memory shards and this
#: may take the second share of the limit, or shards alone the first one.
PROCESS_BYTES, SMALL_SHARE, FULL_SHARE = 500_000_000, 0.1, 0.7
#: Held while room in memory is taken: the shards of several runs may come at once.
_CLAIMING = threading.Lock()
#: So long a worker's shards wait for room on a full disk, all together, before the store is read.
PATIENCE_S, _LOOK_S = 10.0, 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """A shard as a worker holds it: ready for training and for scoring."""

    train: Any
    validation: Any
    mapped: MappedShard | None = None  # where it is read from, if that is the disk


@dataclass(slots=True)
class Counters:
    """What a worker has read and run."""

    shard_bytes_read: int = 0
    units_started: int = 0


def memory_for_shards(limit: float, share: float) -> float:
    """Return the bytes of shards that a worker takes into its memory, by its limit.

    Examples
    --------
    >>> [memory_for_shards(gigabytes * 1e9, 0.5) / 1e9 for gigabytes in (0.5, 1, 2, 4)]
    [0.05, 0.2, 0.9, 2.0]
    """
    with_the_process = FULL_SHARE * limit - PROCESS_BYTES
    return min(share * limit, max(SMALL_SHARE * limit, with_the_process))


def shards_that_fit(
    limit: float | None, shard_bytes: int, *, share: float, beside: int = 0
) -> int | None:
    """Return how many shards a worker takes into its memory; None for any number.

    A limit of None or 0 is none. `shard_bytes` are those of the largest shard with its validation
    shard, `beside` those of shards that other runs hold there; what is left of the limit is for the
    process, states and training.

    Examples
    --------
    >>> shards_that_fit(4e9, 500_000_000, share=0.5), shards_that_fit(1e9, 90_000_000, share=0.5)
    (4, 2)
    >>> shards_that_fit(None, 500_000_000, share=0.5)
    """
    if not limit:
        return None
    return max(0, int(memory_for_shards(limit, share)) - beside) // max(shard_bytes, 1)


class HeldShards:
    """Holds shards for the units of a run on one worker; threads may use it at once.

    Parameters
    ----------
    data
        The data set.
    workload
        What prepares a shard.
    hold
        Where they are held; with ``"auto"`` on the disk what does not fit into memory.
    memory_limit
        That of the worker; None for none.
    share
        The part of it that shards may take, those of other runs as well.
    beside
        Returns the bytes of shards that other runs hold in the worker's memory.
    folder
        Where those on the disk are; None if there is none.
    tell
        Says something to the user.
    sleep
        Waits so many seconds.
    """

    def __init__(
        self,
        data: ShardedDataset,
        workload: Workload,
        *,
        hold: Hold = "memory",
        memory_limit: int | None = None,
        share: float = 0.5,
        beside: Callable[[], int] = lambda: 0,
        folder: str | None = None,
        tell: Callable[[str], object] = lambda text: None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.counters = Counters()
        self._data, self._workload, self._hold, self._tell = data, workload, hold, tell
        self._memory_limit, self._share = memory_limit or math.inf, share
        self._beside = beside
        self._pages = Pages(self._memory_limit * PAGE_SHARE)
        dtypes = (
            workload.cast_dtypes(outline(data.manifest)) if isinstance(workload, CastsData) else {}
        )
        self._cache: ShardCache | None = None
        if folder is not None and not data.is_view:  # a view's shards are no files of their own
            self._cache = ShardCache(folder, data, dtypes)
        self._is_open, self._said = False, set[str]()
        self._sleep, self._patience_s = sleep, PATIENCE_S
        self._held: dict[int, Held | None] = {}  # None: neither memory nor the disk has room
        self._in_memory: set[int] = set()  # or on the way there
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._held))

    def __contains__(self, shard: int) -> bool:
        return shard in self._held

    @property
    def bytes_in_memory(self) -> int:
        """Bytes of those that are in memory, or on the way there."""
        return sum(self._data.shard_sizes[shard].nbytes for shard in self._in_memory.copy())

    @property
    def on_disk(self) -> set[int]:
        """Those that are read from the disk."""
        return {shard for shard, held in self._held.copy().items() if held and held.mapped}

    def open(self) -> None:
        """Make ready for shards on the disk; again is fine. Raises what keeps it from that."""
        with self._lock:
            if not self._is_open and self._cache is not None:
                self._cache.open()
                self._is_open = True

    def load(self, shard: int) -> int:
        """Hold a shard and its validation shard; return their bytes."""
        n_bytes = self._data.shard_sizes[shard].nbytes
        if shard not in self._held:
            if self._claim(shard):
                try:
                    self._held[shard] = Held(*(self._read(shard, split) for split in SPLITS))
                except BaseException:
                    self._in_memory.discard(shard)
                    raise
            else:
                self._held[shard] = self._from_disk(shard, waits=True)
        return n_bytes

    @contextmanager
    def use(self, shard: int, split: Split) -> Iterator[Any]:
        """Give what the workload has prepared of a shard, for one unit."""
        held = self._held[shard]
        if held is None:
            held = self._held[shard] = self._from_disk(shard)  # there may be room now
        if held is None:
            yield self._read(shard, split)
        elif held.mapped is None:
            yield getattr(held, split)
        else:
            with held.mapped.read_ahead(split, self._memory_limit * AT_ONCE_SHARE):
                yield getattr(held, split)
            self._pages.relieve()

    def drop(self, shard: int) -> None:
        """Forget a shard. On the disk it stays until the run ends."""
        self._held.pop(shard, None)
        self._pages.drop(shard)
        self._in_memory.discard(shard)

    def clear(self) -> None:
        """Forget all shards, and leave the disk."""
        self._pages.close()
        self._held.clear()
        self._in_memory.clear()
        with self._lock:
            if self._cache is not None and self._is_open:
                self._cache.close()
            self._cache = None

    def _claim(self, shard: int) -> bool:
        """Take room in memory for a shard, if there is some."""
        with _CLAIMING:
            n_bytes = self.bytes_in_memory + self._data.shard_sizes[shard].nbytes + self._beside()
            match self._hold:
                case "memory":
                    has_room = True  # the dispatcher counts
                case "disk":
                    has_room = False
                case "auto":
                    has_room = n_bytes <= memory_for_shards(self._memory_limit, self._share)
            if has_room:
                self._in_memory.add(shard)
        return has_room

    def _read(self, shard: int, split: Split) -> Any:
        read = self._data.shard if split == "train" else self._data.validation_shard
        with self._reading():
            arrays = read(shard)
        self.counters.shard_bytes_read += sum(array.nbytes for array in arrays.values())
        return self._workload.prepare(arrays)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            with asking_store(self._data.url):
                yield
        except ShardCorruptError:
            if self._data.folder.read(MANIFEST) is not None:
                raise
            raise ClusterError(
                f"cannot reach the data set {self._data.url}: write it to a URL that the driver "
                "and all workers reach, such as a shared folder or s3://"
            ) from None

    def _from_disk(self, shard: int, *, waits: bool = False) -> Held | None:
        """Map a shard from the disk; None if that has no room for it.

        It waits for room if it is told to, `PATIENCE_S` for all shards together: another run that
        ends may leave some.
        """
        cache = self._cache
        if cache is None:
            self._say(
                "the training and validation samples of a shard together do not fit into a "
                "worker's memory: they are read from the store for each pass over them, which is "
                "slow; give workers more memory"
            )
            return None
        while True:
            try:
                self.open()
                with self._reading():
                    mapped = cache.load(shard)
                break
            except (LinkError, NoRoomError) as error:
                will_wait = waits and isinstance(error, NoRoomError) and self._patience_s > 0
                waiting = f", after {PATIENCE_S:g} s in which they wait for room" * will_wait
                self._say(
                    f"the disk of {platform.node()} does not take all shards that are to be there "
                    f"({error}): those that it does not are read from the store for each pass over "
                    f"them{waiting}, which is slow, until it does; free some space there, or give "
                    "another folder with cache_dir="
                )
                if not will_wait:
                    return None
            self._patience_s -= _LOOK_S  # of another thread, too: they wait side by side
            self._sleep(_LOOK_S)
            if self._cache is None:
                return None  # the run has ended meanwhile
        if self._hold == "auto":
            self._say(
                f"not all shards of a worker fit into its memory (its limit is "
                f"{readable_size(int(self._memory_limit))}): it reads the others from its "
                f"disk, in {cache.root}"
            )
        self.counters.shard_bytes_read += mapped.fetched_bytes
        prepare = self._workload.prepare
        held = Held(prepare(mapped.arrays["train"]), prepare(mapped.arrays["validation"]), mapped)
        self._pages.add(shard, mapped)
        return held

    def _say(self, text: str) -> None:
        """Say something of a kind once."""
        kind = text.partition("(")[0]
        with self._lock:
            is_new = kind not in self._said
            self._said.add(kind)
        if is_new:
            self._tell(text)
