"""Gives workers their next units: those that idle, and those whose unit is about to end.

`dagsel.dispatch.list_scheduler.ListScheduler` decides which trial a worker takes; this module
decides which worker is asked, in which order, and when.
"""

from __future__ import annotations

from math import inf

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import Worker
from dagsel.dispatch.gangs import Gangs
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.workers import KnownWorker

DEPTH = 2  # units on a worker: one that runs, one that waits
LONG_UNIT = 20.0  # times `overhead_s`: a unit that long need not be bound ahead of a stay


class Assigner:
    """Binds units that need one worker; those of gangs are bound by `dagsel.dispatch.gangs`."""

    def __init__(self, state: DispatchState, gangs: Gangs) -> None:
        self.state, self.gangs = state, gangs
        self.list_scheduler, self.holdings = state.list_scheduler, state.holdings

    def settle(self) -> None:
        """Bind what can be bound now."""
        if not self.state.n_evaluations and next(self.list_scheduler.idle, None) is None:
            return
        self._bind_idle()
        if self.state.times.known:
            self._look_ahead()

    def _bind_idle(self) -> None:
        state, list_scheduler = self.state, self.list_scheduler
        hosts = [s for s in self.holdings.workers.values() if not s.bound and not s.draining]
        rank = list_scheduler.speed if list_scheduler.replicated else list_scheduler.load
        first = self._warm_homes() if len(hosts) > 1 else ()
        for host in sorted(hosts, key=lambda s: (s.worker not in first, -rank[s.worker])):
            if state.n_evaluations or not list_scheduler.is_dry(host.worker):
                self._serve(host, state.now, blocked=0)

    def _warm_homes(self) -> set[Worker | None]:
        """Workers that keep the state of an idle trial which was stopped inside a shard."""
        trials = self.state.trials
        cut = (trial for trial in self.list_scheduler.idle if trials[trial].partial)
        return {self.list_scheduler.home.get(trial) for trial in cut}

    def _serve(self, host: KnownWorker, start: float, *, blocked: int) -> None:
        """Bind a unit to the host, an evaluating one first."""
        state, list_scheduler = self.state, self.list_scheduler
        unit = state.pick_evaluation(host, blocked) if state.n_evaluations else None
        if unit is not None:
            state.bind(unit, host, unit.position)
            return
        if host.worker in self.gangs.reserved:
            return
        taken = list_scheduler.pick(host.worker, start, blocked=blocked)
        if taken is None:
            if list_scheduler.wait_until < inf:
                state.wake(list_scheduler.wait_until)
            return

        def fits(trial: int, shard: int) -> bool:
            return state.fits(state.trials[trial].ready[0], host.worker, shard, start)

        if not fits(*taken):  # before the horizon; a shorter one may
            idle = (
                trial for trial in list_scheduler.idle if not list_scheduler.need[trial] & blocked
            )
            held = ((t, shard) for t in idle for shard in bits(list_scheduler.need[t] & host.held))
            taken = next((other for other in held if fits(*other)), None)
        if taken is not None:
            trial, shard = taken
            state.bind(state.trials[trial].ready[0], host, shard)

    def _look_ahead(self) -> None:
        """Bind behind units that are about to end what no idle worker could run now."""
        state, list_scheduler = self.state, self.list_scheduler
        if not state.n_evaluations and next(list_scheduler.idle, None) is None:
            return
        now, free_at, blocked, soonest = state.now, list_scheduler.free_at, 0, inf
        near: list[tuple[KnownWorker, Binding]] = []
        for worker, host in self.holdings.workers.items():
            if host.draining:
                continue
            if not host.bound:
                blocked |= 0 if list_scheduler.is_dry(worker) else host.held
            elif len(host.bound) < DEPTH:
                binding = state.bindings[host.bound[-1]]
                opens = free_at[worker] - binding.ahead_s
                if not binding.ahead_s:
                    continue
                if opens <= now:
                    near.append((host, binding))
                elif opens < soonest:
                    soonest = opens
        state.wake(soonest)
        for host, binding in near:
            if self._may_bind_behind(binding, host):
                self._serve(host, free_at[host.worker], blocked=blocked)

    def _may_bind_behind(self, binding: Binding, host: KnownWorker) -> bool:
        state = self.state
        if binding.began_s is None or binding.preempted_s is not None:
            return False
        if state.now > binding.began_s + binding.seconds + binding.ahead_s:
            return False  # overdue: who knows when it ends
        if binding.unit.kind == "train" and binding.unit.trial in state.trials:
            long = binding.seconds >= LONG_UNIT * state.config.overhead_s
            return not (long and self.list_scheduler.would_stay(binding.unit.trial, host.worker))
        return True
