"""Epochs whose training follows the metric are sent one by one, each with that of the one before.

Whatever is decided and reported in whatever order: each epoch is sent once and none too early, a
clone begins with the metric of its source, and other trials are sent as they are decided.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagsel.dispatch.events import TrialRests
from dagsel.dispatch.units import Chain, Round
from dagsel.driver import rounds
from dagsel.driver.recovery import Continuation
from dagsel.driver.rounds import Rounds
from dagsel.flow import (
    Ask,
    Asked,
    Clone,
    Context,
    Decision,
    Event,
    Finish,
    Pause,
    Paused,
    Reported,
    Stop,
    Train,
)
from dagsel.history.record import Record
from dagsel.messages import Message, Turn

from .hand_engine import HandEngine, epoch_of, search

FOLLOWS = {"follows": lambda config: True}


@dataclass
class Listening(HandEngine):
    """Also writes down what chains are told of metrics."""

    chains: list[Chain] = field(default_factory=list)

    def submit(self, round_: Round, configs: Mapping[int, Mapping[str, Any]]) -> None:
        super().submit(round_, configs)
        self.chains += round_.chains

    def values(self, trial: int) -> dict[int, float | None]:
        """By epoch, in the order in which they were sent."""
        mine = [chain for chain in self.chains if chain.trial == trial]
        sent = [epoch for chain in mine for epoch in chain.epochs]
        assert len(set(sent)) == len(sent), f"trial {trial}: an epoch was sent twice: {sent}"
        return {e: v for c in mine for e, v in zip(c.epochs, c.values or [None] * 99, strict=False)}


def listen(begin: Any, answer: Any, *happens: Any, **options: Any) -> Listening:
    engine = Listening(happens)
    search(begin, answer, *happens, engine=engine, **options)
    return engine


def ends(trial: int, epoch: int, loss: float) -> Callable[[HandEngine], list[Message]]:
    return lambda engine: epoch_of(trial, epoch, loss)


def at_once(event: Event) -> list[Decision]:
    """Train a trial for three epochs at once."""
    match event:
        case Asked():
            return [Train(0, 3)]
        case Reported(_, 3):
            return [Finish()]
    return []


LOSSES = [ends(0, 1, 0.5), ends(0, 2, 0.25), ends(0, 3, 0.125)]


def test_epochs_of_one_decision_wait_for_the_metric() -> None:
    engine = listen([Ask(1)], at_once, *LOSSES, **FOLLOWS)
    sent = engine.all_told("submit")
    assert sent == [[(0, range(1, 2))], [(0, range(2, 3))], [(0, range(3, 4))]]
    assert engine.values(0) == {1: None, 2: 0.5, 3: 0.25}


def test_others_are_sent_as_they_are_decided_and_told_nothing() -> None:
    engine = listen([Ask(1)], at_once, *LOSSES)
    assert engine.all_told("submit") == [[(0, range(1, 4))]]
    assert engine.chains[0].values == ()


def test_what_another_run_has_seen_is_told_at_once() -> None:
    engine = listen([Ask(1)], at_once, *LOSSES, foreseen=(0.75, 0.5), **FOLLOWS)
    assert engine.all_told("submit") == [[(0, range(1, 4))]]
    assert engine.values(0) == {1: None, 2: 0.75, 3: 0.5}
    engine = listen([Ask(1)], at_once, *LOSSES, foreseen=(0.75,), **FOLLOWS)
    assert engine.values(0) == {1: None, 2: 0.75, 3: None}


def test_a_million_epochs_are_sent_a_thousand_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MOST_EPOCHS", 4)

    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1_000_000)]
            case Reported(_, 1):
                return [Train(0, 2)]  # which waits behind the others
            case Reported(_, 7):
                return [Finish()]
        return []

    reports = [ends(0, epoch, 1 / epoch) for epoch in range(1, 8)]
    engine = listen([Ask(1)], answer, *reports)
    assert engine.all_told("submit") == [
        [(0, range(1, 5))],
        [(0, range(5, 9))],  # after the second one
        [(0, range(9, 13))],
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_each_epoch_is_sent_once_and_before_it_is_due(decided: list[int]) -> None:
    """Whatever is decided as the first epochs are reported."""
    left = list(decided)

    def answer(event: Event) -> list[Decision]:
        more = [Train(0, left.pop(0))] if left and not isinstance(event, Paused) else []
        is_over = isinstance(event, Reported) and event.epoch == sum(decided)
        return [*more, *([Finish()] if is_over else [])]

    reports = [ends(0, epoch, 1 / epoch) for epoch in range(1, sum(decided) + 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "MOST_EPOCHS", 4)
        engine = listen([Ask(1)], answer, *reports)
    sent = [epochs for (told,) in engine.all_told("submit") for _, epochs in [told]]
    assert [epoch for epochs in sent for epoch in epochs] == list(range(1, sum(decided) + 1))
    assert all(len(epochs) <= 4 for epochs in sent)


def test_what_is_decided_while_an_epoch_trains_waits_too() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1), Train(1, 1)]
            case Reported(1, 1):
                return [Train(0, 2), Stop(1, "enough")]
            case Reported(0, 3):
                return [Finish()]
        return []

    others = [ends(1, 1, 0.9), *LOSSES]
    assert listen([Ask(2)], answer, *others, **FOLLOWS).values(0) == {1: None, 2: 0.5, 3: 0.25}


def test_a_trial_that_is_held_goes_on_with_the_metric_of_its_last_epoch() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 3), Pause(0)]
            case Paused():
                return [Train(0, 0)]
            case Reported(_, 3):
                return [Finish()]
        return []

    def rests(engine: HandEngine) -> list[Message]:
        held = [told for told in engine.all_told("tell") if told.trial == 0]
        return [TrialRests(0, held[-1].number)]

    engine = listen([Ask(1)], answer, LOSSES[0], rests, *LOSSES[1:], **FOLLOWS)
    assert engine.values(0) == {1: None, 2: 0.5, 3: 0.25}


def test_a_clone_begins_with_the_metric_of_its_source() -> None:
    def answer(event: Event) -> list[Decision]:
        match event:
            case Asked():
                return [Train(0, 1), Train(1, 1), Train(2, 1)]
            case Reported(2, 1):  # 1 has the state of 0, and 2 then that of 1
                clones = [Clone(0, 1, {"x": 2.0}), Clone(1, 2, {"x": 3.0})]
                return [*clones, Train(1, 2), Train(2, 1)]
            case Reported(1, 3):
                return [Finish()]
        return []

    first = [ends(0, 1, 0.5), ends(1, 1, 0.75), ends(2, 1, 0.875)]
    more = [ends(2, 2, 0.25), ends(1, 2, 0.375), ends(1, 3, 0.125)]
    engine = listen([Ask(3)], answer, *first, *more, **FOLLOWS)
    assert engine.values(1) == {1: None, 2: 0.5, 3: 0.375}
    assert engine.values(2) == {1: None, 2: 0.5}


def test_a_configuration_that_breaks_the_workload_is_left_to_its_unit() -> None:
    def follows(config: Any) -> bool:
        raise ValueError("the user's own")

    assert listen([Ask(1)], at_once, *LOSSES, follows=follows).values(0)[3] == 0.25


# ---- in any order

N = 4  # shards


def reported(trial: int, epoch: int) -> Turn:
    return Turn(Reported(trial, epoch, epoch / 8, {"loss": epoch / 8}, 1.0), ())


@settings(deadline=None)
@given(st.lists(st.sampled_from(["decide", "decide two", "report", "go on"]), max_size=30))
def test_each_epoch_is_sent_once_and_not_before_its_metric_is_known(happens: list[str]) -> None:
    engine = Listening(())
    record = Record("run", n_shards=N)
    record.add(Turn(None, (Ask(1),), context=Context(1)))
    record.add(Turn(Asked((0,)), (), params={0: {}}))
    trial, sent = record.trials[0], list[int]()

    def session() -> Rounds:
        orders: Any = lambda trial, epoch: None  # noqa: E731
        return Rounds(engine, record, record.add, orders, lambda config: True)

    def send(rounds: Rounds, plan: Continuation) -> None:
        engine.chains.clear()
        rounds.send([plan])
        for chain in engine.chains:
            for epoch, value in zip(chain.epochs, chain.values, strict=True):
                assert epoch <= len(trial.epochs) + 1
                assert value == (None if epoch == 1 else (epoch - 1) / 8)
                sent.append(epoch)

    rounds = session()
    for what in happens:
        if what == "report" and sent and sent[-1] > len(trial.epochs):
            record.add(reported(0, sent[-1]))
            send(rounds, rounds.due(trial))
        elif what == "go on":
            rounds = session()
            first = len(trial.epochs) + 1
            del sent[first - 1 :]
            plan = Continuation(0, range(first, trial.n_decided + 1))
            send(rounds, rounds.anew(plan))
        elif what != "report":
            n_epochs = 1 + (what == "decide two")
            record.add(Turn(None, (Train(0, n_epochs),)))
            send(rounds, rounds.more(trial, n_epochs))
        until = min(trial.n_decided, len(trial.epochs) + 1)
        assert sent == list(range(1, until + 1))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_lost_epochs_are_trained_again_with_the_metrics_that_they_had(
    n_reported: int, n_more: int, first: int
) -> None:
    engine = Listening(())
    record = Record("run", n_shards=N)
    record.add(Turn(None, (Ask(1),), context=Context(1)))
    record.add(Turn(Asked((0,)), (Train(0, n_reported),), params={0: {}}))
    for epoch in range(1, n_reported + 1):
        record.add(reported(0, epoch))
    first = min(first, n_reported)
    orders: Any = lambda trial, epoch: None  # noqa: E731
    rounds = Rounds(engine, record, record.add, orders, lambda config: True)
    lost = rounds.anew(Continuation(0, range(first, n_reported + 1)))
    rounds.send([lost])
    assert [chain.epochs for chain in engine.chains] == [range(first, n_reported + 1)]
    record.add(Turn(None, (Train(0, n_more),)))
    rounds.send([rounds.more(record.trials[0], n_more)])
    assert len(engine.chains) == 1  # it waits for the state that is made anew
    rounds.repaired(record.trials[0])
    told = engine.values(0)
    assert [*told] == [*range(first, n_reported + 2)]
    assert all(told[epoch] == (epoch - 1) / 8 for epoch in told if epoch > 1)
