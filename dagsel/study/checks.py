"""Check a study and a search space before the search."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from traceback import walk_tb
from types import MappingProxyType
from typing import Any, TypeAlias

import optuna
from optuna.pruners import (
    HyperbandPruner,
    MedianPruner,
    NopPruner,
    PatientPruner,
    PercentilePruner,
    SuccessiveHalvingPruner,
    ThresholdPruner,
    WilcoxonPruner,
)
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from dagsel.checks import shown
from dagsel.errors import DagselError, SearchError
from dagsel.flow import Direction, Goal, Traits
from dagsel.study.grid import GridWalk
from dagsel.study.sampler import quiet

logger = logging.getLogger("dagsel")

Space: TypeAlias = Callable[[optuna.Trial], Mapping[str, Any]]

#: A finite space with more points than this is not enumerated before the run.
MAX_GRID_POINTS = 100_000
#: So many configurations are tried before the run, until one can be trained.
MOST_CHECKED = 10
#: A space that rejects so many draws one after the other ends the search.
MAX_REJECTIONS = 1_000


def say_unasked(study: optuna.Study, flow: str, traits: Traits) -> None:
    """Say in the log if somebody has given a study a sampler or a pruner that a flow never asks.

    Those that a study has by itself are nobody's choice.
    """
    sampler, pruner = type(study.sampler), type(study.pruner)
    own = sampler in (TPESampler, NSGAIISampler, RandomSampler)
    if traits.sampling != "study" and not own:
        logger.warning(
            "the study's %s is not asked: %s draws the configurations itself; SamplerSearch, ASHA "
            "and others ask it",
            sampler.__name__,
            flow,
        )
    if not traits.uses_pruner and pruner not in (MedianPruner, NopPruner):
        logger.warning(
            "the study's %s is not asked: %s decides itself which trials go on; OptunaPruner asks "
            "it",
            pruner.__name__,
            flow,
        )


class RejectedError(SearchError):
    """A space has raised `optuna.TrialPruned`: it does not want these parameters."""


def rejects_all(n: int, last: RejectedError) -> SearchError:
    """Return the error of a space that has rejected so many draws in a row."""
    return SearchError(
        f"the space rejects what is drawn, {n:,} times one after the other; at last: {last}; "
        "suggest each parameter within what those before it leave, or mark such trials by "
        "trial.set_constraint, which trains them"
    )


#: What an objective of Optuna's does with a trial, and a space does not.
_OF_OBJECTIVES = {
    "report": "dagsel reports each epoch; leave the call out",
    "should_prune": "leave the call out and write flow=dagsel.flows.OptunaPruner(max_epochs=9, "
    "n_trials=20), which asks the study's pruner after each epoch",
}


def configure(space: Space, trial: Any) -> dict[str, Any]:
    """Call the space with a trial and return the configuration.

    Raises
    ------
    RejectedError
        If the space raises `optuna.TrialPruned`.
    SearchError
        If the space reports or asks the pruner like an objective, suggests a parameter otherwise
        than in trials before, or returns no mapping.
    """
    for name in _OF_OBJECTIVES:
        setattr(trial, name, partial(_refuse, name))
    try:
        config = space(trial)
    except optuna.TrialPruned as error:
        why = f" ({error})" if str(error) else ""
        raise RejectedError(
            f"the space raised TrialPruned{why} for {shown(trial.params)}: it wants others"
        ) from error
    except ValueError as error:
        if (parameter := _changed_parameter(error)) is None:
            _note_space(error, trial)
            raise
        raise SearchError(
            f"the space suggests {parameter!r} otherwise than in a trial before ({error}): suggest "
            "the same kind and the same choices in each trial, or give it another name"
        ) from error
    except Exception as error:
        _note_space(error, trial)
        raise
    finally:
        for name in _OF_OBJECTIVES:
            vars(trial).pop(name, None)
    if not isinstance(config, Mapping):
        raise SearchError(
            f"the space must return the configuration as a dict, got {type(config).__name__}: it "
            "draws and does not train; end it with  return trial.params"
        )
    return dict(config)


def _note_space(error: Exception, trial: Any) -> None:
    if trial.params and not isinstance(error, DagselError):
        error.add_note(
            f"the space raised it for {shown(trial.params)}; for parameters that do not go "
            "together it raises optuna.TrialPruned, and others are drawn"
        )


def _refuse(name: str, *args: Any, **options: Any) -> None:
    raise SearchError(f"the space calls trial.{name}, but it only draws: {_OF_OBJECTIVES[name]}")


def _changed_parameter(error: ValueError) -> str | None:
    """Return the parameter that a study has with other choices; None if the error is another."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    if frames[-1].f_globals.get("__name__") != "optuna.distributions":
        return None
    if frames[-1].f_code.co_name != "check_distribution_compatibility":
        return None
    names = [f.f_locals.get("name") for f in frames if f.f_code.co_name == "_suggest"]
    return str(names[-1]) if names else None


def is_infeasible(trial: FrozenTrial, sampler: BaseSampler) -> bool:
    """Whether a trial that was drawn breaks a constraint, of its space or of the study's sampler.

    A sampler's ``constraints_func`` is asked now; one that looks at what is not there yet decides
    nothing.
    """
    values = [*trial.constraints.values()]
    of_sampler = getattr(sampler, "_constraints_func", None)
    if of_sampler is not None:
        with suppress(Exception):
            values += of_sampler(copy.copy(trial))
    return any(value > 0.0 for value in values)


def directions_of(study: optuna.Study) -> tuple[Direction, ...]:
    """Return the directions of a study in dagsel's words."""
    words: dict[StudyDirection, Direction] = {StudyDirection.MAXIMIZE: "maximize"}
    return tuple(words.get(direction, "minimize") for direction in study.directions)


def check_metrics(
    study: optuna.Study, metrics: Sequence[str], better: Mapping[str, Direction | None]
) -> tuple[Goal, ...]:
    """Return what a study is to do with each metric.

    Raises a `SearchError` unless the study has a direction for each, and the metric has the same
    one. `better` has the directions of all metrics of the workload, None where it is not known.
    """
    told, directions = f"study {study.study_name!r}", directions_of(study)
    for metric in metrics:
        if metric not in better:
            known = ", ".join(better)
            plain = re.sub("^(val|valid|validation|eval|test)_", "", metric)
            if plain in better:
                raise SearchError(
                    f"the workload gives no metric {metric!r}, it gives {known}, all of the "
                    f"validation set; write metric={plain!r}"
                )
            raise SearchError(
                f"the workload gives no metric {metric!r}, it gives {known}; take one of these, or "
                f"add {metric!r} to the workload's metrics="
            )
        if metrics.count(metric) > 1:
            raise SearchError(f"metric names {metric!r} twice; name each metric once")
    wanted = [better[metric] or "minimize" for metric in metrics]
    create = f"directions={wanted}" if len(metrics) > 1 else f"direction={wanted[0]!r}"
    if len(directions) != len(metrics):
        has = "one direction" if len(directions) == 1 else f"{len(directions)} directions"
        names = "one" if len(metrics) == 1 else len(metrics)
        write = f" write metric=[{metrics[0]!r}, ...] with a metric for each direction, or"
        raise SearchError(
            f"{told} has {has}, and metric= names {names};{write if len(directions) > 1 else ''} "
            f"create the study with {create}"
        )
    for metric, direction in zip(metrics, directions, strict=True):
        if better[metric] not in (None, direction):
            raise SearchError(
                f"{told} is to {direction} and {metric!r} is to {better[metric]}; create the study "
                f"with {create}"
            )
    if directions == ("minimize",) and better[metrics[0]] is None:  # what a study does by default
        logger.warning(
            "nothing says whether a larger %s is better, and the study minimizes it: create the "
            'study with direction="maximize", or give the function the attribute '
            'direction = "minimize"',
            metrics[0],
        )
    return tuple(map(Goal, metrics, directions))


def probe(
    space: Space,
    sampler: BaseSampler,
    check: Callable[[Any], None],
    user_attrs: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Draw two configurations, or all of them with a `GridWalk`, in a study that is thrown away.

    It has the user attributes of the user's study, which a space may read. One of the first ten has
    to pass a check. Raises a `SearchError` if the space suggests nothing,
    rejects all, or has too many points to enumerate; and the first one's error if all ten fail.
    """
    configs = _draw(space, sampler, user_attrs)
    first = next(configs)
    try:
        check(first)
    except Exception as error:
        if not any(_passes(check, other) for other in islice(configs, MOST_CHECKED - 1)):
            if not isinstance(error, DagselError):  # else the last line says what to do
                told = ", ".join(f"{name}={shown(value)}" for name, value in first.items())
                error.add_note(f"raised for the configuration {told}, and for all others tried")
            raise error from error.__cause__
        logger.warning(
            "not all that the space draws can be trained, and such trials fail: of %s it is "
            "said: %s: %s",
            shown(first),
            type(error).__name__,
            error,
        )
    else:
        next(configs, None)  # shows whether the space draws from the same choices again
    if isinstance(sampler, GridWalk):
        for _ in configs:
            pass


def _passes(check: Callable[[Any], None], config: Mapping[str, Any]) -> bool:
    try:
        check(config)
    except Exception:  # noqa: BLE001 - the error of another one is told
        return False
    return True


def _draw(
    space: Space, sampler: BaseSampler, user_attrs: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    storage = optuna.storages.InMemoryStorage()
    with quiet():
        storage.create_new_study([StudyDirection.MINIMIZE], "probe")
    study = optuna.Study("probe", storage, sampler=sampler)
    for name, value in user_attrs.items():
        study.set_user_attr(name, value)
    n_drawn, rejected = 0, None
    for number in range(1, MAX_GRID_POINTS + 1):
        trial = study.ask()
        try:
            config = configure(space, trial)
        except RejectedError as error:
            rejected = error
        else:
            if not trial.params:
                raise SearchError(
                    "the space suggests nothing: call trial.suggest_float, suggest_int or "
                    "suggest_categorical in it, and return the configuration as a dict"
                )
            n_drawn += 1
            yield config
        if isinstance(sampler, GridWalk):
            has_more = sampler.advance()
        else:
            has_more = n_drawn < MOST_CHECKED and number < MAX_REJECTIONS
        if not has_more:
            break
    else:
        raise SearchError(f"the grid has more than {MAX_GRID_POINTS:,} points; use RandomSearch")
    if rejected is not None and not n_drawn:
        raise rejects_all(number, rejected)


def check_pruner(pruner: Any, max_epochs: int, first_step: int = 0) -> None:
    """Raise a `SearchError` unless a pruner can stop a trial before its last epoch.

    `first_step` is the step of the first epoch.
    """
    first = first_epoch(pruner, first_step)
    if first >= max(max_epochs, 2):
        raise SearchError(
            f"{type(pruner).__name__} ends no trial before epoch {first}, and a trial has "
            f"{max_epochs} epochs, the first of which is step {first_step}; lower its warm-up or "
            "resource"
        )


def first_epoch(pruner: Any, first_step: int = 0) -> int:
    """Return the first epoch after which a pruner can act; 1 if that is not known.

    Examples
    --------
    >>> first_epoch(SuccessiveHalvingPruner(min_resource=2, min_early_stopping_rate=1))
    9
    """
    match pruner:
        case PercentilePruner() | ThresholdPruner():  # MedianPruner is a PercentilePruner
            return max(1, pruner._n_warmup_steps - first_step + 1)
        case SuccessiveHalvingPruner():
            rung: int = pruner._reduction_factor**pruner._min_early_stopping_rate
            return (pruner._min_resource or 1) * rung - first_step + 1
        case HyperbandPruner():
            return pruner._min_resource - first_step + 1
        case WilcoxonPruner():
            return max(2, pruner._n_startup_steps)
        case PatientPruner():
            return max(pruner._patience + 2, first_epoch(pruner._wrapped_pruner, first_step))
    return 1
