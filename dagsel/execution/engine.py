"""The driver's side of a run on a cluster: sends rounds, hears what became of them."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any

from distributed import Client, Future

from dagsel.dispatch.description import DescribeWorkers, WorkerNow, WorkersDescribed
from dagsel.dispatch.dispatcher import DispatchConfig
from dagsel.dispatch.events import (
    CheckAdded,
    Drained,
    LoadShard,
    RoundAdded,
    ShardLoaded,
    TrialAllowed,
    TrialHeld,
    TrialStopped,
    WorkerRemoved,
)
from dagsel.dispatch.units import Chain, Round, Unit
from dagsel.errors import (
    ClusterError,
    NoWorkersError,
    VersionMismatchError,
    WorkerMemoryError,
)
from dagsel.execution.answers import why_silent, within
from dagsel.execution.cluster import workers_of
from dagsel.execution.cluster_driver import ClusterDriver
from dagsel.execution.compatibility import check_versions
from dagsel.execution.connection import Connection
from dagsel.execution.graph import chains_graph, check_graph
from dagsel.execution.outbox import CHECK, Outbox
from dagsel.execution.run_spec import RunSpec, command_topic, plugin_name, report_topic
from dagsel.execution.scheduler_plugin import DispatchPlugin
from dagsel.execution.slices import Slices, begun_first
from dagsel.execution.standstill import Standstill
from dagsel.execution.worker_plugin import TrainingPlugin, load_shard
from dagsel.execution.workforce import Workforce
from dagsel.messages import (
    COMMANDS,
    REPORTS,
    Command,
    EndRun,
    LimitTime,
    Message,
    Note,
    PieceRecord,
    Shrink,
    StatePlace,
    UnitRecord,
    WorkerDrains,
    WorkerJoined,
    WorkerRefused,
)
from dagsel.planning.bill import Bill
from dagsel.planning.capacity import ClusterCapacity

logger = logging.getLogger("dagsel")
#: So long is waited for workers that have to do something before a search begins or ends.
_PATIENCE_S = 10.0


@dataclass(slots=True)
class DaskEngine:
    """A run's plugins on a cluster, for as long as the ``with`` block lasts."""

    client: Client  # client of the cluster; left as it was
    spec: RunSpec  # what the workers are given
    dispatch: DispatchConfig  # what the dispatcher is told
    worker_timeout_s: float = 60.0  # how long to wait for the first worker
    driver: ClusterDriver | None = None  # lets the cluster grow and shrink; None if nobody may
    # So often `messages` looks up while nothing happens, so that Ctrl-C is heard.
    poll_s: float = 0.5
    stall_s: float = 60.0  # how long nothing may be under way while the flow waits for nothing
    # When the call began whose workers are billed, by `time.monotonic`.
    began: float = field(default_factory=time.monotonic)
    n_first: int = 1  # workers to ask for if there is none
    known: ClusterCapacity = field(default_factory=ClusterCapacity)  # of the cluster, so far
    _workforce: Workforce = field(init=False)
    _connection: Connection = field(init=False)
    _processes: dict[str, str] = field(default_factory=dict)  # that workers live in, gone ones too
    _has_shared: bool = False  # whether two of them were seen in one
    _n_most: int = 0  # workers that were there at once
    _troubles: set[str] = field(default_factory=set)  # those that were told
    _threads: set[int] = field(default_factory=set)
    # What came in, by what was heard at once; nothing where somebody else wakes the driver.
    _messages: queue.SimpleQueue[Sequence[Message]] = field(default_factory=queue.SimpleQueue)
    _outbox: Outbox = field(init=False)
    _configs: dict[int, Mapping[str, Any]] = field(default_factory=dict)  # by trial
    _slices: Slices = field(default_factory=Slices)
    _loads: dict[tuple[str, int], Future[Any]] = field(default_factory=dict)
    _n_loads: int = 0
    _workers_now: tuple[WorkerNow, ...] = ()  # as the scheduler has last described them
    _standstill: Standstill = field(init=False)

    def __post_init__(self) -> None:
        self._connection = Connection.of(self.client)
        self._outbox = Outbox(self._connection, self.spec.run, self.wake)
        self._workforce = Workforce(self.driver, self.known, self.now, self.n_first)
        self._standstill = Standstill(self.worker_timeout_s)

    def __enter__(self) -> DaskEngine:
        try:
            self._start()
        except BaseException as error:
            self._stop()
            if isinstance(error, OSError) and not isinstance(error, ClusterError):
                raise ClusterError(
                    f"the scheduler was lost as the run began: {error}; start it again, and "
                    "then the search"
                ) from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop()

    def _start(self) -> None:
        run = self.spec.run
        self._connection.check()
        found = workers_of(self.client)
        names = {worker: str(about["name"]) for worker, about in found.items()}
        self._workforce.begin(names, self.began)
        # A flow begins once there is a worker; who adapts starts none while there is nothing to do.
        awaits = None
        if not found:
            awaits = self.client.submit(int, pure=False)
            self._workforce.ask_for_first(self.worker_timeout_s)
        self.client.subscribe_topic(report_topic(run), self._hear)
        patience_s = max(_PATIENCE_S, self.worker_timeout_s)
        versions = check_versions(self.client, list(found), within_s=patience_s)
        self.spec = replace(self.spec, versions=versions)
        plugin = DispatchPlugin(run, self.dispatch, self.client.id)
        try:
            self.client.register_plugin(plugin)
        except Exception as error:
            raise ClusterError(
                "the scheduler refuses dagsel's plugin; install the same dagsel there as here: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._wait_for_workers()
        if awaits is not None:
            awaits.release()
        for worker in names.keys() - self._workers_there():  # gone before the plugin could tell
            self._workforce.miss(worker)
        most = self.capacity.most_in_nodes
        if most is None or self._n_staying <= most:
            return
        if self.driver is not None and self.driver.can_scale:
            self.scale(most)

    def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + self.worker_timeout_s
        try:
            registered = set(self.client.register_plugin(TrainingPlugin(self.spec)))
        except OSError:  # a worker was lost in the middle of it; the others have been told
            registered = self._workers_there()
        refusals: list[str] = []
        notes: list[Message] = []
        while not self.workers or not registered <= self.workers:
            left_s = deadline - time.monotonic()
            try:
                heard = self._messages.get(timeout=min(max(0.0, left_s), 0.5))
            except queue.Empty:
                if left_s <= 0:
                    break
                registered &= self._workers_there()
                if not registered:  # they were lost before they could join
                    self._workforce.ask_again()
                continue
            for message in heard:
                match message:
                    case Note():
                        notes.append(message)
                    case WorkerRemoved(worker):
                        registered.discard(worker)
                    case WorkerRefused(worker, reason):
                        registered.discard(worker)
                        refusals.append(reason)
            if refusals and not registered:
                break
        if notes:  # for whoever listens from now on
            self._messages.put(notes)
        if refusals:
            kinds = (WorkerMemoryError, VersionMismatchError)
            kind = next((k for k in kinds if k.__name__ in refusals[0]), ClusterError)
            raise kind("; ".join(refusals))
        if not self.workers:
            why = "; ".join(["", *(self.driver.troubles() if self.driver is not None else ())])
            raise NoWorkersError(
                f"no worker came within {self.worker_timeout_s:.3g} s; start workers, scale the "
                "cluster, or raise worker_timeout, and deadline and budget where they end sooner"
                f"{why}"
            )

    def _workers_there(self) -> set[str]:
        return set(workers_of(self.client))

    def _stop(self) -> None:
        run, name = self.spec.run, plugin_name(self.spec.run)
        self._outbox.clear()
        self._loads.clear()
        leaves = (
            # The one command that is waited for: no task is left that a worker cannot run.
            partial(self._connection.log, command_topic(run), COMMANDS.to_text(EndRun())),
            partial(self.client.unregister_scheduler_plugin, name),
            partial(within, _PATIENCE_S, partial(self.client.unregister_worker_plugin, name)),
            partial(self.client.unsubscribe_topic, report_topic(run)),
            # Last: a worker goes when it holds nothing of the run any more.
            partial(self._workforce.give_back, self._workers_there),
        )
        try:
            for leave in leaves if self._connection.is_there else ():  # each would wait for it
                try:
                    leave()
                except TimeoutError:
                    strangers = self._workers_there() - self._processes.keys()
                    logger.warning("%s", why_silent(strangers))
                except Exception:  # the cluster may be gone; leave the rest too
                    logger.debug("leaving the cluster", exc_info=True)
        finally:  # also where Ctrl-C has ended that
            self._workforce.give_up()
            self._end_bill()

    def _end_bill(self) -> None:
        """End the bill, unless the cluster is ours: its workers cost until it is closed."""
        if self.driver is None or self.driver.own_since is None:
            self._workforce.end()

    def _hear(self, event: tuple[float, str]) -> None:
        """Take messages of the dispatcher; runs in the client's event loop."""
        heard = [message for message in REPORTS.from_text(event[1]) if self._take(message)]
        if heard:
            self._messages.put(heard)  # at once: the driver's thread wakes up once

    def _take(self, message: Message) -> bool:
        """Take in a message; return whether the driver is to hear it."""
        match message:
            case LoadShard(worker, shard):
                self._load(worker, shard)
            case ShardLoaded(worker, shard):
                self._loads.pop((worker, shard), None)
            case WorkerJoined(worker, name, threads):
                self._processes[worker] = message.process or worker
                self._workforce.join(worker, name, message.age_s)
                self._n_most = max(self._n_most, self.n_workers)
                self._compare_threads(threads)
                self._warn_of_shared_process(message.process)
            case WorkerRemoved(worker):
                self._workforce.miss(worker)
            case WorkerDrains(worker, retire):
                self._workforce.drain(worker, retire=retire)
            case Drained(worker):
                self._workforce.retire(worker)
            case WorkersDescribed(workers):
                self._workers_now = workers
                return False
            case UnitRecord() | PieceRecord():
                self._standstill.end(time.monotonic())
            case Note(text):
                if text in self._troubles:
                    return False  # another worker has said it
                self._troubles.add(text)
                logger.warning("%s", text)
        return True

    def _compare_threads(self, threads: int | None) -> None:
        if threads is None:
            return
        self._threads.add(threads)
        if len(self._threads) == 2:
            numbers = " and ".join(map(str, sorted(self._threads)))
            self._warn(
                f"workers train with {numbers} threads, whose "
                "sums differ in their last bits; to repeat this run bit for bit give them the same "
                "OMP_NUM_THREADS"
            )

    def _warn_of_shared_process(self, process: str) -> None:
        here = [worker for worker in self.workers if self._processes[worker] == process]
        if len(here) > 1 and not self._has_shared:
            self._has_shared = True
            self._warn(
                f"{len(here)} workers are threads of one process, which trains one unit at a time: "
                "random numbers belong to the process; to train on all workers at once, start "
                "them as processes: Client(processes=True)"
            )

    def _warn(self, reason: str) -> None:
        logger.warning("%s", reason)
        self._messages.put([Note(reason)])

    def _load(self, worker: str, shard: int) -> None:
        self._n_loads += 1
        self._loads[worker, shard] = self.client.submit(
            load_shard,
            self.spec.run,
            shard,
            key=(f"load-{self.spec.run}", shard, worker, self._n_loads),
            workers=[worker],
            pure=False,
            priority=1_000,
        )

    @property
    def workers(self) -> set[str]:
        """Workers that can run units."""
        return self._workforce.there

    @property
    def bill(self) -> Bill:
        """What the workers have cost since `began`.

        After the ``with`` block nothing is billed, but for a cluster of our own that is still open.
        """
        return self._workforce.bill

    @property
    def capacity(self) -> ClusterCapacity:
        """What the cluster can have: as known before, with what has been measured since."""
        return self._workforce.capacity

    @property
    def n_workers(self) -> int:
        """Workers that can run units and stay; those that share a process count as one."""
        return len({self._processes[worker] for worker in self._workforce.staying})

    @property
    def _n_staying(self) -> int:
        return len(self._workforce.staying)

    @property
    def most_workers(self) -> int | None:
        """Workers that there can ever be; None if nobody knows."""
        return self._n_most if self.why_fixed else None  # one that was lost may come back

    @property
    def why_fixed(self) -> str:
        """Why the number of workers cannot be changed; empty if it can."""
        return self._workforce.why_fixed

    def now(self) -> float:
        """Seconds, from any moment on; never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        """Send a round, the far ends of its chains later; the run's earlier rounds go on."""
        self.tell(RoundAdded(round_))
        self._configs.update(configs)
        for part in begun_first(self._slices.first(round_.chains), self.n_workers):
            self._send(part)
            self._outbox.flush()

    def _send(self, chains: Sequence[Chain]) -> None:
        """Send tasks of which the dispatcher knows."""
        if not chains:
            return
        self._outbox.send(*chains_graph(self.spec.run, chains, self._configs))

    def stop(self, trial: int) -> None:
        """Stop a trial: its waiting units are forgotten, its running one ends at its next batch."""
        self.tell(TrialStopped(trial))
        self._outbox.give_up(trial)
        self._configs.pop(trial, None)
        self._slices.forget(trial)

    def raised(self, trial: int) -> BaseException | None:
        """Return the error of a trial that has failed, without the frames of other processes."""
        error = self._outbox.raised(trial)
        return None if error is None else error.with_traceback(None)

    def release(self, trial: int, epoch: int) -> None:
        """Have the cluster forget an epoch's results; else it makes them again if they are lost."""
        self._outbox.give_up(trial, epoch)

    def tell(self, command: Command) -> None:
        """Tell the dispatcher something, by the next time that `messages` looks."""
        if isinstance(command, TrialAllowed | TrialHeld):
            # Nobody waits for its score any more, and the state that is scored may be deleted.
            self._outbox.give_up(command.trial, CHECK)
        self._outbox.tell(command)

    def check(
        self,
        trial: int,
        number: int,
        place: StatePlace,
        configs: Mapping[int, Mapping[str, Any]],
        *,
        halvings: int = 0,
    ) -> None:
        """Score a stored state of a trial."""
        self.tell(CheckAdded(trial, number))
        units = [Unit("check", trial, number, shard) for shard in range(self.spec.data.n_shards)]
        graph, keys = check_graph(self.spec.run, units, place, configs[trial], halvings)
        self._outbox.send(graph, {trial: {CHECK: keys}})

    def limit(self, at: float) -> None:
        """Begin no unit that is expected to end after this moment."""
        self.tell(LimitTime(at - self.now()))

    def scale(self, n_workers: int) -> None:
        """Scale the cluster to so many workers, if that is possible.

        The workers whose loss costs least are released, once they have ended what they run and
        handed over what only they hold.
        """
        why_not = self._workforce.want(n_workers)
        if why_not and why_not not in self._troubles:
            self._troubles.add(why_not)
            self._warn(why_not)
        self._shrink()

    def workers_now(self) -> tuple[WorkerNow, ...]:
        """Return what the workers did when this was last called, and ask the scheduler again."""
        self.tell(DescribeWorkers())
        return self._workers_now

    def _shrink(self) -> None:
        """Release surplus workers."""
        n_workers = self._workforce.surplus
        if n_workers is not None:
            billed = self.bill.nodes.items()
            nodes = {worker: node for node, workers in billed for worker in workers}
            self.tell(Shrink(n_workers, nodes, self._workforce.prices(nodes)))

    def check_alive(self) -> None:
        """Check that there is a cluster to hear from.

        Raises
        ------
        ClusterError
            If the scheduler is gone, or nothing has happened for too long, as `Standstill` has it.
        """
        self._connection.check()
        now = time.monotonic()
        if self._standstill.wants_to_know(now):
            self.tell(DescribeWorkers())
        self._standstill.check(now, self.workers, self._workers_now)

    def messages(self, *, timeout_s: float) -> Iterator[Message]:
        """Yield what came from the cluster; wait at most so long for the first message."""
        self._workforce.settle()
        self._workforce.ask_again()
        if missing := self._workforce.missing():
            logger.warning("%s", missing)
            yield Note(missing)
        try:
            for trouble in self.driver.troubles() if self.driver is not None else ():
                if trouble not in self._troubles:
                    self._troubles.add(trouble)
                    logger.warning("%s", trouble)
                    yield Note(trouble)
            yield from self._read(timeout_s=min(timeout_s, self.poll_s))
            while True:
                yield from self._read()
        except queue.Empty:
            return

    def wake(self) -> None:
        """Have `messages` wait no longer; may be called by other threads and signal handlers."""
        self._messages.put([])

    def _read(self, *, timeout_s: float = 0.0) -> Sequence[Message]:
        until = time.monotonic() + timeout_s
        while True:
            patience_s, left_s = self._outbox.flush(), until - time.monotonic()
            try:
                heard = self._messages.get(left_s > 0, min(patience_s, left_s))
                break
            except queue.Empty:
                if left_s <= patience_s:
                    raise
        for message in heard:
            match message:
                case WorkerJoined():
                    self._shrink()
                case UnitRecord(Unit("train", trial, epoch)):
                    self._send(self._slices.trained(trial, epoch))
        return heard
