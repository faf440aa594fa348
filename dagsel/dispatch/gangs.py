"""Binds the units of gangs: to workers that are all idle, all at once, or to none.

A gang that waits is given the workers that are the soonest to be free together: they get no other
training unit until it has begun. Only the gang whose turn it is may do so, and what runs on these
workers ends by itself, so no two gangs wait for each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from math import inf, nextafter
from typing import NamedTuple

from dagsel.dispatch.dispatch_state import DispatchState
from dagsel.dispatch.events import Worker
from dagsel.dispatch.interventions import fail
from dagsel.dispatch.list_scheduler import bits
from dagsel.dispatch.trials import Trial
from dagsel.dispatch.units import Unit
from dagsel.dispatch.workers import KnownWorker


class Choice(NamedTuple):
    """Where a gang may train: when, with which shard, on which workers, the leader first."""

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
    """Choose shard and workers of a gang: the soonest, those of last time, the fewest nodes.

    Parameters
    ----------
    need
        Bit mask of the shards that it may visit.
    size
        Its workers.
    hosts
        Workers to choose from.
    free_at
        When each is free.
    now_s
        The time.
    home
        Where its state is: the leader, if it is one of them.
    last
        The workers that it trained on before.

    Returns
    -------
    Choice
        None if no shard is held by so many workers.

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
        holders = [host for host in hosts if host.held >> shard & 1]
        if len(holders) < size:
            continue
        times = sorted(max(now_s, free_at[host.worker]) for host in holders)
        start = times[size - 1]
        there = [host for host in holders if max(now_s, free_at[host.worker]) <= start]
        chosen = _near(there, size, home, last)
        n_new = sum(host.worker not in last for host in chosen)
        rank = (start, n_new, len({host.node for host in chosen}))
        if best is None or rank < best:
            workers = sorted((host.worker for host in chosen), key=lambda w: (w != home, w))
            best, choice = rank, Choice(start, shard, tuple(workers))
    return choice


def _near(
    hosts: list[KnownWorker], size: int, home: Worker | None, last: Collection[Worker]
) -> list[KnownWorker]:
    """Choose hosts of few nodes: those of last time first, then whole nodes."""
    n_free = Counter(host.node for host in hosts)
    kept = Counter(host.node for host in hosts if host.worker in last)

    def rank(host: KnownWorker) -> tuple[bool, bool, int, bool, int, str, str]:
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
    """The gangs that wait on a state.

    Attributes
    ----------
    reserved
        Workers that are kept for the gang whose turn it is.
    stuck
        Since when there have not been workers enough for a trial's gang.
    """

    def __init__(self, state: DispatchState) -> None:
        self.state = state
        self.reserved: frozenset[Worker] = frozenset()
        self.stuck: dict[int, float] = {}

    def settle(self) -> None:
        """Bind what can begin now, and give up what could not for too long."""
        if self.state.gangs or self.reserved or self.stuck:
            self._serve()
            self._watch()

    def _watch(self) -> None:
        for number, since in list(self.stuck.items()):
            overdue_s = since + self.state.config.capacity_timeout_s
            if self.state.now < overdue_s:
                self.state.wake(overdue_s)
            else:
                fail(self.state, number, self._shortage(number))

    def _serve(self) -> None:
        """Bind what can begin now, and reserve workers for the first that cannot."""
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
            idle = not any(state.holdings.workers[w].bound for w in choice.workers)
            if idle:
                leader, *members = (state.holdings.workers[w] for w in choice.workers)
                self._bind(trial.ready[0], choice.shard, leader, members)
            elif not self.reserved:
                self.reserved = frozenset(choice.workers)
        self.stuck = stuck

    def _shortage(self, number: int) -> str:
        """Why a gang cannot begin, in numbers."""
        size, holdings = self.state.terms[number].gang, self.state.holdings
        stay = sum(not host.draining for host in holdings.workers.values())
        if stay < size:
            return f"a gang of {size} was wanted, and there are {stay} workers; add workers"
        return (
            f"a gang of {size} was wanted, and memory lets fewer of the {stay} workers hold the "
            "same shard; add memory, or write the data set in smaller shards"
        )

    def _can_be_formed(self, trial: Trial) -> bool:
        """Whether there would be workers enough if all were free and shards were loaded."""
        size, need = self.state.terms[trial.number].gang, trial.need(trial.ready[0])
        stay = [host for host in self.state.holdings.workers.values() if not host.draining]
        if not stay:
            return True  # if none comes, it is the run that ends, not the trial
        return any(
            sum((host.held | host.loading | host.wanted) >> shard & 1 for host in stay) >= size
            for shard in bits(need)
        )

    def _bind(
        self, unit: Unit, shard: int, leader: KnownWorker, members: list[KnownWorker]
    ) -> None:
        state = self.state
        if state.fits(unit, leader.worker, shard, state.now, 1 + len(members)):
            state.bind(unit, leader, shard, members)

    def _choose(self, trial: Trial) -> Choice | None:
        state = self.state
        hosts = [
            host
            for host in state.holdings.workers.values()
            if not host.draining and host.worker not in self.reserved
        ]
        return choose(
            trial.need(trial.ready[0]),
            state.terms[trial.number].gang,
            hosts,
            {host.worker: self._free_at(host) for host in hosts},
            state.now,
            home=state.list_scheduler.home.get(trial.number),
            last=state.last_gang.get(trial.number, ()),
        )

    def _free_at(self, host: KnownWorker) -> float:
        # A unit that takes longer than was expected has not ended for all that.
        free_at = self.state.list_scheduler.free_at[host.worker]
        return max(free_at, nextafter(self.state.now, inf)) if host.bound else free_at

    def _rank(self, number: int) -> tuple[float, float, int]:
        list_scheduler = self.state.list_scheduler
        return -list_scheduler.priority.get(number, 0.0), -list_scheduler.rem[number], number

    def _is_scored_first(self, trial: Trial) -> bool:
        # Else a gang that goes on from epoch to epoch would never hear what they were worth.
        epoch = trial.ready[0].epoch - 1
        before = trial.open.get(epoch)
        return before is not None and any(
            unit.trial == trial.number and unit.epoch == epoch
            for waiting in self.state.evaluations
            for unit in waiting
        )

    def _fits_alone(self, trial: int, workers: Iterable[Worker]) -> bool:
        state = self.state
        unit, need = state.trials[trial].ready[0], state.list_scheduler.need[trial]
        return any(state.fits(unit, w, shard, state.now) for w in workers for shard in bits(need))

    def _crowds_out(self, number: int, choice: Choice) -> bool:
        """Whether a trial that comes first would find no worker beside the gang."""
        list_scheduler = self.state.list_scheduler

        def rank(trial: int) -> tuple[float, float]:
            return list_scheduler.priority.get(trial, 0.0), list_scheduler.rem[trial]

        n_ahead = sum(
            rank(trial) > rank(number) and self._fits_alone(trial, choice.workers)
            for trial in list_scheduler.idle
        )
        hosts = self.state.holdings.workers.values()
        n_left = sum(
            not (host.bound or host.draining or host.worker in choice.workers) for host in hosts
        )
        return n_ahead > n_left
