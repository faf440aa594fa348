"""Units under which workers die, or that take too long, and when their trials fail for it."""

from __future__ import annotations

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import FailTrial, Preempt, RestartWorker, Worker
from dagsel.dispatch.list_scheduler import ROUNDING_S
from dagsel.dispatch.suspicion import (
    CONTROL,
    MOST_CONTROL_S,
    MOST_UNBEGUN,
    Evidence,
    Seen,
    Suspect,
)
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker


def fail(state: DispatchState, trial: int, reason: str) -> None:
    """End a trial as failed."""
    state.out.append(FailTrial(trial, reason))
    state.forget(trial)


def strike(state: DispatchState, unit: Unit, reason: str) -> None:
    """Count a strike of a unit; its trial fails if it was one too many."""
    if unit.trial not in state.trials:
        return
    state.strikes[unit] = state.strikes.get(unit, 0) + 1
    if state.strikes[unit] >= state.config.max_strikes:
        fail(state, unit.trial, f"{reason} ({state.strikes[unit]} strikes)")


# ---- lost workers


def begin(state: DispatchState, binding: Binding) -> None:
    """Note that a unit trains or scores from now on."""
    if binding.trains_s is None and not binding.died:
        binding.trains_s, binding.before = state.now, (state.worker_s, state.n_lost)


def worker_lost(state: DispatchState, host: KnownWorker) -> None:
    """Note that a worker was lost that was not to go, and under which unit."""
    on_it = [state.bindings[unit] for unit in host.bound if unit.trial in state.trials]
    if any(binding.timed_out for binding in on_it):
        return  # it was restarted, and the unit got its strike at its time limit
    running = next((b for b in on_it if b.trains_s is not None or b.died), None)
    if running is not None and running.trains_s is not None and host.filled is not None:
        _filled(state, running.unit, host.worker, *host.filled)
        return
    if running is not None:
        suspect = state.suspects.setdefault(running.unit, Suspect())
        if not running.died:
            running.died = True
            suspect.gang = {*running.workers} - {host.worker}
            before = Seen(*running.before, suspect.own_s, suspect.n_own)
            state.stop_clock(running)
            _died(state, running.unit, before)
    else:
        late = ((u, s) for u, s in state.suspects.items() if s.was_in_gang(host.worker, state.now))
        found = next(late, None)
        if found is not None:
            unit, suspect = found
            suspect.gang.discard(host.worker)
            if suspect.broke is not None:
                _died(state, unit, suspect.broke)
        elif on_it:
            suspect = state.suspects.setdefault(on_it[0].unit, Suspect())
            _died_before_it_began(state, suspect)
        else:
            suspect = Suspect()
    suspect.n_own += 1
    state.n_lost += 1


def _filled(
    state: DispatchState, unit: Unit, worker: Worker, n_bytes: int, limit: int | None
) -> None:
    """Fail the trial whose unit has filled a worker's memory; the driver may try it once more."""
    state.n_lost += 1
    reason = f"{unit} filled the memory of worker {worker} with {n_bytes:,} bytes"
    state.out.append(FailTrial(unit.trial, reason, (unit, worker, n_bytes, limit)))
    state.forget(unit.trial)


def _died(state: DispatchState, unit: Unit, before: Seen) -> None:
    """Note a death under a unit that had begun; if it is not the first, the unit has to wait."""
    suspect = state.suspects[unit]
    if suspect.broke is not None:  # that is why its gang broke
        state.strikes[unit] -= 1
    suspect.deaths.append(before)
    suspect.broke, suspect.died_s = None, state.now
    if len(suspect.deaths) >= min(2, state.config.max_strikes):
        control_s = min(CONTROL * (suspect.own_s - before.own_s), MOST_CONTROL_S)
        suspect.waits_until = state.worker_s + control_s


def _died_before_it_began(state: DispatchState, suspect: Suspect) -> None:
    """Note a death under a unit that had not begun, as far as is known."""
    if not suspect.n_unbegun:
        suspect.unbegun_since = suspect.seen(state.worker_s, state.n_lost)
    suspect.n_unbegun += 1
    if suspect.n_unbegun >= MOST_UNBEGUN * state.config.max_strikes:
        suspect.waits_until = state.worker_s + MOST_CONTROL_S


def gang_broke(state: DispatchState, unit: Unit, reason: str) -> None:
    """Count a strike of a gang's unit, unless it broke since a worker was lost or went."""
    binding = state.bindings.get(unit)
    if binding is None or binding.died or binding.lost:
        return
    if unit.trial in state.trials and binding.trains_s is not None:  # else not all had come
        suspect = state.suspects.setdefault(unit, Suspect())
        suspect.gang = {*binding.workers}  # a loss may be heard of later
        suspect.broke = Seen(*binding.before, suspect.own_s, suspect.n_own)
    strike(state, unit, f"the gang of {unit} broke: {reason}")


def judge(state: DispatchState) -> None:
    """Let suspects try again that have waited, or fail their trials."""
    for unit, suspect in list(state.suspects.items()):
        if suspect.waits_until is None or unit not in state.suspects:
            continue
        left_s = suspect.waits_until - state.worker_s
        if left_s > ROUNDING_S:
            if state.workers:
                state.wake(state.now + left_s / len(state.workers))
            continue
        suspect.waits_until = None
        now = suspect.seen(state.worker_s, state.n_lost)
        evidence = suspect.verdict(now, state.config.max_strikes)
        if evidence is not None:
            fail(state, unit.trial, _reason(unit, evidence))
        elif suspect.n_unbegun >= MOST_UNBEGUN * state.config.max_strikes:
            if suspect.others_since(suspect.unbegun_since, now) == 0:
                n = suspect.n_unbegun
                fail(state, unit.trial, f"{n} workers were lost before {unit} began, and no other")
            suspect.n_unbegun = 0
        if unit in state.suspects:
            _let_go(state, unit, suspect)


def _let_go(state: DispatchState, unit: Unit, suspect: Suspect) -> None:
    if unit.kind != "train":
        if suspect.is_ready:
            suspect.is_ready = False
            state.add_evaluation(unit)
    elif unit.trial in state.trials:
        state.requeue(state.trials[unit.trial])


def _reason(unit: Unit, evidence: Evidence) -> str:
    others = "no other was" if not evidence.n_other else f"{evidence.n_other} others were"
    return (
        f"{evidence.n_own} workers were lost while {unit} ran, in {evidence.own_s:.3g} s; in "
        f"{evidence.other_s:.3g} s of workers without it {others}"
    )


# ---- time limits


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
        overdue_s = max(binding.began_s, binding.preempted_s) + grace_s
        if state.now < overdue_s:
            state.wake(overdue_s)
            continue
        reason = f"{binding.unit} was told to stop {grace_s:g} s ago and still runs"
        for worker in binding.there:  # any one of a gang may be the one that hangs
            host = state.workers[worker]
            if not host.restarting:
                host.restarting = True
                state.out.append(RestartWorker(worker, reason))
