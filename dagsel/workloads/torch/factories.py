"""What a `TorchWorkload` calls: checked when it is made; optimizers may be given as a class."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from dagsel.checks import check_call, short_traceback, takes
from dagsel.errors import WorkloadError
from dagsel.workloads.base import Config

logger = logging.getLogger("dagsel")

#: How each is called, and what could be written.
_CALLS = {
    "model": ("config", "lambda config: torch.nn.Linear(64, 10)"),
    "loss": ("output, target", "torch.nn.functional.cross_entropy"),
    "optimizer": ("parameters, config", "torch.optim.Adam"),
    "lr_scheduler": (
        "optimizer, config",
        "lambda optimizer, config: torch.optim.lr_scheduler.StepLR(optimizer, 1)",
    ),
    "input_fn": ("batch, config", 'lambda batch, config: (batch["x"], batch["y"])'),
    "collate": ("batch", "dagsel.collate.pad(ids=0)"),
    "augment": ("sample, config", "augment, with def augment(sample, config): ..."),
    "train_fn": (
        "model, optimizer, batches, config",
        "train, with def train(model, optimizer, batches, config): ...",
    ),
}
_WITH_BASE = (
    "config, base",
    "lambda config, base: torch.nn.Sequential(base, torch.nn.Linear(64, 10))",
)
_OPTIONAL = {"lr_scheduler", "input_fn", "collate", "augment", "train_fn"}


@short_traceback
def check_functions(*, base: Any = None, **functions: Any) -> None:
    """Raise a `WorkloadError` if one is not called as a `TorchWorkload` calls it."""
    for name, function in functions.items():
        if function is None and name in _OPTIONAL:
            continue
        arguments, write = _CALLS[name] if name != "model" or base is None else _WITH_BASE
        instead = next(_instead(name, function), None)
        if instead is None and not takes(function, arguments.count(",") + 1):
            is_class = isinstance(function, type)
            instead = f"lambda {arguments}: {_path(function)}(...)" if is_class else write
        check_call(name, function, arguments, instead)


def _instead(name: str, function: Any) -> Iterator[str]:
    """Yield what to write in place of something that could be called, but is not what is asked."""
    kind = function if isinstance(function, type) else type(function)
    if name == "model" and isinstance(function, torch.nn.Module):
        yield f"lambda config: {_path(kind)}(...)"
    if name == "loss" and isinstance(function, type):
        yield f"{_path(function)}()"
    if name == "optimizer" and isinstance(function, Optimizer):
        yield _path(kind)
    if name == "optimizer" and isinstance(function, str):
        known = {key.casefold(): item for key, item in vars(torch.optim).items()}
        if is_optimizer_class(found := known.get(function.casefold())):
            yield _path(found)
    if name == "lr_scheduler" and issubclass(kind, torch.optim.lr_scheduler.LRScheduler):
        yield f"lambda optimizer, config: {_path(kind)}(optimizer, ...)"


def _path(kind: Any) -> str:
    """Return what a script calls a class, as far as its module tells."""
    for package in ("torch.optim.lr_scheduler", "torch.optim", "torch.nn"):
        if kind.__module__.startswith(package):
            return f"{package}.{kind.__qualname__}"
    return str(kind.__qualname__)


def is_optimizer_class(optimizer: Any) -> bool:
    """Whether an optimizer is given as its class."""
    return isinstance(optimizer, type) and issubclass(optimizer, Optimizer)


def make_optimizer(optimizer: Any, parameters: Any, config: Config) -> Any:
    """Call an optimizer's factory, or make one of a class with what the configuration has for it.

    Examples
    --------
    >>> parameters = [torch.nn.Parameter(torch.zeros(1))]
    >>> sgd = make_optimizer(torch.optim.SGD, parameters, {"lr": 0.5, "momentum": 0.9, "width": 3})
    >>> sgd.defaults["lr"], sgd.defaults["momentum"]
    (0.5, 0.9)
    """
    if not is_optimizer_class(optimizer):
        return optimizer(parameters, config)
    options = {name: config[name] for name in _options(optimizer) if name in config}
    return optimizer(parameters, **options)


def check_options_of(optimizer: Any, config: Config) -> None:
    """Check that a configuration has what an optimizer's class needs; say if it has no rate."""
    if not is_optimizer_class(optimizer):
        return
    options = _options(optimizer)
    missing = [name for name, default in options.items() if default is _NONE and name not in config]
    if missing:
        raise WorkloadError(
            f"{optimizer.__name__} needs {', '.join(missing)}, and the configuration has "
            f"{', '.join(config) or 'nothing'}: let the space return it, or write "
            "optimizer=lambda parameters, config: ..."
        )
    if "lr" in options and "lr" not in config:
        _say_rate(optimizer, options["lr"])


_NONE = inspect.Parameter.empty


@cache
def _options(optimizer: type[Optimizer]) -> dict[str, Any]:
    """Return the arguments of an optimizer's class after the parameters, with their defaults."""
    _, *options = inspect.signature(optimizer).parameters.values()
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return {option.name: option.default for option in options if option.kind not in open_ended}


@cache
def _say_rate(optimizer: type[Optimizer], rate: Any) -> None:
    logger.warning(
        "the configuration has no 'lr': %s trains with its own, %s", optimizer.__name__, rate
    )
