"""Finite search spaces: walk through all points, and tell whether two points are the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from dagsel.errors import SearchError

#: Parameters by name, in a form that is equal for equal points.
Point: TypeAlias = tuple[tuple[str, str], ...]


class GridWalk(BaseSampler):
    """Walks through every combination of a define-by-run space, like an odometer.

    Each trial takes the next combination. A parameter is a wheel of the odometer while the space
    suggests it. A trial that the user has enqueued takes no combination: each parameter that it
    leaves open takes its first choice.
    """

    def __init__(self) -> None:
        self._wheels: list[tuple[Sequence[Any], int]] = []
        self._place = 0
        self._is_enqueued = False
        self.ended = False

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Begin at the first wheel, and note whether the trial was enqueued."""
        self._place = 0
        self._is_enqueued = "fixed_params" in trial.system_attrs

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return none: each parameter is sampled on its own."""
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return none: each parameter is sampled on its own."""
        return {}

    def sample_independent(
        self,
        study: optuna.Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Return the choice of the parameter's wheel, or add a wheel."""
        if self._is_enqueued:
            return _choices(param_name, param_distribution)[0]
        if self._place == len(self._wheels):
            self._wheels.append((_choices(param_name, param_distribution), 0))
        choices, index = self._wheels[self._place]
        self._place += 1
        return choices[index]

    def advance(self) -> bool:
        """Turn to the next combination; return False if there is none."""
        while self._wheels:
            choices, index = self._wheels.pop()
            if index + 1 < len(choices):
                self._wheels.append((choices, index + 1))
                return True
        self.ended = True
        return False


def _choices(name: str, distribution: BaseDistribution) -> Sequence[Any]:
    match distribution:
        case CategoricalDistribution():
            return distribution.choices
        case IntDistribution():
            return range(distribution.low, distribution.high + 1, distribution.step)
        case FloatDistribution() if distribution.step is not None:
            n_steps = round((distribution.high - distribution.low) / distribution.step)
            steps = (distribution.low + index * distribution.step for index in range(n_steps + 1))
            return [min(value, distribution.high) for value in steps]
        case FloatDistribution() if distribution.single():
            return [distribution.low]
        case _:
            raise SearchError(
                f"a grid needs finite parameters, but {name!r} is continuous; give it a step, "
                "suggest it with suggest_categorical, or use RandomSearch"
            )


def is_finite(distributions: Mapping[str, BaseDistribution]) -> bool:
    """Whether parameters have finitely many points.

    Examples
    --------
    >>> is_finite({"n": IntDistribution(1, 3)})
    True
    >>> is_finite({"n": IntDistribution(1, 3), "lr": FloatDistribution(0.0, 1.0)})
    False
    """
    return not any(
        isinstance(distribution, FloatDistribution)
        and distribution.step is None
        and not distribution.single()
        for distribution in distributions.values()
    )


def point(params: Mapping[str, Any]) -> Point:
    """Return the parameters' point; floats that differ in their last digits give the same one.

    Examples
    --------
    >>> point({"x": 0.1 + 2 * 0.1}) == point({"x": 0.3})
    True
    >>> point({"x": 1}) == point({"x": "1"})
    False
    """
    return tuple(
        (name, f"{value:.12g}" if isinstance(value, float) else repr(value))
        for name, value in sorted(params.items())
    )
