"""Changes the configuration of an optimizer and a schedule in the middle of a trial.

Both are built with the old and with the new configuration, and stepped to where the trial is.
Where the two differ the new value counts; everything else is the trial's. So a rate that a
schedule has lowered is lowered as much from its new base, and changes made by a training loop are
kept.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from dagsel.errors import WorkloadError
from dagsel.state import State, reading_state
from dagsel.workloads.base import Config
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.torch.build import equal
from dagsel.workloads.torch.frozen import Frozen
from dagsel.workloads.torch.schedules import takes_metric
from dagsel.workloads.torch.state import StateReader, module_tree, pack


def n_steps(schedule: Any) -> int:
    """Return the steps in a schedule's state dict; 0 if it does not say."""
    if "last_epoch" in schedule:
        return int(schedule["last_epoch"])
    return max(map(n_steps, schedule.get("_schedulers", ())), default=0)


class Reconfigures:
    """The part of a workload of PyTorch that makes a trial go on with another configuration."""

    def _build(self, config: Config, seed: int, *, large: bool = False) -> torch.nn.Module:
        raise NotImplementedError

    def _frozen(self, module: torch.nn.Module) -> Frozen:
        raise NotImplementedError

    def _build_optimizer(
        self, module: torch.nn.Module, config: Config
    ) -> tuple[torch.optim.Optimizer, Any]:
        raise NotImplementedError

    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        """Make a state continue with another configuration.

        Weights, moments, random streams and step counts stay. Optimizer and learning-rate schedule
        get the values that differ in the new configuration; the rate is the schedule's, from its
        new base after as many steps as it has made.

        Raises
        ------
        WorkloadError
            If the new configuration makes another model or another optimizer.
        """
        reader = StateReader(state)
        tree = {part: reader.decode(part, reader.view) for part in reader.tree}
        reached = tree["schedule"] or {}
        with reading_state():
            n_steps(reached)
        with preserved_streams(torch=True):
            before, after = self._outline(config, reached), self._outline(new_config, reached)
            if before.kind != after.kind:
                changed = [k for k, v in new_config.items() if k not in config or config[k] != v]
                alone = {k: self._outline({**config, k: new_config[k]}, {}).kind for k in changed}
                keys = [k for k in changed if alone[k] != before.kind] or changed
                names = " and ".join(map(repr, keys))
                raise WorkloadError(
                    f"a trial cannot go on with another {names}: "
                    f"{difference(before.kind, after.kind)}; leave {names} out of what "
                    "changes, such as PBT's mutations"
                )
        meta = {name: value for name, value in reader.meta.items() if name != "tree"}
        merged = merge(tree, before.settings, after.settings)
        if before.follows and after.follows:
            lower(merged, tree, before.settings, after.settings)
        return pack(merged, meta)

    def _outline(self, config: Config, reached: Any) -> Outline:
        """Return the outline of a configuration; `reached` is the schedule's state dict."""
        module = self._build(config, seed=0, large=True)
        frozen = self._frozen(module).may_lack()
        return outline(module, *self._build_optimizer(module, config), reached, without=frozen)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a configuration says of a trial.

    `kind` cannot change: shapes, the class of the optimizer; by a name for errors. `settings` can:
    everything else in the state dicts of optimizer and schedule. `follows`: whether the schedule
    follows a metric, so that its steps cannot be repeated.
    """

    kind: dict[str, Any]
    settings: dict[str, Any]
    follows: bool = False


def outline(
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    reached: Any,
    without: Collection[str] = (),
) -> Outline:
    """Return the outline of a fresh model, optimizer and schedule; steps the schedule.

    It makes as many steps as `reached`, the state dict of the trial's, has made.
    """
    follows = takes_metric(schedule)
    if schedule is not None and not follows:
        step_as(schedule, reached, optimizer)
    model = module_tree(module, without)["model"].items()
    kind: dict[str, Any] = {
        f"model {name}": list(getattr(value, "shape", ())) for name, value in model
    }
    kind["optimizer"] = type(optimizer).__name__
    kind["parameters in the optimizer's groups"] = [
        len(group["params"]) for group in optimizer.param_groups
    ]
    own = {key: value for key, value in optimizer.state_dict().items() if key != "state"}
    settings = {"optimizer": own, "schedule": schedule and schedule.state_dict()}
    return Outline(kind, settings, follows)


def step_as(schedule: Any, reached: Any, optimizer: Any) -> None:
    """Step a schedule as often as another one, of which `reached` is the state dict.

    If it has `parts`, each of them has its own steps.
    """
    if not hasattr(schedule, "parts"):
        optimizer._opt_called = True  # or PyTorch warns
        for _ in range(n_steps(reached)):
            schedule.step()
        return
    for part, its in zip(schedule.parts, reached.get("_schedulers", ()), strict=False):
        if not takes_metric(part):
            step_as(part, its, part.optimizer)


def lower(merged: Any, saved: Any, before: Any, after: Any) -> None:
    """Lower rates that have changed by as much as a schedule has lowered them by a metric."""
    trees = (merged, saved, before, after)
    for group, reached, base, new in zip(
        *(tree["optimizer"]["param_groups"] for tree in trees), strict=True
    ):
        if new["lr"] != base["lr"] and base["lr"]:
            group["lr"] = new["lr"] * (reached["lr"] / base["lr"])
    if "_last_lr" in merged["schedule"]:
        rates = [group["lr"] for group in merged["optimizer"]["param_groups"]]
        merged["schedule"]["_last_lr"] = rates


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describe the first difference of two kinds."""
    name = next(name for name in {**before, **after} if before.get(name) != after.get(name))
    return f"{name} is {before.get(name)} and would be {after.get(name)}"


def merge(saved: Any, before: Any, after: Any) -> Any:
    """Take from `after` what differs from `before`, and everything else from `saved`.

    Examples
    --------
    >>> merge({"lr": 0.1, "step": 7}, {"lr": 0.1, "step": 0}, {"lr": 0.2, "step": 0})
    {'lr': 0.2, 'step': 7}
    """
    if equal(before, after):
        return saved
    if all(isinstance(node, dict) for node in (saved, before, after)):
        merged = {key: value for key, value in saved.items() if key in after or key not in before}
        for key, value in after.items():
            known = key in saved and key in before
            merged[key] = merge(saved[key], before[key], value) if known else value
        return merged
    same_type = type(saved) is type(before) is type(after)
    if same_type and isinstance(saved, list | tuple) and len(saved) == len(before) == len(after):
        return type(saved)(map(merge, saved, before, after))
    return after
