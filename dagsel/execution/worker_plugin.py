"""A run's plugin on a worker, and the tasks that it is for.

The plugin makes the worker ready, hears the dispatcher and leaves the worker as it was; in between
it owns what runs the units. `train_unit`, `evaluate_unit` and `load_shard` are the tasks.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import cloudpickle
import numpy as np
from dask.sizeof import sizeof
from distributed import Status, Worker, WorkerPlugin, get_worker
from distributed.utils import sync
from distributed.worker_state_machine import TaskState, UpdateDataEvent
from tornado.ioloop import PeriodicCallback

from dagsel import messages
from dagsel.codec import from_json
from dagsel.dispatch.events import DropShard
from dagsel.dispatch.units import Unit
from dagsel.errors import ClusterError, WorkerMemoryError
from dagsel.execution.allocator import (
    begin_training,
    give_back_memory,
    prepare_allocator,
    where_units_train,
)
from dagsel.execution.compatibility import check_here
from dagsel.execution.held_shards import HeldShards, memory_for_shards, shards_that_fit
from dagsel.execution.process import (
    QUIET,
    check_gpu_resource,
    gpus_seen,
    keep_quiet,
    own_random_numbers,
    seconds_since_start,
    this_process,
    torch_threads,
    why_on_cpu,
)
from dagsel.execution.raising import Raising, give_back_gpu_memory, gpu_memory, own_bytes
from dagsel.execution.run_spec import (
    CHANNEL,
    PER_UNIT,
    RESOURCE,
    Key,
    RunSpec,
    StoredResult,
    plugin_name,
    unit_key,
    worker_topic,
    write_records,
)
from dagsel.execution.sigterm import PATIENCE_S, SigtermHandler
from dagsel.execution.unit_runner import UnitRunner
from dagsel.execution.user_modules import why_stale
from dagsel.state import State
from dagsel.storage.shared_folder import NoRoomError

#: Where Dask's workers log tasks that raise.
WORKER_LOG = logging.getLogger("distributed.worker")
#: Dask pauses a worker whose process is too large; one that stays so for that long is told of.
TELL_PAUSED_AFTER_S = 5.0
#: So long after a worker was lost calls to it are ended: those that were just beginning, too.
LOST_AFTER_S = 0.2
#: Workers that have the resource from a run, and not from whoever started them.
_OURS: WeakSet[Worker] = WeakSet()


class TrainingPlugin(WorkerPlugin):
    """Makes a worker one of a run's workers, for as long as the run lasts.

    It is pickled at the driver; what belongs to the worker comes with `setup`.

    Parameters
    ----------
    spec
        What the run is.

    Attributes
    ----------
    units
        Runs the run's units here; None until the worker is ready.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.name = plugin_name(spec.run)
        self.owns_resource = False
        self.units: UnitRunner | None = None
        self._sigterm: SigtermHandler | None = None
        self._paused_since: float | None = None
        self._has_told_pause = False

    async def setup(self, worker: Worker) -> None:
        """Make the worker ready for units, and say so or why it cannot be."""
        self._worker = worker
        keep_quiet()
        try:
            check_here(self.spec.versions)
            workload = await self._load_workload()
            if text := await asyncio.to_thread(why_stale, self.spec.modules):
                self._tell(messages.Note(text))
            self.spec = replace(self.spec, workload=b"")  # a base in it may be most of the memory
            check_gpu_resource(worker.state.total_resources, gpus_seen())
            if text := why_on_cpu(worker.state.total_resources):
                self._tell(messages.Note(f"worker {worker.name} at {worker.address} {text}"))
            _check_resource(worker.state.total_resources)
            max_shards = self._room(worker)
            await asyncio.to_thread(self._check_store)
            shards = self._shards(worker, workload)
            if self.spec.hold == "disk":
                await asyncio.to_thread(self._open, shards)
            give_back_memory()  # what an earlier run has left is not taken
            prepare_allocator(worker)
            own_random_numbers()
            speed = await asyncio.to_thread(measure_speed)
        except Exception as error:  # noqa: BLE001 - whatever it is, the driver must hear of it
            text = f"worker {worker.name} at {worker.address}: {type(error).__name__}: {error}"
            self._tell(messages.WorkerRefused(worker.address, text))
            return
        units = self.units = UnitRunner(
            self.spec,
            workload,
            address=worker.address,
            tell=self._tell,
            tell_surely=self._tell_surely,
            is_short_of_memory=self._is_short_of_memory,
            in_turn=partial(where_units_train, worker),
            shards=shards,
            raising=self._raising(worker, workload),
        )
        worker.stream_handlers.setdefault(CHANNEL, partial(_hear, worker))
        self._sigterm = SigtermHandler(worker, units.stop_all, units.is_idle, self._tell)
        await self._take_resource(worker)
        WORKER_LOG.addFilter(self._is_news)
        watch = PeriodicCallback(self._go_on, 500)
        worker.periodic_callbacks[self.name] = watch
        watch.start()
        # Dask looks at the training thread's stack 100 times a second: 5% of its time.
        _profiler(worker, "stop")
        threads = self.spec.threads or torch_threads()
        about = (threads, max_shards, speed, self.owns_resource, this_process(os.getpid()))
        told = (worker.address, str(worker.name), *about, self._copy_room(worker))
        rooms, age_s = self._rooms(worker), seconds_since_start()
        self._tell(messages.WorkerJoined(*told, rooms=rooms, age_s=age_s))

    async def teardown(self, worker: Worker) -> None:
        """Leave the worker as it was."""
        if not _other_runs(worker, self):
            keep_quiet(logging.CRITICAL + 1)
        if self.units is not None:
            self.units.stop_all()
        if self._sigterm is not None:
            await self._sigterm.end()
        if self.units is not None:
            await asyncio.to_thread(self.units.clear)
        watch = worker.periodic_callbacks.pop(self.name, None)
        if watch is not None:
            watch.stop()
        if not _other_runs(worker):
            _profiler(worker, "start")
            await asyncio.to_thread(give_back_gpu_memory)
            await asyncio.to_thread(give_back_memory)
        if self.owns_resource and await _is_unused(worker):
            worker.state.total_resources.pop(RESOURCE, None)
            worker.state.available_resources.pop(RESOURCE, None)
            _OURS.discard(worker)
        WORKER_LOG.removeFilter(self._is_news)

    async def _take_resource(self, worker: Worker) -> None:
        there = worker.state.total_resources.get(RESOURCE)
        if there is None:
            _OURS.add(worker)
        self.owns_resource = worker in _OURS
        # If it is there of a run that is still leaving, the scheduler has forgotten it already.
        if there is None or not _other_runs(worker, self):
            await worker.set_resources(**{RESOURCE: 1 if there is None else there})

    def _room(self, worker: Worker) -> int | None:
        if self.spec.hold != "memory":
            return None  # what does not fit into memory is on the disk
        max_shards = self._fits(worker, self.spec.shard_share)
        if max_shards == 0:
            limit, beside = worker.memory_manager.memory_limit or 0, self._held_by_others()
            takes = memory_for_shards(limit, self.spec.shard_share)
            taken = f", and those of other searches take {beside:,}" if beside else ""
            raise WorkerMemoryError(
                f"its memory limit is {limit:,} bytes, of which shards may take {takes:,.0f}"
                f"{taken}; the largest one takes {self._largest:,} bytes: give workers more "
                "memory, write the data set with more shards, or leave hold= out"
            )
        return max_shards

    def _rooms(self, worker: Worker) -> tuple[int | None, int | None]:
        """Return the bytes for units and for shards in memory, and those that shards may take."""
        gpu = gpu_memory()
        if gpu is not None:  # which shards are there, training sees to itself
            return gpu, 0
        limit, share = worker.memory_manager.memory_limit, self.spec.shard_share
        if not limit:
            return None, None
        shards = share * limit if self.spec.hold == "disk" else memory_for_shards(limit, share)
        taken = own_bytes() or worker.monitor.get_process_memory()
        return max(0, limit - taken), max(0, int(shards) - self._held_by_others())

    def _copy_room(self, worker: Worker) -> int | None:
        return 0 if self.spec.hold == "disk" else self._fits(worker, self.spec.copy_share)

    def _fits(self, worker: Worker, share: float) -> int | None:
        limit, beside = worker.memory_manager.memory_limit, self._held_by_others()
        return shards_that_fit(limit, self._largest, share=share, beside=beside)

    def _held_by_others(self) -> int:
        """Return the bytes of shards that other runs hold in the worker's memory."""
        others = [other.units for other in _other_runs(self._worker, self)]
        return sum(units.shards.bytes_in_memory for units in others if units is not None)

    @property
    def _largest(self) -> int:
        return max(size.nbytes for size in self.spec.data.shard_sizes)

    def _open(self, shards: HeldShards) -> None:
        try:
            shards.open()
        except NoRoomError as error:
            raise ClusterError(
                f"it cannot hold shards on its disk: {error}; give another folder with cache_dir="
            ) from error

    def _shards(self, worker: Worker, workload: Any) -> HeldShards:
        # Not in the worker's own folder, which goes with it.
        beside_it = str(Path(worker.local_directory).parent)
        return HeldShards(
            self.spec.data,
            workload,
            hold=self.spec.hold,
            memory_limit=worker.memory_manager.memory_limit,
            share=self.spec.shard_share,
            beside=self._held_by_others,
            folder=self.spec.cache_dir or beside_it,
            tell=lambda text: self._tell(messages.Note(text)),
        )

    def _raising(self, worker: Worker, workload: Any) -> Raising:
        limit = worker.memory_manager.memory_limit
        who = {"worker": str(worker.name), "address": worker.address}
        close = partial(worker.close_gracefully, restart=True, reason="CUDA is of no use")
        restart = partial(worker.loop.add_callback, close)
        return Raising(workload, self._tell, memory_limit=limit, restart=restart, **who)

    async def _load_workload(self) -> Any:
        try:
            return await asyncio.to_thread(cloudpickle.loads, self.spec.workload)
        except ValueError as error:
            # A module that is imported with it sets a signal's handler, as dask_jobqueue does.
            if "main thread" not in str(error):
                raise
            return cloudpickle.loads(self.spec.workload)
        except ModuleNotFoundError as error:
            raise ClusterError(
                f"the workload does not load there: {error}; install it on the workers, or send a "
                "file of yours with client.upload_file"
            ) from error

    def _check_store(self) -> None:
        if not self.spec.run_dir.belongs_to(self.spec.run.partition(".")[0]):
            raise ClusterError(
                f"cannot reach run_dir {self.spec.run_dir.url}: give run_dir= a URL that the "
                "driver and all workers reach, such as a shared folder or s3://"
            )

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Say whether what Dask logs tells anything new.

        Trials have the tracebacks of this run's tasks that raise. Where one of our own workers has
        gone from which a state was to come, the store has the state.
        """
        if os.environ.get(QUIET) and str(record.msg).startswith("Worker stream died"):
            return False
        key = record.args[0] if isinstance(record.args, tuple) and record.args else None
        is_ours = isinstance(key, tuple) and str(key[0]).partition("-")[2] == self.spec.run
        return not (is_ours and str(record.msg).startswith("Compute Failed"))

    def _tell(self, notice: messages.Notice) -> None:
        # Dask writes the worker's address into what it is given.
        told = {"notice": messages.NOTICES.to_text(notice)}
        self._worker.log_event(worker_topic(self.spec.run), told)

    def _tell_surely(self, notice: messages.Notice) -> None:
        """Tell the scheduler something and wait until it knows; for a task's thread."""
        log_event, topic = self._worker.scheduler.log_event, worker_topic(self.spec.run)
        with suppress(OSError):  # the scheduler is lost, and the run with it
            told = {"notice": messages.NOTICES.to_text(notice)}
            sync(self._worker.loop, log_event, topic=topic, msg=told)

    def pass_on(self, key: Key, state: State | StoredResult, told: messages.UnitsDone) -> None:
        """Have the cluster take a state as the result of another task; for a task's thread."""

        def put() -> None:
            event = UpdateDataEvent(data={key: state}, stimulus_id=f"dagsel-pass-on-{time.time()}")
            self._worker.handle_stimulus(event)
            self._tell(told)

        self._worker.loop.add_callback(put)

    def follow(self, order: messages.Order) -> None:
        """Do what the dispatcher tells this worker."""
        if self.units is None:
            return
        match order:
            case messages.StopUnit():
                self.units.stop(order)
            case DropShard(_, shard):
                self.units.drop(shard)
            case messages.ForgetState(unit):
                self.units.forget(unit)
            case messages.JoinGang():
                self.units.gangs.join(order, partial(begin_training, self._worker))
            case messages.AbandonGang(unit, attempt, reason):
                self.units.gangs.abandon(unit, attempt, reason)
            case messages.WorkerLost(address):
                # Dask ends calls to a lost worker when it hears of the loss. One that begins in
                # that moment tries on for 30 s, and so long a unit waits for its state.
                rpc, loop = self._worker.rpc, self._worker.loop
                loop.call_later(LOST_AFTER_S, rpc.remove, address)

    def _is_short_of_memory(self, n_bytes: int) -> bool:
        """Whether states had better wait in the store alone if a unit is to take so many bytes."""
        limit = self._worker.memory_manager.memory_limit
        used = self._worker.monitor.get_process_memory()
        return limit is not None and used + n_bytes > self.spec.state_share * limit

    async def _go_on(self) -> None:
        """Have a worker that Dask has paused go on; say so if that does not help."""
        if self._worker.status is not Status.paused:
            self._paused_since = None
            return
        await asyncio.to_thread(give_back_memory)
        now = time.monotonic()
        if self._paused_since is None:
            self._paused_since = now
        if now - self._paused_since > TELL_PAUSED_AFTER_S and not self._has_told_pause:
            self._has_told_pause = True
            self._tell(messages.Note(self._why_paused()))

    def _why_paused(self) -> str:
        worker, memory = self._worker, self._worker.memory_manager
        return (
            f"worker {worker.name} at {worker.address} takes no units: its process has "
            f"{worker.monitor.get_process_memory():,} of {memory.memory_limit:,} bytes, and Dask "
            f"pauses a worker from {memory.memory_pause_fraction:.0%} on; give workers more memory"
        )


def _hear(worker: Worker, run: str, order: str) -> None:
    # Dask closes a worker that is told what it has no handler for. This one therefore stays when
    # the run has ended: a message may be on its way until then.
    plugin = worker.plugins.get(plugin_name(run))
    if isinstance(plugin, TrainingPlugin):
        plugin.follow(*messages.ORDERS.from_text(order))


def measure_speed(*, repeats: int = 20, size: int = 64, n: int = 32) -> float:
    """Measure how fast a thread of this worker multiplies matrices, in GFLOP/s.

    The best of several short runs, so that a busy neighbour does not count. The matrices are small,
    so that BLAS takes no second thread for one: two that wait for each other while others compute
    took a hundred times as long in each run.
    """
    matrices = np.ones((n, size, size), np.float32)
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        matrices @ matrices
        best = min(best, time.perf_counter() - start)
    return 2e-9 * n * size**3 / best


def _profiler(worker: Worker, action: Literal["start", "stop"]) -> None:
    callback = worker.periodic_callbacks.get("profile")
    if callback is not None and callback.is_running() == (action == "stop"):
        getattr(callback, action)()


def _other_runs(worker: Worker, this: TrainingPlugin | None = None) -> list[TrainingPlugin]:
    plugins = [*worker.plugins.values()]  # of which threads ask, too
    return [p for p in plugins if isinstance(p, TrainingPlugin) and p is not this]


def _check_resource(resources: Mapping[str, float]) -> None:
    if (there := resources.get(RESOURCE, 1.0)) < PER_UNIT:
        raise ClusterError(
            f"it was started with the resource {RESOURCE}={there:g}, so that no unit could run "
            f"there: leave {RESOURCE} out or give 1, or keep the worker out of the cluster"
        )


async def _is_unused(worker: Worker) -> bool:
    """Wait until no task has the resource; Dask closes a worker where one gives back what is gone.

    A worker that closes takes it along, and one whose unit does not stop may keep it. So may the
    units of another run, which gives it back itself.
    """
    has, free = worker.state.total_resources, worker.state.available_resources
    deadline = time.monotonic() + PATIENCE_S
    while not _other_runs(worker) and free.get(RESOURCE) != has.get(RESOURCE):
        if time.monotonic() > deadline or worker.status not in (Status.running, Status.paused):
            return False
        await asyncio.sleep(0.01)
    return not _other_runs(worker)


def _joined(run: str) -> tuple[TrainingPlugin, UnitRunner]:
    plugin = get_worker().plugins[plugin_name(run)]
    assert isinstance(plugin, TrainingPlugin)
    assert plugin.units is not None, "only workers that have joined are given tasks"
    return plugin, plugin.units


def _units(run: str) -> UnitRunner:
    return _joined(run)[1]


def _this_task() -> TaskState:
    worker = get_worker()
    return worker.state.tasks[worker.get_current_task()]


def train_unit(
    run: str,
    unit: tuple[Any, ...],
    config: Mapping[str, Any],
    state: State | StoredResult | None,
    value: float | None,
    halvings: int,
) -> State | StoredResult:
    """Task of a training unit, and of those that follow it on the same worker."""
    task = _this_task()
    plugin, units = _joined(run)  # it may leave the run meanwhile
    which, binding = Unit(*unit), _assignment(task)
    with units.raising.telling(which, config, halvings):
        trained, work = units.train(which, binding, config, state, value, halvings)
    done = [each.unit for each in work if isinstance(each, messages.UnitRecord)]
    last = [each for each in done if each.kind == "train"][-1]
    if last == which:
        write_records(task.metadata, *work)
        return trained
    about = (last, get_worker().address, binding.attempt, sizeof(trained), tuple(work))
    plugin.pass_on(unit_key(run, last), trained, messages.UnitsDone(*about))
    return StoredResult(*which[1:])  # nobody waits for it


def evaluate_unit(
    run: str,
    unit: tuple[Any, ...],
    config: Mapping[str, Any],
    state: State | StoredResult,
    halvings: int,
) -> dict[str, float]:
    """Task of an evaluating unit."""
    task = _this_task()
    units, which = _units(run), Unit(*unit)
    with units.raising.telling(which, config, halvings):
        done = units.evaluate(which, _assignment(task), config, state, halvings)
    write_records(task.metadata, done)
    return dict(done.metrics or {})


def _assignment(task: TaskState) -> messages.Assignment:
    assert task.annotations is not None
    binding: messages.Assignment = from_json(messages.Assignment, task.annotations["dagsel"])
    return binding


def load_shard(run: str, shard: int) -> int:
    """Task that makes a worker hold a shard; returns its bytes."""
    return _units(run).load(shard)
