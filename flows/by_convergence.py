"""Convergence as the priority of any search: what improves fastest is served first."""

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
    priority: float = 0.0  # of the search inside
    given: float = 0.0  # what the engine was told
    gang: int = 1
    left: int = 0  # epochs to report
    is_fixed: bool = True  # it does not train, or must not be told anew that it does


@dataclass(slots=True)
class Paces:
    """The state of `ByConvergence`."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    worst: float | None = None  # of all first values: what a trial is taken to begin with
    paces: dict[int, Pace] = field(default_factory=dict)


@dataclass
class ByConvergence(Wrapper):
    """Serve those trials of a search first that converge fastest.

    What the search decides is not changed, but for the priority: of trials to which it gives the
    same, the one goes first whose value improved most in its last epoch. A trial's first value is
    compared with the worst first value of all; trials that have not reported stand at no gain. What
    no longer improves, or has no finite value, goes last. So survivors of a rung show up sooner
    where there are more trials than workers.

    The gain is at most half a step of priority: the search's own priorities should be whole.

    The rule is that of `Hermes` (Son et al., Electronics 2021, Algorithm 2), for trials that wait
    in the engine instead of in a worker's memory.

    Parameters
    ----------
    flow
        The search.

    Raises
    ------
    SearchError
        If the search is none.

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
        """Begin the search inside."""
        self.own.context = context
        return self._pass(self.flow.start(context))

    def handle(self, event: Event) -> list[Decision]:
        """Let the search inside answer, and serve the trial that reported by what it gained."""
        paces = self.own.paces
        match event:
            case Asked(trials):
                paces.update({trial: Pace() for trial in trials})
            case Reported(trial, _, value):
                self._learn(paces[trial], self.own.context.loss(value))
            case TrialFailed(trial):
                paces.pop(trial, None)
        decisions = self._pass(self.flow.handle(event))
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

    def _pass(self, decisions: Iterable[Decision]) -> list[Decision]:
        """Give what the search inside decides the priority of its trial."""
        paces, passed = self.own.paces, list[Decision]()
        for decision in decisions:
            match decision:
                case Train(trial):
                    pace = paces[trial]
                    pace.left += decision.epochs
                    pace.priority, pace.gang = decision.priority, decision.gang
                    pace.is_fixed = decision.seconds is not None  # its time would begin anew
                    pace.given = self._priority(pace)
                    passed.append(replace(decision, priority=pace.given))
                    continue
                case Pause(trial):
                    paces[trial].is_fixed = True
                case Stop(trial):
                    paces.pop(trial, None)
                case Clone(source, target):
                    paces[target].loss, paces[target].before = paces[source].loss, None
            passed.append(decision)
        return passed

    def _renew(self, trial: int) -> list[Decision]:
        pace = self.own.paces.get(trial)
        if pace is None or pace.is_fixed or pace.left <= 0 or pace.given == self._priority(pace):
            return []
        pace.given = self._priority(pace)
        return [Train(trial, 0, pace.given, pace.gang)]
