"""A priority for the trials of any search: those that improve fastest train first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from dagsel.flow import (
    Asked,
    Clone,
    Context,
    Decision,
    Event,
    Pause,
    Reported,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.flows.wrapper import Wrapper


@dataclass(slots=True)
class Pace:
    """How fast a live trial improves, and how it trains."""

    loss: float | None = None
    before: float | None = None  # its loss one epoch before
    priority: float = 0.0  # that the inner search gave it
    given: float = 0.0  # that it trains with
    gang: int = 1
    left: int = 0  # epochs to report
    is_fixed: bool = True  # it does not train, or another `Train` would restart its time


@dataclass(slots=True)
class Paces:
    """The state of `ByConvergence`."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    worst: float | None = None  # of all first values; a trial's first gain is counted from it
    paces: dict[int, Pace] = field(default_factory=dict)


@dataclass
class ByConvergence(Wrapper):
    """Train first those trials of a search that improve fastest.

    The decisions of the search stay as they are; only the order changes. Among trials with the same
    priority, the one whose value improved most in its last epoch goes first. A trial's first value
    is compared with the worst first value of all trials. A trial without a report has no gain. A
    trial that does not improve, or whose value is not finite, goes last. So the survivors of a rung
    are known sooner if there are more trials than workers.

    A gain changes the priority by less than 0.5 and a value that is not finite by 0.5. So the
    search's own priorities should be whole numbers.

    The rule is that of `Hermes` (Son et al., Electronics 2021, Algorithm 3), for trials that wait
    for any worker, and not in the memory of one.

    Parameters
    ----------
    flow
        The search.

    Raises
    ------
    SearchError
        If `flow` is no search procedure.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> from dagsel.flows import ASHA
    >>> flow = ByConvergence(ASHA(max_epochs=9, n_trials=9, n_concurrent=3))
    >>> decisions = flow.start(Context(n_workers=1)) + flow.handle(Asked((0, 1, 2)))
    >>> for trial, loss in enumerate([0.5, 0.75, 1.0]):
    ...     decisions = flow.handle(Reported(trial, 1, loss, {}, 1.0))
    >>> decisions
    [Train(trial=0, epochs=2, priority=0.16666666666666666)]
    """

    own: Paces = field(default_factory=Paces, init=False, repr=False, compare=False)

    def start(self, context: Context) -> list[Decision]:
        """Begin the inner search."""
        self.own.context = context
        return self._prioritize(self.flow.start(context))

    def handle(self, event: Event) -> list[Decision]:
        """Return the inner search's answer, with a new priority for a trial that reported."""
        paces = self.own.paces
        match event:
            case Asked(trials):
                paces.update({trial: Pace() for trial in trials})
            case Reported(trial, _, value):
                self._learn(paces[trial], self.own.context.loss(value))
            case TrialFailed(trial):
                paces.pop(trial, None)
        decisions = self._prioritize(self.flow.handle(event))
        if isinstance(event, Reported):
            decisions += self._renew(event.trial)
        return decisions

    def _learn(self, pace: Pace, loss: float) -> None:
        own = self.own
        if pace.loss is None and math.isfinite(loss):
            own.worst = loss if own.worst is None else max(own.worst, loss)
        pace.before, pace.loss = pace.loss, loss
        pace.left -= 1

    def _priority(self, pace: Pace) -> float:
        if pace.loss is None:
            return pace.priority
        is_known = pace.before is not None and math.isfinite(pace.before)
        before = pace.before if is_known else self.own.worst
        if before is None or not math.isfinite(pace.loss):
            return pace.priority - 0.5
        gain = before - pace.loss
        return pace.priority + gain / (2 * (1 + abs(gain)))

    def _prioritize(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Set the priority of each `Train` of the inner search."""
        paces, prioritized = self.own.paces, list[Decision]()
        for decision in decisions:
            match decision:
                case Train(trial):
                    pace = paces.setdefault(trial, Pace())  # one that had ended trains on
                    pace.left += decision.epochs
                    pace.priority, pace.gang = decision.priority, decision.gang
                    pace.is_fixed = decision.seconds is not None
                    pace.given = self._priority(pace)
                    decision = replace(decision, priority=pace.given)
                case Pause(trial):
                    paces[trial].is_fixed = True
                case Stop(trial):
                    paces.pop(trial, None)
                case Clone(source, target):
                    paces[target].loss, paces[target].before = paces[source].loss, None
            prioritized.append(decision)
        return prioritized

    def _renew(self, trial: int) -> list[Decision]:
        pace = self.own.paces.get(trial)
        if pace is None or pace.is_fixed or pace.left <= 0 or pace.given == self._priority(pace):
            return []
        pace.given = self._priority(pace)
        return [Train(trial, 0, pace.given, pace.gang)]
