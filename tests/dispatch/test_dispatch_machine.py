"""Random events in any legal order never break the laws of dispatch, and every round ends.

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

from dagsel.dispatch import dispatcher, openings
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
from dagsel.dispatch.units import Begun, Chain, Round, Unit

from .independent_cluster import IndependentCluster

SECONDS = st.sampled_from([0.01, 0.5, 1.0, 3.0])


class DispatchMachine(RuleBasedStateMachine):
    dispatcher_type = Dispatcher

    @initialize(
        n_shards=st.integers(1, 5),
        replicas=st.sampled_from([1, 2, None]),
        n_workers=st.integers(0, 3),
        timeout=st.sampled_from([None, 5.0]),
        n_epochs=st.integers(1, 3),
        limit=st.none() | st.integers(1, 3),
        at_once_s=st.sampled_from([0.25, 100.0]),
    )
    def begin(self, n_shards, replicas, n_workers, timeout, n_epochs=1, limit=None, at_once_s=0.25):
        config = DispatchConfig(
            n_shards,
            replicas,
            unit_timeout_s=timeout,
            lookahead_s=1.0,
            overhead_s=0.1,
            at_once_s=at_once_s,
        )
        self.n_rounds = 0
        self.epochs: dict[int, int] = {}
        self.model = IndependentCluster(config, self.dispatcher_type)
        for _ in range(n_workers):
            self.model.add_worker((), 1.0, limit)
        self.add_round(2, n_epochs, True, None)

    def add_round(self, n_trials, n_epochs, evaluate, random):
        n = self.model.config.n_shards
        chains = []
        for trial in range(n_trials):
            if trial in self.model.gone:
                continue
            first = self.epochs.get(trial, 0) + 1
            self.epochs[trial] = first + n_epochs - 1
            order = None
            if random is not None:
                order = tuple(tuple(random.sample(range(n), n)) for _ in range(n_epochs))
            self.model.dispatcher.times.add_trial(trial, cost=1.0 + trial)
            chains.append(Chain(trial, range(first, first + n_epochs), n, order, evaluate))
        round_ = Round(self.n_rounds, tuple(chains))
        self.n_rounds += 1
        self.model.add_round(round_)
        self.model.tell(RoundAdded(round_), *self.model.refresh_ready())

    @precondition(lambda self: self.n_rounds < 3)
    @rule(random=st.randoms(use_true_random=False), has_ended=st.booleans())
    def resume_a_trial(self, random, has_ended):
        n, trial = self.model.config.n_shards, 100 + self.n_rounds
        visits = tuple(random.sample(range(n), n))
        scored = frozenset(random.sample(range(n), random.randint(0, n)))
        partly = Begun(visits[: random.randint(0, n - 1)])
        begun = (Begun(visits, scored), partly) if has_ended else (partly,)
        first = random.randint(1, 3)
        self.epochs[trial] = first + 1
        round_ = Round(self.n_rounds, (Chain(trial, range(first, first + 2), n, begun=begun),))
        self.n_rounds += 1
        self.model.add_round(round_)
        self.model.tell(RoundAdded(round_), *self.model.refresh_ready())

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
        names = sorted(self.model.machines)
        return data.draw(st.sampled_from(names)) if names else None

    @precondition(lambda self: len(self.model.machines) < 5)
    @rule(
        data=st.data(),
        speed=st.sampled_from([0.5, 1.0, 4.0]),
        limited=st.booleans(),
        again=st.booleans(),
    )
    def worker_comes(self, data, speed, limited, again):
        n = self.model.config.n_shards
        limit = data.draw(st.integers(0, n)) if limited else None
        most = n if limit is None else limit
        shards = data.draw(st.sets(st.integers(0, n - 1), max_size=min(most, 2)))
        self.model.add_worker(shards, speed, limit, again)

    @precondition(lambda self: self.model.machines)
    @rule(data=st.data(), expected=st.booleans(), finished=st.booleans(), noticed=st.booleans())
    def worker_dies(self, data, expected, finished, noticed):
        self.model.kill(self.some_worker(data), expected, finished, noticed)

    @precondition(lambda self: sum(not m.draining for m in self.model.machines.values()) > 1)
    @rule(data=st.data(), unfit=st.sampled_from(["", "its store fails"]))
    def worker_drains(self, data, unfit):
        worker = self.some_worker(data)
        self.model.machines[worker].draining = True
        self.model.tell(DrainRequested(worker, unfit))

    @precondition(lambda self: any(m.drained for m in self.model.machines.values()))
    @rule()
    def drained_worker_goes(self):
        for worker, machine in list(self.model.machines.items()):
            if machine.drained:
                self.model.kill(worker, True, False)

    @rule(n=st.integers(1, 5))
    def shards_arrive(self, n):
        for worker, machine in self.model.machines.items():
            for _ in range(min(n, len(machine.loading))):
                self.model.load(worker)

    @precondition(lambda self: any(m.loading for m in self.model.machines.values()))
    @rule(data=st.data())
    def a_shard_is_refused(self, data):
        names = [w for w, m in sorted(self.model.machines.items()) if m.loading]
        self.model.refuse(data.draw(st.sampled_from(names)))

    @precondition(lambda self: self.model.machines)
    @rule(data=st.data(), index=st.integers(0, 1), trains=st.booleans())
    def unit_starts(self, data, index, trains):
        self.model.start(self.some_worker(data), index, trains)

    @precondition(lambda self: self.model.machines)
    @rule(
        data=st.data(), seconds=SECONDS, together=st.booleans(), n=st.integers(1, 4),
        n_scored=st.sampled_from([0, 1, 100]), n_then=st.sampled_from([0, 1, 100]),
        is_cut=st.booleans(), overlaps=st.booleans(),
    )  # fmt: skip
    def units_finish(self, data, seconds, together, n, n_scored, n_then, is_cut, overlaps):
        for _ in range(n):
            self.model.now += seconds
            worker = self.some_worker(data)
            self.model.finish(worker, seconds, together, n_scored, n_then, is_cut, overlaps)

    @precondition(lambda self: self.model.machines)
    @rule(data=st.data())
    def unit_raises(self, data):
        self.model.fail(self.some_worker(data))

    @rule(n_steps=st.integers(1, 20))
    def all_goes_well(self, n_steps):
        for _ in range(n_steps):
            self.model.step()

    @precondition(lambda self: self.model.results)
    @rule(data=st.data())
    def result_is_lost(self, data):
        self.model.lose(data.draw(st.sampled_from(sorted(self.model.results))))

    @precondition(lambda self: self.model.awaited())
    @rule(data=st.data())
    def awaited_result_is_lost(self, data):
        """The epoch is still being validated, and the trial may be in its next one."""
        self.model.lose(data.draw(st.sampled_from(self.model.awaited())))

    @precondition(lambda self: any(m.queue for m in self.model.machines.values()))
    @rule(data=st.data())
    def unit_is_interrupted(self, data):
        busy = [w for w, m in sorted(self.model.machines.items()) if m.queue]
        self.model.interrupt(data.draw(st.sampled_from(busy)))

    @precondition(lambda self: self.model.preempts)
    @rule(keep=st.booleans())
    def preempted_unit_comes_back(self, keep):
        self.model.answer_preempt(keep)

    @rule(seconds=SECONDS)
    def time_passes(self, seconds):
        self.model.tick(seconds)

    @precondition(lambda self: len(self.model.chains.keys() - self.model.gone) > 1)
    @rule(data=st.data())
    def trial_is_stopped(self, data):
        trial = data.draw(st.sampled_from(sorted(self.model.chains.keys() - self.model.gone)))
        self.model.withdraw(trial)
        self.model.tell(TrialStopped(trial))

    @rule(data=st.data(), priority=st.sampled_from([-1.0, 0.0, 2.0]))
    def priority_changes(self, data, priority):
        trial = data.draw(st.sampled_from(sorted(self.model.chains)))
        self.model.tell(PriorityChanged(trial, priority))

    @rule(data=st.data(), gang=st.integers(1, 3), seconds=st.none() | st.sampled_from([0.25, 2.0]))
    def trial_gets_an_allowance(self, data, gang, seconds):
        trial = data.draw(st.sampled_from(sorted(self.model.chains)))
        if trial not in self.model.gone:
            self.model.allow(trial, gang, seconds)

    @rule(n=st.integers(1, 3))
    def gangs_begin(self, n):
        """Shards come to where gangs can train, and those of 2 do."""
        for trial in sorted(self.model.chains.keys() - self.model.gone)[:n]:
            self.model.allow(trial, 2, None)
        self.shards_arrive(5)

    @rule(data=st.data())
    def trial_has_to_rest(self, data):
        trial = data.draw(st.sampled_from(sorted(self.model.chains)))
        if trial not in self.model.gone:
            self.model.hold(trial)

    def teardown(self):
        if not hasattr(self, "model"):
            return
        model = self.model
        if model.run_failed is None:
            model.add_worker((), 1.0, None)
        for trial in sorted(model.chains.keys() - model.gone):
            if trial % 3 == 2 and model.run_failed is None:
                model.hold(trial)
                continue
            most = sum(not machine.draining for machine in model.machines.values())
            if trial % 2 or model.gangs.get(trial, 1) > most or model.run_failed is not None:
                model.allow(trial, 1, None)
            else:
                model.allow(trial, model.gangs.get(trial, 1), None)
        model.complete()
        if model.run_failed is None:
            for trial in sorted(model.held - model.gone):
                model.allow(trial, 1, None)
            model.complete()
        for machine in model.machines.values():
            if machine.draining and model.run_failed is None:
                assert machine.drained, "a drain does not end"


BY_NIGHT = pytest.mark.skipif(settings().max_examples < 500, reason="by night: make laws")
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
    monkeypatch.setattr(openings, "DEPTH", 3)
    monkeypatch.setattr(Assigner, "_may_bind_behind", lambda self, binding, host: True)


def forgets_the_shards_of_lost_units(monkeypatch):
    monkeypatch.setattr(Trial, "recorded", lambda self, unit: self.partial.get(unit))


def forgets_the_shards_of_dead_workers(monkeypatch):
    removed = Dispatcher._on_worker_removed

    def broken(self, event):
        removed(self, event)
        self.moves.workers_changed = False

    monkeypatch.setattr(Dispatcher, "_on_worker_removed", broken)


def forgets_the_shards_of_interrupted_units(monkeypatch):
    monkeypatch.setattr(
        Trial, "recorded", lambda self, unit: self.epochs[unit.epoch].visited[unit.position]
    )


def begins_on_busy_workers(monkeypatch):
    def broken(self):
        for number in list(self.state.gangs):
            trial, hosts = self.state.trials[number], self.state.workers.values()
            shard = next(bits(trial.need(trial.ready[0])))
            holders = [s for s in hosts if s.held >> shard & 1 and len(s.bound) < 2]
            size = self.state.allowances[number].gang
            if len(holders) >= size:
                self.state.bind(trial.ready[0], holders[0], shard, holders[1:size])

    monkeypatch.setattr(Gangs, "_start_or_reserve", broken)


def offers_trials_that_rest(monkeypatch):
    def broken(self, trial):
        self.gangs.pop(trial.number, None)
        gang = self.allowances[trial.number].gang if trial.number in self.allowances else 1
        if trial.active is None and trial.ready and gang > 1:
            self.gangs[trial.number] = None
        elif trial.active is None and trial.ready:
            self.list_scheduler.enter(trial.number, trial.need(trial.ready[0]))

    monkeypatch.setattr(DispatchState, "requeue", broken)


def leaves_lost_results_of_trials_that_rest(monkeypatch):
    requeue = DispatchState.requeue

    def broken(self, trial):
        allowance = self.allowances.get(trial.number)
        if allowance is not None and allowance.held and trial.active is None:
            self.list_scheduler.leave(trial.number)
        else:
            requeue(self, trial)

    monkeypatch.setattr(DispatchState, "requeue", broken)


def rests_too_early(monkeypatch):
    def broken(state):
        for number in list(state.coming_to_rest):
            del state.coming_to_rest[number]
            state.out.append(TrialRests(number, state.allowances[number].number))

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
        pytest.param(leaves_lost_results_of_trials_that_rest, marks=BY_NIGHT),
        rests_too_early,
        pytest.param(forgets_that_members_went, marks=BY_NIGHT),
    ],
)
def test_planted_bug_is_caught(plant, monkeypatch):
    plant(monkeypatch)
    # Without shrinking: that it fails is all we want to know.
    hunt = settings(LEAN, max_examples=2000)
    with pytest.raises((AssertionError, LookupError, ValueError)):
        run_state_machine_as_test(DispatchMachine, settings=hunt)


def test_a_unit_told_early_is_bound_once_the_one_before_it_is_done():
    """A chain's first unit is told to be ready while the chain before it trains."""
    machine = DispatchMachine()
    machine.begin(n_shards=1, replicas=1, n_workers=1, timeout=None)
    model = machine.model
    model.withdraw(1)
    model.tell(TrialStopped(1))
    model.load("w0")
    machine.add_round(1, 1, False, None)
    model.finish("w0", 1.0, together=False, n_scored=0)
    assert [unit for unit, _ in model.machines["w0"].queue][:1] == [Unit("train", 0, 2, 0)]
    machine.teardown()
