"""Names of arguments: those that a search does not take, such as Optuna's, and those it needs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar

from dagsel.checks import refuse_elsewhere, short_traceback
from dagsel.errors import SearchError
from dagsel.flow.argument_names import NAMES, PATIENT, RANDOM, SEARCH_NAMES, STUDY_NAMES
from dagsel.workloads.base import Workload

P = ParamSpec("P")
T = TypeVar("T")

_FLOW = f"write {RANDOM}"
_ASHA = "write flow=dagsel.flows.ASHA(max_epochs=9, n_trials=20)"
_WORKLOAD = "write workload=dagsel.TorchWorkload(...), which takes it"
_PATIENCE = f"write {PATIENT}"
_DATA = 'write data=ShardedDataset.write("data.zarr", {"x": x, "y": y}, ...), which takes it'
_SHARE = "a fifth of data=(x, y) is held out; write data=ShardedDataset.write(..., validation=0.2)"
#: Arguments that `dagsel.optimize` does not take, Optuna's and others', and what to write instead.
_ELSEWHERE = {
    **{other: f"write {name}=" for name, others in SEARCH_NAMES.items() for other in others},
    **STUDY_NAMES,
    **dict.fromkeys(("max_epochs", *NAMES["max_epochs"], "n_trials", *NAMES["n_trials"]), _FLOW),
    **dict.fromkeys(("min_epochs", *NAMES["min_epochs"], "reduction_factor", "eta"), _ASHA),
    **dict.fromkeys(("n_concurrent", *NAMES["n_concurrent"]), f"{_ASHA[:-1]}, n_concurrent=4)"),
    **dict.fromkeys(("early_stopping", "patience", *NAMES["patience"]), _PATIENCE),
    **dict.fromkeys(("groups", "n_shards", "split", "stratify", "validation"), _DATA),
    **dict.fromkeys(("batch_size", "loss", "metrics", "model", "optimizer"), _WORKLOAD),
    **dict.fromkeys(("precision", "train_fn"), _WORKLOAD),
    **dict.fromkeys(("test_size", "validation_data", "validation_split"), _SHARE),
    **dict.fromkeys(("X", "x", "y"), "write data=(x, y)"),
    "catch": "a trial that fails does not end the run; leave it out, and see run.failures",
    "cv": "one validation set scores all trials; leave it out",
    "estimator": "write workload=dagsel.SklearnWorkload(...), which takes it",
    "func": "write space=, a function that draws a configuration, and workload=, what is trained",
    "gc_after_trial": "trials train on workers; leave it out",
    "n_jobs": "as many trials train as there are workers; write "
    "client=distributed.Client(n_workers=4)",
    "objective": "write space=, a function that draws a configuration, and workload=, what is "
    "trained",
    "pruner": "write flow=dagsel.flows.OptunaPruner(max_epochs=9, n_trials=20, pruner=...)",
    "sampler": "write study=optuna.create_study(sampler=...) and "
    "flow=dagsel.flows.SamplerSearch(max_epochs=9, n_trials=20)",
    "scheduler": _ASHA,
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
    places = [n for n, it in signature.parameters.items() if it.kind is it.POSITIONAL_OR_KEYWORD]

    @short_traceback
    def check(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        known = signature.parameters
        refuse_elsewhere(f"dagsel.{call.__name__}", kwargs, known, _ELSEWHERE, error=SearchError)
        if len(args) > len(places):
            raise SearchError(
                f"dagsel.{call.__name__} takes {', '.join(places)} by their places, and all others "
                "by name; arrays are one of them, data=(x, y)"
            )
        if args and places[0] == "study" and isinstance(args[0], Workload):
            by_place = places[1 : 1 + len(args)]
            by_name = ", ".join(f"{name}=..." for name in by_place)
            lacks = missing({*by_place, *kwargs})
            needs = f"; it needs {lacks}" if lacks else ""
            raise SearchError(
                f"dagsel.{call.__name__} takes the study first; write {by_name} by name{needs}"
            )
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
