"""Whether training needs what it changes beside the state: a batch is tried with it and without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dagsel.errors import WorkloadError
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.random_streams import write_streams
from dagsel.workloads.torch.build import equal, tensors_in
from dagsel.workloads.torch.device import Shard, device_of
from dagsel.workloads.torch.frozen import checksums
from dagsel.workloads.torch.live import BuiltTrial
from dagsel.workloads.torch.passes import TrainsOnShards
from dagsel.workloads.torch.state import Captured
from dagsel.workloads.torch.unkept import Beside

logger = logging.getLogger("dagsel")

#: What a workload's training changes beside the state, and does not need: of which configurations.
_NEEDLESS: WeakKeyDictionary[Any, set[tuple[str, ...]]] = WeakKeyDictionary()


class TriesWithout(TrainsOnShards):
    """The part of a workload of PyTorch that tries whether a trial needs what no state holds."""

    def _check_needless(
        self,
        changed: Sequence[WorkloadError],
        beside: Beside,
        trial: BuiltTrial,
        captured: Captured,
        shard: Shard,
        config: Config,
        visit: Visit,
    ) -> None:
        """Raise the first error of what is lost, unless a trial goes on alike without it.

        A batch is trained on with what the pass has left, and with what is made anew of the state:
        what is set in each forward pass, or a cache, makes no difference.
        """
        about = (repr({**config}), *map(str, changed))
        needless = _NEEDLESS.setdefault(self, set())
        if about in needless:
            return
        trial.set_streams, trial.cursor = lambda device: write_streams(captured.streams), None
        try:
            left = self._one_batch_on(trial, beside, shard, config, visit)
        except Exception as error:
            raise changed[0] from error
        trial.free()
        captured.tensors.clear()
        beside.put_back()
        anew = self._trial(captured.state, config, shard, lives=False)
        anew.cursor = None
        made = self._beside(anew.module, anew.optimizer)
        if not _alike(left, self._one_batch_on(anew, made, shard, config, visit)):
            raise changed[0]
        needless.add(about)

    def _one_batch_on(
        self, trial: BuiltTrial, beside: Beside, shard: Shard, config: Config, visit: Visit
    ) -> tuple[list[int], list[float], Any]:
        """Train a trial on another batch.

        Return checksums of what it is then, or norms where two passes come near alone, and what is
        beside it.
        """
        self._pass(trial, shard, config, replace(visit, epoch=visit.epoch + 1), lambda: True, None)
        held = [*tensors_in((trial.module.state_dict(), trial.optimizer.state_dict()))]
        if device_of(shard).type == "cpu":
            return sorted(checksums(held)), [], beside.now()
        return [], sorted(float(it.double().norm()) for it in held), beside.now()


def _alike(one: tuple[list[int], list[float], Any], other: Any) -> bool:
    if len(one[1]) != len(other[1]):
        return False
    are_near = np.allclose(one[1], other[1], rtol=0.01, equal_nan=True)
    return one[0] == other[0] and are_near and equal(one[2], other[2])


@cache
def say_untried(*changed: str) -> None:
    """Say once what training in a gang has changed, where it is not tried whether that matters."""
    for text in changed:
        logger.warning("%s (in a gang it is not tried whether a result depends on it)", text)
