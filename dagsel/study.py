"""The only place that knows Optuna: the driver draws, reports and tells trials here, and alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

from dagsel.errors import SearchError
from dagsel.flow import Sampling

Space: TypeAlias = Callable[[optuna.Trial], Mapping[str, Any]]
Callback: TypeAlias = Callable[[optuna.Study, FrozenTrial], None]

#: A finite space with more points than this is not enumerated before the run.
MAX_GRID_POINTS = 100_000


class GridWalk(BaseSampler):
    """Walks through every leaf of a define-by-run space, like an odometer.

    Each trial takes the next combination. A parameter that a branch alone suggests becomes a wheel
    only on that branch. A trial that the user has enqueued stands beside the walk: what it leaves
    open takes its first choice.
    """

    def __init__(self) -> None:
        self._wheels: list[tuple[Sequence[Any], int]] = []
        self._place = 0
        self._is_enqueued = False

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """See whether the trial takes the walk's next combination, or was enqueued."""
        self._is_enqueued = "fixed_params" in trial.system_attrs

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Sample every parameter on its own."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Sample every parameter on its own."""
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Read the parameter's wheel, or add one."""
        if self._is_enqueued:
            return _choices(param_name, param_distribution)[0]
        if self._place == len(self._wheels):
            self._wheels.append((_choices(param_name, param_distribution), 0))
        choices, index = self._wheels[self._place]
        self._place += 1
        return choices[index]

    def advance(self) -> bool:
        """Turn to the next combination; False when all have been seen."""
        if self._is_enqueued:
            return True
        self._place = 0
        while self._wheels:
            choices, index = self._wheels.pop()
            if index + 1 < len(choices):
                self._wheels.append((choices, index + 1))
                return True
        return False


def _choices(name: str, distribution: BaseDistribution) -> Sequence[Any]:
    match distribution:
        case CategoricalDistribution():
            return distribution.choices
        case IntDistribution():
            return range(distribution.low, distribution.high + 1, distribution.step)
        case FloatDistribution() if distribution.step is not None:
            n_steps = round((distribution.high - distribution.low) / distribution.step)
            return [distribution.low + index * distribution.step for index in range(n_steps + 1)]
        case _:
            raise SearchError(
                f"a grid needs finite parameters, but {name!r} is continuous; give it a step, "
                "suggest it with suggest_categorical, or use RandomSearch"
            )


@contextmanager
def _quiet() -> Iterator[None]:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)


@dataclass(slots=True)
class StudyDriver:
    """A study, the space that its trials are drawn from, and the trials of this run.

    Parameters
    ----------
    study
        The user's study; its sampler is left as it is.
    space
        Optuna's define-by-run function: a trial in, a configuration out.
    metric
        Name of the metric that is reported and told.
    seed
        Seeds the draws that are not the study's own sampler's.
    callbacks
        Called with study and trial after each trial that ended, as Optuna does.
    """

    study: optuna.Study
    space: Space
    metric: str
    seed: int = 0
    callbacks: Sequence[Callback] = ()
    _live: dict[int, optuna.Trial] = field(default_factory=dict)
    _random: RandomSampler = field(init=False)
    _grid: GridWalk | None = field(default=None, init=False)
    _grid_ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._random = RandomSampler(self.seed)

    @property
    def name(self) -> str:
        """Name of the study."""
        return str(self.study.study_name)

    @property
    def maximize(self) -> bool:
        """Whether larger values are better."""
        return bool(self.study.direction == optuna.study.StudyDirection.MAXIMIZE)

    def validate(
        self, directions: Mapping[str, str | None], *, grid: bool, check: Callable[[Any], None]
    ) -> None:
        """Check that study, space and metric fit together, before anything runs.

        Parameters
        ----------
        directions
            The workload's metrics, each with its better direction if known.
        grid
            Whether the space has to be finite.
        check
            Raises an error if nothing can be trained with a configuration.

        Raises
        ------
        SearchError
            If they do not; the text names the culprit and the cure.
        """
        self._check_metric(directions)
        configs = self._probe(GridWalk() if grid else RandomSampler(self.seed))
        check(next(configs))
        if grid:
            for _ in configs:
                pass

    def _check_metric(self, directions: Mapping[str, str | None]) -> None:
        if len(self.study.directions) != 1:
            raise SearchError(
                f"study {self.name!r} has {len(self.study.directions)} directions; dagsel searches "
                "for one metric: create the study with direction=, not directions="
            )
        if self.metric not in directions:
            raise SearchError(
                f"the workload gives no metric {self.metric!r}; it gives {', '.join(directions)}"
            )
        direction = "maximize" if self.maximize else "minimize"
        better = directions[self.metric]
        if better is not None and better != direction:
            raise SearchError(
                f"study {self.name!r} is to {direction} and {self.metric!r} is to {better}; "
                f"create the study with direction={better!r}"
            )

    def _probe(self, sampler: BaseSampler) -> Iterator[dict[str, Any]]:
        storage = optuna.storages.InMemoryStorage()
        with _quiet():
            storage.create_new_study([self.study.direction], "probe")
        probe = optuna.Study("probe", storage, sampler=sampler)
        for _ in range(MAX_GRID_POINTS):
            trial = probe.ask()
            config = self._config(trial)
            if not trial.params:
                raise SearchError(
                    "the space suggests nothing: call trial.suggest_float, suggest_int or "
                    "suggest_categorical in it, and return the configuration as a dict"
                )
            yield config
            if not (isinstance(sampler, GridWalk) and sampler.advance()):
                return
        raise SearchError(f"the grid has more than {MAX_GRID_POINTS:,} points; use RandomSearch")

    def _config(self, trial: optuna.Trial) -> dict[str, Any]:
        config = self.space(trial)
        if not isinstance(config, Mapping):
            raise SearchError(
                f"the space must return the configuration as a dict, got {type(config).__name__}"
            )
        return dict(config)

    def ask(self, n: int, sampling: Sampling) -> tuple[dict[int, dict[str, Any]], bool]:
        """Draw trials.

        Parameters
        ----------
        n
            How many.
        sampling
            Who draws.

        Returns
        -------
        configs
            Each new trial's configuration, by its number.
        exhausted
            Whether no further trial can be drawn.
        """
        configs: dict[int, dict[str, Any]] = {}
        with self._sampling(sampling):
            for _ in range(n):
                if self._grid_ended:
                    break
                trial = self.study.ask()
                self._live[trial.number] = trial
                configs[trial.number] = self._config(trial)
                self._grid_ended = self._grid is not None and not self._grid.advance()
        return configs, self._grid_ended

    @contextmanager
    def _sampling(self, sampling: Sampling) -> Iterator[None]:
        own = self.study.sampler
        if sampling == "random":
            self.study.sampler = self._random
        elif sampling == "grid":
            self._grid = self._grid or GridWalk()
            self.study.sampler = self._grid
        try:
            yield
        finally:
            self.study.sampler = own

    def params(self, number: int) -> dict[str, Any]:
        """Parameters that a live trial has suggested."""
        return dict(self._live[number].params)

    def report(self, number: int, epoch: int, value: float) -> None:
        """Report a live trial's value after an epoch."""
        self._live[number].report(value, epoch)

    def complete(self, number: int, value: float) -> None:
        """Tell a live trial's final value."""
        self._end(number, TrialState.COMPLETE, value)

    def prune(self, number: int) -> None:
        """Tell that a live trial was ended early; its last report stays its value."""
        self._end(number, TrialState.PRUNED)

    def fail(self, number: int, reason: str, traceback: str = "") -> None:
        """Tell that a live trial has failed, and keep why as a user attribute of it."""
        trial = self._live[number]
        trial.set_user_attr("dagsel:reason", reason)
        if traceback:
            trial.set_user_attr("dagsel:traceback", traceback)
        self._end(number, TrialState.FAIL)

    def fail_live(self, reason: str) -> None:
        """Leave no trial of this run in the state RUNNING; no callback can keep that from it."""
        for number, trial in list(self._live.items()):
            trial.set_user_attr("dagsel:reason", reason)
            del self._live[number]
            self.study.tell(number, state=TrialState.FAIL)

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than another; NaN never is."""
        if math.isnan(value):
            return False
        if than is None:
            return True
        return value > than if self.maximize else value < than

    def _end(self, number: int, state: TrialState, value: float | None = None) -> None:
        self._live.pop(number)
        frozen = self.study.tell(number, value, state=state)
        for callback in self.callbacks:
            callback(self.study, frozen)

    def trials_dataframe(self) -> Any:
        """Give the study's own frame of all its trials."""
        return self.study.trials_dataframe()
