"""What is checked of study and space before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import optuna
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection

from dagsel.errors import SearchError
from dagsel.study.grid import GridWalk
from dagsel.study.sampler import quiet

Space: TypeAlias = Callable[[optuna.Trial], Mapping[str, Any]]

#: A finite space with more points than this is not enumerated before the run.
MAX_GRID_POINTS = 100_000


def configure(space: Space, trial: Any) -> dict[str, Any]:
    """Let a space suggest on a trial, and give its configuration."""
    config = space(trial)
    if not isinstance(config, Mapping):
        raise SearchError(
            f"the space must return the configuration as a dict, got {type(config).__name__}"
        )
    return dict(config)


def check_metric(study: optuna.Study, metric: str, directions: Mapping[str, str | None]) -> None:
    """Check that a study searches for one metric, that the workload gives it, and which way.

    Raises
    ------
    SearchError
        If not.
    """
    name = study.study_name
    if len(study.directions) != 1:
        raise SearchError(
            f"study {name!r} has {len(study.directions)} directions; dagsel searches "
            "for one metric: create the study with direction=, not directions="
        )
    if metric not in directions:
        raise SearchError(
            f"the workload gives no metric {metric!r}; it gives {', '.join(directions)}"
        )
    direction = "maximize" if study.direction == StudyDirection.MAXIMIZE else "minimize"
    better = directions[metric]
    if better is not None and better != direction:
        raise SearchError(
            f"study {name!r} is to {direction} and {metric!r} is to {better}; "
            f"create the study with direction={better!r}"
        )


def probe(space: Space, sampler: BaseSampler) -> Iterator[dict[str, Any]]:
    """Draw one configuration, or with a `GridWalk` all of them, for no study.

    Raises
    ------
    SearchError
        If the space suggests nothing, or more points than can be enumerated.
    """
    storage = optuna.storages.InMemoryStorage()
    with quiet():
        storage.create_new_study([StudyDirection.MINIMIZE], "probe")
    study = optuna.Study("probe", storage, sampler=sampler)
    for _ in range(MAX_GRID_POINTS):
        trial = study.ask()
        config = configure(space, trial)
        if not trial.params:
            raise SearchError(
                "the space suggests nothing: call trial.suggest_float, suggest_int or "
                "suggest_categorical in it, and return the configuration as a dict"
            )
        yield config
        if not (isinstance(sampler, GridWalk) and sampler.advance()):
            return
    raise SearchError(f"the grid has more than {MAX_GRID_POINTS:,} points; use RandomSearch")
