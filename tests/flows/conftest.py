"""A run of a flow with made-up trials, one epoch after another."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from dagsel.flow import (
    Ask,
    Asked,
    Context,
    Decision,
    Event,
    Finish,
    Flow,
    Reported,
    Stop,
    Train,
    TrialFailed,
)


@dataclass
class Played:
    """What became of the trials."""

    epochs: dict[int, int] = field(default_factory=dict)  # by trial
    ended: dict[int, str] = field(default_factory=dict)  # "complete", "pruned" or "failed"
    reasons: dict[int, str] = field(default_factory=dict)
    order: list[tuple[int, int]] = field(default_factory=list)  # trial and epoch, as they ended
    most_training: int = 0

    def at(self, outcome: str) -> list[int]:
        """Epochs of the trials that ended so, most first."""
        trials = [trial for trial, ended in self.ended.items() if ended == outcome]
        return sorted((self.epochs[trial] for trial in trials), reverse=True)


def run(
    flow: Flow,
    value: Callable[[int, int], float | None],
    *,
    context: Context | None = None,
    n_points: int | None = None,
    pick: Callable[[list[int]], int] = min,
) -> Played:
    """Train the picked trial for an epoch until the flow finishes; a value of None is a failure."""
    played, training = Played(), dict[int, int]()
    answers = flow.start(context or Context(n_workers=1))
    while True:
        asks = [decision.n for decision in answers if isinstance(decision, Ask)]
        finished = any(isinstance(decision, Finish) for decision in answers)
        apply(answers, played, training)
        if finished:
            return played
        event: Event
        if asks:
            n_drawn = len(played.epochs)
            n = min(asks[0], math.inf if n_points is None else n_points - n_drawn)
            trials = tuple(range(n_drawn, n_drawn + int(n)))
            played.epochs |= dict.fromkeys(trials, 0)
            event = Asked(trials, exhausted=len(played.epochs) == n_points)
        else:
            trial = pick(sorted(training))
            epoch = played.epochs[trial] + 1
            result = value(trial, epoch)
            if result is None:
                del training[trial]
                played.ended[trial] = "failed"
                event = TrialFailed(trial, "it broke")
            else:
                training[trial] -= 1
                if not training[trial]:
                    del training[trial]
                played.epochs[trial] = epoch
                played.order.append((trial, epoch))
                event = Reported(trial, epoch, result, {"loss": result}, seconds=1.0)
        answers = flow.handle(event)


def apply(decisions: list[Decision], played: Played, training: dict[int, int]) -> None:
    for decision in decisions:
        match decision:
            case Train(trial, epochs):
                assert trial not in played.ended
                training[trial] = training.get(trial, 0) + epochs
            case Stop(trial, reason, outcome):
                assert trial not in played.ended
                played.ended[trial], played.reasons[trial] = outcome, reason
                training.pop(trial, None)
    played.most_training = max(played.most_training, len(training))


@pytest.fixture(scope="session")
def play() -> Callable[..., Played]:
    """Give `run`."""
    return run
