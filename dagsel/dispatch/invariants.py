"""What must hold for the dispatcher's state at every moment, each as a clear sentence.

Completeness: in an epoch a trial visits each shard once. Isolation: a trial trains one unit at a
time. Exclusivity: a worker trains one unit at a time; it may store what another one has trained.
"""

from __future__ import annotations

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.trials import Binding, Trial
from dagsel.dispatch.units import Unit


def check(state: DispatchState) -> None:
    """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
    _check_memory(state)
    for trial in state.trials.values():
        _check_completeness(trial)
    _check_exclusivity(state)
    _check_isolation(state)
    for binding in state.bindings.values():
        _check_binding(state, binding)
    for waiting in state.evaluations:
        assert not waiting.keys() & state.bindings.keys(), "an evaluation is ready and bound"
    n_waiting = sum(len(waiting) for waiting in state.evaluations)
    assert n_waiting == state.n_evaluations, "the number of waiting evaluations is wrong"
    state.check()


def _check_memory(state: DispatchState) -> None:
    for host in state.workers.values():
        assert not host.held & host.loading, f"{host.worker} loads what it holds"
        if host.max_shards is not None and not host.draining:
            taken = (host.held | host.loading).bit_count()
            assert taken <= max(host.max_shards, host.held.bit_count()), (
                f"{host.worker} is asked to hold {taken} of at most {host.max_shards} shards"
            )


def _check_completeness(trial: Trial) -> None:
    for number, epoch in trial.epochs.items():
        name = f"trial {trial.number}, epoch {number}"
        visited = [shard for shard in epoch.visited if shard is not None]
        assert len(set(visited)) == len(visited), f"{name}: a shard was visited twice: {visited}"
        left = set(range(epoch.chain.n_shards)) - set(visited)
        assert epoch.left == sum(1 << shard for shard in left), (
            f"{name}: visited {sorted(visited)}, but {epoch.left:b} is noted as left"
        )


def _check_exclusivity(state: DispatchState) -> None:
    hosts = state.workers.values()
    placed = [(unit, host.worker) for host in hosts for unit in host.bound]
    bound = [(unit, worker) for unit, binding in state.bindings.items() for worker in binding.there]
    assert sorted(placed) == sorted(bound), "workers and bindings disagree"
    for host in hosts:
        assert len(host.bound) <= 2, f"exclusivity: {host.worker} has {len(host.bound)} units"
        bindings = {unit: state.bindings[unit] for unit in host.bound}
        running = [unit for unit, b in bindings.items() if b.started and not b.stores]
        assert len(running) <= 1, f"exclusivity: {host.worker} runs {running} at once"


def _check_isolation(state: DispatchState) -> None:
    active: dict[int, Unit] = {}
    for unit in state.bindings:
        if unit.kind == "train":
            other = active.setdefault(unit.trial, unit)
            assert other is unit, f"isolation: {unit} and {other} are bound at once"
    for trial in state.trials.values():
        assert trial.active == active.get(trial.number), (
            f"isolation: trial {trial.number} has {trial.active} as bound, "
            f"but {active.get(trial.number)} is"
        )
        assert trial.active not in trial.ready, f"{trial.active} is ready and bound"


def _check_binding(state: DispatchState, binding: Binding) -> None:
    unit, shard = binding.unit, binding.shard
    for worker in binding.there:
        host = state.workers.get(worker)
        assert host is not None, f"{unit} is bound to {worker}, which is gone"
        assert host.holds(shard), f"{worker} does not hold shard {shard} of {unit}"
        assert not binding.members or host.bound == [unit], (
            f"a worker of the gang of {unit} has another unit"
        )
    assert unit.kind == "train" or shard == unit.position, f"{unit} is bound to shard {shard}"
    if unit.kind == "check":
        return
    trial = state.trials.get(unit.trial)
    if trial is None or unit.epoch not in trial.epochs:
        assert binding.preempted_s is not None, f"{unit} runs, but its trial is over"
        return
    if unit.kind == "evaluate":
        return
    recorded = trial.recorded(unit)
    if recorded is None:
        recorded = trial.epochs[unit.epoch].chain.fixed_shard(unit)
    assert recorded is None or recorded == shard, (
        f"completeness: {unit} belongs to shard {recorded}, but is bound to {shard}"
    )
    if not trial.is_repeat(unit):
        for visit in binding.visits:
            assert trial.epochs[unit.epoch].left >> visit & 1, (
                f"completeness: {unit} is bound to shard {visit}, which the trial has visited"
            )
            assert state.workers[binding.worker].holds(visit), (
                f"{binding.worker} does not hold shard {visit}, which it visits after {unit}"
            )


def check_no_shard_is_missing(state: DispatchState) -> None:
    """Raise ``AssertionError`` if a shard that could be held is neither held nor on its way."""
    staying, workers = state.workers.staying, state.workers
    if not state.trials or not staying or any(host.refused for host in staying):
        return
    missing = workers.missing() if workers.room >= workers.n_shards else []
    assert not missing, f"shards {missing} are nowhere, and nobody loads them"
