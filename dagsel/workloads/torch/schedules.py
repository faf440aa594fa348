"""Learning-rate schedules: those that step by themselves, and those that follow a metric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from dagsel.checks import takes
from dagsel.errors import WorkloadError
from dagsel.flow import Goal
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.batches import ShardPass, sizes_of
from dagsel.workloads.random_streams import preserved_streams
from dagsel.workloads.torch import factories
from dagsel.workloads.torch.build import check_optimizer
from dagsel.workloads.torch.loop import say_weighted


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


def check_mode(schedule: Any, goal: Goal) -> None:
    """Raise a `WorkloadError` if a schedule takes the metric's worse values for the better."""
    mode, own = getattr(schedule, "mode", None), goal.direction[:3]
    if mode in ("min", "max") and mode != own:
        kind = type(schedule).__name__
        raise WorkloadError(
            f"{kind} has mode={mode!r}, and the search is to {goal.direction} {goal.metric!r}, "
            f"which it follows; write {kind}(optimizer, mode={own!r})"
        )


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

    loss: Any
    optimizer: Any
    lr_scheduler: Callable[[Any, Any], Any] | None
    lr_scheduler_interval: str
    drop_last: bool
    _batch_size: Callable[[Config], int]
    _has_said = False  # what there is to say of the metric
    #: Of a refit: samples of each shard in the search, and now.
    _n_samples: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def steps_by_batch(self) -> bool:
        """Whether there is a learning-rate schedule that steps after each batch."""
        return self.lr_scheduler is not None and self.lr_scheduler_interval == "step"

    def refitting(self, before: Sequence[int], now: Sequence[int]) -> Self:
        """Return this workload for a refit: its schedule steps as often an epoch as in the search.

        Parameters
        ----------
        before, now
            Samples of each shard that the search trained on, and that the refit does.
        """
        then = copy.copy(self)
        then._n_samples = before, now
        return then

    def _step_by_batch(self, schedule: Any, batches: ShardPass, config: Config) -> None:
        """Let a schedule step after each batch, if it does so."""
        if schedule is None or not self.steps_by_batch:
            return
        batches.after_batch = schedule.step
        if self._n_samples is None:
            return
        size = self._batch_size(config)
        before, now = (
            [len(sizes_of(n, size, drop_last=self.drop_last)) for n in each]
            for each in self._n_samples
        )
        shard = batches.cursor.shard
        if len(before) == len(now):
            batches.n_after = before[shard]
        else:  # rounded so that all shards have as many together
            first, last = (sum(now[:end]) * sum(before) // sum(now) for end in (shard, shard + 1))
            batches.n_after = last - first

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
        if goal.metric == "loss" and not self._has_said:
            self._has_said = True
            say_weighted(self.loss)
        if self.lr_scheduler is None:
            return False
        with preserved_streams(torch=True):
            module = self._build(config, seed=0, large=True)
            schedule = self._build_optimizer(module, config)[1]
        if not takes_metric(schedule):
            return False
        check_mode(schedule, goal)
        return True
