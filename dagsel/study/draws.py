"""Draw trials: by which sampler, with which random numbers, and again if it is a duplicate."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.samplers import BaseSampler, GridSampler, RandomSampler

from dagsel.errors import SearchError
from dagsel.flow import Sampling
from dagsel.study.checks import MAX_REJECTIONS, RejectedError, Space, configure, rejects_all
from dagsel.study.grid import GridWalk, Point, is_finite, point
from dagsel.study.labels import ChosenTrial, DrawnTrial, labelled
from dagsel.study.sampler import SamplerStudy, quiet
from dagsel.study.streams import reseed

#: How often the sampler, and then a uniform one, may draw again after a duplicate.
_REDRAWS, _RANDOM_REDRAWS = 4, 16
#: How often the sampler may draw again after a draw that the space rejects; then a uniform one may.
_REJECTIONS = 20


@dataclass(slots=True)
class Draws:
    """The draws of a run.

    Each draw seeds the random streams from a seed and the number of the draw. So their state need
    not be stored, and a resumed run draws what the run would have drawn.
    """

    view: SamplerStudy
    space: Space
    sampler: BaseSampler  # the study's own
    sampler_seed: int
    seed: int  # of uniform draws
    n_before: int = 0  # trials that had begun in the study: a study that goes on draws others
    n: int = 0  # trials drawn so far
    had: set[Point] = field(default_factory=set)  # the run's trials
    # Other ended trials of the study; the grid draws them again.
    had_before: set[Point] = field(default_factory=set)
    # Trials that somebody else had begun, such as a search of the same seed that runs beside; of a
    # finite space they are drawn last.
    elsewhere: set[Point] = field(default_factory=set)
    grid: GridWalk = field(default_factory=GridWalk, init=False)
    _random: RandomSampler = field(default_factory=RandomSampler, init=False)
    _rest: GridWalk = field(default_factory=GridWalk, init=False)

    def count(self, params: Mapping[str, Any]) -> None:
        """Count a trial of the run."""
        self.n += 1
        self.had.add(point(params))

    def rest_of(self, number: int, sampling: Sampling) -> tuple[DrawnTrial, dict[str, Any]]:
        """Draw what an enqueued trial leaves open; return it with its configuration."""
        trial = self.view.draw_rest(number, self._sampler_for(sampling))
        return trial, configure(self.space, trial)

    def next(self, sampling: Sampling) -> tuple[DrawnTrial, dict[str, Any]] | None:
        """Draw a trial and its configuration; None if a finite space has no further point."""
        if sampling == "grid":
            return self._next_point(self.grid, self.had)
        if sampling == "study" and isinstance(self.sampler, GridSampler):
            return self._next_of_grid(self._sampler_for(sampling))
        n_redraws = _REDRAWS + _RANDOM_REDRAWS
        for attempt in range(n_redraws):
            found = self._new("random" if attempt >= _REDRAWS else sampling, attempt)
            if found is not None:
                return found
        try:
            return self._next_point(self._rest, self.had | self.had_before)
        except SearchError:  # another branch of the space is continuous, and has further points
            for attempt in range(n_redraws, MAX_REJECTIONS):
                if (found := self._new("random", attempt)) is not None:
                    return found
            return self._accepted("random", MAX_REJECTIONS)

    def _new(self, sampling: Sampling, attempt: int) -> tuple[DrawnTrial, dict[str, Any]] | None:
        """Draw a point; None if it was had."""
        trial, config = self._accepted(sampling, attempt)
        was_had = is_finite(trial.distributions) and self._was_had(trial)
        if was_had or _point(trial) in self.elsewhere:
            self.view.take_back()
            return None
        return trial, config

    def _accepted(self, sampling: Sampling, attempt: int) -> tuple[DrawnTrial, dict[str, Any]]:
        """Draw until the space does not reject what is drawn."""
        last: RejectedError | None = None
        for n in range(MAX_REJECTIONS):
            again = (attempt, n) if n else (attempt,)
            try:
                return self._draw(
                    self._sampler_for(sampling if n < _REJECTIONS else "random", again)
                )
            except RejectedError as error:
                last = error
        assert last is not None
        raise rejects_all(MAX_REJECTIONS, last)

    def _next_of_grid(self, sampler: BaseSampler) -> tuple[DrawnTrial, dict[str, Any]] | None:
        """Draw from the grid of the study's sampler, which begins anew after its last point."""
        try:
            with quiet(optuna.logging.ERROR):
                trial, config = self._draw(sampler)
        except RejectedError as error:  # it would draw it again: the grid is of its own numbering
            raise SearchError(
                f"{error}; GridSampler leaves out no point of its grid: take Grid as the flow"
            ) from error
        if not self._was_had(trial):
            return trial, config
        self.view.take_back()
        return None

    def why_no_more(self) -> str:
        """Say why no further trial can be drawn."""
        others = len(self.had_before - self.had)
        what = "GridSampler's grid" if isinstance(self.sampler, GridSampler) else "the space"
        told = f"{what} has no further points: this run has drawn {len(self.had)}"
        if not others:
            return told
        return (
            f"{told}, and {others} are in the study already, which are not drawn again: take a new "
            "study to train them once more"
        )

    def _was_had(self, trial: DrawnTrial) -> bool:
        drawn = _point(trial)
        return drawn in self.had or drawn in self.had_before

    def _sampler_for(self, sampling: Sampling, attempt: tuple[int, ...] = (0,)) -> BaseSampler:
        if sampling == "grid":
            return self.grid
        if sampling == "study":
            reseed(self.sampler, self.sampler_seed, *self._number(*attempt))
            return self.sampler
        reseed(self._random, self.seed, *self._number(*attempt))
        return self._random

    def _number(self, *attempt: int) -> tuple[int, ...]:
        return (*([self.n_before] if self.n_before else []), self.n, *attempt)

    def _next_point(
        self, walk: GridWalk, had: set[Point]
    ) -> tuple[DrawnTrial, dict[str, Any]] | None:
        while not walk.ended:
            try:
                trial, config = self._draw(walk)
            except RejectedError:
                walk.advance()
                continue
            walk.advance()
            if _point(trial) not in had:
                return trial, config
            self.view.take_back()
        return None

    def _draw(self, sampler: BaseSampler) -> tuple[DrawnTrial, dict[str, Any]]:
        trial = self.view.draw(sampler)
        try:
            return trial, configure(self.space, trial)
        except BaseException:
            self.view.take_back()
            raise


def _point(trial: DrawnTrial) -> Point:
    return point(labelled(trial.params, trial.distributions))


def choose(
    study: optuna.Study,
    space: Space,
    params: Mapping[str, Any],
    over: Mapping[str, Any],
    number: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of a trial that the user chooses, and its configuration.

    Parameters
    ----------
    study
        What the space finds as its trial's study.
    space
        What draws trials.
    params
        Parameters by name; the space must suggest each of them.
    over
        Those of another trial, for what `params` leaves out.
    number
        The trial's number.

    Returns
    -------
    params, config
        All that the space suggests, with labels for what has no form in JSON.

    Raises
    ------
    SearchError
        If a parameter is missing, is none of the space's, or has a value that it does not suggest.
    """
    trial = ChosenTrial(study, {**over, **params}, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna warns of a value that is refused here
        try:
            config = configure(space, trial)
        except RejectedError as error:
            raise SearchError(f"{error}; give parameters that it takes") from error
    if unknown := params.keys() - trial.params.keys():
        raise SearchError(
            f"the space does not suggest {', '.join(map(repr, sorted(unknown)))} here; it suggests "
            f"{', '.join(trial.params)}"
        )
    return labelled(trial.params, trial.distributions), config
