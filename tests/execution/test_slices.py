"""Long chains are sent to Dask in slices: nothing is left out, and nothing comes late."""

from __future__ import annotations

from collections import Counter
from typing import Any

from distributed import Client
from hypothesis import given
from hypothesis import strategies as st

from dagsel.dispatch.units import Begun, Chain
from dagsel.execution.slices import Slices, begun_first
from dagsel.flow import Decision, Event, Finish, Reported
from dagsel.flows import RandomSearch
from tests.conftest import Optimize

from .helpers import log_anew

N_SHARDS = 3
ORDER = (2, 0, 1)


@st.composite
def rounds(draw: st.DrawFn) -> list[list[Chain]]:
    """Draw rounds: each goes on where a trial's last chain ended."""
    ends, drawn = Counter[int](), []
    for _ in range(draw(st.integers(1, 3))):
        chains = []
        for trial in draw(st.sets(st.integers(0, 3), min_size=1)):
            epochs = range(ends[trial] + 1, ends[trial] + 1 + draw(st.integers(1, 300)))
            ends[trial] = epochs[-1]
            order = draw(st.sampled_from([None, (ORDER,) * len(epochs)]))
            begun = (Begun((1,)),) if draw(st.booleans()) else ()
            values = tuple(map(float, epochs)) if draw(st.booleans()) else ()
            told: dict[str, Any] = {"order": order, "begun": begun, "values": values}
            chains.append(Chain(trial, epochs, N_SHARDS, **told))
        drawn.append(chains)
    return drawn


@given(rounds())
def test_what_is_sent_is_what_was_given_and_ahead_of_the_trials(given: list[list[Chain]]) -> None:
    held = Slices()
    sent: list[Chain] = []
    for chains in given:
        first = held.first(chains)
        assert all(len(part.epochs) <= 64 for part in first)
        sent += first
    for trial in {chain.trial for chains in given for chain in chains}:
        whole = [chain for chains in given for chain in chains if chain.trial == trial]
        parts = [part for part in sent if part.trial == trial]
        for epoch in range(1, whole[-1].epochs[-1] + 1):
            assert epoch in parts[-1].epochs or epoch < parts[-1].epochs[0], "it was not sent yet"
            parts += held.trained(trial, epoch)
        assert _units(parts) == _units(whole)


@given(rounds(), st.integers(0, 5))
def test_what_workers_begin_with_goes_first_and_nothing_is_left_out(
    given: list[list[Chain]], n_workers: int
) -> None:
    for chains in given:
        parts = begun_first(chains, n_workers)
        assert [chain for part in parts for chain in part] == chains
        assert len(parts) < 3
        assert len(parts) < 2 or len(parts[0]) == n_workers


def _units(chains: list[Chain]) -> list[Any]:
    return [
        (unit, chain.fixed_shard(unit), chain.value(unit), chain.done(unit.epoch))
        for chain in chains
        for unit in chain.units
    ]


def test_a_trial_that_is_forgotten_gets_no_more() -> None:
    held = Slices()
    held.first([Chain(0, range(1, 1001), N_SHARDS)])
    held.forget(0)
    assert held.trained(0, 64) == []


class Short(RandomSearch):
    """Ends after some epochs, however many its trials were given."""

    n_heard = 0

    def handle(self, event: Event) -> list[Decision]:
        self.n_heard += isinstance(event, Reported)
        return [Finish()] if self.n_heard == 100 else super().handle(event)


def test_a_search_of_many_epochs_begins_before_dask_knows_them_all(
    optimize: Optimize, client: Client
) -> None:
    """With all 40,000 tasks in one graph nothing was trained in half a minute."""
    client.run_on_scheduler(log_anew)
    optimize(Short(max_epochs=1000, n_trials=5), client=client)
    known = client.run_on_scheduler(
        lambda dask_scheduler: {key for key, *_ in dask_scheduler.transition_log}
    )
    assert {key[1] for key in known if key[0].startswith("train-")} == set(range(5))
    assert len(known) < 2 * 5 * 4 * 1000 / 8
