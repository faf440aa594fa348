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
        now = _described(has)
        if now == then:
            continue
        told = f"the {role} of the run's study was {_apart(then, now)}, and is {_apart(now, then)}"
        if type(has) in _OPTUNAS and now == _described(type(has)()):
            raise SearchError(
                f"{told} here, as Optuna gives it: storages keep no {role}; give "
                f"study=optuna.load_study(..., {role}=...), or create_study for one that was in "
                "memory, with the same"
            )
        logger.warning("%s; the run goes on with that", told)


def _described(what: BaseSampler | BasePruner) -> dict[str, str]:
    """Return how a sampler or a pruner was made, but for its seed: runs have their own."""
    held = vars(what)
    arguments = {
        name: _text(held.get(f"_{name}", held.get(name)))
        for name in inspect.signature(type(what)).parameters
        if "seed" not in name and (f"_{name}" in held or name in held)
    }
    return {"": type(what).__name__, **arguments}


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
        about = _described(value)
        kind = about.pop("")
        return f"{kind}({', '.join(f'{name}={it}' for name, it in about.items())})"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_text(it)}' for key, it in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_text, value))}]"
    return str(getattr(value, "__qualname__", type(value).__name__))
