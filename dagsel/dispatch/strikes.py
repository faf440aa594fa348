"""Units under which workers die, or that take too long, and when their trials fail for it."""

from __future__ import annotations

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import FailTrial, Preempt, RestartWorker
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker

MOST_STRIKES = 2  # times `max_strikes`, however many strikes other units get meanwhile


def fail(state: DispatchState, trial: int, reason: str) -> None:
    """End a trial as failed."""
    state.out.append(FailTrial(trial, reason))
    state.forget(trial)


def strike(state: DispatchState, unit: Unit, reason: str) -> None:
    """Count a strike of a unit; its trial fails if it was one too many."""
    if unit.trial not in state.trials:
        return
    own, others = state.strike(unit)
    # Where workers die under other units too, the unit may not be the cause.
    most = state.config.max_strikes
    if own >= min(most + others, MOST_STRIKES * most):
        fail(state, unit.trial, f"{reason} ({own} strikes)")


def culprit(state: DispatchState, host: KnownWorker, *, expected: bool) -> Unit | None:
    """Return the unit under which a worker was lost; None if no unit is to blame.

    It is the unit that ran there. A gang's unit counts only where the leader is lost: for another
    member it gets its strike when the gang breaks.
    """
    led = [unit for unit in host.bound if state.bindings[unit].worker == host.worker]
    found = next((unit for unit in led if state.bindings[unit].started), led[0] if led else None)
    if found is not None and (expected or state.bindings[found].timed_out):
        return None  # the worker was asked to go, or the unit got its strike at its time limit
    return found


def watch_time_limits(state: DispatchState) -> None:
    """Stop units that are past their time limit; restart the workers of those that do not stop."""
    limit = state.config.unit_timeout_s
    if limit is None:
        return
    grace_s = state.config.grace_s
    for binding in list(state.bindings.values()):
        if binding.began_s is None or not binding.started:  # it waits for another unit
            continue
        if binding.preempted_s is None:
            if state.now < binding.began_s + limit:
                state.wake(binding.began_s + limit)
                continue
            binding.preempted_s, binding.timed_out = state.now, True
            state.out.append(Preempt(binding.unit, binding.worker))
            strike(state, binding.unit, f"{binding.unit} ran longer than {limit:g} s")
        host = state.workers[binding.worker]
        overdue_s = max(binding.began_s, binding.preempted_s) + grace_s
        if state.now < overdue_s:
            state.wake(overdue_s)
        elif not host.restarting:
            host.restarting = True
            reason = f"{binding.unit} was told to stop {grace_s:g} s ago and still runs"
            state.out.append(RestartWorker(binding.worker, reason))
