"""Laws 1 to 3 and what the dispatcher's state must always satisfy, each as a clear sentence."""

from __future__ import annotations

from dagsel.planning.accounting import Binding
from dagsel.planning.board import Board
from dagsel.planning.rounds import Unit


def check(board: Board) -> None:
    """Raise ``AssertionError`` with a clear sentence if an invariant does not hold."""
    board.holdings.check()
    for trial in board.trials.values():
        trial.check()
    _check_exclusivity(board)
    _check_isolation(board)
    for binding in board.bindings.values():
        _check_binding(board, binding)
    for waiting in board.evaluations:
        assert not waiting.keys() & board.bindings.keys(), "an evaluation is ready and bound"
    n_waiting = sum(len(waiting) for waiting in board.evaluations)
    assert n_waiting == board.n_evaluations, "the number of waiting evaluations is wrong"


def _check_exclusivity(board: Board) -> None:
    seats = board.holdings.workers.values()
    placed = [(unit, seat.worker) for seat in seats for unit in seat.bound]
    bound = [(unit, worker) for unit, binding in board.bindings.items() for worker in binding.there]
    assert sorted(placed) == sorted(bound), "workers and bindings disagree"
    for seat in board.holdings.workers.values():
        assert len(seat.bound) <= 2, f"exclusivity: {seat.worker} has {len(seat.bound)} units"
        running = [unit for unit in seat.bound if board.bindings[unit].started]
        assert len(running) <= 1, f"exclusivity: {seat.worker} runs {running} at once"


def _check_isolation(board: Board) -> None:
    active: dict[int, Unit] = {}
    for unit in board.bindings:
        if unit.kind == "train":
            other = active.setdefault(unit.trial, unit)
            assert other is unit, f"isolation: {unit} and {other} are bound at once"
    for trial in board.trials.values():
        assert trial.active == active.get(trial.number), (
            f"isolation: trial {trial.number} says that {trial.active} is bound, "
            f"but {active.get(trial.number)} is"
        )
        assert trial.active not in trial.ready, f"{trial.active} is ready and bound"


def _check_binding(board: Board, binding: Binding) -> None:
    unit, shard = binding.unit, binding.shard
    for worker in binding.there:
        seat = board.holdings.workers.get(worker)
        assert seat is not None, f"{unit} is bound to {worker}, which is gone"
        assert seat.held >> shard & 1, f"{worker} does not hold shard {shard} of {unit}"
        assert not binding.members or seat.bound == [unit], (
            f"a worker of the gang of {unit} has another unit"
        )
    if unit.kind == "check":
        assert shard == unit.position, f"{unit} is bound to shard {shard}"
        return
    trial = board.trials.get(unit.trial)
    if trial is None or unit.epoch not in trial.epochs:
        assert binding.preempted_s is not None, f"{unit} is nobody's, but runs"
        return
    if unit.kind == "evaluate":
        assert shard == unit.position, f"{unit} is bound to shard {shard}"
        return
    recorded = trial.recorded(unit)
    if recorded is None:
        recorded = trial.epochs[unit.epoch].chain.fixed_shard(unit)
    assert recorded is None or recorded == shard, (
        f"completeness: {unit} belongs to shard {recorded}, but is bound to {shard}"
    )
    if not trial.is_repeat(unit):
        assert trial.epochs[unit.epoch].left >> shard & 1, (
            f"completeness: {unit} is bound to shard {shard}, which the trial has visited"
        )


def check_homes(board: Board) -> None:
    """Each shard that may be held is held, on its way, or waits for room."""
    if not board.trials:
        return
    stay = [seat for seat in board.holdings.workers.values() if not seat.draining]
    room = sum(
        board.config.n_shards if seat.max_shards is None else seat.max_shards for seat in stay
    )
    if not stay or room < board.config.n_shards or any(seat.refused for seat in stay):
        return
    homeless = board.holdings.homeless()
    assert not homeless, f"shards {homeless} are nowhere, and nobody loads them"
