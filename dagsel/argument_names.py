"""Names of arguments: those that a search does not take, such as Optuna's, and those it needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from dagsel.checks import refuse_elsewhere, short_traceback
from dagsel.errors import SearchError

P = ParamSpec("P")
T = TypeVar("T")

#: Arguments that `dagsel.optimize` does not take, Optuna's and others', and what to write instead.
_ELSEWHERE = {
    **dict.fromkeys(
        ("groups", "n_shards", "split", "stratify", "validation"),
        'write data=ShardedDataset.write("data.zarr", {"x": x, "y": y}, ...), which takes it',
    ),
    **dict.fromkeys(
        ("batch_size", "loss", "metrics", "model", "optimizer", "precision", "train_fn"),
        "write workload=dagsel.TorchWorkload(...), which takes it",
    ),
    "catch": "a trial that fails does not end the run; leave it out, and see run.failures",
    "direction": "write study=optuna.create_study(direction=...)",
    "directions": "write study=optuna.create_study(directions=...)",
    "epochs": "write flow=dagsel.flows.RandomSearch(max_epochs=9, n_trials=20)",
    "func": "write space=, a function that draws a configuration, and workload=, what is trained",
    "gc_after_trial": "trials train on workers; leave it out",
    "max_epochs": "write flow=dagsel.flows.RandomSearch(max_epochs=9, n_trials=20)",
    "n_jobs": "as many trials train as there are workers; write "
    "client=distributed.Client(n_workers=4)",
    "n_trials": "write flow=dagsel.flows.RandomSearch(max_epochs=9, n_trials=20)",
    "objective": "write space=, a function that draws a configuration, and workload=, what is "
    "trained",
    "pruner": "write flow=dagsel.flows.OptunaPruner(max_epochs=9, n_trials=20, pruner=...)",
    "sampler": "write study=optuna.create_study(sampler=...) and "
    "flow=dagsel.flows.SamplerSearch(max_epochs=9, n_trials=20)",
    "show_progress_bar": "write progress=False to see nothing, or leave it out",
    "storage": "write study=optuna.create_study(storage=...)",
    "timeout": 'write deadline="10 min"',
}
#: Arguments that a search needs, and how they are written.
_NEEDED = {
    "study": 'optuna.create_study(direction="maximize")',
    "workload": "dagsel.TorchWorkload(model=..., loss=..., optimizer=..., batch_size=32)",
    "data": "(x, y), or a ShardedDataset",
    "space": 'lambda trial: {"lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True)}',
    "flow": "dagsel.flows.ASHA(max_epochs=9, n_trials=20)",
    "metric": '"loss", or another metric of the workload',
}


def missing(given: Collection[str]) -> str:
    """Name what a search needs and is not given, and how it is written; empty if all is there."""
    names = [name for name in _NEEDED if name not in given]
    lines = "; ".join(f"{name}={_NEEDED[name]}" for name in names)
    return f"{' and '.join(names)}: write {lines}" if names else ""


def named_arguments(call: Callable[P, T]) -> Callable[P, T]:
    """Say what to write instead of an argument that belongs elsewhere, and for a missing one."""
    signature = inspect.signature(call)

    @short_traceback
    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        known = signature.parameters
        refuse_elsewhere(f"dagsel.{call.__name__}", kwargs, known, _ELSEWHERE, error=SearchError)
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return  # Python says it when it is called
        if lacks := missing(given):
            raise SearchError(f"dagsel.{call.__name__} needs {lacks}")

    @functools.wraps(call)
    def checked_call(*args: P.args, **kwargs: P.kwargs) -> T:
        check(args, kwargs)
        return call(*args, **kwargs)

    return checked_call
