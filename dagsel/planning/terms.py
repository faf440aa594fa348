"""On what terms trials train: on how many workers, for how long, and whether they have to rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagsel.planning.events import Preempt, TrialAllowed, TrialHeld, TrialRests
from dagsel.planning.rounds import Unit

if TYPE_CHECKING:
    from dagsel.planning.board import Board

#: What is left of a trial's time when it is over: less than a batch takes.
SPENT_S = 1e-4


@dataclass(slots=True)
class Terms:
    """A trial's terms.

    Attributes
    ----------
    gang
        Workers that train it together.
    seconds_left
        Time that it may still train; None for no limit.
    held
        Whether it has to rest.
    number
        What it was told last.
    """

    gang: int = 1
    seconds_left: float | None = None
    held: bool = False
    number: int = 0


#: Terms of a trial of which nothing was said.
FREE = Terms()


def allow(board: Board, event: TrialAllowed) -> None:
    """Give a trial new terms; its running unit ends if it was bound on others."""
    terms = board.terms[event.trial] = Terms(event.gang, event.seconds, number=event.number)
    board.coming_to_rest.pop(event.trial, None)
    trial = board.trials.get(event.trial)
    if trial is None:
        return
    if trial.active is None:
        board.requeue(trial)
        return
    binding = board.bindings[trial.active]
    if terms.seconds_left is not None and binding.began_s is not None:
        terms.seconds_left += board.now - binding.began_s  # its unit tells all its seconds at once
    is_other = terms.seconds_left is not None or len(binding.workers) != event.gang
    if is_other and not trial.is_repeat(trial.active):
        preempt(board, trial.active)


def hold(board: Board, event: TrialHeld) -> None:
    """Let a trial rest from its next batch on."""
    if event.trial in board.stopped:
        return
    terms = board.terms.setdefault(event.trial, Terms())
    terms.held, terms.number = True, event.number
    board.coming_to_rest[event.trial] = None
    trial = board.trials.get(event.trial)
    if trial is None:
        return
    if trial.active is None:
        board.requeue(trial)
    elif not trial.is_repeat(trial.active):
        preempt(board, trial.active)


def spend(board: Board, unit: Unit, seconds: float) -> None:
    """Subtract what a training unit took from its trial's time."""
    terms = board.terms.get(unit.trial)
    if unit.kind == "train" and terms is not None and terms.seconds_left is not None:
        terms.seconds_left = max(0.0, terms.seconds_left - seconds)
        if terms.seconds_left <= SPENT_S and not terms.held:
            terms.held = True
            board.coming_to_rest[unit.trial] = None


def preempt(board: Board, unit: Unit) -> None:
    """Stop a bound unit at its next batch."""
    binding = board.bindings[unit]
    if binding.preempted_s is None:
        binding.preempted_s = board.now
        board.out.append(Preempt(unit, binding.worker))


def tell_rests(board: Board) -> None:
    """Say of each trial that was held and has come to rest that it has."""
    for number in list(board.coming_to_rest):
        trial = board.trials.get(number)
        if trial is not None:
            trained = [epoch for epoch in trial.open.values() if not epoch.left]
            if trial.active is not None or any(epoch.unscored for epoch in trained):
                continue
        del board.coming_to_rest[number]
        board.out.append(TrialRests(number, board.terms[number].number))
