"""What a worker keeps for a run, and how it runs a unit.

A worker holds the run's workload and its shards; states come and go as task results. The functions
`train_unit`, `evaluate_unit` and `load_shard` are the tasks; they find everything else here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import cloudpickle
import numpy as np
from distributed import Reschedule, Status, Worker, WorkerPlugin, get_worker
from distributed.comm.addressing import get_address_host
from tornado.ioloop import PeriodicCallback

from dagsel.errors import (
    CheckpointError,
    ClusterError,
    DivergedError,
    GangBrokenError,
    VersionMismatchError,
    WorkerMemoryError,
)
from dagsel.execution.farewell import PATIENCE_S, Farewell
from dagsel.execution.gpus import check_gpu_resource, gpus_seen
from dagsel.execution.process import (
    give_back_memory,
    keep_freed_memory,
    own_random_numbers,
    shards_that_fit,
    torch_threads,
    use_torch_threads,
)
from dagsel.planning.rounds import Unit
from dagsel.state import State
from dagsel.storage import RunDir, ShardedDataset
from dagsel.storage.room import wait_for_room
from dagsel.workloads.base import Trained, Visit, Workload, never
from dagsel.workloads.gang import GangWorkload, join_gang, lead_gang

logger = logging.getLogger("dagsel")

#: The one resource that a unit takes, so that a worker runs one unit at a time.
RESOURCE = "TRAIN"
#: Where a worker hears the dispatchers of all runs.
CHANNEL = "dagsel"


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
class Stored:
    """Stands for a state that waits in the store: the one after the unit, or a later one.

    A partial one is that of a unit which was stopped before its end.
    """

    trial: int
    epoch: int
    position: int
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Binding:
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


@dataclass(frozen=True, slots=True)
class Warm:
    """The state of a unit that was stopped, kept where it was."""

    state: State
    shard: int
    n_pieces: int


@dataclass(slots=True)
class Held:
    """A shard as a worker holds it: ready for training and for scoring."""

    train: Any
    validation: Any
    n_bytes: int


@dataclass(slots=True)
class Counters:
    """What a worker has read and run."""

    shard_bytes_read: int = 0
    units_started: int = 0


class TrainingPlugin(WorkerPlugin):
    """Holds a run's workload and shards on a worker, and runs its units.

    Parameters
    ----------
    spec
        What the run is.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.name = plugin_name(spec.run)
        self.shards: dict[int, Held] = {}
        self.counters = Counters()
        self.owns_resource = False
        self._stops: dict[Unit, threading.Event] = {}
        self._stop_early: set[tuple[Unit, int]] = set()  # told to stop before they began
        self._warm: dict[Unit, Warm] = {}
        self._gathering: dict[tuple[Unit, int], Callable[[], None]] = {}  # ends the wait for others
        self._farewell: Farewell | None = None

    async def setup(self, worker: Worker) -> None:
        """Make the worker ready for units, and say so or why it cannot be."""
        self._worker = worker
        self._training = threading.Lock()  # a worker trains one unit at a time, in a gang or not
        try:
            self._check_versions()
            self.workload: Workload = await asyncio.to_thread(cloudpickle.loads, self.spec.workload)
            check_gpu_resource(worker.state.total_resources, gpus_seen())
            max_shards = self._room(worker)
            await asyncio.to_thread(self._check_store)
            keep_freed_memory()
            own_random_numbers()
            speed = await asyncio.to_thread(measure_speed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            text = f"worker {worker.name} at {worker.address}: {type(error).__name__}: {error}"
            self._tell("refused", reason=text)
            return
        worker.stream_handlers.setdefault(CHANNEL, partial(_hear, worker))
        self._farewell = Farewell(worker, self._stop_all, self._is_idle, self._tell)
        await self._take_resource(worker)
        watch = PeriodicCallback(self._go_on, 500)
        worker.periodic_callbacks[self.name] = watch
        watch.start()
        # Dask looks at the training thread's stack 100 times a second: 5% of its time.
        _profiler(worker, "stop")
        about = {
            "owns_resource": self.owns_resource,
            "name": str(worker.name),
            "threads": self.spec.threads or torch_threads(),
        }
        self._tell("joined", max_shards=max_shards, speed=speed, **about)

    async def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was."""
        self._stop_all()
        if self._farewell is not None:
            await self._farewell.end()
        self.shards.clear()
        watch = worker.periodic_callbacks.pop(self.name, None)
        if watch is not None:
            watch.stop()
        self._warm.clear()
        if not _other_runs(worker):
            _profiler(worker, "start")
        if self.owns_resource and await _is_unused(worker) and not _other_runs(worker):
            worker.state.total_resources.pop(RESOURCE, None)
            worker.state.available_resources.pop(RESOURCE, None)

    def _stop_all(self) -> None:
        for stop in list(self._stops.values()):
            stop.set()

    def _is_idle(self) -> bool:
        return not self._stops

    async def _take_resource(self, worker: Worker) -> None:
        others = _other_runs(worker, self)
        missing = RESOURCE not in worker.state.total_resources
        self.owns_resource = missing or any(other.owns_resource for other in others)
        if missing:
            await worker.set_resources(**{RESOURCE: 1})

    def _room(self, worker: Worker) -> int | None:
        limit = worker.memory_manager.memory_limit
        largest = max(size.nbytes for size in self.spec.data.shard_sizes)
        max_shards = shards_that_fit(limit, largest, share=self.spec.shard_share)
        if max_shards == 0:
            raise WorkerMemoryError(
                f"its memory limit is {limit:,} bytes, of which shards may take "
                f"{self.spec.shard_share:.0%}; the largest shard takes {largest:,} bytes: give "
                "workers more memory or write the data set with more shards"
            )
        return max_shards

    def _check_versions(self) -> None:
        for package, version in self.spec.versions.items():
            found = importlib.metadata.version(package)
            if found != version:
                raise VersionMismatchError(
                    f"{package} is {found} there and {version} at the driver; install {version}"
                )

    def _check_store(self) -> None:
        if not self.spec.run_dir.belongs_to(self.spec.run.partition(".")[0]):
            raise ClusterError(
                f"cannot reach run_dir {self.spec.run_dir.url}: give run_dir= a URL that the "
                "driver and all workers reach, such as a shared folder or s3://"
            )

    def _tell(self, op: str, **message: Any) -> None:
        topic = worker_topic(self.spec.run)
        self._worker.log_event(topic, {"op": op, "worker": self._worker.address, **message})

    def hear(self, verb: str, message: dict[str, Any]) -> None:
        """Do what the dispatcher tells this worker."""
        match verb:
            case "preempt":
                self._on_preempt(**message)
            case "drop":
                self._on_drop(**message)
            case "cool":
                self._on_cool(**message)
            case "assist":
                self._on_assist(**message)
            case "abandon":
                self._on_abandon(**message)

    def _on_preempt(self, unit: list[Any], attempt: int) -> None:
        self._stop_early.add((Unit(*unit), attempt))
        stop = self._stops.get(Unit(*unit))
        if stop is not None:
            stop.set()

    def _on_drop(self, shard: int) -> None:
        self.shards.pop(shard, None)

    def _on_cool(self, unit: list[Any]) -> None:
        self._warm.pop(Unit(*unit), None)

    def _on_abandon(self, unit: list[Any], attempt: int) -> None:
        give_up = self._gathering.get((Unit(*unit), attempt))
        if give_up is not None:
            threading.Thread(target=give_up, name="dagsel-gang", daemon=True).start()

    def _on_assist(self, **call: Any) -> None:
        threading.Thread(target=self._assist, kwargs=call, name="dagsel-gang", daemon=True).start()

    def _assist(
        self, unit: list[Any], attempt: int, shard: int, rank: int, size: int, host: str, port: int
    ) -> None:
        """Train in a gang that another worker leads. What goes wrong, the leader is told."""
        use_torch_threads(self.spec.threads)
        about = self._gang(Unit(*unit), attempt)
        try:
            with (
                self._training,
                join_gang(host, port, rank=rank, size=size, **about) as gang,
            ):
                config = cloudpickle.loads(gang.receive())
                visit = self._visit(Unit(*unit), shard)
                self._gang_workload.train_gang(
                    None,
                    self.shards[shard].train,
                    config,
                    visit=visit,
                    should_stop=never,
                    gang=gang,
                )
        except Exception:  # the leader has it too, and says what became of the unit
            logger.debug("rank %d of the gang of %s", rank, unit, exc_info=True)

    def _gang(self, unit: Unit, attempt: int) -> dict[str, Any]:
        name = f"{unit.trial}-{unit.epoch}-{unit.position}-{attempt}"
        timeout_s, secret = self.spec.gang_timeout_s, self.spec.secret
        return {"name": name, "timeout_s": timeout_s, "secret": secret}

    @property
    def _gang_workload(self) -> GangWorkload:
        assert isinstance(self.workload, GangWorkload), "checked before the trial began"
        return self.workload

    def _visit(self, unit: Unit, shard: int) -> Visit:
        ends_epoch = unit.position == self.spec.data.n_shards - 1
        return Visit(self.spec.seed, unit.trial, unit.epoch, shard, ends_epoch)

    def load(self, shard: int) -> int:
        """Read a shard and its validation shard from the data set and hold them."""
        if shard not in self.shards:
            train, validation = self.spec.data.shard(shard), self.spec.data.validation_shard(shard)
            n_bytes = sum(array.nbytes for array in (*train.values(), *validation.values()))
            self.shards[shard] = Held(
                self.workload.prepare(train), self.workload.prepare(validation), n_bytes
            )
            self.counters.shard_bytes_read += n_bytes
        return self.shards[shard].n_bytes

    def train(
        self, unit: Unit, config: Mapping[str, Any], state: State | Stored | None
    ) -> State | Stored:
        """Run a training unit: a state in, the next one out."""
        binding = self._binding()
        stop = self._stops[unit] = threading.Event()
        if (unit, binding.attempt) in self._stop_early:
            stop.set()
        self._tell("started", unit=list(unit))
        self.counters.units_started += 1
        use_torch_threads(self.spec.threads)
        report: dict[str, Any] = {"start": time.time(), "recovered": False}
        try:
            found = self._recover(unit, binding) if binding.attempt > 1 else None
            if isinstance(found, Found):
                report |= found.meta | {"recovered": True, "stop": time.time()}
                self._report(report)
                return found.state
            before = found or self._input(unit, config, state)
            self._tell("trains", unit=list(unit))
            leash = Leash(stop, binding.max_seconds, binding.max_batches)
            trained = self._train(unit, before, config, binding, leash)
            losses = [trained.losses.n, trained.losses.low, trained.losses.high]
            meta = {
                "shard": binding.shard,
                "visits": [*binding.visits, binding.shard],
                "n_samples": trained.n_samples,
                "loss": trained.loss,
                "state_bytes": trained.state.nbytes,
            }
            if not trained.finished:
                self._suspend(unit, trained, binding, meta)
                so_far = {"n_samples": trained.n_samples, "loss": trained.loss, "losses": losses}
                n_all = self.spec.data.shard_sizes[binding.shard].n_train
                so_far |= {"share": trained.n_samples / n_all, "shard": binding.shard}
                told = {"start": report["start"], "stop": time.time()}
                self._tell("preempted", unit=list(unit), **so_far, **told)
                raise Reschedule
            if trained.diverged:
                raise DivergedError(
                    f"trial {unit.trial}: the training loss of epoch {unit.epoch} is NaN"
                )
            trained_at = time.time()
            kept = self._save(unit, trained.state, meta)
            stop_at = time.time()
            times = {"stop": stop_at, "save_seconds": stop_at - trained_at}
            self._report(report | kept | times | {"losses": losses})
            if kept["shard"] != binding.shard:  # another attempt, believed lost, was first
                return Stored(unit.trial, unit.epoch, unit.position)
            return self._keep(unit, trained.state)
        finally:
            self._stops.pop(unit, None)
            self._stop_early.discard((unit, binding.attempt))

    def _train(
        self, unit: Unit, state: State, config: Mapping[str, Any], binding: Binding, leash: Leash
    ) -> Trained:
        """Train on a shard, alone or as the leader of a gang."""
        shard, visit = self.shards[binding.shard].train, self._visit(unit, binding.shard)
        with self._training:
            if binding.gang == 1:
                return self.workload.train(state, shard, config, visit=visit, should_stop=leash)
            try:
                with lead_gang(
                    get_address_host(self._worker.address),
                    size=binding.gang,
                    gather=lambda port: self._tell(
                        "gathers", unit=list(unit), attempt=binding.attempt, port=port
                    ),
                    waits=partial(self._gathering.__setitem__, (unit, binding.attempt)),
                    **self._gang(unit, binding.attempt),
                ) as gang:
                    gang.send(cloudpickle.dumps(config))
                    return self._gang_workload.train_gang(
                        state, shard, config, visit=visit, should_stop=leash, gang=gang
                    )
            except GangBrokenError as error:
                self._tell("broke", unit=list(unit), reason=str(error))
                raise Reschedule from error
            finally:
                self._gathering.pop((unit, binding.attempt), None)

    def _suspend(
        self, unit: Unit, trained: Trained, binding: Binding, meta: dict[str, Any]
    ) -> None:
        """Store the state of a unit that was stopped, and keep it warm where memory allows."""
        store, buffer = self.spec.run_dir.states, trained.state.buffer
        place = (unit.trial, unit.epoch, unit.position)
        wait_for_room(lambda: store.save(*place, buffer, meta, partial=True), store.url)
        self._warm.pop(unit, None)
        if not self._is_short_of_memory():
            self._warm[unit] = Warm(trained.state, binding.shard, binding.n_pieces + 1)

    def evaluate(
        self, unit: Unit, config: Mapping[str, Any], state: State | Stored
    ) -> dict[str, float]:
        """Run an evaluating unit: the metrics of a state on one validation shard."""
        start = time.time()
        self._tell("started", unit=list(unit))
        use_torch_threads(self.spec.threads)
        loaded = self._load(state) if isinstance(state, Stored) else state
        scores = self.workload.evaluate(loaded, self.shards[unit.position].validation, config)
        report = {"start": start, "shard": unit.position, "n_samples": scores.n_samples}
        self._report(report | {"metrics": scores.metrics, "stop": time.time()})
        return scores.metrics

    def _binding(self) -> Binding:
        task = self._worker.state.tasks[self._worker.get_current_task()]
        assert task.annotations is not None
        return Binding(**task.annotations["dagsel"])

    def _report(self, report: dict[str, Any]) -> None:
        # Metadata of a task travels in the message that says the task is done: one message, and
        # none is lost or early.
        task = self._worker.state.tasks[self._worker.get_current_task()]
        task.metadata["dagsel"] = report

    def _input(self, unit: Unit, config: Mapping[str, Any], state: State | Stored | None) -> State:
        match state:
            case State():
                return state
            case Stored():
                return self._load(state)
            case None if unit.epoch == 1 and unit.position == 0:
                seeds = np.random.SeedSequence([self.spec.seed, unit.trial])
                return self.workload.init(config, int(seeds.generate_state(1)[0]))
            case None:
                epoch, position = before(unit, self.spec.data.n_shards)
                return self._load(Stored(unit.trial, epoch, position))

    def _load(self, stored: Stored) -> State:
        place = (stored.trial, stored.epoch, stored.position)
        blob, _ = self.spec.run_dir.states.load(*place, partial=stored.is_partial)
        return State(blob)

    def _recover(self, unit: Unit, binding: Binding) -> State | Found | None:
        """Find what an earlier attempt at a unit has left here or in the store."""
        shard, warm = binding.shard, self._warm.pop(unit, None)
        if warm is not None and (warm.shard, warm.n_pieces) == (shard, binding.n_pieces):
            return warm.state
        store, place = self.spec.run_dir.states, (unit.trial, unit.epoch, unit.position)
        with contextlib.suppress(CheckpointError):
            blob, meta = store.load(*place)
            return Found(self._keep(unit, State(blob)), meta)
        latest = store.latest(unit.trial)
        if latest is not None and latest > (unit.epoch, unit.position):
            return Found(Stored(unit.trial, *latest), {"shard": shard})
        with contextlib.suppress(CheckpointError):
            blob, meta = store.load(*place, partial=True)
            return State(blob) if meta["shard"] == shard else None
        return None

    def _save(self, unit: Unit, state: State, meta: dict[str, Any]) -> dict[str, Any]:
        """Store a state, and give what was stored with the one that is kept."""
        store, n_shards = self.spec.run_dir.states, self.spec.data.n_shards
        place = (unit.trial, unit.epoch, unit.position)
        kept = wait_for_room(lambda: store.save_first(*place, state.buffer, meta), store.url)
        old = before(unit, n_shards, by=2)
        if old[0] >= 1 and old[1] != n_shards - 1:  # the driver deletes the ends of epochs
            store.delete(unit.trial, *old)
        return kept

    def _keep(self, unit: Unit, state: State) -> State | Stored:
        """Keep a state in memory, or in the store alone when memory is short."""
        if self._is_short_of_memory():
            give_back_memory()
            if self._is_short_of_memory():
                return Stored(unit.trial, unit.epoch, unit.position)
        return state

    def _is_short_of_memory(self) -> bool:
        limit = self._worker.memory_manager.memory_limit
        used = self._worker.monitor.get_process_memory()
        return limit is not None and used > self.spec.state_share * limit

    async def _go_on(self) -> None:
        if self._worker.status is Status.paused:
            await asyncio.to_thread(give_back_memory)


@dataclass(frozen=True, slots=True)
class Found:
    """A unit's result that was in the store."""

    state: State | Stored
    meta: dict[str, Any]


class Leash:
    """Says at each batch boundary whether a unit has to stop there.

    Parameters
    ----------
    stop
        Set when the unit is told to stop.
    max_seconds, max_batches
        What it may take; None for no bound.
    """

    __slots__ = ("_batches_left", "_deadline", "_stop")

    def __init__(
        self, stop: threading.Event, max_seconds: float | None, max_batches: int | None
    ) -> None:
        self._stop = stop
        self._deadline = math.inf if max_seconds is None else time.monotonic() + max_seconds
        self._batches_left = math.inf if max_batches is None else max_batches

    def __call__(self) -> bool:
        """Say whether to stop; asked once a batch."""
        self._batches_left -= 1
        return self._stop.is_set() or self._batches_left <= 0 or time.monotonic() >= self._deadline


def before(unit: Unit, n_shards: int, *, by: int = 1) -> tuple[int, int]:
    """Epoch and position of the unit that comes some units before in its trial's chain.

    Examples
    --------
    >>> before(Unit("train", trial=0, epoch=2, position=0), n_shards=4)
    (1, 3)
    """
    epoch, position = divmod((unit.epoch - 1) * n_shards + unit.position - by, n_shards)
    return epoch + 1, position


def plugin_name(run: str) -> str:
    """Name of a run's plugins on scheduler and workers."""
    return f"dagsel-{run}"


def worker_topic(run: str) -> str:
    """Topic of what workers tell the scheduler."""
    return f"dagsel-{run}-workers"


def _hear(worker: Worker, run: str, verb: str, message: dict[str, Any]) -> None:
    # Dask closes a worker that is told what it has no handler for. This one therefore stays when
    # the run has ended: a message may be on its way until then.
    plugin = worker.plugins.get(plugin_name(run))
    if isinstance(plugin, TrainingPlugin):
        plugin.hear(verb, message)


def measure_speed(*, repeats: int = 20, size: int = 256) -> float:
    """Measure how fast this worker multiplies matrices, in GFLOP/s.

    The best of several short runs, so that a busy neighbour does not count.
    """
    matrix = np.ones((size, size), np.float32)
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        matrix @ matrix
        best = min(best, time.perf_counter() - start)
    return 2e-9 * size**3 / best


def _profiler(worker: Worker, action: Literal["start", "stop"]) -> None:
    callback = worker.periodic_callbacks.get("profile")
    if callback is not None and callback.is_running() == (action == "stop"):
        getattr(callback, action)()


def _other_runs(worker: Worker, this: TrainingPlugin | None = None) -> list[TrainingPlugin]:
    plugins = worker.plugins.values()
    return [p for p in plugins if isinstance(p, TrainingPlugin) and p is not this]


async def _is_unused(worker: Worker) -> bool:
    """Wait until no task has the resource; Dask closes a worker where one gives back what is gone.

    A worker that closes takes it along, and one whose unit does not stop may keep it.
    """
    has, free = worker.state.total_resources, worker.state.available_resources
    deadline = time.monotonic() + PATIENCE_S
    while free.get(RESOURCE) != has.get(RESOURCE):
        if time.monotonic() > deadline or worker.status not in (Status.running, Status.paused):
            return False
        await asyncio.sleep(0.01)
    return True


def _plugin(run: str) -> TrainingPlugin:
    plugin = get_worker().plugins[plugin_name(run)]
    assert isinstance(plugin, TrainingPlugin)
    return plugin


def train_unit(
    run: str, unit: tuple[Any, ...], config: Mapping[str, Any], state: State | Stored | None
) -> State | Stored:
    """Task of a training unit."""
    return _plugin(run).train(Unit(*unit), config, state)


def evaluate_unit(
    run: str, unit: tuple[Any, ...], config: Mapping[str, Any], state: State | Stored
) -> dict[str, float]:
    """Task of an evaluating unit."""
    return _plugin(run).evaluate(Unit(*unit), config, state)


def load_shard(run: str, shard: int) -> int:
    """Task that makes a worker hold a shard; gives its bytes."""
    return _plugin(run).load(shard)
