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

from dagsel.planning.board import Board
from dagsel.planning.events import Worker
from dagsel.planning.holdings import Seated
from dagsel.planning.ledger import Trial
from dagsel.planning.rounds import Unit
from dagsel.planning.rule import bits
from dagsel.planning.strikes import fail


class Choice(NamedTuple):
    """Where a gang may train: when, with which shard, on which workers, the leader first."""

    start_s: float
    shard: int
    workers: tuple[Worker, ...]


def choose(
    need: int,
    size: int,
    seats: Iterable[Seated],
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
    seats
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
    >>> seats = [Seated(w, None, held=0b11, node=w[0]) for w in ("a1", "b1", "b2")]
    >>> choose(0b01, 2, seats, {"a1": 0.0, "b1": 0.0, "b2": 0.0}, now_s=0.0)
    Choice(start_s=0.0, shard=0, workers=('b1', 'b2'))
    """
    seats = list(seats)
    best: tuple[float, int, int] | None = None
    choice: Choice | None = None
    for shard in bits(need):
        holders = [seat for seat in seats if seat.held >> shard & 1]
        if len(holders) < size:
            continue
        times = sorted(max(now_s, free_at[seat.worker]) for seat in holders)
        start = times[size - 1]
        there = [seat for seat in holders if max(now_s, free_at[seat.worker]) <= start]
        chosen = _near(there, size, home, last)
        n_new = sum(seat.worker not in last for seat in chosen)
        rank = (start, n_new, len({seat.node for seat in chosen}))
        if best is None or rank < best:
            workers = sorted((seat.worker for seat in chosen), key=lambda w: (w != home, w))
            best, choice = rank, Choice(start, shard, tuple(workers))
    return choice


def _near(
    seats: list[Seated], size: int, home: Worker | None, last: Collection[Worker]
) -> list[Seated]:
    """Choose seats of few nodes: those of last time first, then whole nodes."""
    n_free = Counter(seat.node for seat in seats)
    kept = Counter(seat.node for seat in seats if seat.worker in last)

    def rank(seat: Seated) -> tuple[bool, bool, int, bool, int, str, str]:
        n = n_free[seat.node]
        fits = n >= size
        return (
            seat.worker != home,
            seat.worker not in last,
            -kept[seat.node],
            not fits,
            n if fits else -n,  # the smallest node that takes all, else the largest ones
            seat.node,
            seat.worker,
        )

    return sorted(seats, key=rank)[:size]


class Gangs:
    """The gangs that wait on a board.

    Attributes
    ----------
    reserved
        Workers that are kept for the gang whose turn it is.
    stuck
        Since when there have not been workers enough for a trial's gang.
    """

    def __init__(self, board: Board) -> None:
        self.board = board
        self.reserved: frozenset[Worker] = frozenset()
        self.stuck: dict[int, float] = {}

    def settle(self) -> None:
        """Bind what can begin now, and give up what could not for too long."""
        if self.board.gangs or self.reserved or self.stuck:
            self._serve()
            self._watch()

    def _watch(self) -> None:
        for number, since in list(self.stuck.items()):
            overdue_s = since + self.board.config.capacity_timeout_s
            if self.board.now < overdue_s:
                self.board.wake(overdue_s)
            else:
                fail(self.board, number, self._shortage(number))

    def _serve(self) -> None:
        """Bind what can begin now, and reserve workers for the first that cannot."""
        self.reserved = frozenset()
        board = self.board
        stuck: dict[int, float] = {}
        for number in sorted(board.gangs, key=self._rank):
            trial = board.trials[number]
            if self._is_scored_first(trial):
                continue
            choice = self._choose(trial)
            if choice is None:
                if not self._can_be_formed(trial):
                    stuck[number] = self.stuck.get(number, board.now)
                continue
            if self._crowds_out(number, choice):
                continue
            idle = not any(board.holdings.workers[w].bound for w in choice.workers)
            if idle:
                leader, *members = (board.holdings.workers[w] for w in choice.workers)
                self._bind(trial.ready[0], choice.shard, leader, members)
            elif not self.reserved:
                self.reserved = frozenset(choice.workers)
        self.stuck = stuck

    def _shortage(self, number: int) -> str:
        """Why a gang cannot begin, in numbers."""
        size, holdings = self.board.terms[number].gang, self.board.holdings
        stay = sum(not seat.draining for seat in holdings.workers.values())
        if stay < size:
            return f"a gang of {size} was wanted, and there are {stay} workers; add workers"
        return (
            f"a gang of {size} was wanted, and memory lets fewer of the {stay} workers hold the "
            "same shard; add memory, or write the data set in smaller shards"
        )

    def _can_be_formed(self, trial: Trial) -> bool:
        """Whether there would be workers enough if all were free and shards were loaded."""
        size, need = self.board.terms[trial.number].gang, trial.need(trial.ready[0])
        stay = [seat for seat in self.board.holdings.workers.values() if not seat.draining]
        if not stay:
            return True  # if none comes, it is the run that ends, not the trial
        return any(
            sum((seat.held | seat.loading | seat.wanted) >> shard & 1 for seat in stay) >= size
            for shard in bits(need)
        )

    def _bind(self, unit: Unit, shard: int, leader: Seated, members: list[Seated]) -> None:
        board = self.board
        if board.fits(unit, leader.worker, shard, board.now, 1 + len(members)):
            board.bind(unit, leader, shard, members)

    def _choose(self, trial: Trial) -> Choice | None:
        board = self.board
        seats = [
            seat
            for seat in board.holdings.workers.values()
            if not seat.draining and seat.worker not in self.reserved
        ]
        return choose(
            trial.need(trial.ready[0]),
            board.terms[trial.number].gang,
            seats,
            {seat.worker: self._free_at(seat) for seat in seats},
            board.now,
            home=board.shop.home.get(trial.number),
            last=board.last_gang.get(trial.number, ()),
        )

    def _free_at(self, seat: Seated) -> float:
        # A unit that takes longer than was expected has not ended for all that.
        free_at = self.board.shop.free_at[seat.worker]
        return max(free_at, nextafter(self.board.now, inf)) if seat.bound else free_at

    def _rank(self, number: int) -> tuple[float, float, int]:
        shop = self.board.shop
        return -shop.priority.get(number, 0.0), -shop.rem[number], number

    def _is_scored_first(self, trial: Trial) -> bool:
        # Else a gang that goes on from epoch to epoch would never hear what they were worth.
        epoch = trial.ready[0].epoch - 1
        before = trial.open.get(epoch)
        return before is not None and any(
            unit.trial == trial.number and unit.epoch == epoch
            for waiting in self.board.evaluations
            for unit in waiting
        )

    def _fits_alone(self, trial: int, workers: Iterable[Worker]) -> bool:
        board = self.board
        unit, need = board.trials[trial].ready[0], board.shop.need[trial]
        return any(board.fits(unit, w, shard, board.now) for w in workers for shard in bits(need))

    def _crowds_out(self, number: int, choice: Choice) -> bool:
        """Whether a trial that comes first would find no worker beside the gang."""
        shop = self.board.shop

        def rank(trial: int) -> tuple[float, float]:
            return shop.priority.get(trial, 0.0), shop.rem[trial]

        n_ahead = sum(
            rank(trial) > rank(number) and self._fits_alone(trial, choice.workers)
            for trial in shop.idle
        )
        seats = self.board.holdings.workers.values()
        n_left = sum(
            not (seat.bound or seat.draining or seat.worker in choice.workers) for seat in seats
        )
        return n_ahead > n_left
