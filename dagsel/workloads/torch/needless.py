"""Whether training needs what it changes beside the state: a batch is tried with it and without."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from dagsel.errors import WorkloadError
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.random_streams import write_streams
from dagsel.workloads.torch.build import tensors_in
from dagsel.workloads.torch.device import Shard, device_of
from dagsel.workloads.torch.frozen import checksums
from dagsel.workloads.torch.live import BuiltTrial
from dagsel.workloads.torch.passes import TrainsOnShards
from dagsel.workloads.torch.state import Captured
from dagsel.workloads.torch.unkept import Beside, Key, same

logger = logging.getLogger("dagsel")

#: What a workload's training changes beside the state, and does not need: of which configurations.
_NEEDLESS: WeakKeyDictionary[Any, set[tuple[str, ...]]] = WeakKeyDictionary()


class TriesWithout(TrainsOnShards):
    """The part of a workload of PyTorch that tries whether a trial needs what no state holds."""

    def _check_needless(
        self,
        changed: Mapping[Key, WorkloadError],
        beside: Beside,
        trial: BuiltTrial,
        captured: Captured,
        shard: Shard,
        config: Config,
        visit: Visit,
    ) -> None:
        """Raise the error of what is lost, unless a trial goes on alike without it.

        A batch is trained on with what the pass has left, and with what is made anew of the state:
        what is set in each forward pass, or a cache, makes no difference.
        """
        about = (repr({**config}), *map(str, changed.values()))
        needless = _NEEDLESS.setdefault(self, set())
        if about in needless:
            return
        trial.set_streams, trial.cursor = lambda device: write_streams(captured.streams), None
        try:
            left = self._one_batch_on(trial, beside, shard, config, visit)
        except Exception as error:
            raise next(iter(changed.values())) from error
        trial.free()  # what is made anew takes as much memory
        captured.tensors.clear()
        beside.put_back()
        anew = self._trial(captured.state, config, shard, lives=False)
        anew.cursor = None
        made = self._beside(anew.module, anew.optimizer)
        tensors, others = left
        its_tensors, its_others = self._one_batch_on(anew, made, shard, config, visit)
        for key, lost in changed.items():
            if not same(others.get(key), its_others.get(key)):
                raise lost
        if not _alike(tensors, its_tensors):
            raise next(iter(changed.values()))
        needless.add(about)

    def _one_batch_on(
        self, trial: BuiltTrial, beside: Beside, shard: Shard, config: Config, visit: Visit
    ) -> tuple[list[int] | list[float], dict[Key, Any]]:
        """Train a trial on another batch.

        Return checksums of its tensors, or norms where two passes come near alone, and what is
        beside it.
        """
        self._pass(trial, shard, config, replace(visit, epoch=visit.epoch + 1), lambda: True, None)
        held = [*tensors_in((trial.module.state_dict(), trial.optimizer.state_dict()))]
        if device_of(shard).type == "cpu":
            return sorted(checksums(held)), beside.now()
        return sorted(float(it.double().norm()) for it in held), beside.now()


def _alike(some: list[Any], others: list[Any]) -> bool:
    if some == others or len(some) != len(others):
        return some == others
    are_near = isinstance(some[0], float) and np.allclose(some, others, rtol=0.01, equal_nan=True)
    return bool(are_near)


@cache
def say_untried(*changed: str) -> None:
    """Say once what training in a gang has changed, where it is not tried whether that matters."""
    for text in changed:
        logger.warning("%s (in a gang it is not tried whether a result depends on it)", text)
