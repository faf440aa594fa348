"""The arguments of the calls: what each may be, in one table.

A check returns what is to be used. What cannot be used is refused with the line to write instead,
before anything starts.
"""

from __future__ import annotations

import inspect
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields
from types import SimpleNamespace
from typing import Any, Literal, get_args

import dagsel.flows
import dagsel.flows.baselines
from dagsel.checks import choice, flag, number, short_traceback, shown, takes, whole
from dagsel.console import Progress
from dagsel.errors import DatasetInputError, SearchError, WorkloadError
from dagsel.flow import Direction, Flow, Goal, Keep, Traits
from dagsel.flow.argument_names import NEEDED
from dagsel.planning.budget import Budget, budget_for, to_seconds
from dagsel.planning.pools import Workers, check_workers
from dagsel.storage import Batches, ImageFolder, RunDir, ShardedDataset, WebDataset
from dagsel.storage.datasets.inputs.read import is_dataset
from dagsel.storage.datasets.pair import ArrayPair
from dagsel.storage.shard_cache import Hold
from dagsel.storage.shared_folder import folder_here
from dagsel.study import BaseSampler, Study, guarded
from dagsel.study.checks import check_metrics
from dagsel.workloads.base import TRAINED_BY, Workload

#: Arguments that are easily swapped.
_ROLES = {
    "study": (Study, "a study"),
    "workload": (Workload, "a workload"),
    "data": (ShardedDataset, "a data set"),
}
_PLAIN = ("builtins", "numpy")  # what holds no samples as a data set does
_PRUNER, _SAMPLER = "optuna.pruners._base.BasePruner", "optuna.samplers._base.BaseSampler"


@short_traceback
def checked(*may_be_none: str, **given: Any) -> Any:
    """Return a namespace of arguments, each as it is to be used.

    Parameters
    ----------
    *may_be_none
        Names of those that may be None, and then stay so.
    **given
        The arguments by name.

    Raises
    ------
    DagselError
        If one of them cannot be used; says what to write instead.
    """
    for name in _ROLES.keys() & given.keys():
        for other, (kind, what) in _ROLES.items():
            if other != name and _is_made(given[name], kind):
                raise SearchError(
                    f"{name} is {what}; give them by their names: {other}=..., {name}=..."
                )
    return SimpleNamespace(**{
        name: None if value is None and name in may_be_none else _CHECKS[name](value)
        for name, value in given.items()
    })  # fmt: skip


def check_flow(flow: Any) -> None:
    """Raise an error if something is no flow.

    Raises
    ------
    SearchError
        If a member of `Flow` is missing, which is named, or `traits` are no `Traits`.

    Examples
    --------
    >>> check_flow("asha")
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: flow must be a search procedure such as RandomSearch, got 'asha'
    """
    members = ("start", "handle", "state", "traits", "fresh")
    missing = [name for name in members if not hasattr(flow, name)]
    if isinstance(flow, type) or {"start", "handle"} <= set(missing):
        raise SearchError(f"flow must be a search procedure such as RandomSearch, got {flow!r}")
    if missing:
        raise SearchError(
            f"{type(flow).__name__} has no {' and no '.join(missing)}: let it inherit "
            "dagsel.flow.Flow, which declares what every search procedure has"
        )
    if not isinstance(flow.traits, Traits):
        raise SearchError(
            f"{type(flow).__name__}.traits must be dagsel.flow.Traits, got {flow.traits!r}"
        )


@short_traceback
def limits_of(
    traits: Traits,
    deadline: Any,
    budget: float | str | None,
    price: float | str | None,
    workers: Sequence[Workers] = (),
) -> tuple[float | None, Budget | None]:
    """Return deadline and budget of a search: the caller's; where one is missing, the flow's own.

    `price` is that of an hour of a worker, None for the flow's own; or `workers` are pools, each
    with its price. Raises a `SearchError` if one cannot be read, or they contradict each other.

    Examples
    --------
    >>> limits_of(Traits(deadline_s=60.0), None, "2 worker-minutes", None)
    (60.0, Budget(worker_seconds=120.0, price=None, amount=None))
    """
    deadline_s = traits.deadline_s if deadline is None else to_seconds("deadline", deadline)
    return deadline_s, budget_for(traits.budget, budget, price, workers)


@short_traceback
def check_limits(traits: Traits, deadline_s: float | None, budget: Budget | None) -> None:
    """Raise a `SearchError` if a search is to end before its flow has planned to.

    Examples
    --------
    >>> check_limits(Traits(deadline_s=60.0), 30.0, None)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: deadline is 30 s, and the flow has planned with 60 s: give one of ...
    """
    own_s = traits.deadline_s
    if deadline_s is not None and own_s is not None and deadline_s < own_s:
        raise SearchError(
            f"deadline is {deadline_s:g} s, and the flow has planned with {own_s:g} s: give one of "
            "them only, best to the flow"
        )
    own = traits.budget
    if budget is not None and own is not None and budget.worker_seconds < own.worker_seconds:
        raise SearchError(
            f"budget is {budget.worker_seconds:g} worker-seconds, and the flow has planned with "
            f"{own.worker_seconds:g}: give one of them only, best to the flow"
        )


@short_traceback
def check_goals(study: Study, metric: Any, workload: Workload) -> tuple[Goal, ...]:
    """Return the metrics of a search, each with its direction.

    Raises a `SearchError` unless study, metrics and workload fit together.
    """
    names = [metric] if isinstance(metric, str) else metric
    is_list = isinstance(names, list | tuple) and len(names) > 0
    if not is_list or not all(isinstance(name, str) for name in names):
        name = getattr(metric, "__name__", "")
        write = name if name in workload.metrics else list(workload.metrics)[-1]
        raise SearchError(
            f"metric must be the name of one of the workload's metrics "
            f"({', '.join(workload.metrics)}), or a list of names, got {shown(metric)}; write "
            f"metric={write!r}"
        )
    return check_metrics(guarded(study), names, workload.metrics)


@short_traceback
def check_several(goals: Sequence[Goal], flow: Flow, keep: Keep | None, top_k: int) -> Keep:
    """Return which state of a trial is its model.

    Raises a `SearchError` if a search for several metrics is to rank trials by one.

    Examples
    --------
    >>> several = [Goal("f1", "maximize"), Goal("ms", "minimize")]
    >>> check_several(several, dagsel.flows.RandomSearch(max_epochs=5), None, 1)
    'last'
    >>> check_several(several, dagsel.flows.ASHA(max_epochs=9, n_trials=9), None, 1)
    Traceback (most recent call last):
    ...
    dagsel.errors.SearchError: ASHA ranks trials by one metric, and the search is about f1, ms: ...
    """
    if len(goals) < 2:
        return keep or "best"
    about = f"and the search is about {', '.join(goal.metric for goal in goals)}"
    if not flow.traits.takes_several:
        raise SearchError(
            f"{type(flow).__name__} ranks trials by one metric, {about}: take MOASHA, "
            "SamplerSearch, RandomSearch or Grid"
        )
    if keep == "best":
        raise SearchError(
            f"keep='best' is the epoch in which one metric is best, {about}: leave it out, and a "
            "trial is worth its last epoch"
        )
    if top_k != 1:
        raise SearchError(
            f"top_k={top_k} ranks models by one metric, {about}: leave it out, and those of the "
            "Pareto front are kept"
        )
    return "last"


# ---- what is searched


def _progress(value: Any) -> Any:
    return value is not False and choice("progress", value, get_args(Progress)[:-1])


def _study(study: Any) -> Study:
    if isinstance(study, Study):
        return study
    write = 'optuna.create_study(direction="maximize")'
    if isinstance(study, str):
        write = f"optuna.load_study(study_name={study!r}, storage=...)"
    raise SearchError(f"study must be a study of Optuna, got {shown(study)}; write study={write}")


def _study_or_url(study: Any) -> Study | str:
    if isinstance(study, str) and "://" in study:
        return study
    if isinstance(study, str):
        raise SearchError(
            f"study must be a study of Optuna or the URL of its storage, got {study!r}; write "
            f"study='sqlite:///study.db' or study=optuna.load_study(study_name={study!r}, ...)"
        )
    return _study(study)


def _workload(workload: Any) -> Workload:
    if _is_made(workload, Workload):
        return workload  # type: ignore[no-any-return]
    name = workload.__name__ if isinstance(workload, type) else type(workload).__name__
    if isinstance(workload, Workload):
        raise WorkloadError(f"workload is the class {name}: make one of it, workload={name}(...)")
    if write := next((write for kind, write in TRAINED_BY.items() if _is_a(workload, kind)), None):
        raise WorkloadError(
            f"workload is {name}, a module, which does not say how it is trained; write "
            f"workload=dagsel.{write.format(name)}"
        )
    if hasattr(workload, "fit") and hasattr(workload, "get_params"):
        raise WorkloadError(
            f"workload is {name}, an estimator; write workload=dagsel.SklearnWorkload({name}())"
        )
    members = [name for name in dir(Workload) if not name.startswith("_")]
    missing = [member for member in members if not hasattr(workload, member)]
    if 0 < len(missing) < len(members):
        raise WorkloadError(
            f"workload is a {name} and has no {' and no '.join(missing)}: write what "
            "dagsel.workloads.Workload declares"
        )
    raise WorkloadError(
        f"workload must be what is trained, got {shown(workload)}; write "
        "workload=dagsel.TorchWorkload(model=..., loss=..., optimizer=..., batch_size=32)"
    )


def _data(data: Any) -> ShardedDataset:
    if isinstance(data, ShardedDataset):
        return data
    if isinstance(data, str | os.PathLike):
        return ShardedDataset.open(data)
    names = "x, y" if isinstance(data, tuple | list) else "data"
    arrays = '{"x": x, "y": y}' if names == "x, y" else "..."
    raise DatasetInputError(
        f"data must be a data set or its URL, got {shown(data)}; write "
        f'data=ShardedDataset.write("data.zarr", {arrays}, n_shards=8)'
    )


def _data_or_pair(data: Any) -> ShardedDataset | ArrayPair:
    are_datasets = isinstance(data, tuple | list) and data and all(map(is_dataset, data))
    brings_validation = not are_datasets and _brings_validation(data)
    is_pair = isinstance(data, tuple) and len(data) == 2
    if is_pair and not (are_datasets or brings_validation):
        return ArrayPair.read(*data)
    if isinstance(data, ShardedDataset | str | os.PathLike):
        return _data(data)
    if isinstance(data, Mapping) and brings_validation and is_dataset(data["train"]):
        (other, *_) = [key for key in ("validation", "valid", "val", "test") if key in data]
        of_both = f'data["train"], validation=data["{other}"]'
        write = f'data=ShardedDataset.write("data.zarr", {of_both}, n_shards=8)'
    elif brings_validation:
        write = (
            'data=ShardedDataset.write("data.zarr", {"x": x, "y": y}, '
            'validation={"x": x_test, "y": y_test}, n_shards=8)'
        )
    elif isinstance(data, Mapping) and {"data", "target"} <= data.keys():  # of scikit-learn
        write = 'data=(data["data"], data["target"])'
    elif isinstance(data, Mapping):
        write = 'data=ShardedDataset.write("data.zarr", {"x": ..., "y": ...}, n_shards=8)'
    elif hasattr(data, "train_dataloader"):
        write = (
            'data=ShardedDataset.write("data.zarr", data.train_dataloader().dataset, n_shards=8)'
        )
    elif are_datasets:
        write = 'data=ShardedDataset.write("data.zarr", train, validation=test, n_shards=8)'
    elif is_dataset(getattr(data, "dataset", None)) and not is_dataset(data):
        write = 'data=ShardedDataset.write("data.zarr", loader.dataset, n_shards=8)'
    elif hasattr(data, "iloc"):
        write = 'data=(frame.drop(columns="target"), frame["target"])'
    elif isinstance(tensors := getattr(data, "tensors", None), tuple) and len(tensors) == 2:
        write = "data=dataset.tensors"
    elif isinstance(data, Batches | ImageFolder | WebDataset) or (
        hasattr(data, "__getitem__") and type(data).__module__.partition(".")[0] not in _PLAIN
    ):
        write = 'data=ShardedDataset.write("data.zarr", dataset, n_shards=8)'
    else:
        write = "data=(x, y), or the URL of a data set that ShardedDataset.write wrote"
    raise DatasetInputError(
        f"data must be a data set, its URL, or two arrays, got {shown(data)}; write {write}"
    )


def _brings_validation(data: Any) -> bool:
    """Whether it is arrays to train on and others to validate with, as some libraries give them."""
    if isinstance(data, Mapping):
        return "train" in data and not {"validation", "valid", "val", "test"}.isdisjoint(data)
    if not isinstance(data, tuple | list):
        return False
    are_pairs = len(data) == 2 and all(isinstance(part, tuple) for part in data)
    return are_pairs or (len(data) == 4 and all(hasattr(part, "shape") for part in data))


# ---- how it is searched


def _space(space: Any) -> Callable[..., Any]:
    if callable(space) and not isinstance(space, type) and takes(space, 1):
        return space  # type: ignore[no-any-return]
    write = 'lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}'
    if isinstance(space, Mapping) and space:
        write = f"lambda trial: {{{', '.join(map(_suggested, space.items()))}}}"
    raise SearchError(
        f"space must be a function of an Optuna trial, got {shown(space)}; write space={write}"
    )


def _suggested(item: tuple[Any, Any]) -> str:
    """Return the entry of a space that says what a mapping has for a parameter."""
    name, value = item
    if (kind := type(value).__name__) in ("FloatDistribution", "IntDistribution"):
        suggest, ends = kind.removesuffix("Distribution").lower(), (value.low, value.high)
        rest = [", log=True" if value.log else ""]
        rest += [f", step={value.step}" if value.step not in (None, 1) else ""]
    elif isinstance(value, range) and len(value):
        suggest, ends = "int", (value[0], value[-1])
        rest = [f", step={value.step}" if value.step != 1 else ""]
    elif isinstance(value, tuple) and len(value) == 2 and all(map(_is_plain_number, value)):
        whole_ends = all(isinstance(end, int) for end in value)
        suggest, ends, rest = "int" if whole_ends else "float", value, []
    else:
        choices = getattr(value, "choices", value)
        if not isinstance(choices, list | tuple | set | frozenset):
            return f"{name!r}: {value!r}" if _is_plain_number(value) else f"{name!r}: ..."
        return f"{name!r}: trial.suggest_categorical({name!r}, {list(choices)!r})"
    return f"{name!r}: trial.suggest_{suggest}({name!r}, {ends[0]!r}, {ends[1]!r}{''.join(rest)})"


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _flow(flow: Any) -> Flow:
    known = {
        name.casefold(): kind
        for package in (dagsel.flows.baselines, dagsel.flows)
        for name, kind in vars(package).items()
        if _is_flow_class(kind)
    }
    if _is_flow_class(flow):
        write = _made(flow)
    elif isinstance(flow, str) and flow.casefold() in known:
        write = f"dagsel.flows.{_made(known[flow.casefold()])}"
    elif _is_a(flow, _PRUNER):
        write = f"dagsel.flows.{_made(dagsel.flows.OptunaPruner)[:-1]}, pruner=...)"
    elif _is_a(flow, _SAMPLER):
        write = f"dagsel.flows.{_made(dagsel.flows.SamplerSearch)} and give the study the sampler"
    elif not isinstance(flow, type) and (hasattr(flow, "start") or hasattr(flow, "handle")):
        check_flow(flow)
        return flow  # type: ignore[no-any-return]
    else:
        write = f"dagsel.flows.{_made(dagsel.flows.ASHA)}"
    raise SearchError(
        f"flow must be a search procedure such as RandomSearch, got {shown(flow)}; write "
        f"flow={write}"
    )


def _is_flow_class(kind: Any) -> bool:
    return isinstance(kind, type) and Flow in kind.__mro__


def _made(kind: type[Flow]) -> str:
    """Return the call that makes a flow, with the arguments that it needs."""
    needed = [
        f.name
        for f in fields(kind)  # type: ignore[arg-type]
        if f.init and f.default is MISSING and f.default_factory is MISSING
    ]
    arguments = (f"{name}={NEEDED.get(name, '...')}" for name in needed)
    return f"{kind.__name__}({', '.join(arguments)})"


def _callbacks(callbacks: Any) -> tuple[Callable[..., Any], ...]:
    if callbacks is None:
        return ()
    if callable(callbacks):
        name = getattr(callbacks, "__name__", "callback")
        raise SearchError(
            f"callbacks must be a sequence of functions, got {shown(callbacks)}; write "
            f"callbacks=[{name}]"
        )
    found = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
    for callback in found:
        if not takes(callback, 2):
            raise SearchError(
                f"callbacks must be functions of study and trial, got {shown(callback)}; write "
                "callbacks=[lambda study, trial: ...]"
            )
    return found


def _seed(seed: Any) -> int:
    """Return a seed; one that nobody knows for None."""
    return secrets.randbits(32) if seed is None else whole("seed", seed, least=0)


def _replicas(replicas: Any) -> int | Literal["auto"]:
    if isinstance(replicas, str) and replicas == "auto":
        return "auto"
    with suppress(SearchError):
        return whole("replicas", replicas)
    raise SearchError(
        f'replicas must be "auto" or a whole number of 1 or more, got {shown(replicas)}'
    )


def _sampler(sampler: Any) -> BaseSampler:
    if isinstance(sampler, BaseSampler):
        return sampler
    raise SearchError(
        f"sampler must be a sampler of Optuna, got {shown(sampler)}; write "
        "sampler=optuna.samplers.TPESampler()"
    )


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "cache_dir": lambda value: folder_here("cache_dir", value),
    "callbacks": _callbacks,
    "data": _data,
    "data_or_pair": _data_or_pair,
    "deterministic": lambda value: flag("deterministic", value),
    "count_downtime": lambda value: flag("count_downtime", value),
    "direction": lambda value: choice("direction", value, get_args(Direction)),
    "epoch_seconds": lambda value: to_seconds("epoch_seconds", value),
    "flow": _flow,
    "hold": lambda value: choice("hold", value, get_args(Hold)),
    "into": RunDir,
    "keep": lambda value: choice("keep", value, get_args(Keep)),
    "max_cluster_workers": lambda value: whole("max_cluster_workers", value),
    "n_workers": lambda value: whole("n_workers", value),
    "progress": _progress,
    "remeasure": lambda value: flag("remeasure", value),
    "replicas": _replicas,
    "run_dir": RunDir,
    "sampler": _sampler,
    "seed": _seed,
    "space": _space,
    "study": _study,
    "study_or_url": _study_or_url,
    "top_k": lambda value: whole("top_k", value),
    "unit_timeout": lambda value: to_seconds("unit_timeout", value),
    "workers": check_workers,
    "within": lambda value: number("within", value, "at least 0 and below 1", _is_share),
    "worker_startup": lambda value: to_seconds("worker_startup", value),
    "worker_timeout": lambda value: to_seconds("worker_timeout", value),
    "workload": _workload,
}


def _is_share(value: float) -> bool:
    return 0 <= value < 1


def _is_made(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not inspect.isclass(value)


def _is_a(value: Any, name: str) -> bool:
    """Whether something is, or makes, instances of a class of a package that may be missing."""
    kind = value if isinstance(value, type) else type(value)
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in kind.__mro__)
