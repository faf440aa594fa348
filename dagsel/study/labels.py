"""Choices that have no form in JSON, such as classes and functions, by name.

Optuna keeps them in a study in memory. In a run's journal and its tables each stands under its
name, and a resumed run finds it among the choices of the space.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FixedTrial

from dagsel.errors import SearchError

_PLAIN = (type(None), bool, int, float, str)


def labels(choices: Sequence[Any]) -> list[Any]:
    """Return what stands for each choice; plain ones stand for themselves.

    Examples
    --------
    >>> labels(["a", 1, len, (1, 2)])
    ['a', 1, 'len', '(1, 2)']
    >>> labels([max, max])
    ['max#0', 'max#1']
    """
    names = [
        choice if isinstance(choice, _PLAIN) else getattr(choice, "__qualname__", repr(choice))
        for choice in choices
    ]
    n_times = Counter(map(str, names))
    return [
        name if isinstance(choice, _PLAIN) or n_times[str(name)] == 1 else f"{name}#{at}"
        for at, (choice, name) in enumerate(zip(choices, names, strict=True))
    ]


def labelled(
    params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]
) -> dict[str, Any]:
    """Return parameters with the labels of those values that have no form in JSON."""
    found = dict(params)
    for name, value in params.items():
        distribution = distributions.get(name)
        if isinstance(value, _PLAIN) or not isinstance(distribution, CategoricalDistribution):
            continue
        at = int(distribution.to_internal_repr(value))
        found[name] = labels(distribution.choices)[at]
    return found


class RecalledTrial(FixedTrial):
    """A trial with the parameters that a journal holds: labels stand for choices."""

    def _suggest(self, name: str, distribution: BaseDistribution) -> Any:
        value = self._params.get(name)
        if isinstance(distribution, CategoricalDistribution) and isinstance(value, str):
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
        self._params[name] = chosen = distribution.to_external_repr(inner)
        return chosen
