"""Chains become a Dask graph: every unit a task, every trial a chain of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dask._task_spec import Task, TaskRef
from dask.highlevelgraph import HighLevelGraph, MaterializedLayer

from dagsel.dispatch.units import Chain, Unit
from dagsel.execution.run_spec import PER_UNIT, RESOURCE, Key, StoredResult, unit_key
from dagsel.execution.worker_plugin import evaluate_unit, train_unit
from dagsel.messages import StatePlace


def chains_graph(
    run: str, chains: Sequence[Chain], configs: Mapping[int, Mapping[str, Any]]
) -> tuple[HighLevelGraph, dict[int, dict[int, list[Key]]]]:
    """Compile what is sent of chains.

    Parameters
    ----------
    run
        Identifier of the run.
    chains
        At most one for each trial.
    configs
        Configuration of each trial.

    Returns
    -------
    graph
        One layer; each train unit depends on the one before it, each evaluating unit on the last
        train unit of its epoch.
    wanted
        For each trial and epoch the keys that keep its chain alive.
    """
    tasks: dict[Key, Task] = {}
    wanted: dict[int, dict[int, list[Key]]] = {}
    for chain in chains:
        wanted[chain.trial] = _compile_chain(run, chain, configs[chain.trial], tasks)
    return _graph(run, f"chains-{run}", tasks), wanted


def check_graph(
    run: str,
    units: Sequence[Unit],
    place: StatePlace,
    config: Mapping[str, Any],
    halvings: int = 0,
) -> tuple[HighLevelGraph, list[Key]]:
    """Compile a check: units that score a stored state.

    Parameters
    ----------
    run
        Identifier of the run.
    units
        Of one trial.
    place
        Where its state is.
    config
        Its configuration.
    halvings
        How often the samples are halved that are scored at once.
    """
    tasks: dict[Key, Task] = {}
    for unit in units:
        state = StoredResult(unit.trial, place.epoch, place.position, place.is_partial)
        key = unit_key(run, unit)
        tasks[key] = Task(key, evaluate_unit, run, tuple(unit), config, state, halvings)
    name = f"check-{run}-{units[0].trial}-{units[0].epoch}"
    return _graph(run, name, tasks), list(tasks)


def _graph(run: str, name: str, tasks: dict[Key, Task]) -> HighLevelGraph:
    how = {"resources": {RESOURCE: PER_UNIT}, "dagsel": run}
    layer = MaterializedLayer(tasks, annotations=how)
    return HighLevelGraph({name: layer}, {name: set()})


def _compile_chain(
    run: str, chain: Chain, config: Mapping[str, Any], tasks: dict[Key, Task]
) -> dict[int, list[Key]]:
    wanted: dict[int, list[Key]] = {}
    made = {unit: unit_key(run, unit) for unit in chain.units}
    previous: Key | None = None
    for unit, key in made.items():
        state: Any = None if previous is None else TaskRef(previous)  # none: begin, or the store's
        if chain.is_clone and (unit.epoch, unit.position) == (1, 0):
            state = StoredResult(unit.trial, 0, chain.n_shards - 1)
        value = chain.value(unit)
        how = (config, state, value, chain.n_halvings(unit))
        tasks[key] = Task(key, train_unit, run, tuple(unit), *how)
        previous = key
    for epoch in chain.epochs:
        last = Unit("train", chain.trial, epoch, chain.n_shards - 1)
        end = TaskRef(made[last]) if last in made else StoredResult(*last[1:])
        for evaluation in chain.evaluations(epoch):
            scoring = unit_key(run, evaluation)
            what = (tuple(evaluation), config, end, chain.n_halvings(evaluation))
            tasks[scoring] = Task(scoring, evaluate_unit, run, *what)
            wanted.setdefault(epoch, []).append(scoring)
    if previous is not None and not any(chain.evaluations(chain.epochs[-1])):
        wanted.setdefault(previous[2], []).append(previous)
    return wanted
