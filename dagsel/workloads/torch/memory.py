"""How much memory a trial takes, and how it can do with less."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Self

from dagsel.dispatch.units import Kind
from dagsel.workloads.base import Config
from dagsel.workloads.torch.live import LiveTrials


class SparesMemory:
    """The part of a workload of PyTorch that does with less memory than it usually takes."""

    loss: Any
    train_fn: Any
    eval_batch_size: int
    max_batch: int | None
    _batch_size: Callable[[Config], int]
    _live: LiveTrials
    _halvings = 0

    def forget(self) -> None:
        """Drop the trials that were just trained."""
        self._live.clear()

    def at_once(self, config: Config, kind: Kind) -> int | None:
        """Return the samples that are computed at once; None if they cannot be fewer."""
        if kind != "train":
            size = self.eval_batch_size
        elif self.train_fn is not None or _is_sum(self.loss):
            return None
        else:
            size = min(self._batch_size(config), self.max_batch or self._batch_size(config))
        return max(1, -(-size // 2**self._halvings))

    def halved(self, times: int) -> Self:
        """Return this workload with half the samples at once, so many times over, at least one."""
        then = copy.copy(self)  # that keeps the same trials
        then._halvings = times
        return then

    def _most_at_once(self, config: Config) -> int | None:
        """Return the samples of a training batch that are computed at once; None for all."""
        return self.at_once(config, "train") if self._halvings else self.max_batch


def _is_sum(loss: Any) -> bool:
    """Whether a loss adds up what it says of samples: that of a piece has no share of it.

    Examples
    --------
    >>> import torch
    >>> _is_sum(torch.nn.MSELoss(reduction="sum")), _is_sum(torch.nn.MSELoss())
    (True, False)
    """
    while isinstance(loss, functools.partial):
        if loss.keywords.get("reduction") == "sum":
            return True
        loss = loss.func
    return getattr(loss, "reduction", None) == "sum"
