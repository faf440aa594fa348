"""Successive halving: train many trials a little, keep the best, train these for longer.

Its brackets (`BracketSearch`) are also what Hyperband runs side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from dagsel.flow import Context, Decision, Finish, Stop
from dagsel.flows.rung_search import RungSearch, RungState, check_choice
from dagsel.flows.rungs import Bracket, Rounding, Rung, rung_epochs, rung_sizes


@dataclass(slots=True)
class BracketState:
    """A bracket's present rung."""

    n_entered: int = 0
    rung: int = 0
    n_members: int = 0
    n_running: int = 0
    waiting: list[int] = field(default_factory=list)
    results: list[tuple[float, int]] = field(default_factory=list)  # loss and trial: paused


@dataclass(slots=True)
class BracketsState(RungState):
    """The state of a search with synchronous brackets."""

    brackets: list[BracketState] = field(default_factory=list)
    home: dict[int, int] = field(default_factory=dict)  # live trial: index of its bracket


class BracketSearch(RungSearch):
    """Run synchronous brackets side by side; earlier ones are served first.

    A rung is judged when all its trials have reached it or failed. New trials are drawn only when
    no trial of a bracket that is under way waits for a place.
    """

    rounding: Rounding
    state: BracketsState

    @property
    def brackets(self) -> tuple[Bracket, ...]:
        """Rungs of each bracket, the lowest first."""
        raise NotImplementedError

    def _check(self) -> None:
        check_choice("rounding", self.rounding, get_args(Rounding))

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        self.state.brackets = [BracketState() for _ in self.brackets]
        return super().start(context)

    def _n_trials(self) -> int:
        return sum(bracket[0].n_trials for bracket in self.brackets)

    def _admit(self, trials: tuple[int, ...]) -> None:
        state, plans, index = self.state, self.brackets, 0
        for trial in trials:
            while state.brackets[index].n_entered == plans[index][0].n_trials:
                index += 1
            bracket = state.brackets[index]
            bracket.n_entered += 1
            bracket.n_members += 1
            bracket.waiting.append(trial)
            state.home[trial] = index

    def _judge(self, trial: int, epochs: int, loss: float) -> list[Decision]:
        index = self.state.home[trial]
        bracket, plan = self.state.brackets[index], self.brackets[index]
        bracket.n_running -= 1
        if bracket.rung == len(plan) - 1:
            del self.state.home[trial]
            return [Stop(trial, f"trained to the last rung, {epochs} epochs", "complete")]
        bracket.results.append((loss, trial))
        return []

    def _lose(self, trial: int, *, trained: bool) -> None:
        if trial not in self.state.home:
            return
        bracket = self.state.brackets[self.state.home.pop(trial)]
        if trained:
            bracket.n_running -= 1
        else:
            bracket.waiting = [other for other in bracket.waiting if other != trial]
            bracket.results = [result for result in bracket.results if result[1] != trial]

    def _live(self) -> set[int]:
        return set(self.state.home)

    def _advance(self) -> list[Decision]:
        state = self.state
        decisions: list[Decision] = []
        for bracket, plan in zip(state.brackets, self.brackets, strict=True):
            entered = state.exhausted or bracket.n_entered == plan[0].n_trials
            if entered and bracket.results and not bracket.waiting and not bracket.n_running:
                decisions += self._halve(bracket, len(plan))
            n = max(0, min(self._room(), len(bracket.waiting)))
            started, bracket.waiting = bracket.waiting[:n], bracket.waiting[n:]
            bracket.n_running += n
            done = plan[bracket.rung - 1].epochs if bracket.rung else 0
            until = plan[bracket.rung].epochs
            decisions += [self._train(trial, done=done, until=until) for trial in started]
        decisions += self._ask()
        if not state.home and not state.n_awaited:
            state.finished = True
            decisions.append(Finish())
        return decisions

    def _halve(self, bracket: BracketState, n_rungs: int) -> list[Decision]:
        """Let the best go on; failed trials count as members of the rung that were worse."""
        sizes = rung_sizes(bracket.n_entered, n_rungs, self.reduction_factor, self.rounding)
        n_kept = sizes[bracket.rung + 1]
        ranked = sorted(bracket.results)
        best = f"{n_kept} of {bracket.n_members}"
        out = [
            Stop(trial, self._miss(bracket.rung, loss, best), "pruned")
            for loss, trial in ranked[n_kept:]
        ]
        for stop in out:
            del self.state.home[stop.trial]
        bracket.waiting = [trial for _, trial in ranked[:n_kept]]
        bracket.n_members = len(bracket.waiting)
        bracket.results = []
        bracket.rung += 1
        return [*out]


@dataclass
class SuccessiveHalving(BracketSearch):
    """Train all trials up to a rung, keep the best of them, and so on up to the last rung.

    The rungs are at ``min_epochs · reduction_factor**k`` epochs and at `max_epochs`. Trials that
    have reached a rung pause until the last one of the rung is there; one that fails counts as the
    worst. At least one trial goes on. Ties go to the trial with the lower number.

    Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter Optimization,
    AISTATS 2016.

    Parameters
    ----------
    max_epochs
        Epochs of a trial that reaches the last rung.
    n_trials
        How many trials to draw.
    min_epochs
        Epochs up to the first rung.
    reduction_factor
        η: one of so many trials goes on.
    rounding
        ``"floor"`` keeps ⌊n/η⌋ trials, as the paper does; ``"ceil"`` keeps ⌈n/η⌉, as Ray and Syne
        Tune do.
    n_concurrent
        How many of them train at once; None for four a worker.

    Raises
    ------
    SearchError
        If one of them is no whole number, or too small, or `min_epochs` is above `max_epochs`.

    Examples
    --------
    >>> from dagsel.flow import Asked, Context, Reported
    >>> flow = SuccessiveHalving(max_epochs=3, n_trials=3)
    >>> flow.start(Context(n_workers=1))
    [Ask(n=3, sampling='study')]
    >>> decisions = flow.handle(Asked(trials=(0, 1, 2)))
    >>> for trial, loss in enumerate([0.3, 0.1, 0.2]):
    ...     decisions = flow.handle(Reported(trial, 1, loss, {"loss": loss}, seconds=1.0))
    >>> for decision in decisions:
    ...     print(decision)
    Stop(trial=2, reason='rung 1: 0.2 is not among the best 1 of 3', outcome='pruned')
    Stop(trial=0, reason='rung 1: 0.3 is not among the best 1 of 3', outcome='pruned')
    Train(trial=1, epochs=2)
    """

    max_epochs: int
    n_trials: int
    min_epochs: int = 1
    reduction_factor: int = 3
    rounding: Rounding = "floor"
    n_concurrent: int | None = None
    state: BracketsState = field(
        default_factory=BracketsState, init=False, repr=False, compare=False
    )

    @property
    def brackets(self) -> tuple[Bracket, ...]:
        """The one bracket."""
        epochs = rung_epochs(self.min_epochs, self.max_epochs, self.reduction_factor)
        sizes = rung_sizes(self.n_trials, len(epochs), self.reduction_factor, self.rounding)
        return (tuple(Rung(n, until) for n, until in zip(sizes, epochs, strict=True)),)

    def _n_trials(self) -> int:
        return self.n_trials
