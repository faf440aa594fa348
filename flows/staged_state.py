"""The state of a search in stages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dagsel.flow import Context
from dagsel.planning.capacity import Plan


@dataclass(slots=True)
class StagedTrial:
    """A trial of a search in stages."""

    bracket: int
    gang: int = 0  # workers that it was given
    epochs: int = 0
    epochs_before: int = 0  # those when the stage began
    trained: float = 0.0  # epochs, with a part of one, when it paused last
    n_given: int = 0
    loss: float = math.inf
    has_value: bool = False  # it was scored, after an epoch or at a pause
    is_paused: bool = True


@dataclass(slots=True)
class StagedState:
    """The state of a search in stages; trials that come first are the first to get workers."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    n_workers: int = 0  # that are there
    n_wanted: int = 0  # that were asked for
    plan: Plan | None = None  # what is done
    stage: int = 0
    measures_at: float | None = None  # when to pause to measure what an epoch takes
    # Epochs that were trained in the first pause, and when it was over: what workers do for the
    # first time takes longer, and is not counted.
    since: tuple[float, float] | None = None
    trials: dict[int, StagedTrial] = field(default_factory=dict)
    best: tuple[float, int] | None = None  # loss and trial, of those that are complete
    trained: float = 0.0  # epochs of those that are complete or have failed
    exhausted: bool = False  # the space has no more
    awaited: list[int] = field(default_factory=list)  # of each `Ask` without an answer, how many
    pausing: set[int] = field(default_factory=set)
    n_pausing: int = 0  # trials of the last pause
    n_replaced: int = 0  # trials that failed in the first stage, and for which others were drawn
    paused_at: float | None = None  # when the last pause began
    is_halfway: bool = False  # that pause is in the middle of the last stage, to be timed
    pause_s: float = 0.0  # how long a pause and its evaluation took, at most
    trial_s: float = 0.0  # the same for one trial on one worker
    seconds: float = 0.0
    n_billed: int = 0  # the most that cost something since then
    spent: float = 0.0  # worker-seconds so far
    finished: bool = False
