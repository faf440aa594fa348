"""Early stopping around any search: a trial that gets no better ends with the best that it had."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from dagsel.checks import is_number, shown
from dagsel.errors import SearchError
from dagsel.flow import (
    Asked,
    Clone,
    Context,
    Decision,
    Event,
    Extended,
    Finish,
    Pause,
    Reported,
    Stop,
    Train,
    TrialFailed,
)
from dagsel.flows.drawing import check_counts
from dagsel.flows.wrapper import EndedWell, Wrapper


@dataclass(slots=True)
class Patience:
    """How a live trial does."""

    least: tuple[float, ...] = ()  # of each metric its loss when that last improved
    n_waited: int = 0  # epochs since then


@dataclass(slots=True)
class Patiences:
    """The state of `EarlyStopping`."""

    context: Context = field(default_factory=lambda: Context(n_workers=1))
    trials: dict[int, Patience] = field(default_factory=dict)
    ended: dict[int, Patience] = field(default_factory=dict)  # by the inner search


@dataclass
class EarlyStopping(Wrapper):
    """End a trial of another search when it has not improved for some epochs.

    The trial is complete: with ``keep="best"``, the default of `dagsel.optimize`, it has the value
    and the model of its best epoch, and can win. The inner search goes on without it. A trial that
    takes over another trial's state (`PBT`) begins to count anew.

    `patience` and `min_delta` mean what they mean to the callback of that name in Keras.

    Parameters
    ----------
    flow
        The search.
    patience
        How many epochs without improvement end a trial.
    min_delta
        An epoch is better if its metric is, by more than this; of several metrics, if one is.

    Raises
    ------
    SearchError
        If `flow` is no search procedure, `patience` is below 1, or `min_delta` is no finite number
        from 0 up.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> from dagsel.flows import RandomSearch
    >>> flow = EarlyStopping(RandomSearch(max_epochs=9, n_trials=1), patience=2)
    >>> decisions = flow.start(Context(n_workers=1)) + flow.handle(Asked((0,)))
    >>> for epoch, loss in enumerate([0.5, 0.4, 0.6, 0.4], start=1):
    ...     decisions = flow.handle(Reported(0, epoch, loss, {}, 1.0))
    >>> decisions
    [Stop(trial=0, reason='no better for 2 epochs', outcome='complete'), Finish()]
    """

    patience: int = 5
    min_delta: float = 0.0
    own: Patiences = field(default_factory=Patiences, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(patience=self.patience)
        if not is_number(self.min_delta) or not 0.0 <= self.min_delta < math.inf:
            raise SearchError(
                f"min_delta must be a finite number from 0 up, got {shown(self.min_delta)}"
            )

    def start(self, context: Context) -> list[Decision]:
        """Begin the inner search."""
        self.own.context = context
        return self._follow(self.flow.start(context))

    def handle(self, event: Event) -> list[Decision]:
        """Return the inner search's answer, and end the trial that is past its patience."""
        trials = self.own.trials
        match event:
            case Asked(new):
                trials.update({trial: Patience() for trial in new})
            case Reported(trial) if trial in trials:
                self._learn(trials[trial], self.own.context.losses(event))
            case TrialFailed(trial):
                trials.pop(trial, None)
            case Extended(ended=ended):  # without those that got no better
                event = replace(event, ended=tuple(e for e in ended if e.trial in self.own.ended))
        decisions = self._follow(self.flow.handle(event))
        if isinstance(event, Reported) and self._is_over(event.trial, decisions):
            return self._end(event.trial, decisions)
        return decisions

    def _learn(self, trial: Patience, losses: tuple[float, ...]) -> None:
        before = trial.least or (math.inf,) * len(losses)
        pairs = zip(losses, before, strict=True)
        least = tuple(loss if loss < last - self.min_delta else last for loss, last in pairs)
        # The first epoch is an improvement, whatever it is.
        trial.n_waited = 0 if least != trial.least else trial.n_waited + 1
        trial.least = least

    def _is_over(self, number: int, decisions: list[Decision]) -> bool:
        trial = self.own.trials.get(number)
        is_live = trial is not None and not any(isinstance(d, Finish) for d in decisions)
        return is_live and self.own.trials[number].n_waited >= self.patience

    def _end(self, number: int, decisions: list[Decision]) -> list[Decision]:
        left = [d for d in decisions if not (isinstance(d, Train | Pause) and d.trial == number)]
        epochs = "1 epoch" if self.patience == 1 else f"{self.patience} epochs"
        stop = Stop(number, f"no better for {epochs}", "complete")
        del self.own.trials[number]
        return [*left, stop, *self._follow(self.flow.handle(EndedWell(number, stop.reason)))]

    def _follow(self, decisions: list[Decision]) -> list[Decision]:
        """Note which trials have ended, or have another state."""
        for decision in decisions:
            match decision:
                case Stop(trial) if trial in self.own.trials:
                    self.own.ended[trial] = self.own.trials.pop(trial)
                case Train(trial) if trial in self.own.ended:
                    self.own.trials[trial] = self.own.ended.pop(trial)
                case Clone(_, target):
                    self.own.trials[target] = Patience()
        return decisions
