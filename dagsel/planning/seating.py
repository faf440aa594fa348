"""Gives workers their next units: those that idle, and those whose unit is about to end.

Which trial a worker takes is decided by `dagsel.planning.rule.Shop`; here is decided who is asked,
in which order, and when.
"""

from __future__ import annotations

from math import inf

from dagsel.planning.accounting import Binding
from dagsel.planning.board import Board
from dagsel.planning.events import Worker
from dagsel.planning.gangs import Gangs
from dagsel.planning.holdings import Seated
from dagsel.planning.rule import bits

DEPTH = 2  # units on a worker: one that runs, one that waits
LONG_UNIT = 20.0  # times `overhead_s`: a unit that long need not be bound ahead of a stay


class Seating:
    """Binds units that need one worker; those of gangs are bound by `dagsel.planning.gangs`."""

    def __init__(self, board: Board, gangs: Gangs) -> None:
        self.board, self.gangs = board, gangs
        self.shop, self.holdings = board.shop, board.holdings

    def settle(self) -> None:
        """Bind what can be bound now."""
        if not self.board.n_evaluations and next(self.shop.idle, None) is None:
            return
        self._bind_idle()
        if self.board.times.known:
            self._look_ahead()

    def _bind_idle(self) -> None:
        board, shop = self.board, self.shop
        seats = [s for s in self.holdings.workers.values() if not s.bound and not s.draining]
        rank = shop.speed if shop.replicated else shop.load
        first = self._warm_homes() if len(seats) > 1 else ()
        for seat in sorted(seats, key=lambda s: (s.worker not in first, -rank[s.worker])):
            if board.n_evaluations or not shop.is_dry(seat.worker):
                self._serve(seat, board.now, blocked=0)

    def _warm_homes(self) -> set[Worker | None]:
        """Workers that keep the state of an idle trial which was stopped inside a shard."""
        trials = self.board.trials
        cut = (trial for trial in self.shop.idle if trials[trial].partial)
        return {self.shop.home.get(trial) for trial in cut}

    def _serve(self, seat: Seated, start: float, *, blocked: int) -> None:
        """Bind a unit to the seat, an evaluating one first."""
        board, shop = self.board, self.shop
        unit = board.pick_evaluation(seat, blocked) if board.n_evaluations else None
        if unit is not None:
            board.bind(unit, seat, unit.position)
            return
        if seat.worker in self.gangs.reserved:
            return
        taken = shop.pick(seat.worker, start, blocked=blocked)
        if taken is None:
            if shop.wait_until < inf:
                board.wake(shop.wait_until)
            return

        def fits(trial: int, shard: int) -> bool:
            return board.fits(board.trials[trial].ready[0], seat.worker, shard, start)

        if not fits(*taken):  # before the horizon; a shorter one may
            idle = (trial for trial in shop.idle if not shop.need[trial] & blocked)
            held = ((t, shard) for t in idle for shard in bits(shop.need[t] & seat.held))
            taken = next((other for other in held if fits(*other)), None)
        if taken is not None:
            trial, shard = taken
            board.bind(board.trials[trial].ready[0], seat, shard)

    def _look_ahead(self) -> None:
        """Bind behind units that are about to end what no idle worker could run now."""
        board, shop = self.board, self.shop
        if not board.n_evaluations and next(shop.idle, None) is None:
            return
        now, free_at, blocked, soonest = board.now, shop.free_at, 0, inf
        near: list[tuple[Seated, Binding]] = []
        for worker, seat in self.holdings.workers.items():
            if seat.draining:
                continue
            if not seat.bound:
                blocked |= 0 if shop.is_dry(worker) else seat.held
            elif len(seat.bound) < DEPTH:
                binding = board.bindings[seat.bound[-1]]
                opens = free_at[worker] - binding.ahead_s
                if not binding.ahead_s:
                    continue
                if opens <= now:
                    near.append((seat, binding))
                elif opens < soonest:
                    soonest = opens
        board.wake(soonest)
        for seat, binding in near:
            if self._may_bind_behind(binding, seat):
                self._serve(seat, free_at[seat.worker], blocked=blocked)

    def _may_bind_behind(self, binding: Binding, seat: Seated) -> bool:
        board = self.board
        if binding.began_s is None or binding.preempted_s is not None:
            return False
        if board.now > binding.began_s + binding.seconds + binding.ahead_s:
            return False  # overdue: who knows when it ends
        if binding.unit.kind == "train" and binding.unit.trial in board.trials:
            long = binding.seconds >= LONG_UNIT * board.config.overhead_s
            return not (long and self.shop.would_stay(binding.unit.trial, seat.worker))
        return True
