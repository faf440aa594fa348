"""Laws 1 to 3 and what the dispatcher's state must always satisfy, each as a clear sentence."""

from __future__ import annotations

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.units import Unit


def check(state: DispatchState) -> None:
    """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
    state.holdings.check()
    for trial in state.trials.values():
        trial.check()
    _check_exclusivity(state)
    _check_isolation(state)
    for binding in state.bindings.values():
        _check_binding(state, binding)
    for waiting in state.evaluations:
        assert not waiting.keys() & state.bindings.keys(), "an evaluation is ready and bound"
    n_waiting = sum(len(waiting) for waiting in state.evaluations)
    assert n_waiting == state.n_evaluations, "the number of waiting evaluations is wrong"


def _check_exclusivity(state: DispatchState) -> None:
    hosts = state.holdings.workers.values()
    placed = [(unit, host.worker) for host in hosts for unit in host.bound]
    bound = [(unit, worker) for unit, binding in state.bindings.items() for worker in binding.there]
    assert sorted(placed) == sorted(bound), "workers and bindings disagree"
    for host in state.holdings.workers.values():
        assert len(host.bound) <= 2, f"exclusivity: {host.worker} has {len(host.bound)} units"
        running = [unit for unit in host.bound if state.bindings[unit].started]
        assert len(running) <= 1, f"exclusivity: {host.worker} runs {running} at once"


def _check_isolation(state: DispatchState) -> None:
    active: dict[int, Unit] = {}
    for unit in state.bindings:
        if unit.kind == "train":
            other = active.setdefault(unit.trial, unit)
            assert other is unit, f"isolation: {unit} and {other} are bound at once"
    for trial in state.trials.values():
        assert trial.active == active.get(trial.number), (
            f"isolation: trial {trial.number} says that {trial.active} is bound, "
            f"but {active.get(trial.number)} is"
        )
        assert trial.active not in trial.ready, f"{trial.active} is ready and bound"


def _check_binding(state: DispatchState, binding: Binding) -> None:
    unit, shard = binding.unit, binding.shard
    for worker in binding.there:
        host = state.holdings.workers.get(worker)
        assert host is not None, f"{unit} is bound to {worker}, which is gone"
        assert host.held >> shard & 1, f"{worker} does not hold shard {shard} of {unit}"
        assert not binding.members or host.bound == [unit], (
            f"a worker of the gang of {unit} has another unit"
        )
    if unit.kind == "check":
        assert shard == unit.position, f"{unit} is bound to shard {shard}"
        return
    trial = state.trials.get(unit.trial)
    if trial is None or unit.epoch not in trial.epochs:
        assert binding.preempted_s is not None, f"{unit} is nobody's, but runs"
        return
    if unit.kind == "evaluate":
        assert shard == unit.position, f"{unit} is bound to shard {shard}"
        return
    recorded = trial.recorded(unit)
    if recorded is None:
        recorded = trial.epochs[unit.epoch].chain.fixed_shard(unit)
    assert recorded is None or recorded == shard, (
        f"completeness: {unit} belongs to shard {recorded}, but is bound to {shard}"
    )
    if not trial.is_repeat(unit):
        assert trial.epochs[unit.epoch].left >> shard & 1, (
            f"completeness: {unit} is bound to shard {shard}, which the trial has visited"
        )


def check_homes(state: DispatchState) -> None:
    """Each shard that may be held is held, on its way, or waits for room."""
    if not state.trials:
        return
    stay = [host for host in state.holdings.workers.values() if not host.draining]
    room = sum(
        state.config.n_shards if host.max_shards is None else host.max_shards for host in stay
    )
    if not stay or room < state.config.n_shards or any(host.refused for host in stay):
        return
    homeless = state.holdings.homeless()
    assert not homeless, f"shards {homeless} are nowhere, and nobody loads them"
