"""Whether training needs what it changes beside the state: a batch is tried with it and without."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dagsel.errors import WorkloadError
from dagsel.workloads.base import Config, Visit
from dagsel.workloads.memory import is_out_of_memory
from dagsel.workloads.random_streams import write_streams
from dagsel.workloads.torch.build import tensors_in
from dagsel.workloads.torch.device import Shard, device_of
from dagsel.workloads.torch.frozen import checksums
from dagsel.workloads.torch.live import BuiltTrial
from dagsel.workloads.torch.passes import TrainsOnShards
from dagsel.workloads.torch.state import Captured
from dagsel.workloads.torch.unkept import Beside, Key, same

logger = logging.getLogger("dagsel")


@dataclass(slots=True)
class _Tried:
    """What was tried last of a trial: without what it goes on alike."""

    epoch: int = 0
    seen: int = 0  # the epoch of its last pass
    without: frozenset[Key] = frozenset()
    numbers: Mapping[Key, int | float] = field(default_factory=dict)  # as the last pass left them


class _Outcome(NamedTuple):
    """What a batch comes to."""

    tensors: Sequence[float] = ()  # checksums; loss and norms where two passes come near alone
    beside: Mapping[Key, Any] = MappingProxyType({})
    began: Mapping[Key, Any] = MappingProxyType({})  # what it was beside before
    error: Exception | None = None

    def unlike(
        self, other: _Outcome, asked: Iterable[Key], *, is_near: bool
    ) -> list[Key | Literal["tensors"]]:
        """Return in what another outcome differs: which of some things, or the tensors."""
        mine, its = self.beside, other.beside
        found: list[Key | Literal["tensors"]] = [
            key for key in asked if not _alike(mine.get(key), its.get(key), is_near=is_near)
        ]
        if not _alike(self.tensors, other.tensors, is_near=is_near):
            found.append("tensors")
        return found


#: Of each trial and configuration; of most trials nothing.
_TRIED: WeakKeyDictionary[Any, dict[tuple[str, int], _Tried]] = WeakKeyDictionary()


class TriesWithout(TrainsOnShards):
    """The part of a workload of PyTorch that tries whether a trial needs what no state holds."""

    def _tried_without(
        self,
        changed: Mapping[Key, WorkloadError],
        beside: Beside,
        trial: BuiltTrial,
        captured: Captured,
        shard: Shard,
        config: Config,
        visit: Visit,
    ) -> bool:
        """Raise the error of what is lost, unless a trial goes on alike without it.

        A batch is trained on with what the pass has left, and with what is made anew of the state:
        what is set in each forward pass, or a cache, makes no difference. Nor does what differs if
        it is made anew once more, such as a time that is measured. It is tried again when a pass
        lets a number be that an earlier one has set, and now and then, since what a trial does may
        depend on how long it has trained. Return whether it was tried now, by this trial.
        """
        trials = _TRIED.setdefault(self, {})
        about = repr({**config}), visit.trial
        if not changed and about not in trials:
            return False
        tried, numbers = trials.setdefault(about, _Tried()), beside.numbers(changed)
        if visit.epoch < tried.seen:  # it has begun again
            tried = trials[about] = _Tried()
        let_be = {
            key: value
            for key, value in tried.numbers.items()
            if key not in changed and key[0] != "loss"  # which other trials have changed as well
        }
        is_known = changed.keys() <= tried.without and visit.epoch < 2 * tried.epoch
        if not let_be and (is_known or not changed):
            tried.numbers, tried.seen = numbers, visit.epoch
            return False
        beside.put(let_be)
        lost = {**changed, **{key: beside.lost(key) for key in let_be}}
        before, is_near = beside.numbers(lost), device_of(shard).type != "cpu"
        trial.set_streams, trial.cursor = lambda device: write_streams(captured.streams), None
        left = self._one_batch_on(trial, beside, shard, config, visit)
        trial.free()  # what is made anew takes as much memory
        captured.tensors.clear()

        def go_on_without() -> _Outcome:
            beside.put_back()
            anew = self._trial(captured.state, config, shard, lives=False)
            anew.cursor = None
            return self._one_batch_on(anew, self._beside(anew), shard, config, visit)

        made = go_on_without()
        if type(left.error) is not type(made.error):  # both fail if a model has come to its end
            raise beside.lost(*lost) from (left.error or made.error)
        # A number that the batch leaves as it is counts nothing, such as the size of a cache.
        asked = [
            key for key in lost if key not in before or not same(before[key], left.beside.get(key))
        ]
        if differs := left.unlike(made, asked, is_near=is_near):
            again = go_on_without()
            is_shared = any(not same(made.began.get(key), again.began.get(key)) for key in lost)
            chance = [] if is_shared else again.unlike(made, asked, is_near=is_near)
            for key in differs:
                if key not in chance:
                    raise lost[key] if key in lost else beside.lost(*lost)
        trials[about] = _Tried(visit.epoch, visit.epoch, frozenset(changed), numbers)
        return True

    def _one_batch_on(
        self, trial: BuiltTrial, beside: Beside, shard: Shard, config: Config, visit: Visit
    ) -> _Outcome:
        """Train a trial on another batch."""
        then, trial.schedule = replace(visit, epoch=visit.epoch + 1), None  # it may have ended
        try:
            batches = self._pass(trial, shard, config, then, lambda: True, None)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return _Outcome(error=error)
        held = [*tensors_in((trial.module.state_dict(), trial.optimizer.state_dict()))]
        if device_of(shard).type == "cpu":
            return _Outcome(sorted(checksums(held)), beside.now(), beside.before)
        losses_and_norms = [batches.loss, *sorted(map(_norm, held))]
        return _Outcome(losses_and_norms, beside.now(), beside.before)


def _norm(tensor: torch.Tensor) -> float:
    if tensor.is_floating_point():  # without a wider copy
        return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return float(tensor.double().norm())


def _alike(one: Any, other: Any, *, is_near: bool) -> bool:
    """Whether two things are alike; of two passes on a GPU numbers come near alone."""
    if is_near and type(one) is type(other) is float:
        return bool(np.isclose(one, other, rtol=0.01, equal_nan=True))
    if is_near and type(one) is type(other) is list and len(one) == len(other):
        return all(_alike(*pair, is_near=True) for pair in zip(one, other, strict=True))
    return same(one, other)


@cache
def say_untried(*changed: str) -> None:
    """Say once what training in a gang has changed, where it is not tried whether that matters."""
    for text in changed:
        logger.warning("%s (in a gang it is not tried whether a result depends on it)", text)
