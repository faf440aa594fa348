"""The best model so far is there whenever a search ends, also of trials that no epoch has ended."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from distributed import Client

from dagsel.flow import Ask, Asked, Decision, Event, Finish, Pause, Paused, Tick, Train, Wake
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize
from tests.driver.scripted import Scripted

N_BATCHES = 160  # as many as a shard has samples to train on


def test_what_was_scored_last_is_the_model_of_a_trial_that_went_on(
    optimize: Optimize, client: Client, tmp_path: Path
) -> None:
    arrays = {"x": np.zeros((400, 4), np.float32)}
    data = ShardedDataset.write(str(tmp_path / "data.zarr"), arrays, n_shards=2)
    scores: list[Paused] = []

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1), Wake(0.3)]
            case Tick():
                return [Pause(0, evaluate=not scores)]
            case Paused() if scores and event.epochs > scores[0].epochs:
                return [Finish()]
            case Paused():
                scores.extend([event] if event.value is not None else [])
                return [Train(0, 0), Wake(event.seconds + 0.3)]
        return []

    workload = SyntheticWorkload(8.0, n_batches=N_BATCHES)
    run = optimize(Scripted([Ask(1)], answer), workload=workload, data=data, client=client)
    (scored,) = scores
    assert run.best_value == scored.value
    assert run.best.check == 1
    batches = run.best_model()
    assert len(batches) == round(scored.epochs * 2 * N_BATCHES)
    assert run.run_dir.states.list(0) == run.run_dir.states.list(0, partial=True) == ()
