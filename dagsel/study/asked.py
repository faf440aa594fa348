"""What a run asks of its study: its sampler and its pruner, which no storage keeps."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import optuna
from optuna.pruners import BasePruner, MedianPruner
from optuna.samplers import BaseSampler, NSGAIISampler, TPESampler

from dagsel.errors import SearchError
from dagsel.flow import Traits

logger = logging.getLogger("dagsel")

#: What a study has that was made or opened without others.
_OPTUNAS = (TPESampler, NSGAIISampler, MedianPruner)
#: What a sampler that was given none fills in at its first draw.
_FILLED_IN = {"default_gamma", "default_gamma_multiobjective"}


def asked_of(study: optuna.Study, traits: Traits) -> dict[str, dict[str, str]]:
    """Return what a run with a search procedure asks of its study: class and arguments of each.

    Examples
    --------
    >>> study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(lower=0.1))
    >>> asked_of(study, Traits(sampling="random", uses_pruner=True))["pruner"]["lower"]
    '0.1'
    """
    found = {}
    if traits.sampling == "study":
        found["sampler"] = _described(study.sampler)
    if traits.uses_pruner and traits.pruner is None:
        found["pruner"] = _described(study.pruner)
    return found


def check_asked(study: optuna.Study, asked: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a `SearchError` if a study has Optuna's own sampler or pruner, where a run asks others.

    If the study has another one that is the user's, this is said in the log.

    Parameters
    ----------
    study
        The study that the run goes on with.
    asked
        What the run began with, of `asked_of`.
    """
    for role, then in asked.items():
        has = getattr(study, role)
        then, now = _by_draws(then), _by_draws(_described(has))
        if now == then:
            continue
        told = f"the {role} of the run's study was {_apart(then, now)}, and is {_apart(now, then)}"
        if type(has) in _OPTUNAS and now == _by_draws(_described(type(has)())):
            raise SearchError(
                f"{told} here, as Optuna gives it: storages keep no {role}; give "
                f"study=optuna.load_study(..., {role}=...), or create_study for one that was in "
                "memory, with the same"
            )
        logger.warning("%s; the run goes on with that", told)


def is_optunas(asked: Mapping[str, Mapping[str, str]], n_metrics: int) -> bool:
    """Whether a study that is opened anew has what `asked_of` returned of the first one.

    Examples
    --------
    >>> study = optuna.create_study(sampler=optuna.samplers.CmaEsSampler())
    >>> is_optunas(asked_of(study, Traits(sampling="study")), n_metrics=1)
    False
    """
    sampler = TPESampler if n_metrics == 1 else NSGAIISampler
    fresh = [_by_draws(_described(kind())) for kind in (sampler, MedianPruner)]
    return all(_by_draws(then) in fresh for then in asked.values())


def _described(what: BaseSampler | BasePruner) -> dict[str, str]:
    """Return how a sampler or a pruner was made, but for its seed: runs have their own."""
    held = vars(what)
    arguments = {
        name: _text(held.get(f"_{name}", held.get(name)))
        for name in inspect.signature(type(what)).parameters
        if "seed" not in name and (f"_{name}" in held or name in held)
    }
    return {"": type(what).__name__, **arguments}


def _by_draws(about: Mapping[str, str]) -> dict[str, str]:
    """Return how a sampler or a pruner was made, without what changes as it is used.

    Examples
    --------
    >>> _by_draws({"": "CmaEsSampler", "sigma0": "1.0", "warn_independent_sampling": "False"})
    {'': 'CmaEsSampler', 'sigma0': '1.0'}
    """
    return {
        name: "None" if value in _FILLED_IN else value
        for name, value in about.items()
        if not name.startswith("warn_")  # said once, and no more
    }


def _apart(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return a class, with the arguments that another one of it has otherwise.

    Examples
    --------
    >>> _apart({"": "TPESampler", "a": "1", "b": "2"}, {"": "TPESampler", "a": "1", "b": "3"})
    'TPESampler(b=2)'
    """
    names = [name for name in one if name and one[""] == other[""] and one[name] != other.get(name)]
    return f"{one['']}({', '.join(f'{name}={one[name]}' for name in names)})"


def _text(value: Any) -> str:
    if isinstance(value, BaseSampler | BasePruner):
        about = _by_draws(_described(value))
        kind = about.pop("")
        return f"{kind}({', '.join(f'{name}={it}' for name, it in about.items())})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(it)}' for key, it in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(getattr(value, "__qualname__", type(value).__name__))
