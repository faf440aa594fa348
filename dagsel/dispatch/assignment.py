"""Binds units to idle workers, and behind units that are about to end.

`dagsel.dispatch.list_scheduler.ListScheduler` chooses the trial for a worker. This module decides
which workers are offered one, in which order, and when.
"""

from __future__ import annotations

from itertools import chain
from math import inf

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import Worker
from dagsel.dispatch.gangs import Gangs
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.trials import Binding
from dagsel.dispatch.workers import KnownWorker

LONG_UNIT = 20.0  # times `overhead_s`: behind so long a unit nothing is bound if its trial may stay


class Assigner:
    """Binds units that need one worker; those of gangs are bound by `dagsel.dispatch.gangs`."""

    def __init__(self, state: DispatchState, gangs: Gangs) -> None:
        self.state, self.gangs = state, gangs
        self.list_scheduler, self.workers = state.list_scheduler, state.workers

    def settle(self) -> None:
        """Bind what can be bound now."""
        self.state.openings.tidy()
        if self._is_any_ready():
            self._bind_idle()
            if self.state.times.known and self._is_any_ready():
                self._look_ahead()

    def _is_any_ready(self) -> bool:
        return bool(self.state.n_evaluations or self.list_scheduler.n_idle)

    def _bind_idle(self) -> None:
        state, list_scheduler = self.state, self.list_scheduler
        first = self._warm_homes()
        warm = [host for host in self.workers.unbound if host.worker in first] if first else []
        others = (host for host in self.workers.unbound if host.worker not in first)
        for host in chain(warm, others):
            if not self._is_any_ready():
                break
            if state.n_evaluations or host.worker not in list_scheduler.unneeded:
                self._bind_next(host, state.now, blocked=0)

    def _warm_homes(self) -> set[Worker | None]:
        """Return the workers that have the state of an idle trial inside a shard in memory."""
        state = self.state
        state.cut = {n for n in state.cut if n in state.trials and state.trials[n].partial}
        idle = (number for number in state.cut if self.list_scheduler.is_idle(number))
        return {self.list_scheduler.home.get(number) for number in idle}

    def _bind_next(self, host: KnownWorker, start: float, *, blocked: int) -> None:
        """Bind a unit to the worker, an evaluating one first."""
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

        def fits(trial: int) -> bool:
            return state.fits(state.trials[trial].ready[0], host.worker, start)

        if not fits(taken[0]):  # before the horizon; a shorter unit may
            need = list_scheduler.need
            idle = (t for t in list_scheduler.idle if not need[t] & blocked and need[t] & host.held)
            has_room = (t for t in idle if state.rooms.fits(t, host.worker))
            other = next((trial for trial in has_room if fits(trial)), None)
            if other is None:
                return
            taken = other, next(bits(need[other] & host.held))
        trial, shard = taken
        state.bind(state.trials[trial].ready[0], host, shard)

    def _look_ahead(self) -> None:
        """Bind behind units that are about to end what no idle worker could run now."""
        state, list_scheduler = self.state, self.list_scheduler
        blocked = 0
        for host in self.workers.unbound:
            blocked |= 0 if host.worker in list_scheduler.unneeded else host.held
        open_now = state.openings.open_at(state.now)
        state.wake(state.openings.next_at())
        for host in open_now:
            if self._may_bind_behind(state.bindings[host.bound[-1]], host):
                self._bind_next(host, list_scheduler.free_at[host.worker], blocked=blocked)

    def _may_bind_behind(self, binding: Binding, host: KnownWorker) -> bool:
        state = self.state
        if binding.began_s is None or binding.preempted_s is not None:
            return False
        if state.now > binding.began_s + binding.seconds + binding.ahead_s:
            return False  # it is overdue, and its end is not known
        if binding.in_plenty:
            return state.has_plenty(host, binding.seconds)
        if binding.unit.kind == "train" and binding.unit.trial in state.trials:
            is_long = binding.seconds >= LONG_UNIT * state.config.overhead_s
            return not (is_long and self.list_scheduler.would_stay(binding.unit.trial, host.worker))
        return True
