"""A small search whose driver is stopped at a chosen moment: after so many steps that it takes."""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import optuna
import pytest
from optuna.samplers import NSGAIISampler, TPESampler

import dagsel
from dagsel.execution.engine import DaskEngine
from dagsel.flow import Direction
from dagsel.flows import ASHA, MOASHA, PBT, RandomSearch, Range, SamplerSearch
from dagsel.state import State
from dagsel.storage import CheckpointStore, Journal
from dagsel.study import StudyDriver
from dagsel.testing.synthetic import SyntheticWorkload
from dagsel.workloads.base import Evaluated

FLOWS: dict[str, Any] = {
    "random search": RandomSearch(max_epochs=2, n_trials=5, n_concurrent=3),
    "asha": ASHA(max_epochs=3, n_trials=6, reduction_factor=2, n_concurrent=3),
    "pbt": PBT(max_epochs=3, n_trials=4, mutations={"x": Range(0.0, 1.0)}),
}
#: Searches for several metrics.
SEVERAL: dict[str, Any] = {
    "nsga-ii": SamplerSearch(max_epochs=2, n_trials=8, n_concurrent=3),
    "random": RandomSearch(max_epochs=2, n_trials=9, n_concurrent=3),
    "mo-asha": MOASHA(max_epochs=3, n_trials=7, reduction_factor=2, n_concurrent=3),
}
METRICS = ["value", "cost"]
#: All that a driver does to the world.
STEPS: list[tuple[type, str]] = [
    (Journal, "append"),
    (DaskEngine, "submit"),
    (DaskEngine, "stop"),
    (StudyDriver, "ask"),
    (StudyDriver, "report"),
    (StudyDriver, "complete"),
    (StudyDriver, "prune"),
    (CheckpointStore, "save"),
    (CheckpointStore, "delete"),
    (CheckpointStore, "drop"),
]


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0), "fixed": object}


def value(config: Any, epoch: int) -> float:
    """Rise and fall: the last epoch is not always the best one."""
    return math.sin(9 * config["x"] + 2 * epoch)


def workload() -> SyntheticWorkload:
    """Its state remembers the order of the visits, so that its checksum tells two orders apart."""
    return SyntheticWorkload(seconds=0.01, value=value)


@dataclass(frozen=True)
class Twofold(SyntheticWorkload):
    """A workload with a second metric: what costs little is worth little."""

    @property
    def metrics(self) -> Mapping[str, Direction | None]:
        return {**super().metrics, "cost": "minimize"}

    def evaluate(self, state: State, shard: int | None, config: Any) -> Evaluated:
        scored = super().evaluate(state, shard, config)
        cost = config["x"] + 0.01 * state.meta["epoch"]
        return Evaluated(scored.n_samples, {**scored.metrics, "cost": cost})


def twofold() -> Twofold:
    return Twofold(seconds=0.01, value=value)


def delay(config: Any) -> float:
    """Give no two processes the same speed."""
    return random.SystemRandom().uniform(0.0, 0.02)


def open_study(storage: Any) -> optuna.Study:
    return optuna.create_study(
        study_name="test",
        storage=storage,
        direction="maximize",
        sampler=TPESampler(seed=1, n_startup_trials=2),
        load_if_exists=True,
    )


def open_several(storage: Any) -> optuna.Study:
    return optuna.create_study(
        study_name="test",
        storage=storage,
        directions=["maximize", "minimize"],
        sampler=NSGAIISampler(population_size=3, seed=1),
        load_if_exists=True,
    )


@contextlib.contextmanager
def stopping_after(n_steps: int, stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when so many steps have begun or ended."""
    left = n_steps

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            stop()

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            count()
            result = function(*args, **kwargs)
            count()
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for kind, name in STEPS:
            patch.setattr(kind, name, counted(getattr(kind, name)))
        yield


def interrupt() -> None:
    raise KeyboardInterrupt


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    flow, n_steps, data, scheduler, run_dir, storage = sys.argv[1:]
    # What is sent to the workers must be found there under the name it has here.
    from tests.execution import interrupted

    with interrupted.stopping_after(int(n_steps), die):
        several = flow in SEVERAL
        dagsel.optimize(
            open_several(storage) if several else open_study(storage),
            interrupted.twofold() if several else interrupted.workload(),
            data,
            space=interrupted.space,
            flow=(FLOWS | SEVERAL)[flow],
            metric=METRICS if several else "value",
            client=scheduler,
            run_dir=run_dir,
        )
