"""Units that kill workers, raise or take too long, and what becomes of their trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagsel.dispatch.events import (
    FailTrial,
    Preempt,
    RestartWorker,
    TrialAllowed,
    TrialHeld,
    TrialRests,
    UnitFailed,
)
from dagsel.dispatch.trials import SPENT_S, Allowance
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker

if TYPE_CHECKING:
    from dagsel.dispatch.dispatch_state import DispatchState

if TYPE_CHECKING:
    from dagsel.dispatch.dispatch_state import DispatchState

MOST_STRIKES = 2  # times `max_strikes`, however many strikes other units get meanwhile


def fail(state: DispatchState, trial: int, reason: str) -> None:
    """Give a trial up."""
    state.out.append(FailTrial(trial, reason))
    state.forget(trial)


def strike(state: DispatchState, unit: Unit, reason: str) -> None:
    """Give a unit a strike; its trial fails if it was one too many."""
    if unit.trial not in state.trials:
        return
    own, others = state.strike(unit)
    # Where workers die under other units too, a unit may have been unlucky.
    most = state.config.max_strikes
    if own >= min(most + others, MOST_STRIKES * most):
        fail(state, unit.trial, f"{reason} ({own} strikes)")


def raised(state: DispatchState, event: UnitFailed) -> None:
    """Take a unit that raised off its worker; its trial fails if it did so too often."""
    unit = event.unit
    state.give_back(unit)
    if unit.trial not in state.trials:
        return
    count = state.failures[unit] = state.failures.get(unit, 0) + 1
    if count >= state.config.max_failures:
        fail(state, unit.trial, event.reason)


def culprit(state: DispatchState, host: KnownWorker, *, expected: bool) -> Unit | None:
    """Find the unit under which a worker was lost; None if no unit is to blame.

    It is the one that ran there. Of a gang's unit only the leader's loss counts here: who loses
    another member hears of it when the gang breaks.
    """
    led = [unit for unit in host.bound if state.bindings[unit].worker == host.worker]
    found = next((unit for unit in led if state.bindings[unit].started), led[0] if led else None)
    if found is not None and (expected or state.bindings[found].timed_out):
        return None  # asked for, or struck when its time was over
    return found


def watch_clock(state: DispatchState) -> None:
    """Stop units past their limit; restart the workers of those that do not heed."""
    limit = state.config.unit_timeout_s
    if limit is None:
        return
    grace_s = state.config.grace_s
    for binding in list(state.bindings.values()):
        if binding.began_s is None:
            continue
        if binding.preempted_s is None:
            if state.now < binding.began_s + limit:
                state.wake(binding.began_s + limit)
                continue
            binding.preempted_s, binding.timed_out = state.now, True
            state.out.append(Preempt(binding.unit, binding.worker))
            strike(state, binding.unit, f"{binding.unit} ran longer than {limit:g} s")
        host = state.holdings.workers[binding.worker]
        overdue_s = binding.preempted_s + grace_s
        if state.now < overdue_s:
            state.wake(overdue_s)
        elif not host.restarting:
            host.restarting = True
            reason = f"{binding.unit} was told to stop {grace_s:g} s ago and runs on"
            state.out.append(RestartWorker(binding.worker, reason))


def allow(state: DispatchState, event: TrialAllowed) -> None:
    """Give a trial new terms; its running unit ends if it was bound on others."""
    terms = state.terms[event.trial] = Allowance(event.gang, event.seconds, number=event.number)
    state.coming_to_rest.pop(event.trial, None)
    trial = state.trials.get(event.trial)
    if trial is None:
        return
    if trial.active is None:
        state.requeue(trial)
        return
    binding = state.bindings[trial.active]
    if terms.seconds_left is not None and binding.began_s is not None:
        terms.seconds_left += state.now - binding.began_s  # its unit tells all its seconds at once
    is_other = terms.seconds_left is not None or len(binding.workers) != event.gang
    if is_other and not trial.is_repeat(trial.active):
        state.preempt(trial.active)


def hold(state: DispatchState, event: TrialHeld) -> None:
    """Let a trial rest from its next batch on."""
    if event.trial in state.stopped:
        return
    terms = state.terms.setdefault(event.trial, Allowance())
    terms.held, terms.number = True, event.number
    state.coming_to_rest[event.trial] = None
    trial = state.trials.get(event.trial)
    if trial is None:
        return
    if trial.active is None:
        state.requeue(trial)
    elif not trial.is_repeat(trial.active):
        state.preempt(trial.active)


def spend(state: DispatchState, unit: Unit, seconds: float) -> None:
    """Subtract what a training unit took from its trial's time."""
    terms = state.terms.get(unit.trial)
    if unit.kind == "train" and terms is not None and terms.seconds_left is not None:
        terms.seconds_left = max(0.0, terms.seconds_left - seconds)
        if terms.seconds_left <= SPENT_S and not terms.held:
            terms.held = True
            state.coming_to_rest[unit.trial] = None


def tell_rests(state: DispatchState) -> None:
    """Say of each trial that was held and has come to rest that it has."""
    for number in list(state.coming_to_rest):
        trial = state.trials.get(number)
        if trial is not None:
            trained = [epoch for epoch in trial.open.values() if not epoch.left]
            if trial.active is not None or any(epoch.unscored for epoch in trained):
                continue
        del state.coming_to_rest[number]
        state.out.append(TrialRests(number, state.terms[number].number))
