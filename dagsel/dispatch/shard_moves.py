"""When shards are placed anew, how they get there, and how long one may be nowhere.

Where they shall be is decided by `dagsel.dispatch.placement`; who holds, loads and drops what is in
`dagsel.dispatch.workers`.
"""

from __future__ import annotations

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import Drained, FailRun, Worker
from dagsel.dispatch.workers import DRIFT, WATCH_S

EVERYWHERE = 1 << 30  # replicas: as many as there are workers


class ShardMoves:
    """The shards' ways on a state.

    Attributes
    ----------
    has_begun
        Whether there was a round: before the first one no shard is placed.
    members_changed
        Whether shards are to be placed anew: workers came or go, or hold more or less than was
        thought.
    """

    def __init__(self, state: DispatchState) -> None:
        self.state = state
        self.has_begun = False
        self.members_changed = False
        self._moving = False  # not all is where it is wanted
        self._homes_changed = False  # since it was last seen whether all shards have a worker
        self._homeless_since: float | None = None
        self._has_failed = False

    # ---- what may move shards

    def spread(self) -> None:
        """Let every worker hold every shard, as far as memory allows: for gangs and quanta.

        Whoever trains a gang's unit holds its shard, and who is free together is not known before.
        A trial that was stopped inside a shard goes on there: with one holder it would wait for
        that worker while another one idles.
        """
        holdings = self.state.holdings
        if holdings.replicas != EVERYWHERE:
            holdings.replicas = EVERYWHERE
            self.members_changed = True

    def drain(self, worker: Worker) -> None:
        """Let a worker go once others hold what it holds."""
        host = self.state.holdings.workers.get(worker)
        if host is not None:
            host.draining = True
            self.members_changed = True

    def loaded(self, worker: Worker, shard: int, refusal: str | None = None) -> None:
        """Note that a worker has loaded a shard, or why it could not."""
        host = self.state.holdings.workers.get(worker)
        if host is None:
            return
        self._homes_changed = True
        host.loading &= ~(1 << shard)
        if refusal is None:
            host.held |= 1 << shard
            self._moving = True
        else:
            host.refused[shard] = refusal
            self.members_changed = True
        self.state.work_left.is_stale = True

    def watch_drift(self, worker: Worker) -> None:
        """Place the shards anew when a measured speed has clearly left the one it was placed by."""
        times, holdings = self.state.times, self.state.holdings
        drift = abs(1.0 / times.pace[worker] / holdings.workers[worker].placed_speed - 1.0)
        sure = times.n_observed[worker] >= 3 and times.observed_s[worker] >= WATCH_S
        if sure and drift > max(DRIFT, 3.0 * times.speed_error(worker)):
            speeds = self._speeds()
            if not self._moving and holdings.drifted(speeds):
                holdings.replace(speeds)
                self._moving = True

    # ---- decisions

    def settle(self) -> None:
        """Place shards anew if that is due, and ask for the next loads and drops."""
        if self.members_changed and self.has_begun:
            self.members_changed = False
            self.state.holdings.replace(self._speeds())
            self._moving = self._homes_changed = True
        if self._moving:
            self._move()

    def _speeds(self) -> dict[Worker, float]:
        pace = self.state.times.pace
        if not self.state.config.rebalance:
            return dict.fromkeys(pace, 1.0)
        return {worker: 1.0 / seconds for worker, seconds in pace.items()}

    def _move(self) -> None:
        state, list_scheduler, workers = (
            self.state,
            self.state.list_scheduler,
            self.state.holdings.workers,
        )
        in_use: dict[Worker, int] = {}
        for binding in state.bindings.values():
            for worker in binding.there:
                in_use[worker] = in_use.get(worker, 0) | 1 << binding.shard
        state.out.extend(state.holdings.moves(in_use))
        for worker, host in workers.items():
            offered = 0 if host.draining else host.held
            if list_scheduler.held[worker] != offered:
                list_scheduler.held[worker] = offered
                state.work_left.is_stale = True
        list_scheduler.holders_changed()
        stay = (host for host in workers.values() if not host.draining)
        self._moving = any(host.held != host.wanted for host in stay)

    # ---- what time brings

    def watch_drains(self) -> None:
        """Say of each worker that shall go that it may, once it may."""
        for host in self.state.holdings.workers.values():
            if host.draining and not host.drained and self.state.holdings.drain_is_over(host):
                host.drained = True
                self.state.out.append(Drained(host.worker))

    def watch_homeless(self) -> None:
        """Give the run up when a shard has had no worker for too long, or is refused by all."""
        if not self._homes_changed and self._homeless_since is None:
            return
        self._homes_changed = False
        state, holdings = self.state, self.state.holdings
        stay = [host for host in holdings.workers.values() if not host.draining]
        homeless = holdings.homeless() if stay and state.trials else []
        if not homeless:
            self._homeless_since = None
            return
        if self._homeless_since is None:
            self._homeless_since = state.now
        overdue_s = self._homeless_since + state.config.capacity_timeout_s
        refused = any(all(shard in host.refused for host in stay) for shard in homeless)
        if (refused or state.now >= overdue_s) and not self._has_failed:
            self._has_failed = True
            state.out.append(FailRun(holdings.shortage(homeless)))
        elif not self._has_failed:
            state.wake(overdue_s)
