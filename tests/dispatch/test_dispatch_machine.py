"""Random events in any legal order never break laws 1 to 3, and every round ends.

Gangs begin whole or not at all, trials that have to rest run nothing, and say so once.

Eleven bugs are planted to see that the machine would notice:

1. a visited shard is not removed from what is left to visit;
2. isolation is not enforced: a trial with a bound unit is offered again;
3. exclusivity is off by one: a worker may have three units;
4. a unit whose result was lost may be bound to a different shard;
5. the shards of a dead worker are not re-homed;
6. a unit that was interrupted in the middle of a shard may go on with another;
7. a gang begins on a worker that is busy;
8. a trial that was told to rest is offered again;
9. a trial is said to rest while its unit runs;
10. a result that is lost while its trial rests is not made again;
11. a gang's member that went is not told from one that came under its address.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dagsel.dispatch import assignment, dispatcher
from dagsel.dispatch.assignment import Assigner
from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.dispatcher import DispatchConfig, Dispatcher
from dagsel.dispatch.events import (
    DrainRequested,
    PriorityChanged,
    RoundAdded,
    TrialRests,
    TrialStopped,
)
from dagsel.dispatch.gangs import Gangs
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.trials import Binding, Trial
from dagsel.dispatch.units import Begun, Chain, Round

from .independent_cluster import World

SECONDS = st.sampled_from([0.01, 0.5, 1.0, 3.0])


class DispatchMachine(RuleBasedStateMachine):
    dispatcher_type = Dispatcher

    @initialize(
        n_shards=st.integers(1, 5),
        replicas=st.integers(1, 2),
        n_workers=st.integers(0, 3),
        failures=st.integers(1, 2),
        timeout=st.sampled_from([None, 5.0]),
        n_epochs=st.integers(1, 3),
        limit=st.none() | st.integers(1, 3),
    )
    def begin(self, n_shards, replicas, n_workers, failures, timeout, n_epochs=1, limit=None):
        config = DispatchConfig(
            n_shards, replicas, max_failures=failures, unit_timeout_s=timeout, lookahead_s=1.0,
            overhead_s=0.1,
        )  # fmt: skip
        self.n_rounds = 0
        self.epochs: dict[int, int] = {}
        self.world = World(config, self.dispatcher_type)
        for _ in range(n_workers):
            self.world.add_worker((), 1.0, limit)
        self.add_round(2, n_epochs, True, None)

    def add_round(self, n_trials, n_epochs, evaluate, random):
        n = self.world.config.n_shards
        chains = []
        for trial in range(n_trials):
            if trial in self.world.gone:
                continue
            first = self.epochs.get(trial, 0) + 1
            self.epochs[trial] = first + n_epochs - 1
            order = None
            if random is not None:
                order = tuple(tuple(random.sample(range(n), n)) for _ in range(n_epochs))
            chains.append(
                Chain(trial, range(first, first + n_epochs), n, 1.0 + trial, order, evaluate)
            )
        round_ = Round(self.n_rounds, tuple(chains))
        self.n_rounds += 1
        self.world.add_round(round_)
        self.world.tell(RoundAdded(round_), *self.world.refresh_ready())

    @precondition(lambda self: self.n_rounds < 3)
    @rule(random=st.randoms(use_true_random=False), has_ended=st.booleans())
    def resume_a_trial(self, random, has_ended):
        n, trial = self.world.config.n_shards, 100 + self.n_rounds
        visits = tuple(random.sample(range(n), n))
        scored = frozenset(random.sample(range(n), random.randint(0, n)))
        partly = Begun(visits[: random.randint(0, n - 1)])
        begun = (Begun(visits, scored), partly) if has_ended else (partly,)
        first = random.randint(1, 3)
        self.epochs[trial] = first + 1
        round_ = Round(self.n_rounds, (Chain(trial, range(first, first + 2), n, begun=begun),))
        self.n_rounds += 1
        self.world.add_round(round_)
        self.world.tell(RoundAdded(round_), *self.world.refresh_ready())

    @precondition(lambda self: self.n_rounds < 3)
    @rule(
        n_trials=st.integers(1, 4),
        n_epochs=st.integers(1, 2),
        evaluate=st.booleans(),
        random=st.none() | st.randoms(use_true_random=False),
    )
    def more_rounds(self, n_trials, n_epochs, evaluate, random):
        self.add_round(n_trials, n_epochs, evaluate, random)

    def some_worker(self, data):
        names = sorted(self.world.machines)
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: len(self.world.machines) < 5)
    @rule(
        data=st.data(),
        speed=st.sampled_from([0.5, 1.0, 4.0]),
        limited=st.booleans(),
        again=st.booleans(),
    )
    def worker_comes(self, data, speed, limited, again):
        n = self.world.config.n_shards
        limit = data.draw(st.integers(0, n)) if limited else None
        most = n if limit is None else limit
        shards = data.draw(st.sets(st.integers(0, n - 1), max_size=min(most, 2)))
        self.world.add_worker(shards, speed, limit, again)

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data(), expected=st.booleans(), finished=st.booleans(), noticed=st.booleans())
    def worker_dies(self, data, expected, finished, noticed):
        self.world.kill(self.some_worker(data), expected, finished, noticed)

    @precondition(lambda self: sum(not m.draining for m in self.world.machines.values()) > 1)
    @rule(data=st.data())
    def worker_drains(self, data):
        worker = self.some_worker(data)
        self.world.machines[worker].draining = True
        self.world.tell(DrainRequested(worker))

    @precondition(lambda self: any(m.drained for m in self.world.machines.values()))
    @rule()
    def drained_worker_goes(self):
        for worker, machine in list(self.world.machines.items()):
            if machine.drained:
                self.world.kill(worker, True, False)

    @rule(n=st.integers(1, 5))
    def shards_arrive(self, n):
        for worker, machine in self.world.machines.items():
            for _ in range(min(n, len(machine.loading))):
                self.world.load(worker)

    @precondition(lambda self: any(m.loading for m in self.world.machines.values()))
    @rule(data=st.data())
    def a_shard_is_refused(self, data):
        names = [w for w, m in sorted(self.world.machines.items()) if m.loading]
        self.world.refuse(data.draw(st.sampled_from(names)))

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data(), index=st.integers(0, 1))
    def unit_starts(self, data, index):
        self.world.start(self.some_worker(data), index)

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data(), seconds=SECONDS, together=st.booleans(), n=st.integers(1, 4))
    def units_finish(self, data, seconds, together, n):
        for _ in range(n):
            self.world.now += seconds
            self.world.finish(self.some_worker(data), seconds, together)

    @precondition(lambda self: self.world.machines)
    @rule(data=st.data())
    def unit_raises(self, data):
        self.world.fail(self.some_worker(data))

    @rule(n_steps=st.integers(1, 20))
    def all_goes_well(self, n_steps):
        for _ in range(n_steps):
            self.world.step()

    @precondition(lambda self: self.world.results)
    @rule(data=st.data())
    def result_is_lost(self, data):
        self.world.lose(data.draw(st.sampled_from(sorted(self.world.results))))

    @precondition(lambda self: self.world.awaited())
    @rule(data=st.data())
    def awaited_result_is_lost(self, data):
        """The epoch is still being validated, and the trial may be in its next one."""
        self.world.lose(data.draw(st.sampled_from(self.world.awaited())))

    @precondition(lambda self: any(m.queue for m in self.world.machines.values()))
    @rule(data=st.data())
    def unit_is_interrupted(self, data):
        busy = [w for w, m in sorted(self.world.machines.items()) if m.queue]
        self.world.interrupt(data.draw(st.sampled_from(busy)))

    @precondition(lambda self: self.world.preempts)
    @rule(keep=st.booleans())
    def preempted_unit_comes_back(self, keep):
        self.world.answer_preempt(keep)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        self.world.tick(seconds)

    @precondition(lambda self: len(self.world.chains.keys() - self.world.gone) > 1)
    @rule(data=st.data())
    def trial_is_stopped(self, data):
        trial = data.draw(st.sampled_from(sorted(self.world.chains.keys() - self.world.gone)))
        self.world.withdraw(trial)
        self.world.tell(TrialStopped(trial))

    @rule(data=st.data(), priority=st.sampled_from([-1.0, 0.0, 2.0]))
    def priority_changes(self, data, priority):
        trial = data.draw(st.sampled_from(sorted(self.world.chains)))
        self.world.tell(PriorityChanged(trial, priority))

    @rule(data=st.data(), gang=st.integers(1, 3), seconds=st.none() | st.sampled_from([0.25, 2.0]))
    def trial_gets_terms(self, data, gang, seconds):
        trial = data.draw(st.sampled_from(sorted(self.world.chains)))
        if trial not in self.world.gone:
            self.world.allow(trial, gang, seconds)

    @rule(n=st.integers(1, 3))
    def gangs_begin(self, n):
        """Shards come to where gangs can train, and those of 2 do."""
        for trial in sorted(self.world.chains.keys() - self.world.gone)[:n]:
            self.world.allow(trial, 2, None)
        self.shards_arrive(5)

    @rule(data=st.data())
    def trial_has_to_rest(self, data):
        trial = data.draw(st.sampled_from(sorted(self.world.chains)))
        if trial not in self.world.gone:
            self.world.hold(trial)

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.run_failed is None:
            world.add_worker((), 1.0, None)
        for trial in sorted(world.chains.keys() - world.gone):
            if trial % 3 == 2 and world.run_failed is None:
                world.hold(trial)
                continue
            most = sum(not machine.draining for machine in world.machines.values())
            if trial % 2 or world.gangs.get(trial, 1) > most or world.run_failed is not None:
                world.allow(trial, 1, None)
            else:
                world.allow(trial, world.gangs.get(trial, 1), None)
        world.complete()
        if world.run_failed is None:
            for trial in sorted(world.held - world.gone):
                world.allow(trial, 1, None)
            world.complete()
        for machine in world.machines.values():
            if machine.draining and world.run_failed is None:
                assert machine.drained, "a drain does not end"


LEAN = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)


def test_laws_hold_whatever_happens():
    run_state_machine_as_test(DispatchMachine, settings=LEAN)


def keeps_visited_shards(monkeypatch):
    record = Trial.record

    def broken(self, unit, shard):
        left = self.epochs[unit.epoch].left
        good = record(self, unit, shard)
        self.epochs[unit.epoch].left = left
        return good

    monkeypatch.setattr(Trial, "record", broken)


def offers_active_trials(monkeypatch):
    def broken(self, trial):
        if trial.ready:
            self.list_scheduler.enter(trial.number, trial.need(trial.ready[0]))

    monkeypatch.setattr(DispatchState, "requeue", broken)


def binds_three_units(monkeypatch):
    monkeypatch.setattr(assignment, "DEPTH", 3)
    monkeypatch.setattr(Assigner, "_may_bind_behind", lambda self, binding, host: True)


def forgets_the_shards_of_lost_units(monkeypatch):
    monkeypatch.setattr(Trial, "recorded", lambda self, unit: self.partial.get(unit))


def forgets_the_shards_of_dead_workers(monkeypatch):
    removed = Dispatcher._on_worker_removed

    def broken(self, event):
        removed(self, event)
        self.moves.members_changed = False

    monkeypatch.setattr(Dispatcher, "_on_worker_removed", broken)


def forgets_the_shards_of_interrupted_units(monkeypatch):
    monkeypatch.setattr(
        Trial, "recorded", lambda self, unit: self.epochs[unit.epoch].visited[unit.position]
    )


def begins_on_busy_workers(monkeypatch):
    def broken(self):
        for number in list(self.state.gangs):
            trial, hosts = self.state.trials[number], self.state.holdings.workers.values()
            shard = next(bits(trial.need(trial.ready[0])))
            holders = [s for s in hosts if s.held >> shard & 1 and len(s.bound) < 2]
            size = self.state.terms[number].gang
            if len(holders) >= size:
                self.state.bind(trial.ready[0], holders[0], shard, holders[1:size])

    monkeypatch.setattr(Gangs, "_serve", broken)


def offers_trials_that_rest(monkeypatch):
    def broken(self, trial):
        self.gangs.pop(trial.number, None)
        gang = self.terms[trial.number].gang if trial.number in self.terms else 1
        if trial.active is None and trial.ready and gang > 1:
            self.gangs[trial.number] = None
        elif trial.active is None and trial.ready:
            self.list_scheduler.enter(trial.number, trial.need(trial.ready[0]))

    monkeypatch.setattr(DispatchState, "requeue", broken)


def leaves_lost_results_of_trials_that_rest(monkeypatch):
    requeue = DispatchState.requeue

    def broken(self, trial):
        terms = self.terms.get(trial.number)
        if terms is not None and terms.held and trial.active is None:
            self.list_scheduler.leave(trial.number)
        else:
            requeue(self, trial)

    monkeypatch.setattr(DispatchState, "requeue", broken)


def rests_too_early(monkeypatch):
    def broken(state):
        for number in list(state.coming_to_rest):
            del state.coming_to_rest[number]
            state.out.append(TrialRests(number, state.terms[number].number))

    monkeypatch.setattr(dispatcher, "tell_rests", broken)


def forgets_that_members_went(monkeypatch):
    monkeypatch.setattr(Binding, "there", Binding.workers)


@pytest.mark.parametrize(
    "plant",
    [
        keeps_visited_shards,
        offers_active_trials,
        binds_three_units,
        forgets_the_shards_of_lost_units,
        forgets_the_shards_of_dead_workers,
        forgets_the_shards_of_interrupted_units,
        begins_on_busy_workers,
        offers_trials_that_rest,
        leaves_lost_results_of_trials_that_rest,
        rests_too_early,
        forgets_that_members_went,
    ],
)
def test_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    # Without shrinking: that it fails is all we want to know.
    hunt = settings(LEAN, max_examples=2000)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        run_state_machine_as_test(DispatchMachine, settings=hunt)
