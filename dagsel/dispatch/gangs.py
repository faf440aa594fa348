"""Binds the units of gangs: to workers that are all idle, at once, or not at all.

For the first gang that has to wait, the workers that will be free together soonest are reserved:
they get no other training unit until the gang has started. Only one gang has such a reservation,
and what runs on its workers ends by itself, so no two gangs of a search wait for each other.
Searches know nothing of each other: the gangs of all take their workers in one order, by process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf, nextafter
from typing import NamedTuple

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import Worker
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.strikes import fail
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.workers import KnownWorker, n_processes


class Choice(NamedTuple):
    """When a gang may start, with which shard, and on which workers, in order; the first leads."""

    start_s: float
    shard: int
    workers: tuple[Worker, ...]


def choose(
    need: int,
    size: int,
    hosts: Iterable[KnownWorker],
    free_at: Mapping[Worker, float],
    now_s: float,
    *,
    home: Worker | None = None,
    last: Collection[Worker] = (),
) -> Choice | None:
    """Choose a gang's shard and workers: free soonest, then those of last time, then few nodes.

    Return None if no shard of the mask `need` is held by `size` hosts. `home` has the state;
    `last` trained the trial last time.

    Examples
    --------
    >>> hosts = [KnownWorker(w, None, held=0b11, node=w[0]) for w in ("a1", "b1", "b2")]
    >>> choose(0b01, 2, hosts, {"a1": 0.0, "b1": 0.0, "b2": 0.0}, now_s=0.0)
    Choice(start_s=0.0, shard=0, workers=('b1', 'b2'))
    """
    hosts = list(hosts)
    best: tuple[float, int, int] | None = None
    choice: Choice | None = None
    for shard in bits(need):
        holders = _one_a_process([host for host in hosts if host.holds(shard)], free_at, home)
        if len(holders) < size:
            continue
        times = sorted(max(now_s, free_at[host.worker]) for host in holders)
        start = times[size - 1]
        there = [host for host in holders if max(now_s, free_at[host.worker]) <= start]
        chosen = _near(there, size, home, last)
        n_new = sum(host.worker not in last for host in chosen)
        rank = (start, n_new, len({host.node for host in chosen}))
        if best is None or rank < best:
            in_order = sorted((host.process or host.worker, host.worker) for host in chosen)
            best, choice = rank, Choice(start, shard, tuple(worker for _, worker in in_order))
    return choice


def _one_a_process(
    hosts: list[KnownWorker], free_at: Mapping[Worker, float], home: Worker | None
) -> list[KnownWorker]:
    """Choose one worker of each process, the one that is free first: ranks need own streams."""
    by_rank = sorted(hosts, key=lambda host: (free_at[host.worker], host.worker != home))
    chosen: dict[str, KnownWorker] = {}
    for host in by_rank:
        chosen.setdefault(host.process or host.worker, host)
    kept = {host.worker for host in chosen.values()}
    return [host for host in hosts if host.worker in kept]


def _near(
    hosts: list[KnownWorker], size: int, home: Worker | None, last: Collection[Worker]
) -> list[KnownWorker]:
    """Choose workers of few nodes: those of last time first, then whole nodes."""
    n_free = Counter(host.node for host in hosts)
    kept = Counter(host.node for host in hosts if host.worker in last or host.worker == home)

    def rank(host: KnownWorker) -> tuple[bool, bool, int, bool, int, str, str]:
        """Return a key by which the workers to choose come first."""
        n = n_free[host.node]
        fits = n >= size
        return (
            host.worker != home,
            host.worker not in last,
            -kept[host.node],
            not fits,
            n if fits else -n,  # the smallest node that takes all, else the largest ones
            host.node,
            host.worker,
        )

    return sorted(hosts, key=rank)[:size]


class Gangs:
    """The gangs that wait."""

    def __init__(self, state: DispatchState) -> None:
        self.state = state
        self.reserved: frozenset[Worker] = frozenset()  # for the first gang that waits
        self.stuck: dict[int, float] = {}  # trials with too few workers, and since when

    def settle(self) -> None:
        """Start the gangs that can start; fail trials whose gangs could not for too long."""
        if self.state.gangs or self.reserved or self.stuck:
            self._start_or_reserve()
            self._watch_stuck()

    def _watch_stuck(self) -> None:
        for number, since in list(self.stuck.items()):
            overdue_s = since + self.state.config.capacity_timeout_s
            if self.state.now < overdue_s:
                self.state.wake(overdue_s)
            else:
                fail(self.state, number, self._shortage(number))

    def _start_or_reserve(self) -> None:
        """Bind the gangs that can start now, and reserve workers for the first that cannot."""
        self.reserved = frozenset()
        state = self.state
        stuck: dict[int, float] = {}
        for number in sorted(state.gangs, key=self._rank):
            trial = state.trials[number]
            if self._is_scored_first(trial):
                continue
            choice = self._choose(trial)
            if choice is None:
                if not self._can_be_formed(trial):
                    stuck[number] = self.stuck.get(number, state.now)
                continue
            if self._crowds_out(number, choice):
                continue
            leader, *members = hosts = [state.workers[worker] for worker in choice.workers]
            unit = trial.ready[0]
            if not state.fits(unit, leader.worker, choice.start_s, len(hosts)):
                continue
            if not any(host.bound for host in hosts):
                state.bind(unit, leader, choice.shard, members)
            elif not self.reserved:
                self.reserved = frozenset(choice.workers)
        self.stuck = stuck

    def _shortage(self, number: int) -> str:
        """Say why a gang cannot start, in numbers."""
        hosts = self.state.workers.staying
        size, n_workers = self.state.allowances[number].gang, len(hosts)
        n_with_room = len(self._with_room(number, hosts))
        if n_with_room < size <= n_workers:
            return (
                f"a gang of {size} was wanted, and {n_with_room} of {n_workers} workers have the "
                f"{self.state.rooms.needs[number]:,} bytes that a unit of it takes; take a smaller "
                "batch_size, max_batch or model, or add memory"
            )
        if n_processes(hosts) < size <= n_workers:
            return (
                f"a gang of {size} was wanted, and the {n_workers} workers are threads of "
                f"{n_processes(hosts)} processes, which can each train a part of one gang; start "
                "workers as processes: Client(processes=True)"
            )
        if n_workers < size:
            return f"a gang of {size} was wanted, and there are {n_workers} workers; add workers"
        return (
            f"a gang of {size} was wanted, and memory lets fewer of the {n_workers} workers hold "
            "the same shard; add memory, write the data set in smaller shards, or leave hold= out"
        )

    def _can_be_formed(self, trial: Trial) -> bool:
        """Whether there would be enough workers if all were free and shards were loaded."""
        size, need = self.state.allowances[trial.number].gang, trial.need(trial.ready[0])
        hosts = self.state.workers.staying
        if not hosts:
            return True  # if none comes, the run ends, not the trial
        hosts = self._with_room(trial.number, hosts)
        return any(
            n_processes(h for h in hosts if (h.held | h.loading | h.wanted) >> shard & 1) >= size
            for shard in bits(need)
        )

    def _choose(self, trial: Trial) -> Choice | None:
        state = self.state
        hosts = [host for host in state.workers.staying if host.worker not in self.reserved]
        hosts = self._with_room(trial.number, hosts)
        return choose(
            trial.need(trial.ready[0]),
            state.allowances[trial.number].gang,
            hosts,
            {host.worker: self._free_at(host) for host in hosts},
            state.now,
            home=state.list_scheduler.home.get(trial.number),
            last=state.last_gang.get(trial.number, ()),
        )

    def _with_room(self, trial: int, hosts: list[KnownWorker]) -> list[KnownWorker]:
        return [host for host in hosts if self.state.rooms.fits(trial, host.worker)]

    def _free_at(self, host: KnownWorker) -> float:
        # A unit that takes longer than expected has not ended yet.
        free_at = self.state.list_scheduler.free_at[host.worker]
        return max(free_at, nextafter(self.state.now, inf)) if host.bound else free_at

    def _rank(self, number: int) -> tuple[float, float, int]:
        list_scheduler = self.state.list_scheduler
        return -list_scheduler.priority.get(number, 0.0), -list_scheduler.rem[number], number

    def _is_scored_first(self, trial: Trial) -> bool:
        # Else the evaluating units would wait for workers until the gang has trained all epochs.
        epoch = trial.ready[0].epoch - 1
        return epoch in trial.open and any(
            unit.trial == trial.number and unit.epoch == epoch
            for waiting in self.state.evaluations
            for unit in waiting
        )

    def _fits_alone(self, trial: int, workers: Iterable[Worker]) -> bool:
        state = self.state
        unit, need = state.trials[trial].ready[0], state.list_scheduler.need[trial]
        return any(
            need & state.workers[worker].held
            and state.rooms.fits(trial, worker)
            and state.fits(unit, worker, state.now)
            for worker in workers
        )

    def _crowds_out(self, number: int, choice: Choice) -> bool:
        """Whether a trial of higher rank would find no worker beside the gang."""
        list_scheduler = self.state.list_scheduler

        def rank(trial: int) -> tuple[float, float]:
            """Return priority and remaining work: of two trials the larger pair goes first."""
            return list_scheduler.priority.get(trial, 0.0), list_scheduler.rem[trial]

        n_ahead = sum(
            rank(trial) > rank(number) and self._fits_alone(trial, choice.workers)
            for trial in list_scheduler.idle
        )
        hosts = self.state.workers.staying
        n_left = sum(not (host.bound or host.worker in choice.workers) for host in hosts)
        return n_ahead > n_left
