"""A model of the cluster and of Dask's graph against which a dispatcher is tested.

It keeps its own records and asserts the laws from them; it does not rely on the dispatcher's state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    Bind,
    Drained,
    DropShard,
    FailRun,
    FailTrial,
    GangBroke,
    LoadShard,
    Preempt,
    RestartWorker,
    TimerFired,
    TrialAllowed,
    TrialHeld,
    TrialRests,
    UnitDone,
    UnitFailed,
    UnitLost,
    UnitReady,
    UnitReturned,
    UnitStarted,
    UnitTrains,
    WorkerAdded,
    WorkerRemoved,
)
from dagsel.dispatch.units import Chain, Unit


@dataclass
class Machine:
    held: set[int]
    max_shards: int | None
    loading: list[int] = field(default_factory=list)
    queue: list[tuple[Unit, int]] = field(default_factory=list)
    started: bool = False
    draining: bool = False
    drained: bool = False
    member_of: Unit | None = None  # the unit of a gang that another worker leads


class IndependentCluster:
    """Workers, graph and results; sends events to the dispatcher and performs its instructions."""

    def __init__(self, config: DispatchConfig, dispatcher_type: type[Dispatcher] = Dispatcher):
        self.config = config
        self.dispatcher = dispatcher_type(config)
        self.now = 0.0
        self.machines: dict[str, Machine] = {}
        self.chains: dict[int, list[Chain]] = {}
        self.gone: set[int] = set()
        self.ready: set[Unit] = set()
        self.early: set[Unit] = set()  # told to be ready, though what comes before is not done
        self.visits: dict[Unit, int] = {}  # training units done at least once: shard
        self.results: dict[Unit, str] = {}  # training units whose result is somewhere
        self.scored: set[Unit] = set()
        self.stored: dict[Unit, int] = {}  # finished, but nobody was told
        self.partial: dict[Unit, int] = {}
        self.preempts: list[tuple[Unit, str]] = []
        self.failed: dict[int, str] = {}
        self.run_failed: str | None = None
        self.n_workers = 0
        self.addresses: list[str] = []  # of workers that are gone
        self.gangs: dict[int, int] = {}  # what each trial was allowed
        self.held: set[int] = set()
        self.left_s: dict[int, float] = {}
        self.n_told = 0
        self.last_number: dict[int, int] = {}
        self.to_score: dict[Unit, tuple[int, ...]] = {}
        self.to_visit: dict[Unit, tuple[int, ...]] = {}

    # ---- events and instructions

    def tell(self, *events):
        for instruction in self.dispatcher.handle(*events, now_s=self.now):
            self.perform(instruction)
        self.dispatcher.check()

    def perform(self, instruction):
        match instruction:
            case Bind(unit, worker, shard, members, seconds, _, scores, then):
                self.bind(unit, worker, shard, members)
                self.check_then(unit, worker, shard, members, then)
                self.check_scores(unit, worker, (shard, *then), members, scores)
                is_timed = unit.kind == "train" and unit not in self.visits
                assert seconds == (self.left_s.get(unit.trial) if is_timed else None)
            case TrialRests(trial, number):
                self.rest(trial, number)
            case LoadShard(worker, shard):
                machine = self.machines[worker]
                assert shard not in machine.held, f"{worker} loads {shard} again"
                assert shard not in machine.loading, f"{worker} is told twice to load {shard}"
                machine.loading.append(shard)
                if machine.max_shards is not None:
                    assert len(machine.held) + len(machine.loading) <= machine.max_shards
            case DropShard(worker, shard):
                machine = self.machines[worker]
                assert all(
                    shard not in (used, *self.to_visit[unit], *self.to_score[unit])
                    for unit, used in machine.queue
                ), "dropped in use"
                assert self.shard_of(machine.member_of) != shard, "dropped in use by a gang"
                machine.held.remove(shard)
                assert any(shard in m.held for m in self.machines.values()), "the last copy"
            case Preempt(unit, worker):
                assert any(unit == u for u, _ in self.machines[worker].queue)
                self.preempts.append((unit, worker))
            case Drained(worker):
                machine = self.machines[worker]
                assert machine.draining
                assert not machine.drained, "drained twice"
                assert not machine.queue, "drained while it runs"
                assert machine.member_of is None, "drained while its gang runs"
                machine.drained = True
            case FailTrial(trial, reason):
                assert trial not in self.failed
                self.failed[trial] = reason
                self.withdraw(trial)
            case RestartWorker(worker):
                self.restarting = worker
            case FailRun(reason):
                self.run_failed = reason

    def check_then(self, unit, worker, shard, members, then):
        """What follows in a unit's task are the next units of its epoch, on what the worker has."""
        self.to_visit[unit] = then
        if not then:
            return
        assert unit.kind == "train"
        assert unit not in self.visits
        assert not members
        assert unit.trial not in self.left_s
        assert {shard, *then} <= self.machines[worker].held
        assert len({shard, *then}) == 1 + len(then), f"{then} after {shard}: one of them twice"
        for position, visit in enumerate(then, unit.position + 1):
            following = unit._replace(position=position)
            assert position < self.config.n_shards, f"{unit}: its task goes beyond the epoch"
            assert following not in self.partial, f"{following} has begun, and {unit} has not ended"
            self.check_shard(following, visit)

    def check_scores(self, unit, worker, visits, members, scores):
        """What is to be scored with a unit is what its epoch lacks, and the worker has it."""
        self.to_score[unit] = scores
        if not scores:
            return
        assert unit.kind == "train"
        assert unit not in self.visits
        assert not members
        chain = self.chain_of(unit)
        seen = {s for u, s in self.visits.items() if u[:3] == unit[:3]}
        assert seen | set(visits) == set(range(chain.n_shards)), f"{unit} does not end its epoch"
        missing = {u.position for u in chain.evaluations(unit.epoch) if u not in self.scored}
        assert set(scores) == missing, f"{scores} are to be scored, and {missing} are not"
        assert missing <= self.machines[worker].held, f"{worker} does not hold {missing}"

    def shard_of(self, unit):
        held = (s for m in self.machines.values() for u, s in m.queue if u == unit)
        return next(held, None)

    def rest(self, trial, number):
        assert trial in self.held or self.left_s.get(trial, 1.0) < 1e-3, "rests unasked"
        assert number == self.last_number.get(trial, 0), "it repeats another number than the last"
        self.held.add(trial)
        for unit in self.units(trial):
            assert not self.busy(unit), f"trial {trial} rests while {unit} runs"
        if trial not in self.gone:
            for chain in self.chains.get(trial, ()):
                for epoch in chain.epochs:
                    units = [u for u in self.units(trial) if u.epoch == epoch]
                    if all(unit in self.visits for unit in units):
                        missing = set(chain.evaluations(epoch)) - self.scored
                        assert not missing, f"trial {trial} rests before {missing} are scored"

    def resting(self, trial):
        return trial in self.dispatcher.state.coming_to_rest

    def allow(self, trial, gang, seconds):
        self.n_told += 1
        self.last_number[trial] = self.n_told
        self.gangs[trial] = gang
        self.left_s.pop(trial, None)
        if seconds is not None:
            self.left_s[trial] = seconds + self.trained_s(trial)
        self.held.discard(trial)
        self.tell(TrialAllowed(trial, gang, seconds, self.n_told))

    def trained_s(self, trial):
        """How long the trial's running unit, which tells it at its end, has trained before."""
        bindings = self.dispatcher.state.bindings.values()
        began = (b.began_s for b in bindings
                 if b.unit.kind == "train" and b.unit.trial == trial
                 and b.began_s is not None)  # fmt: skip
        return self.now - next(began, self.now)

    def hold(self, trial):
        self.n_told += 1
        self.last_number[trial] = self.n_told
        self.held.add(trial)
        self.tell(TrialHeld(trial, self.n_told))

    def spend(self, unit, seconds):
        if unit.kind == "train" and unit.trial in self.left_s:
            self.left_s[unit.trial] = max(0.0, self.left_s[unit.trial] - seconds)

    def part(self, unit):
        """The members of a unit's gang are free again."""
        for machine in self.machines.values():
            if machine.member_of == unit:
                machine.member_of = None

    def bind(self, unit, worker, shard, members=()):
        if unit.kind == "train":
            is_repeat = unit in self.visits
            is_held = unit.trial in self.held
            assert is_repeat or not is_held, f"{unit} bound though its trial has to rest"
            size = 1 if is_repeat else self.gangs.get(unit.trial, 1)
            assert 1 + len(members) == size, f"a gang of {members}"
        for member in members:
            other = self.machines[member]
            assert not other.queue, f"{member} is busy and cannot join {unit}"
            assert other.member_of is None, f"{member} is in two gangs"
            assert not other.draining, f"{member} is to go and cannot join {unit}"
            assert shard in other.held, f"{member} does not hold shard {shard} of {unit}"
            other.member_of = unit
        assert len({worker, *members}) == 1 + len(members), "a worker twice in a gang"
        assert self.machines[worker].member_of is None, f"{worker} works for a gang"
        machine = self.machines.get(worker)
        assert machine is not None, f"{unit} bound to {worker}, which is gone"
        assert not machine.draining, f"{unit} bound to {worker}, which is to go"
        is_due = unit in self.early and self.has_input(unit)  # and it was told to be ready
        assert unit in self.ready or is_due, f"{unit} bound, but not ready"
        assert shard in machine.held, f"{worker} does not hold shard {shard}"
        assert len(machine.queue) < 2, f"exclusivity: a third unit on {worker}"
        if unit.kind == "evaluate":
            assert shard == unit.position
        else:
            others = [
                u for m in self.machines.values() for u, _ in m.queue
                if u.kind == "train" and u.trial == unit.trial
            ]  # fmt: skip
            assert not others, f"isolation: {unit} beside {others}"
            self.check_shard(unit, shard)
        self.ready.discard(unit)
        self.early.discard(unit)
        machine.queue.append((unit, shard))

    def check_shard(self, unit, shard):
        if unit in self.visits:
            assert shard == self.visits[unit], f"{unit} visited {self.visits[unit]}, not {shard}"
            return
        assert self.partial.get(unit, shard) == shard, f"{unit} must go on with its shard"
        fixed = self.chain_of(unit).fixed_shard(unit)
        assert fixed in (None, shard), f"{unit} has shard {fixed} in its order"
        seen = [s for u, s in self.visits.items() if u[:3] == unit[:3]]
        assert shard not in seen, f"completeness: {unit} bound to {shard} again"

    def chain_of(self, unit):
        return next(c for c in self.chains[unit.trial] if unit.epoch in c.epochs)

    def withdraw(self, trial):
        self.gone.add(trial)
        self.ready = {unit for unit in self.ready if unit.trial != trial}

    # ---- the graph

    def units(self, trial):
        return [unit for chain in self.chains.get(trial, ()) for unit in chain.units]

    def busy(self, unit):
        return any(unit == u for m in self.machines.values() for u, _ in m.queue)

    def refresh_ready(self):
        """Units whose input exists and that are wanted; returns events for the new ones."""
        events = []
        for trial in self.chains:
            if trial not in self.gone:
                events += self.refresh_trial(trial)
        return events

    def refresh_trial(self, trial):
        wanted, evaluations = self.wanted(trial)
        events = []
        for unit in [*wanted, *evaluations]:
            if unit not in self.ready and not self.busy(unit):
                self.ready.add(unit)
                if unit not in self.early:
                    events.append(UnitReady(unit))
                self.early.discard(unit)
        return [*events, *self.offer(trial)]

    def offer(self, trial):
        """A later chain begins with a stored state: Dask sees nothing that it has to wait for."""
        firsts = {next(chain.units) for chain in self.chains[trial][1:]}
        early = firsts - self.early - self.ready - self.visits.keys()
        early = {unit for unit in early if not self.busy(unit)}
        self.early |= early
        return [UnitReady(unit) for unit in sorted(early)]

    def wanted(self, trial):
        """Training and evaluating units of a trial whose input is there."""
        line = self.units(trial)
        evaluations, goals = [], []
        for k, unit in enumerate(line):
            if unit not in self.visits:
                goals.append(k)  # the first unit that was never done
                break
        for k, unit in enumerate(line):
            chain = self.chain_of(unit)
            if unit.position == chain.n_shards - 1 and unit in self.visits:
                waiting = [e for e in chain.evaluations(unit.epoch) if e not in self.scored]
                if waiting and unit in self.results:
                    evaluations += waiting
                elif waiting:
                    goals.append(k)
        for chain in self.chains[trial]:
            for epoch in chain.epochs:
                if len(chain.done(epoch).visits) == chain.n_shards:  # its state is in the store
                    evaluations += [e for e in chain.evaluations(epoch) if e not in self.scored]
        train = []
        for goal in goals:
            k = goal
            if self.busy(line[k]):
                continue
            while k > 0 and line[k - 1] not in self.results:
                k -= 1
            if line[k] not in train and line[k] not in self.results:
                train.append(line[k])
        return train, evaluations

    # ---- what happens

    def add_round(self, round_):
        for chain in round_.chains:
            self.chains.setdefault(chain.trial, []).append(chain)
            for epoch in chain.epochs:
                for position, shard in enumerate(chain.done(epoch).visits):
                    self.visits[Unit("train", chain.trial, epoch, position)] = shard

    def add_worker(self, shards, speed, max_shards, again=False):
        """A worker comes, under an address of its own or that of one that is gone."""
        if again and self.addresses:
            name = self.addresses.pop()
        else:
            name = f"w{self.n_workers}"
            self.n_workers += 1
        self.machines[name] = Machine(set(shards), max_shards)
        copy_room = None if max_shards is None else max_shards // 2
        self.tell(WorkerAdded(name, frozenset(shards), speed, max_shards, copy_room=copy_room))

    def kill(self, worker, expected, finished, noticed=True):
        """The worker goes; what it ran may have been finished and stored.

        A leader of whose gang it was has not noticed yet, or never will: it may be past its last
        batch.
        """
        machine = self.machines.pop(worker)
        self.addresses.append(worker)
        for unit, _ in machine.queue:
            self.part(unit)
        broken = [(u, m) for m in self.machines.values() for u, _ in m.queue
                  if u == machine.member_of and noticed]  # fmt: skip
        for unit, leader in broken:  # its gang cannot go on
            leader.queue = [(u, s) for u, s in leader.queue if u != unit]
            leader.started = False
            self.part(unit)
            self.preempts = [(u, w) for u, w in self.preempts if u != unit]
        if machine.queue and finished and machine.started:
            unit, shard = machine.queue[0]
            if unit.kind == "train" and unit not in self.visits:
                for position, visit in enumerate((shard, *self.to_visit[unit]), unit.position):
                    self.stored[unit._replace(position=position)] = visit
        self.preempts = [(u, w) for u, w in self.preempts if w != worker]
        events: list[Any] = [WorkerRemoved(worker, expected)]
        for unit, _ in broken:
            events += [GangBroke(unit, "its worker was lost"), UnitReturned(unit)]
        lost = sorted(unit for unit, where in self.results.items() if where == worker)
        self.lose(*lost, before=events)

    def lose(self, *units, before=()):
        """Results are lost, and with them the readiness of what they are input of."""
        for unit in units:
            del self.results[unit]
        lost = [UnitLost(unit) for unit in units if unit.trial not in self.gone]
        self.tell(*before, *lost, *self.take_back_unready())
        self.tell(*self.refresh_ready())

    def awaited(self):
        """Results that evaluating units still need."""
        return [
            unit
            for unit in sorted(self.results)
            if unit.trial not in self.gone
            and unit.position == self.config.n_shards - 1
            and set(self.chain_of(unit).evaluations(unit.epoch)) - self.scored
        ]

    def interrupt(self, worker):
        """Somebody else than the dispatcher stops the worker's unit in the middle."""
        self.start(worker)
        self.preempts.insert(0, (self.machines[worker].queue[0][0], worker))
        self.preempts = list(dict.fromkeys(self.preempts))
        self.answer_preempt(True)

    def take_back_unready(self):
        """Units that wait, ready or on a worker, for a result that is lost."""
        events = []
        possible: set[Unit] = set()
        for trial in self.chains:
            if trial not in self.gone:
                train, evaluations = self.wanted(trial)
                possible.update(train, evaluations)
        for unit in sorted(self.ready - possible):
            self.ready.discard(unit)
            events.append(UnitReturned(unit))
        for machine in self.machines.values():
            keep = [machine.queue[0]] if machine.queue and machine.started else []
            for unit, shard in machine.queue[len(keep) :]:
                if unit.trial in self.gone or self.has_input(unit):
                    keep.append((unit, shard))
                else:
                    events.append(UnitReturned(unit))
                    self.part(unit)
                    self.preempts = [(u, w) for u, w in self.preempts if u != unit]
            machine.queue = keep
        return events

    def has_input(self, unit):
        line = self.units(unit.trial)
        if unit.kind == "evaluate":
            last = unit._replace(kind="train", position=self.config.n_shards - 1)
            return last in self.results or last not in line
        k = line.index(unit)
        return k == 0 or line[k - 1] in self.results

    def start(self, worker, index=0, trains=True):
        machine = self.machines[worker]
        if machine.started or len(machine.queue) <= index:
            return
        machine.queue.insert(0, machine.queue.pop(index))
        machine.started = True
        self.begins(machine.queue[0][0], worker, trains)

    def begins(self, unit, worker, trains):
        self.tell(UnitStarted(unit, worker))
        if trains and unit.kind == "train":
            self.tell(UnitTrains(unit, worker))

    def finish(
        self, worker, seconds, together=True, n_scored=100, n_then=100, is_cut=False, overlaps=False
    ):
        """The worker's task ends: perhaps before all its visits, perhaps within one of them.

        The next one may train before the worker has stored what the task has trained, and said so.
        """
        machine = self.machines[worker]
        if not machine.queue:
            return
        self.start(worker)
        unit, shard = machine.queue.pop(0)
        machine.started = overlaps and len(machine.queue) > 0
        if machine.started:
            self.begins(machine.queue[0][0], worker, trains=True)
        self.part(unit)
        self.preempts = [(u, w) for u, w in self.preempts if u != unit]
        planned, last = self.to_visit[unit], unit
        then = planned[:n_then]
        if unit.kind == "evaluate":
            self.scored.add(unit)
        else:
            if unit in self.stored:
                shard, seconds, then = self.stored.pop(unit), 0.0, ()
            for position, visit in enumerate((shard, *then), unit.position):
                last = unit._replace(position=position)
                if unit.trial not in self.gone:
                    self.record(last, visit)
                self.partial.pop(last, None)
                self.stored.pop(last, None)
            self.results[last] = worker
        with_it = self.to_score[unit][:n_scored] if then == planned else ()
        if unit.trial not in self.gone:
            self.scored |= {unit._replace(kind="evaluate", position=s) for s in with_it}
        scored = tuple((s, 0.3 * seconds) for s in with_it)
        took = tuple((s, seconds) for s in then)
        done: list[Any] = [UnitDone(unit, seconds, shard, scored, took)]
        self.spend(unit, seconds * (1 + len(then)))
        if is_cut and seconds and then != planned and unit.trial not in self.gone:
            following, visit = last._replace(position=last.position + 1), planned[len(then)]
            self.partial[following] = visit
            self.spend(following, 0.5)
            done.append(UnitReturned(following, visit, 0.5))
        if together:
            self.tell(*done, *self.refresh_ready())
        else:
            self.tell(*done)
            self.tell(*self.refresh_ready())

    def record(self, unit, shard):
        assert self.visits.get(unit, shard) == shard, f"{unit} trained on another shard"
        seen = [s for u, s in self.visits.items() if u[:3] == unit[:3] and u != unit]
        assert shard not in seen, f"completeness: {unit} visited shard {shard} again"
        self.visits[unit] = shard

    def fail(self, worker):
        machine = self.machines[worker]
        if not machine.queue:
            return
        unit, _ = machine.queue.pop(0)
        machine.started = False
        self.part(unit)
        self.preempts = [(u, w) for u, w in self.preempts if u != unit]
        self.tell(UnitFailed(unit, worker, "it raised"))
        self.tell(*self.refresh_ready())

    def answer_preempt(self, keep):
        if not self.preempts:
            return
        unit, worker = self.preempts.pop(0)
        machine = self.machines[worker]
        k = next(k for k, (u, _) in enumerate(machine.queue) if u == unit)
        _, shard = machine.queue.pop(k)
        self.part(unit)
        began = k == 0 and machine.started
        if k == 0:
            machine.started = False
        partly = began and keep and unit.kind == "train" and unit not in self.visits
        if partly and unit.trial not in self.gone:
            self.partial[unit] = shard
        self.spend(unit, 0.5 if partly else 0.0)
        self.tell(UnitReturned(unit, shard if partly else None, 0.5 if partly else 0.0))
        self.tell(*self.refresh_ready())

    def tick(self, seconds):
        wake_at = self.dispatcher.wake_at
        self.now = max(self.now, wake_at) if wake_at is not None else self.now + seconds
        self.tell(TimerFired())

    # ---- the end

    def complete(self):
        """Let everything go well from here on; all that is wanted must get done."""
        for _ in range(3000):
            if self.run_failed is not None or not self.step():
                break
        if self.run_failed is not None:
            return
        assert not any(machine.queue for machine in self.machines.values())
        for trial, chains in self.chains.items():
            if trial in self.gone:
                continue
            if trial in self.held:
                assert not self.resting(trial), f"trial {trial} was held and never rests"
                continue
            missing = [unit for unit in self.units(trial) if unit not in self.visits]
            assert not missing, f"nothing happens any more, but {missing[:3]} are not done"
            for chain in chains:
                for epoch in chain.epochs:
                    visited = sorted(s for u, s in self.visits.items() if u[1:3] == (trial, epoch))
                    assert visited == list(range(chain.n_shards))
                    assert set(chain.evaluations(epoch)) <= self.scored

    def step(self):
        if self.preempts:
            self.answer_preempt(True)
            return True
        for worker, machine in self.machines.items():
            if machine.loading:
                self.load(worker)
                return True
            if machine.queue:
                self.now += 1.0
                self.finish(worker, 1.0)
                return True
        events = self.refresh_ready()
        if events or self.dispatcher.wake_at is not None:
            self.tell(*events)
            self.tick(1.0)
            return True
        return False

    def load(self, worker):
        from dagsel.dispatch.events import ShardLoaded

        shard = self.machines[worker].loading.pop(0)
        self.machines[worker].held.add(shard)
        self.tell(ShardLoaded(worker, shard))

    def refuse(self, worker):
        from dagsel.dispatch.events import ShardFailed

        shard = self.machines[worker].loading.pop(0)
        self.tell(ShardFailed(worker, shard, "out of memory"))
