"""A flow that trains one configuration once more."""

from __future__ import annotations

from dataclasses import dataclass, field

from dagsel.flow import (
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


@dataclass(slots=True)
class NothingLearnt:
    """The state of `Refit`, which learns nothing."""


@dataclass
class Refit(Flow):
    """Trains one trial, which is there from the start.

    Examples
    --------
    >>> flow = Refit(7, 2)
    >>> flow.start(Context(n_workers=1))
    [Train(trial=7, epochs=2)]
    >>> flow.handle(Reported(7, 1, 0.5, {}, 1.0)), flow.handle(Reported(7, 2, 0.4, {}, 2.0))
    ([], [Stop(trial=7, reason='trained to the end', outcome='complete'), Finish()])
    """

    trial: int
    epochs: int
    state: NothingLearnt = field(
        default_factory=NothingLearnt, init=False, repr=False, compare=False
    )

    def start(self, context: Context) -> list[Decision]:
        """Train it."""
        return [Train(self.trial, self.epochs)]

    def handle(self, event: Event) -> list[Decision]:
        """End with it."""
        match event:
            case Reported(_, epoch) if epoch == self.epochs:
                return [Stop(self.trial, "trained to the end", "complete"), Finish()]
            case TrialFailed():
                return [Finish()]
            case _:
                return []
