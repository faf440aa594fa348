"""Pauses on a real cluster: at the sample where it stopped, on any worker, a trial goes on."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
from distributed import Client

import dagsel
from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Pause,
    Paused,
    Reported,
    Stop,
    Tick,
    Train,
    Wake,
)
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import CountingWorkload
from tests.conftest import Optimize
from tests.driver.scripted import Scripted

N_BATCHES = 40


@pytest.fixture
def search(optimize: Optimize, client: Client, digits: ShardedDataset) -> Any:
    def call(flow: Scripted, **options: Any) -> tuple[dagsel.Run, list[Event]]:
        seen: list[Event] = []

        def heard(event: Event) -> list[Decision]:
            seen.append(event)
            return list(flow.answer(event))

        run = optimize(
            Scripted(flow.begin, heard),
            study=optuna.create_study(direction="minimize"),
            workload=CountingWorkload(0.2, n_batches=N_BATCHES, n_shards=digits.n_shards),
            data=digits,
            metric="miscounted",
            client=client,
            **options,
        )
        return run, seen

    return call


def test_time_slices_cut_a_trial_and_lose_nothing(search: Any) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 2, seconds=0.15)]
            case Paused(0):
                return [Train(0, 0, seconds=0.15)]
            case Reported(0, 2):
                return [Stop(0, "the end", "complete"), Finish()]
        return []

    run, seen = search(Scripted([Ask(1)], answer))
    paused = [event for event in seen if isinstance(event, Paused)]
    assert len(paused) >= 4
    assert [e.epochs for e in paused] == sorted(e.epochs for e in paused)
    assert all(event.losses.n and event.trained_s > 0.1 for event in paused)
    assert run.best_value == 0.0
    assert len(run.record.pieces) >= 4


def test_a_pause_in_the_middle_of_an_epoch_is_scored_there(search: Any) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 5)]
            case Reported(0, 1):
                return [Wake(event.seconds + 0.3)]
            case Tick():
                return [Pause(0, evaluate=True)]
            case Paused(0):
                return [Train(0, 0)]
            case Reported(0, 5):
                return [Stop(0, "the end", "complete"), Finish()]
        return []

    run, seen = search(Scripted([Ask(1)], answer))
    (paused,) = [event for event in seen if isinstance(event, Paused)]
    assert paused.value is not None
    assert 0 < paused.epochs < 5
    assert run.best_value == 0.0
    assert [e.epoch for e in seen if isinstance(e, Reported)] == [1, 2, 3, 4, 5]


def test_what_was_scored_in_a_pause_is_the_best_model(search: Any) -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 50)]
            case Reported(0, 1):
                return [Wake(event.seconds + 0.3)]
            case Tick():
                return [Pause(0, evaluate=True)]
            case Paused(0):
                return [Stop(0, "the time or the budget is over", "complete"), Finish()]
        return []

    run, seen = search(Scripted([Ask(1)], answer), keep="last")
    (paused,) = [event for event in seen if isinstance(event, Paused)]
    assert run.best_value == paused.value
    n_seen = len(run.best_model())
    assert n_seen == round(paused.epochs * N_BATCHES * run.record.n_shards)
    assert run.study.best_value == paused.value
