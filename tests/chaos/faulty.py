"""A workload that wraps another: it logs the units that begin, slows them and poisons trials."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from dagsel.flow import Direction, Goal
from dagsel.state import State
from dagsel.workloads.base import (
    ChecksData,
    Config,
    DataOutline,
    Evaluated,
    FollowsMetric,
    PoolsScores,
    Reconfigurable,
    Trained,
    Visit,
    Workload,
    never,
)


class Start(NamedTuple):
    """A training unit that began, and the process that it began in."""

    trial: int
    epoch: int
    shard: int
    process: int


@dataclass(frozen=True)
class FaultyWorkload:
    """Does what another workload does, with faults.

    Parameters
    ----------
    workload
        The other one.
    starts
        A file on this machine that gets a line for each training unit that begins: see
        `read_starts`. None to keep none.
    poison
        Trials whose units kill the worker that runs them.
    seconds
        How long a unit waits before it trains: a function of the configuration.
    """

    workload: Workload
    starts: str | None = None
    poison: Collection[int] = ()
    seconds: Callable[[Config], float] | None = None

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        return self.workload.metrics

    def validate(self, config: Config) -> None:
        self.workload.validate(config)

    def prepare(self, arrays: Mapping[str, NDArray[Any]]) -> Any:
        return self.workload.prepare(arrays)

    def validate_data(self, config: Config, data: DataOutline) -> None:
        if isinstance(self.workload, ChecksData):
            self.workload.validate_data(config, data)

    @property
    def pooled_metrics(self) -> Sequence[str]:
        return self.workload.pooled_metrics if isinstance(self.workload, PoolsScores) else ()

    def pool(self, kept: Sequence[State]) -> dict[str, float]:
        return self.workload.pool(kept) if isinstance(self.workload, PoolsScores) else {}

    def init(self, config: Config, seed: int) -> State:
        return self.workload.init(config, seed)

    def train(
        self,
        state: State,
        shard: Any,
        config: Config,
        *,
        visit: Visit,
        should_stop: Callable[[], bool] = never,
    ) -> Trained:
        if self.starts is not None:
            line = f"{visit.trial} {visit.epoch} {visit.shard} {os.getpid()}\n".encode()
            fd = os.open(self.starts, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            try:
                os.write(fd, line)  # one write, so that lines of several processes do not mix
            finally:
                os.close(fd)
        if self.seconds is not None:
            time.sleep(self.seconds(config))
        if visit.trial in self.poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.workload.train(state, shard, config, visit=visit, should_stop=should_stop)

    def evaluate(self, state: State, shard: Any, config: Config) -> Evaluated:
        return self.workload.evaluate(state, shard, config)

    def restore(self, state: State, config: Config) -> Any:
        return self.workload.restore(state, config)

    def follows_metric(self, config: Config, goal: Goal) -> bool:
        if isinstance(self.workload, FollowsMetric):
            return self.workload.follows_metric(config, goal)
        return False

    def reconfigure(self, state: State, config: Config, new_config: Config) -> State:
        if isinstance(self.workload, Reconfigurable):
            return self.workload.reconfigure(state, config, new_config)
        return state


def read_starts(path: str) -> list[Start]:
    """List the units that have begun, in order."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [Start(*map(int, line.split())) for line in lines]
