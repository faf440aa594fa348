"""Learning-rate schedules: those that step by themselves, and those that follow a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dagsel.checks import takes
from dagsel.errors import WorkloadError
from dagsel.flow import Goal
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.torch import factories
from dagsel.workloads.torch.build import check_optimizer


def takes_metric(schedule: Any) -> bool:
    """Whether a schedule steps by a metric, as ``ReduceLROnPlateau`` does.

    Examples
    --------
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> takes_metric(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    True
    >>> takes_metric(torch.optim.lr_scheduler.StepLR(optimizer, 2)), takes_metric(None)
    (False, False)
    """
    return schedule is not None and not takes(schedule.step, 0)


def check_schedule(schedule: Any, interval: str) -> Any:
    """Return what a schedule factory has made, or raise a `WorkloadError`."""
    kind = type(schedule).__name__
    if not all(hasattr(schedule, name) for name in ("step", "state_dict", "load_state_dict")):
        raise WorkloadError(
            f"lr_scheduler gave a {kind}, not a scheduler; return one of torch.optim.lr_scheduler"
        )
    if interval == "step" and takes_metric(schedule):
        raise WorkloadError(
            f"{kind} steps by the metric of an epoch, and lr_scheduler_interval is 'step'; write "
            "lr_scheduler_interval='epoch'"
        )
    return schedule


def begin_epoch(schedule: Any, visit: Visit) -> None:
    """Step a schedule by the metric of the epoch before, if it takes that and it is known."""
    if visit.last_value is not None and takes_metric(schedule):
        schedule.step(visit.last_value)


def end_epoch(schedule: Any, interval: str) -> None:
    """Step a schedule at the end of an epoch, unless it steps otherwise."""
    if schedule is not None and interval == "epoch" and not takes_metric(schedule):
        schedule.step()


class FollowsMetrics:
    """The part of a workload of PyTorch that has to do with its optimizer's rates."""

    optimizer: Any
    lr_scheduler: Callable[[Any, Any], Any] | None
    lr_scheduler_interval: str

    def _build(self, config: Config, seed: int, *, large: bool = False) -> torch.nn.Module:
        raise NotImplementedError

    def _parameters(self, module: torch.nn.Module) -> list[torch.nn.Parameter]:
        raise NotImplementedError

    def _build_optimizer(
        self, module: torch.nn.Module, config: Config
    ) -> tuple[torch.optim.Optimizer, Any]:
        made = factories.make_optimizer(self.optimizer, self._parameters(module), config)
        optimizer = check_optimizer(made)
        if self.lr_scheduler is None:
            return optimizer, None
        schedule = self.lr_scheduler(optimizer, config)
        return optimizer, check_schedule(schedule, self.lr_scheduler_interval)

    def follows_metric(self, config: Config, goal: Goal) -> bool:
        """Return whether the learning-rate schedule of a configuration follows a metric.

        Raises
        ------
        WorkloadError
            If it takes the worse values of this metric for the better ones.
        """
        if self.lr_scheduler is None:
            return False
        with preserved_streams(torch=True):
            module = self._build(config, seed=0, large=True)
            schedule = self._build_optimizer(module, config)[1]
        if not takes_metric(schedule):
            return False
        mode, own = getattr(schedule, "mode", None), goal.direction[:3]
        if mode in ("min", "max") and mode != own:
            kind = type(schedule).__name__
            raise WorkloadError(
                f"{kind} has mode={mode!r}, and the search is to {goal.direction} "
                f"{goal.metric!r}, which it follows; write {kind}(optimizer, mode={own!r})"
            )
        return True
