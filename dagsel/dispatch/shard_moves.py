"""When shards are placed anew, how they get there, and how long one may be missing.

`dagsel.dispatch.placement` decides where shards should be; `dagsel.dispatch.workers` knows who
holds, loads and drops them.
"""

from __future__ import annotations

from functools import reduce
from math import inf
from operator import or_

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import Drained, FailRun, Worker
from dagsel.dispatch.strikes import fail
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.workers import DRIFT, WATCH_S

EVERYWHERE = 1 << 30  # replicas: as many as there are workers


class ShardMoves:
    """Moves shards between workers."""

    def __init__(self, state: DispatchState) -> None:
        self.state = state
        self.has_begun = False  # before the first round no shard is placed
        self.workers_changed = False  # so shards have to be placed anew
        self._moving = False  # not all shards are where they are wanted
        self._holders_changed = False  # since missing shards were last looked for
        self._missing_since: float | None = None
        self._unfit_since: float | None = None  # when the last worker went that could store
        self._has_failed = False
        self._draining: dict[Worker, None] = {}
        self._need = 0  # of the largest trial that some worker had room for, as they were placed
        self._crowded_out: dict[int, float] = {}  # trials that no worker has room for; since when

    # ---- what may move shards

    def make_room(self, trial: int, n_bytes: int | None) -> None:
        """Note what a trial's units take; where that fits a copy of each shard has to be."""
        rooms = self.state.rooms
        if rooms.needs.get(trial) == n_bytes:
            return
        rooms.set_need(trial, n_bytes)
        self.state.list_scheduler.unneeded.clear()
        if trial in rooms.barred_somewhere:
            staying = self.state.workers.staying
            self.workers_changed |= rooms.largest(h.room for h in staying) > self._need

    def spread(self) -> None:
        """Make every worker hold every shard, as far as memory allows.

        Gangs and time limits need it. All workers of a gang hold its unit's shard, and which of
        them will be free together is not known before. A trial that was stopped inside a shard goes
        on with that shard: with one holder it would wait for that worker while others are idle.
        """
        workers = self.state.workers
        if workers.replicas != EVERYWHERE:
            workers.replicas = EVERYWHERE
            self.workers_changed = True

    def drain(self, worker: Worker, unfit: str = "") -> None:
        """Drain a worker: it may go once others hold its shards; one that is unfit runs nothing."""
        host = self.state.workers.get(worker)
        if host is None:
            return
        host.draining = True
        self._draining[worker] = None
        self.workers_changed = True
        if unfit:
            host.unfit = unfit
            self._unfit_since = -inf  # it is not waited for another one
            for unit in host.bound:
                self.state.preempt(unit)

    def loaded(self, worker: Worker, shard: int, refusal: str | None = None) -> None:
        """Note that a worker has loaded a shard, or why it could not."""
        host = self.state.workers.get(worker)
        if host is None:
            return
        self._holders_changed = True
        host.loading &= ~(1 << shard)
        if refusal is None:
            host.held |= 1 << shard
            self._moving = True
        else:
            host.refused[shard] = refusal
            self.workers_changed = True
        self.state.work_left.is_stale = True

    def watch_drift(self, worker: Worker) -> None:
        """Place the shards anew if a worker's measured speed is clearly not the one of before."""
        times, workers = self.state.times, self.state.workers
        drift = abs(1.0 / times.pace[worker] / workers[worker].placed_speed - 1.0)
        sure = times.n_observed[worker] >= 3 and times.observed_s[worker] >= WATCH_S
        if sure and drift > max(DRIFT, 3.0 * times.speed_error(worker)):
            speeds = self._speeds()
            if not self._moving and workers.drifted(speeds):
                workers.replace(speeds, need=self._need)
                self._moving = True

    # ---- decisions

    def settle(self) -> None:
        """Place shards anew if that is due, and ask for the next loads and drops."""
        if self.workers_changed and self.has_begun:
            self.workers_changed = False
            self._need = self.state.rooms.largest(h.room for h in self.state.workers.staying)
            self.state.workers.replace(self._speeds(), need=self._need)
            self._moving = self._holders_changed = True
        if self._moving:
            self._move()

    def _speeds(self) -> dict[Worker, float]:
        pace = self.state.times.pace
        if not self.state.config.rebalance:
            return dict.fromkeys(pace, 1.0)
        return {worker: 1.0 / seconds for worker, seconds in pace.items()}

    def _move(self) -> None:
        state, workers = self.state, self.state.workers
        held = state.list_scheduler.held
        in_use: dict[Worker, int] = {}
        for binding in state.bindings.values():
            for worker in binding.there:
                in_use[worker] = in_use.get(worker, 0) | binding.shards
        state.out.extend(workers.moves(in_use))
        for worker, host in workers.items():
            offered = 0 if host.draining else host.held
            if held[worker] != offered:
                held[worker] = offered
                state.work_left.is_stale = True
            state.rooms.set_room(worker, host.room_beside(state.config.shard_bytes))
        was_replicated = state.list_scheduler.replicated
        state.list_scheduler.holders_changed()
        state.work_left.is_stale |= state.list_scheduler.replicated != was_replicated
        self._moving = any(host.held != host.wanted for host in workers.staying)

    # ---- what time brings

    def watch_drains(self) -> None:
        """Report each draining worker that may go."""
        workers = self.state.workers
        for worker in list(self._draining):
            host = workers.get(worker)
            if host is None or not host.draining or host.drained:
                del self._draining[worker]
            elif workers.drain_is_over(host):
                host.drained = True
                self.state.out.append(Drained(worker))

    def watch_rooms(self) -> None:
        """Fail the trials that no worker has had room for, with a shard they need, for too long."""
        state = self.state
        if not (self._crowded_out or state.rooms.is_used):
            return
        before, self._crowded_out = self._crowded_out, {}
        for number in sorted(state.rooms.barred_somewhere & state.trials.keys()):
            if not self._is_crowded_out(state.trials[number]):
                continue
            since = self._crowded_out[number] = before.get(number, state.now)
            overdue_s = since + state.config.room_timeout_s
            if state.now < overdue_s:
                state.wake(overdue_s)
            else:
                del self._crowded_out[number]
                fail(state, number, self._why_no_room(number))

    def _is_crowded_out(self, trial: Trial) -> bool:
        hosts, there = self.state.workers.staying, 0
        for host in hosts:
            if self.state.rooms.fits(trial.number, host.worker):
                there |= host.held | host.loading | host.wanted
        waits = bool(trial.ready) and trial.active is None
        lacks = waits and not trial.need(trial.ready[0]) & there
        trained = (epoch for epoch in trial.open.values() if not epoch.left)
        unscored = reduce(or_, (epoch.unscored for epoch in trained), 0)
        return bool(hosts) and (lacks or bool(unscored & ~there))

    def _why_no_room(self, trial: int) -> str:
        state, hosts = self.state, self.state.workers.staying
        need = state.rooms.needs[trial]
        rooms = [host.room_beside(state.config.shard_bytes) for host in hosts]
        most = max((inf if room is None else room for room in rooms), default=0)
        if need <= most:
            return (
                f"its units take {need:,} bytes, and the workers that have them do not hold all "
                "shards; give the workers more memory, or leave hold= out"
            )
        return (
            f"its units take {need:,} bytes of memory, and a worker has {max(0, int(most)):,} at "
            f"most beside its process and its shards ({len(hosts)} workers); take a smaller "
            "batch_size, max_batch or model, or give the workers more memory"
        )

    def watch_missing(self) -> None:
        """Fail the run if a shard has had no worker for too long, or all have refused it."""
        if not self._holders_changed and self._missing_since is None:
            return
        self._holders_changed = False
        state, workers, hosts = self.state, self.state.workers, self.state.workers.staying
        missing = workers.missing() if hosts and state.trials else []
        if not missing:
            self._missing_since = None
            return
        if self._missing_since is None:
            self._missing_since = state.now
        overdue_s = self._missing_since + state.config.capacity_timeout_s
        refused = any(all(shard in host.refused for host in hosts) for shard in missing)
        if (refused or state.now >= overdue_s) and not self._has_failed:
            self._has_failed = True
            damage = workers.damage(missing)
            state.out.append(FailRun(damage or workers.shortage(missing), bool(damage)))
        elif not self._has_failed:
            state.wake(overdue_s)

    def watch_unfit(self) -> None:
        """Fail the run if no worker can store what it trains, and none comes that can."""
        state, hosts = self.state, self.state.workers.values()
        if not hosts or not all(host.unfit for host in hosts):
            self._unfit_since = None
            return
        if self._unfit_since is None:
            self._unfit_since = state.now
        overdue_s = self._unfit_since + state.config.capacity_timeout_s
        if state.now < overdue_s:
            state.wake(overdue_s)
        elif not self._has_failed:
            self._has_failed = True
            state.out.append(FailRun(state.workers.why_unfit()))
