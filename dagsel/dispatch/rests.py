"""Trials that may train for a limited time, or have to rest."""

from __future__ import annotations

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import TrialAllowed, TrialHeld, TrialRests
from dagsel.dispatch.trials import SPENT_S, Allowance
from dagsel.dispatch.units import Unit


def allow(state: DispatchState, event: TrialAllowed) -> None:
    """Set a trial's allowance; preempt its running unit if that does not fit the new one."""
    allowance = Allowance(event.gang, event.seconds, number=event.number)
    state.allowances[event.trial] = allowance
    state.coming_to_rest.pop(event.trial, None)
    trial = state.trials.get(event.trial)
    if trial is None:
        return
    if trial.active is None:
        state.requeue(trial)
        return
    binding = state.bindings[trial.active]
    if allowance.seconds_left is not None and binding.began_s is not None:
        # At its end the unit reports all its seconds; those until now do not count.
        allowance.seconds_left += state.now - binding.began_s
    is_other = allowance.seconds_left is not None or len(binding.workers) != event.gang
    if is_other and not trial.is_repeat(trial.active):
        state.preempt(trial.active)


def hold(state: DispatchState, event: TrialHeld) -> None:
    """Make a trial rest from its next batch on."""
    if event.trial in state.stopped:
        return
    allowance = state.allowances.setdefault(event.trial, Allowance())
    allowance.held, allowance.number = True, event.number
    state.coming_to_rest[event.trial] = None
    trial = state.trials.get(event.trial)
    if trial is None:
        return
    if trial.active is None:
        state.requeue(trial)
    elif not trial.is_repeat(trial.active):
        state.preempt(trial.active)


def spend(state: DispatchState, unit: Unit, seconds: float) -> None:
    """Subtract the time of a training unit from what its trial has left."""
    allowance = state.allowances.get(unit.trial)
    if unit.kind == "train" and allowance is not None and allowance.seconds_left is not None:
        allowance.seconds_left = max(0.0, allowance.seconds_left - seconds)
        if allowance.seconds_left <= SPENT_S and not allowance.held:
            allowance.held = True
            state.coming_to_rest[unit.trial] = None


def tell_rests(state: DispatchState) -> None:
    """Report each trial that has come to rest."""
    for number in list(state.coming_to_rest):
        trial = state.trials.get(number)
        if trial is not None:
            trained = [epoch for epoch in trial.open.values() if not epoch.left]
            if trial.active is not None or any(epoch.unscored for epoch in trained):
                continue
        del state.coming_to_rest[number]
        state.out.append(TrialRests(number, state.allowances[number].number))
