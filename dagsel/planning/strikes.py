"""Units that kill workers, raise or take too long, and what becomes of their trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagsel.planning.events import FailTrial, Preempt, RestartWorker, UnitFailed
from dagsel.planning.holdings import Seated
from dagsel.planning.rounds import Unit

if TYPE_CHECKING:
    from dagsel.planning.board import Board

MOST_STRIKES = 2  # times `max_strikes`, however many strikes other units get meanwhile


def fail(board: Board, trial: int, reason: str) -> None:
    """Give a trial up."""
    board.out.append(FailTrial(trial, reason))
    board.forget(trial)


def strike(board: Board, unit: Unit, reason: str) -> None:
    """Give a unit a strike; its trial fails if it was one too many."""
    if unit.trial not in board.trials:
        return
    own, others = board.strike(unit)
    # Where workers die under other units too, a unit may have been unlucky.
    most = board.config.max_strikes
    if own >= min(most + others, MOST_STRIKES * most):
        fail(board, unit.trial, f"{reason} ({own} strikes)")


def raised(board: Board, event: UnitFailed) -> None:
    """Take a unit that raised off its worker; its trial fails if it did so too often."""
    unit = event.unit
    board.give_back(unit)
    if unit.trial not in board.trials:
        return
    count = board.failures[unit] = board.failures.get(unit, 0) + 1
    if count >= board.config.max_failures:
        fail(board, unit.trial, event.reason)


def culprit(board: Board, seat: Seated, *, expected: bool) -> Unit | None:
    """Find the unit under which a worker was lost; None if no unit is to blame.

    It is the one that ran there. Of a gang's unit only the leader's loss counts here: who loses
    another member hears of it when the gang breaks.
    """
    led = [unit for unit in seat.bound if board.bindings[unit].worker == seat.worker]
    found = next((unit for unit in led if board.bindings[unit].started), led[0] if led else None)
    if found is not None and (expected or board.bindings[found].timed_out):
        return None  # asked for, or struck when its time was over
    return found


def watch_clock(board: Board) -> None:
    """Stop units past their limit; restart the workers of those that do not heed."""
    limit = board.config.unit_timeout_s
    if limit is None:
        return
    grace_s = board.config.grace_s
    for binding in list(board.bindings.values()):
        if binding.began_s is None:
            continue
        if binding.preempted_s is None:
            if board.now < binding.began_s + limit:
                board.wake(binding.began_s + limit)
                continue
            binding.preempted_s, binding.timed_out = board.now, True
            board.out.append(Preempt(binding.unit, binding.worker))
            strike(board, binding.unit, f"{binding.unit} ran longer than {limit:g} s")
        seat = board.holdings.workers[binding.worker]
        overdue_s = binding.preempted_s + grace_s
        if board.now < overdue_s:
            board.wake(overdue_s)
        elif not seat.restarting:
            seat.restarting = True
            reason = f"{binding.unit} was told to stop {grace_s:g} s ago and runs on"
            board.out.append(RestartWorker(binding.worker, reason))
