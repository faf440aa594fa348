"""Hyperband: brackets of successive halving from the most to the least aggressive."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from dagsel.checks import choice
from dagsel.flow import Context, Decision, Event, Flow, Traits
from dagsel.flows.drawing import check_counts
from dagsel.flows.rungs import Bracket, Rounding, check_rungs, hyperband_brackets
from dagsel.flows.successive_halving import SynchronousBrackets


@dataclass
class Hyperband(Flow):
    """Run several searches by `SuccessiveHalving` side by side, each with other rungs.

    Each is a bracket. The first has many trials and an early first rung, the last has few trials
    and trains all of them to the end. The bracket with the most trials is filled and served first.
    The others take the places that it leaves free while it waits for the last trial of a rung.
    `brackets` says how many trials each rung has. Ties go to the trial with the lower number.

    Li et al., Hyperband: A Novel Bandit-Based Approach to Hyperparameter Optimization, JMLR 2018,
    Algorithm 1.

    Parameters
    ----------
    max_epochs
        R: the most epochs that a trial may have. A bracket's last rung is at ⌊R·η^-s⌋·η^s epochs,
        which is R if R is `min_epochs` times a power of η.
    min_epochs
        The fewest epochs after which a trial may be judged.
    reduction_factor, rounding, n_concurrent
        η, how n/η is rounded, and how many trials train at once; see `SuccessiveHalving`.

    Raises
    ------
    SearchError
        If one of them is no whole number, or too small, or `min_epochs` is above `max_epochs`.

    Examples
    --------
    >>> from dagsel.flow import Context
    >>> flow = Hyperband(max_epochs=9)
    >>> [[rung.n_trials for rung in bracket] for bracket in flow.brackets]
    [[9, 3, 1], [5, 1], [3]]
    >>> flow.start(Context(n_workers=2))
    [Ask(n=8, sampling='study')]
    """

    max_epochs: int
    min_epochs: int = 1
    reduction_factor: int = 3
    rounding: Rounding = "floor"
    n_concurrent: int | None = None
    state: SynchronousBrackets = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_rungs(self.min_epochs, self.max_epochs, self.reduction_factor)
        choice("rounding", self.rounding, get_args(Rounding))
        n_trials = sum(bracket[0].n_trials for bracket in self.brackets)
        check_counts(n_trials=n_trials, n_concurrent=self.n_concurrent)
        self.state = SynchronousBrackets(self.reduction_factor, self.rounding, self.n_concurrent)

    @property
    def traits(self) -> Traits:
        """What the search says of itself."""
        n_trials = sum(bracket[0].n_trials for bracket in self.brackets)
        return Traits(self.max_epochs, n_trials=n_trials)

    @property
    def brackets(self) -> tuple[Bracket, ...]:
        """Rungs of each bracket, the most aggressive bracket first, the lowest rung first."""
        return hyperband_brackets(
            self.min_epochs, self.max_epochs, self.reduction_factor, self.rounding
        )

    def start(self, context: Context) -> list[Decision]:
        """Ask for the first trials."""
        return self.state.start(context, self.brackets)

    def handle(self, event: Event) -> list[Decision]:
        """Judge each rung when it is full, and fill the places that are free."""
        return self.state.handle(event)
