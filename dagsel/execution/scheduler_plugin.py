"""A thin shell around the dispatcher inside Dask's scheduler.

Every unit is parked when its graph arrives: it gets a worker restriction that no worker meets, so
that Dask makes it ready and then leaves it alone. The shell tells the dispatcher what happens, and
performs what it decides: a bound unit gets its worker as its one restriction and its shard in its
annotations, and is sent on its way.

Of the scheduler this file touches what Dask does not promise to keep: ``TaskState.
worker_restrictions``, ``TaskState.annotations``, ``TaskState.suspicious`` and
``Scheduler.transitions``; docs/how-it-works.md lists the rest. The range of versions in
``pyproject.toml`` is the one it is tested with.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Coroutine, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, assert_never

from distributed import Scheduler, SchedulerPlugin
from distributed.comm.addressing import get_address_host
from distributed.scheduler import Recs, TaskState

from dagsel.dispatch import dispatcher, events
from dagsel.dispatch.units import Begun, Chain, Round, Unit
from dagsel.execution.copies import must_hop, spare_copies
from dagsel.execution.graph import key_unit, unit_key
from dagsel.execution.messages import CHANNEL, RESOURCE, Assignment, plugin_name, worker_topic

#: A worker restriction that no worker meets.
PARKED = frozenset({"dagsel://parked"})
#: Workers whose measured speeds differ by less than this factor count as equally fast.
SAME_SPEED = 1.8


def command_topic(run: str) -> str:
    """Topic of what the driver tells the dispatcher."""
    return f"dagsel-{run}-commands"


def report_topic(run: str) -> str:
    """Topic of what the dispatcher tells the driver."""
    return f"dagsel-{run}-reports"


def _read_chain(epochs: list[int], begun: list[Any], **rest: Any) -> Chain:
    done = tuple(Begun(tuple(visits), frozenset(scored), part) for visits, scored, part in begun)
    return Chain(epochs=range(*epochs), begun=done, **rest)


@dataclass(frozen=True, slots=True)
class WarmPiece:
    """What was trained of a unit until it was stopped: with which shard, how long, where.

    The time of one that the dispatcher was told of is 0.
    """

    shard: int
    seconds: float
    worker: str


class DispatchPlugin(SchedulerPlugin):
    """Lets a run's dispatcher decide where and when each of its units runs.

    Parameters
    ----------
    run
        Identifier of the run.
    config
        What the dispatcher is told once.
    client
        Identifier of the driver's client; when it leaves, the run is over.
    max_seconds, max_batches
        What a unit may take before it stops at a batch boundary and waits for its turn again; None
        for no bound.
    """

    def __init__(
        self,
        run: str,
        config: dispatcher.DispatchConfig,
        client: str,
        *,
        max_seconds: float | None = None,
        max_batches: int | None = None,
    ) -> None:
        self.run, self.config, self.client = run, config, client
        self.max_seconds, self.max_batches = max_seconds, max_batches
        self.name = plugin_name(run)

    async def start(self, scheduler: Scheduler) -> None:
        """Begin to listen."""
        self.scheduler = scheduler
        # The client's own subscription may arrive after the first report.
        scheduler.subscribe_topic(report_topic(self.run), self.client)
        self.dispatcher = dispatcher.Dispatcher(self.config)
        self._loop = asyncio.get_running_loop()
        self._events: list[events.DispatchEvent] = []
        self._turn_due = False
        self._alarm: asyncio.TimerHandle | None = None
        self._stimuli = itertools.count()
        self._attempts: dict[Unit, int] = {}
        self._done: dict[Unit, int] = {}  # unit: the shard it visited
        self._pieces: dict[Unit, list[WarmPiece]] = {}  # of units that were stopped in their shard
        self._hops: dict[Unit, bool] = {}  # bound unit: whether its state had to be sent
        self._read: set[Any] = set()  # keys of states that were read and may have spare copies
        self._tracebacks: dict[int, str] = {}  # of each trial's last unit that raised
        self._speeds: list[float] = []
        self._with_our_resource: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._closed = False

    # What Dask tells

    def update_graph(self, scheduler: Scheduler, *, tasks: list[Any], **kwargs: Any) -> None:
        """Park the run's units before Dask can send them anywhere."""
        for key in tasks:
            if key_unit(self.run, key) is not None:
                scheduler.tasks[key].worker_restrictions = set(PARKED)

    def transition(
        self, key: Any, start: str, finish: str, *args: Any, stimulus_id: str, **kwargs: Any
    ) -> None:
        """See units become ready, end, come back, and shards arrive."""
        unit = key_unit(self.run, key)
        if unit is not None:
            self._unit_moved(unit, key, start, finish, kwargs)
        elif type(key) is tuple and key[0] == f"load-{self.run}":
            self._load_moved(key, start, finish, kwargs)

    def _unit_moved(
        self, unit: Unit, key: Any, start: str, finish: str, details: dict[str, Any]
    ) -> None:
        task = self.scheduler.tasks[key]
        match start, finish:
            case _, "no-worker":
                self._push(events.UnitReady(unit))
            case _, "processing":
                self._hops[unit] = must_hop(task)
            case "processing", "memory":
                self._unit_done(unit, task, details)
            case "processing", "erred":
                self._unit_failed(unit, details)
            case "processing" | "no-worker", "released":
                self._unit_returned(unit, task)
            case "released", "waiting" if unit in self._done:
                self._push(events.UnitLost(unit))

    def _unit_done(self, unit: Unit, task: TaskState, details: dict[str, Any]) -> None:
        task.worker_restrictions = set(PARKED)
        worker, report = details["worker"], details["metadata"]["dagsel"]
        self._done[unit] = report["shard"]
        self._cool_unit(unit)
        seconds = 0.0 if report.get("recovered") else report["stop"] - report["start"]
        self._push(events.UnitDone(unit, seconds, report["shard"]))
        self._read.update(state.key for state in task.dependencies)
        hop = self._hops.pop(unit, False)
        told = {"unit": list(unit), "worker": worker, "hop": hop, **self._members(unit)}
        self._report("done", **told, **report)

    def _members(self, unit: Unit) -> dict[str, Any]:
        binding = self.dispatcher.bindings.get(unit)
        return {"members": list(binding.members)} if binding is not None and binding.members else {}

    def _unit_failed(self, unit: Unit, details: dict[str, Any]) -> None:
        reason = details.get("exception_text") or "a unit raised"
        self._tracebacks[unit.trial] = details.get("traceback_text") or ""
        self._push(events.UnitFailed(unit, details.get("worker") or "", reason))

    def _unit_returned(self, unit: Unit, task: TaskState) -> None:
        # Dask takes a lost worker's tasks back before it says that the worker is lost, and the
        # dispatcher has to know what ran there to give the strike to the right unit.
        worker = self.dispatcher.worker_of(unit)
        if worker is not None and worker not in self.scheduler.workers:
            self._worker_removed(worker, expected=not task.suspicious)
        task.suspicious = 0
        task.worker_restrictions = set(PARKED)
        self._push(self._returned(unit))

    def _returned(self, unit: Unit) -> events.UnitReturned:
        pieces = self._pieces.get(unit)
        if not pieces:
            return events.UnitReturned(unit)
        last = pieces[-1]
        pieces[-1] = replace(last, seconds=0.0)  # it counts once
        return events.UnitReturned(unit, last.shard, last.seconds)

    def _load_moved(self, key: Any, start: str, finish: str, details: dict[str, Any]) -> None:
        _, shard, worker, _ = key
        if start == "processing" and finish == "memory":
            self._push(events.ShardLoaded(worker, shard))
            self._report("loaded", worker=worker, shard=shard)
        elif start == "processing" and finish == "erred":
            reason = details.get("exception_text") or "a shard could not be read"
            self._push(events.ShardFailed(worker, shard, reason))

    def remove_worker(self, scheduler: Scheduler, worker: str, **kwargs: Any) -> None:
        """See a worker go."""
        self._worker_removed(worker, expected=False)

    def _worker_removed(self, worker: str, *, expected: bool) -> None:
        known = self.dispatcher.knows(worker)
        for event in self._events:  # what it will know
            match event:
                case events.WorkerAdded(added) if added == worker:
                    known = True
                case events.WorkerRemoved(removed) if removed == worker:
                    known = False
        if known:
            for other in self.scheduler.workers.keys() - {worker}:
                self._send(other, "lost", address=worker)
            for unit, binding in self.dispatcher.bindings.items():
                if worker in binding.members:  # its leader may wait for it to come
                    attempt = self._attempts.get(unit, 0)
                    self._send(binding.worker, "abandon", unit=list(unit), attempt=attempt)
            self._push(events.WorkerRemoved(worker, expected))
            self._report("left", worker=worker)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """End the run when its driver has gone."""
        if client == self.client and not self._closed:
            self.end()
            scheduler.remove_plugin(self.name)
            self._keep(scheduler.unregister_worker_plugin(None, self.name))

    # What workers and driver tell

    def log_event(self, topic: str, msg: Any) -> None:
        """Hear the run's workers and its driver."""
        if topic == worker_topic(self.run):
            self._hear_worker(**msg)
        elif topic == command_topic(self.run):
            self._hear_driver(**msg)

    def _hear_worker(self, op: str, worker: str, **msg: Any) -> None:
        match op:
            case "joined" if worker in self.scheduler.workers:
                about = {"threads": msg["threads"], "name": msg["name"]}
                self._report("joined", worker=worker, **about)
                speed = self._comparable(msg["speed"])
                if msg["owns_resource"]:
                    self._with_our_resource.add(worker)
                node = get_address_host(worker)
                self._push(events.WorkerAdded(worker, frozenset(), speed, msg["max_shards"], node))
            case "refused":
                self._report("refused", worker=worker, reason=msg["reason"])
            case "leaving":  # it was told to end, and stores what it runs
                self._report("draining", worker=worker, retire=False)
                self._push(events.DrainRequested(worker))
                for unit, binding in self.dispatcher.bindings.items():
                    if worker in binding.members:  # a gang ends where its leader does
                        self._preempt(unit, binding.worker)
            case "started":
                unit = Unit(*msg["unit"])
                self._push(events.UnitStarted(unit, worker))
                task = self.scheduler.tasks.get(unit_key(self.run, unit))
                self._read.update(state.key for state in (task.dependencies if task else ()))
            case "preempted":
                unit = Unit(*msg["unit"])
                piece = WarmPiece(msg["shard"], msg["stop"] - msg["start"], worker)
                self._pieces.setdefault(unit, []).append(piece)
                if unit.trial not in self.dispatcher.trials:  # stopped while it ran
                    self._cool_unit(unit)
                told = {**msg, **self._members(unit), "hop": self._hops.get(unit, False)}
                self._report("preempted", worker=worker, **told)
            case "gathers":
                self._gather(Unit(*msg["unit"]), worker, msg["attempt"], msg["port"])
            case "broke":
                self._push(events.GangBroke(Unit(*msg["unit"]), msg["reason"]))

    def _hear_driver(self, op: str, **msg: Any) -> None:
        match op:
            case "round":
                chains = tuple(_read_chain(**chain) for chain in msg["chains"])
                for chain in chains:  # what the store holds of a unit, no first attempt looks for
                    for epoch, begun in zip(chain.epochs, chain.begun, strict=False):
                        if begun.partial is not None:
                            unit = Unit("train", chain.trial, epoch, len(begun.visits))
                            self._attempts.setdefault(unit, 1)
                self._push(events.RoundAdded(Round(msg["number"], chains)))
            case "stop":
                self._push(events.TrialStopped(msg["trial"]))
                # In that turn; a unit that tells of a piece after it is known to be over.
                self._loop.call_soon(self._cool, msg["trial"])
            case "preempt":
                for unit, binding in self.dispatcher.bindings.items():
                    if unit.trial == msg["trial"]:
                        self._preempt(unit, binding.worker)
            case "priority":
                self._push(events.PriorityChanged(msg["trial"], msg["priority"]))
            case "allow":
                self._push(events.TrialAllowed(**msg))
            case "hold":
                self._push(events.TrialHeld(**msg))
            case "check":
                self._push(events.CheckAdded(**msg))
            case "horizon":
                self._push(events.HorizonSet(time.monotonic() + msg["in_s"]))
            case "shrink":
                self._shrink(msg["n_workers"], msg["nodes"])
            case "drain":
                self._push(events.DrainRequested(msg["worker"]))
            case "end":
                self.end()

    def _shrink(self, n_workers: int, nodes: Mapping[str, str]) -> None:
        """Let nodes go whose loss costs least, as long as no fewer than so many workers stay."""
        dispatcher = self.dispatcher
        for worker in dispatcher.cheapest(dispatcher.n_staying - n_workers, nodes=nodes):
            self._report("draining", worker=worker, retire=True)
            self._push(events.DrainRequested(worker))

    def _comparable(self, speed: float) -> float:
        for known in self._speeds:
            if 1 / SAME_SPEED < speed / known < SAME_SPEED:
                return known
        self._speeds.append(speed)
        return speed

    # What the dispatcher decides

    def _push(self, event: events.DispatchEvent) -> None:
        self._events.append(event)
        if not self._turn_due and not self._closed:
            self._turn_due = True
            # Dask must not be asked for transitions from within one.
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_due = False
        if self._closed:
            return
        batch, self._events = self._events, []
        self._perform(self.dispatcher.handle(*batch, now_s=time.monotonic()))
        self._drop_spare_copies()
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        wake_at = self.dispatcher.wake_at
        if wake_at is not None:
            delay = max(0.0, wake_at - time.monotonic())
            self._alarm = self._loop.call_later(delay, self._push, events.TimerFired())

    def _perform(self, instructions: list[events.Instruction]) -> None:
        bound: Recs = {}
        for instruction in instructions:
            match instruction:
                case events.Bind():
                    self._bind(instruction, bound)
                case events.LoadShard(worker, shard):
                    self._report("load", worker=worker, shard=shard)
                case events.DropShard(worker, shard):
                    self._send(worker, "drop", shard=shard)
                case events.Preempt(unit, worker):
                    self._preempt(unit, worker)
                case events.TrialRests(trial, number):
                    self._report("rests", trial=trial, number=number)
                case events.Drained(worker):
                    self._report("drained", worker=worker)
                case events.FailTrial(trial, reason):
                    self._cool(trial)
                    traceback = self._tracebacks.pop(trial, "")
                    self._report("failed", trial=trial, reason=reason, traceback=traceback)
                case events.RestartWorker(worker, reason):
                    self._restart(worker, reason)
                case events.FailRun(reason):
                    self._report("fatal", reason=reason)
                case _:
                    assert_never(instruction)
        if bound:
            self.scheduler.transitions(bound, f"dagsel-bind-{next(self._stimuli)}")

    def _bind(self, bind: events.Bind, bound: Recs) -> None:
        unit, workers = bind.unit, {bind.worker, *bind.members}
        task = self.scheduler.tasks.get(unit_key(self.run, unit))
        if task is None or task.state != "no-worker":
            # It was withdrawn, or lost its input, in this very turn of the loop.
            self._push(self._returned(unit))
            return
        gone = workers - self.scheduler.workers.keys()
        if gone:  # Dask will not say again that the unit is ready
            for worker in gone:
                self._worker_removed(worker, expected=True)
            self._push(self._returned(unit))
            self._push(events.UnitReady(unit))
            return
        attempt = self._attempts[unit] = self._attempts.get(unit, 0) + 1
        task.worker_restrictions = {bind.worker}
        seconds = [s for s in (self.max_seconds, bind.seconds) if s is not None]
        binding = Assignment(
            bind.shard,
            attempt,
            min(seconds, default=None),
            self.max_batches,
            self.dispatcher.visits_before(unit),
            n_pieces=len(self._pieces.get(unit, ())),
            gang=len(workers),
        )
        task.annotations = {**(task.annotations or {}), "dagsel": asdict(binding)}
        bound[task.key] = "processing"

    def _gather(self, unit: Unit, leader: str, attempt: int, port: int) -> None:
        """Call the other workers of a gang to the one that leads it."""
        binding = self.dispatcher.bindings.get(unit)
        if binding is None or binding.worker != leader or attempt != self._attempts.get(unit):
            return
        if not all(map(self._is_there, binding.members)):  # the leader did not wait yet as it went
            self._send(leader, "abandon", unit=list(unit), attempt=attempt)
            return
        host, size = get_address_host(leader), len(binding.workers)
        for rank, member in enumerate(binding.members, start=1):
            call = {"unit": list(unit), "attempt": attempt, "shard": binding.shard}
            self._send(member, "assist", **call, rank=rank, size=size, host=host, port=port)

    def _drop_spare_copies(self) -> None:
        read, self._read = self._read, set()
        for key in read:
            state = self.scheduler.tasks.get(key)
            if state is None or len(state.who_has or ()) < 2:
                continue
            for worker in spare_copies(state, self._may_read):
                self.scheduler.request_remove_replicas(
                    worker, [key], stimulus_id=f"dagsel-spare-{next(self._stimuli)}"
                )

    def _may_read(self, key: Any, worker: str) -> bool:
        unit = key_unit(self.run, key)
        if unit is None:
            return False
        if unit.kind == "train":
            return self.dispatcher.home(unit.trial) == worker
        return self.dispatcher.holds(worker, unit.position)

    def _cool(self, trial: int) -> None:
        """Let workers forget the states that they keep warm of a trial that is over."""
        for unit in [unit for unit in self._pieces if unit.trial == trial]:
            self._cool_unit(unit)

    def _cool_unit(self, unit: Unit) -> None:
        for worker in {piece.worker for piece in self._pieces.pop(unit, ())}:
            self._send(worker, "cool", unit=list(unit))

    def _preempt(self, unit: Unit, worker: str) -> None:
        self._send(worker, "preempt", unit=list(unit), attempt=self._attempts.get(unit, 0))

    def _send(self, worker: str, verb: str, **message: Any) -> None:
        # One that has not joined, such as a restarted one at the same address, does not listen.
        if self._is_there(worker):
            told = {"op": CHANNEL, "run": self.run, "verb": verb, "message": message}
            self.scheduler.worker_send(worker, told)

    def _is_there(self, worker: str) -> bool:
        return self.dispatcher.knows(worker) and worker in self.scheduler.stream_comms

    def _restart(self, worker: str, reason: str) -> None:
        self._report("restarted", worker=worker, reason=reason)
        restart = self.scheduler.restart_workers(
            [worker],
            wait_for_workers=False,
            on_error="return",
            stimulus_id=f"dagsel-restart-{next(self._stimuli)}",
        )
        self._keep(restart)

    def _keep(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine; the loop alone would forget it."""
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _report(self, op: str, **message: Any) -> None:
        self.scheduler.log_event(report_topic(self.run), {"op": op, **message})

    def end(self) -> None:
        """Stop listening and leave the scheduler as it was."""
        if self._closed:
            return
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._withdraw_all()
        if not any(p for p in self.scheduler.plugins.values() if self._is_other(p)):
            self._give_resources_back()

    def _is_other(self, plugin: SchedulerPlugin) -> bool:
        return isinstance(plugin, DispatchPlugin) and plugin is not self

    def _withdraw_all(self) -> None:
        driver = self.scheduler.clients.get(self.client)
        if driver is not None:
            ours = [task.key for task in driver.wants_what if self._is_ours(task.key)]
            self.scheduler.client_releases_keys(keys=ours, client=self.client)

    def _is_ours(self, key: Any) -> bool:
        return key_unit(self.run, key) is not None or (
            type(key) is tuple and key[0] == f"load-{self.run}"
        )

    def _give_resources_back(self) -> None:
        for worker in self._with_our_resource:
            state = self.scheduler.workers.get(worker)
            if state is not None:
                state.resources.pop(RESOURCE, None)
                state.used_resources.pop(RESOURCE, None)
                self.scheduler.resources.get(RESOURCE, {}).pop(worker, None)
