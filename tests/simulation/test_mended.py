"""A trial whose stored state is damaged is trained again from an earlier one, on its own terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dagsel.flow import (
    Ask,
    Asked,
    Decision,
    Event,
    Finish,
    Pause,
    Paused,
    Reported,
    Tick,
    Train,
    Wake,
)
from dagsel.messages import TrialReport
from dagsel.simulation import PowerLaw, SimulatedCluster, simulate
from dagsel.simulation.engine import VirtualEngine
from tests.driver.scripted import Scripted


@pytest.fixture
def damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial 0's first state cannot be read."""
    messages = VirtualEngine.messages
    left = [TrialReport(0, "CheckpointCorruptError: it")]

    def first_the_damage(engine: VirtualEngine, *, timeout_s: float) -> Iterator[Any]:
        if engine.now() > 0 and left:
            yield left.pop()
        yield from messages(engine, timeout_s=timeout_s)

    monkeypatch.setattr(VirtualEngine, "messages", first_the_damage)


def search(answer: Any) -> Any:
    return simulate(
        Scripted([Ask(1), Wake(1.0)], answer),
        PowerLaw(epoch_s=60.0),
        SimulatedCluster(n_workers=2),
        space=lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
    )


@pytest.mark.usefixtures("damaged")
def test_it_trains_on_as_many_workers_as_before() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 2, gang=2)]
            case Reported(0, 2):
                return [Finish()]
        return []

    run = search(answer)
    assert run.failures == []
    assert {unit.gang for unit in run.record.units if unit.unit.kind == "train"} == {2}


@pytest.mark.usefixtures("damaged")
def test_it_rests_if_it_was_to_rest() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 2)]
            case Tick():
                return [Pause(0)]
            case Paused():
                return [Finish()]
        return []

    run = search(answer)
    assert run.record.finished
    assert run.record.trials[0].epochs == []
