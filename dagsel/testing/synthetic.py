"""A workload that trains nothing: it sleeps for a stated time and records what it saw.

Use it to try a flow or a cluster without a model.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dagsel.errors import WorkloadError
from dagsel.flow import Direction, Losses
from dagsel.state import State, Tensor
from dagsel.workloads.base import Config, Evaluated, Trained, Visit, never
from dagsel.workloads.gang.gang import Gang


@dataclass(frozen=True)
class SyntheticWorkload:
    """Sleeps instead of training, and records every batch.

    Parameters
    ----------
    seconds
        How long a training unit takes: a number, or a function of the configuration.
    evaluation_seconds
        How long an evaluating unit takes.
    n_batches
        Batches of a visit; a unit can be stopped between two of them.
    speedup
        How many times faster a gang trains: a function of the configuration and the number of
        workers.
    state_bytes
        Extra bytes in the state, so that it takes as long to send as a model.
    value
        The metric after an epoch: a function of configuration and epoch.

    Examples
    --------
    >>> workload = SyntheticWorkload(seconds=0.0, n_batches=2)
    >>> state = workload.init({}, seed=0)
    >>> for shard in (1, 0):
    ...     visit = Visit(seed=0, trial=0, epoch=1, shard=shard)
    ...     state = workload.train(state, None, {}, visit=visit).state
    >>> seen(state)
    [(1, 1, 0), (1, 1, 1), (1, 0, 0), (1, 0, 1)]
    """

    seconds: float | Callable[[Config], float] = 0.0
    evaluation_seconds: float = 0.0
    n_batches: int = 1
    speedup: Callable[[Config, int], float] = lambda config, gang: float(gang)
    state_bytes: int = 0
    value: Callable[[Config, int], float] = lambda config, epoch: 1 - 1 / (1 + epoch)

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """``"loss"`` and ``"value"``."""
        return {"loss": "minimize", "value": "maximize"}

    def validate(self, config: Config) -> None:
        """Check that the stated time is not negative."""
        if not self._seconds(config) >= 0:
            raise WorkloadError(f"seconds must be 0 or more, got {self._seconds(config)}")

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> int:
        """Return the number of samples."""
        return len(next(iter(arrays.values())))

    def init(self, config: Config, seed: int) -> State:
        """Return a state that has seen nothing."""
        return self._pack(np.zeros((0, 3), np.int64), epoch=0)

    def train(
        self,
        state: State,
        shard: int | None,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        """Sleep through the remaining batches of the visit."""
        return self._train(state, shard, config, visit, should_stop, 1.0)

    def validate_gang(self, config: Config, size: int) -> None:
        """Check that the stated speedup is above 0."""
        if not self.speedup(config, size) > 0:
            raise WorkloadError(f"speedup must be above 0, got {self.speedup(config, size)}")

    def train_gang(
        self,
        state: State | None,
        shard: int | None,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
        gang: Gang,
    ) -> Trained:
        """Sleep on all ranks, shorter by the speedup, and end together."""
        self.validate_gang(config, gang.size)
        speedup = self.speedup(config, gang.size)
        state = gang.broadcast(state)

        def stop() -> bool:
            return gang.agree(gang.rank == 0 and should_stop())

        trained = self._train(state, shard, config, visit, stop, speedup)
        gang.agree(True)
        return trained

    def _train(
        self,
        state: State,
        shard: int | None,
        config: Config,
        visit: Visit,
        should_stop: Callable[[], bool],
        speedup: float,
    ) -> Trained:
        before = state.tensors["seen"].numpy()
        first = int((before[-1, 2] + 1) % self.n_batches) if len(before) else 0
        pause = self._seconds(config) / self.n_batches / speedup
        batches: list[tuple[int, int, int]] = []
        for batch in range(first, self.n_batches):
            if batches and should_stop():
                break
            _sleep(pause)
            batches.append((visit.epoch, visit.shard, batch))
        seen_now = np.concatenate([before, np.array(batches, np.int64).reshape(-1, 3)])
        finished = first + len(batches) == self.n_batches
        n_samples = (shard or 1) * (first + len(batches)) // self.n_batches
        loss = 1 - self.value(config, visit.epoch)
        after, losses = self._pack(seen_now, visit.epoch), Losses(len(batches), loss, loss)
        return Trained(after, n_samples, loss, finished, losses=losses)

    def evaluate(self, state: State, shard: int | None, config: Config) -> Evaluated:
        """Return the stated value after the state's epoch."""
        _sleep(self.evaluation_seconds)
        value = float(self.value(config, state.meta["epoch"]))
        return Evaluated(shard or 1, {"loss": 1 - value, "value": value})

    def restore(self, state: State, config: Config) -> list[tuple[int, int, int]]:
        """Return what was seen, in place of a model."""
        return seen(state)

    def _seconds(self, config: Config) -> float:
        return self.seconds(config) if callable(self.seconds) else self.seconds

    def _pack(self, batches: NDArray[np.int64], epoch: int) -> State:
        extra = np.zeros(self.state_bytes, np.uint8)
        tensors = {"seen": Tensor.from_numpy(batches), "extra": Tensor.from_numpy(extra)}
        return State.pack(tensors, {"epoch": epoch})


@dataclass(frozen=True)
class CountingWorkload(SyntheticWorkload):
    """A `SyntheticWorkload` that also counts the batches not seen exactly once an epoch.

    Examples
    --------
    >>> workload = CountingWorkload(n_shards=1)
    >>> state, visit = workload.init({}, seed=0), Visit(seed=0, trial=0, epoch=1, shard=0)
    >>> for _ in range(2):
    ...     state = workload.train(state, None, {}, visit=visit).state
    ...     print(workload.evaluate(state, None, {}).metrics["miscounted"])
    0.0
    1.0
    """

    n_shards: int = 1  # of the data set

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        """Those of a `SyntheticWorkload`, and ``"miscounted"``."""
        return {**super().metrics, "miscounted": "minimize"}

    def evaluate(self, state: State, shard: int | None, config: Config) -> Evaluated:
        """Return the stated value, and how many batches were missed or seen too often."""
        scores = super().evaluate(state, shard, config)
        shape = (state.meta["epoch"], self.n_shards, self.n_batches)
        counts = Counter(seen(state))
        wanted = {(epoch + 1, *place) for epoch, *place in np.ndindex(*shape)}
        wrong = sum(counts[batch] != 1 for batch in wanted | counts.keys())
        return Evaluated(scores.n_samples, {**scores.metrics, "miscounted": float(wrong)})


def seen(state: State) -> list[tuple[int, int, int]]:
    """Return the epoch, shard and batch of each batch that a state has seen, in order.

    Parameters
    ----------
    state
        A state of a `SyntheticWorkload`.

    Examples
    --------
    >>> workload = SyntheticWorkload(n_batches=2)
    >>> visit = Visit(seed=0, trial=0, epoch=1, shard=3)
    >>> seen(workload.train(workload.init({}, seed=0), None, {}, visit=visit).state)
    [(1, 3, 0), (1, 3, 1)]
    """
    return [tuple(row) for row in state.tensors["seen"].numpy().tolist()]


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)
