"""Choices that have no form in JSON, such as classes and functions, by name.

The space gets the choices themselves. Samplers see their names, as Optuna's write what they draw as
JSON. A study in memory keeps the choices; in one that is stored, in a run's journal and in its
tables each stands under its name, and a resumed run finds it among the choices of the space.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import InMemoryStorage
from optuna.trial import FixedTrial, FrozenTrial

from dagsel.errors import SearchError

_PLAIN = (type(None), bool, int, float, str)


def labels(choices: Sequence[Any]) -> list[Any]:
    """Return what stands for each choice; plain ones stand for themselves, NumPy's numbers too.

    Examples
    --------
    >>> labels(["a", 1, len, (1, 2), np.int64(32)])
    ['a', 1, 'len', '(1, 2)', 32]
    >>> labels([max, max])
    ['max#0', 'max#1']
    """
    plain = [choice.item() if isinstance(choice, np.generic) else choice for choice in choices]
    names = [
        choice if isinstance(choice, _PLAIN) else getattr(choice, "__qualname__", repr(choice))
        for choice in plain
    ]
    n_times = Counter(map(str, names))
    return [
        name if isinstance(choice, _PLAIN) or n_times[str(name)] == 1 else f"{name}#{at}"
        for at, (choice, name) in enumerate(zip(plain, names, strict=True))
    ]


def _has_names(distribution: BaseDistribution | None) -> TypeGuard[CategoricalDistribution]:
    return isinstance(distribution, CategoricalDistribution) and not all(
        isinstance(choice, _PLAIN) for choice in distribution.choices
    )


def labelled(
    params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]
) -> dict[str, Any]:
    """Return parameters with the labels of those values that have no form in JSON."""
    found = dict(params)
    for name, value in params.items():
        distribution = distributions.get(name)
        if not isinstance(value, _PLAIN) and _has_names(distribution):
            found[name] = labels(distribution.choices)[int(distribution.to_internal_repr(value))]
    return found


def as_labelled(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial with labels in the place of choices; itself if it needs none."""
    if not any(map(_has_names, trial.distributions.values())):
        return trial
    shown = copy.copy(trial)
    shown.params = labelled(trial.params, trial.distributions)
    shown.distributions = {
        name: CategoricalDistribution(labels(it.choices)) if _has_names(it) else it
        for name, it in trial.distributions.items()
    }
    return shown


def as_kept(study: optuna.Study, trial: FrozenTrial) -> FrozenTrial:
    """Return a trial as a study can keep it."""
    return trial if isinstance(study._storage, InMemoryStorage) else as_labelled(trial)


class DrawnTrial(optuna.Trial):
    """A trial whose sampler sees labels, and whose space gets the choices themselves."""

    def __init__(self, study: optuna.Study, trial_id: int) -> None:
        super().__init__(study, trial_id)
        self._given: dict[str, BaseDistribution] = {}

    @property
    def params(self) -> dict[str, Any]:
        """What has been suggested, by name."""
        return {name: self._choice(name, value) for name, value in super().params.items()}

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """From what it was suggested, by name."""
        return dict(self._given)

    def with_choices(self, shown: FrozenTrial) -> FrozenTrial:
        """Return what the sampler sees of it, with the choices in the place of labels."""
        frozen = copy.copy(shown)
        frozen.params, frozen.distributions = self.params, self.distributions
        return frozen

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        self._given.setdefault(name, distribution)
        if not _has_names(distribution):
            return super()._suggest(name, distribution)
        shown = CategoricalDistribution(labels(distribution.choices))
        fixed = labelled(self._fixed_params, {name: distribution})  # those of an enqueued trial
        self._fixed_params = fixed
        try:
            return self._choice(name, super()._suggest(name, shown))
        except ValueError as error:  # a sampler that has choices of its own, such as GridSampler
            if " not in " not in str(error):
                raise
            names = ", ".join(map(repr, shown.choices))
            raise SearchError(
                f"of {name!r} a sampler or an enqueued trial has a choice that is none of the "
                f"names {names} ({error}): samplers see choices such as tuples and classes by "
                "name; give it these names"
            ) from error

    def _choice(self, name: str, value: Any) -> Any:
        distribution = self._given[name]
        if not _has_names(distribution):
            return value
        return distribution.choices[labels(distribution.choices).index(value)]


class RecalledTrial(FixedTrial):
    """A trial with the parameters that a journal holds: labels stand for choices."""

    def __init__(self, study: optuna.Study, params: dict[str, Any], number: int) -> None:
        super().__init__(params, number)
        self.study = study  # as a space reads it

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        value = self._params.get(name)
        if _has_names(distribution) and isinstance(value, _PLAIN):
            known = dict(zip(labels(distribution.choices), distribution.choices, strict=True))
            self._params[name] = known.get(value, value)
        return super()._suggest(name, distribution)


class ChosenTrial(RecalledTrial):
    """A trial whose parameters the user has chosen; the space must be able to draw each."""

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        if name not in self._params:
            given = ", ".join(self._params) or "none"
            raise SearchError(f"{name!r} is missing: the space suggests it too; given are {given}")
        try:
            value = super()._suggest(name, distribution)
            inner = distribution.to_internal_repr(value)
            can_be = distribution._contains(inner)
        except (ValueError, TypeError):
            can_be = False
        if not can_be:
            raise SearchError(
                f"{name}={self._params[name]!r} is outside of the space, which has {distribution}"
            )
        chosen = distribution.to_external_repr(inner)
        self._params[name] = self._suggested_params[name] = chosen  # the text of a number is one
        return chosen
