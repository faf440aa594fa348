"""Searches on machines that come late, never, or are taken back: what is promised holds on each."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from distributed import Client, Status

from dagsel.execution.elastic import elastic_for
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.waiting import slowness

from .deployed import (
    FLOWS,
    N_BATCHES,
    N_MOST,
    RELEASE_S,
    Outcome,
    check_bill,
    check_limits,
    check_model,
    search,
)
from .helpers import engine_for
from .machines import Loss, Machine, Provider, cluster_of

pytestmark = pytest.mark.slow

#: Seeds of the machines that are lost; `make churn` tries more, and each search on each cluster.
SEEDS = int(os.environ.get("MACHINE_SEEDS", "1"))


@dataclass(frozen=True)
class Kind:
    """What becomes of the machines."""

    provider: dict[str, Any] = field(default_factory=dict)
    loss: Loss | None = None
    told: dict[str, Any] = field(default_factory=dict)  # to the search

    @property
    def release_s(self) -> float:
        """How long it may take to give a machine back."""
        waits = self.provider.get("waits", False)
        return RELEASE_S + (self.provider["delay_s"] if waits else 0.0)


KINDS = {
    "late": Kind({"delay_s": 2.0}),
    "late, and waited for": Kind({"delay_s": 2.0, "waits": True}),
    "too late": Kind({"delay_s": 5.0}),
    "two never": Kind({"n_coming": 1}, told={"worker_startup": 1.0}),
    "notice": Kind(loss="notice"),
    "no notice": Kind(loss="no notice"),
}
SHORT = [
    ("late", "seer"),
    ("late, and waited for", "growth"),
    ("too late", "asha"),
    ("two never", "asha"),
    ("notice", "growth"),
    ("no notice", "seer"),
]
EACH = [(kind, flow, seed) for kind, flow in product(KINDS, FLOWS) for seed in range(SEEDS)]


@pytest.mark.parametrize(
    ("kind", "flow", "seed"), EACH if SEEDS > 1 else [(*one, 0) for one in SHORT]
)
def test_what_is_promised_holds(kind: str, flow: str, seed: int, tmp_path: Path) -> None:
    about, slow = KINDS[kind], slowness()
    provider = Provider(tmp_path, **about.provider)
    lost: AbstractContextManager[list[Machine]] = nullcontext([])
    if about.loss:
        lost = provider.losing(about.loss, every_s=2.0, seed=seed)
    with cluster_of(provider) as cluster:
        if flow == "asha":  # which asks for no worker itself
            cluster.scale(N_MOST)
            cluster.wait_for_workers(N_MOST if provider.waits else 1, timeout=60 * slow)
        with lost as taken:
            told = {"worker_timeout": 60 * slow, **about.told}
            outcome = search(FLOWS[flow](slow), tmp_path, slow, cluster=cluster, **told)
        n_before = N_MOST if flow == "asha" else 1
        assert len(cluster.worker_spec) == n_before
        assert sum(m.status == Status.running for m in provider.machines) <= n_before
    check_limits(outcome, release_s=about.release_s)
    check_model(outcome)
    check_bill(
        outcome,
        provider.cost(outcome.called, outcome.end),
        n_asked=len(provider.machines),
        n_lost=len(taken),
    )
    check_wanted(outcome, provider, about.release_s * slow)
    n_lost = 1 if about.loss == "notice" else N_BATCHES  # the one or those of a unit
    assert outcome.n_trained_again <= n_lost * len(taken)
    if kind == "two never":
        assert any("2 of 4 workers have not come" in note for note in outcome.run.record.notes)


def check_wanted(outcome: Outcome, provider: Provider, release_s: float) -> None:
    """What is not wanted any more is given back."""
    wanted = [*outcome.wanted(), (outcome.end, N_MOST)]
    asked = [rental.asked for rental in provider.rentals]
    for (at, n_workers), (until, _) in pairwise(wanted):
        moments = [moment for moment in (at, *asked) if at <= moment < until - release_s]
        assert all(provider.n_rented(m, m + release_s) <= n_workers for m in moments)


def test_a_machine_that_is_lost_as_the_search_begins_is_asked_for_again(
    digits: ShardedDataset, tmp_path: Path
) -> None:
    here, was_lost = os.getpid(), tmp_path / "lost"

    class LosesTheFirst(SyntheticWorkload):
        """Ends the first machine as that unpacks it, before its worker can join."""

        def __setstate__(self, state: Any) -> None:
            vars(self).update(state)
            if os.getpid() != here and not was_lost.exists():
                was_lost.touch()
                os._exit(1)

    provider = Provider(tmp_path)
    with cluster_of(provider) as cluster, Client(cluster, set_as_default=False) as client:
        workload, folder = LosesTheFirst(), str(tmp_path / "run")
        with engine_for(client, digits, workload, folder, driver=elastic_for(client)) as engine:
            assert was_lost.exists()
            assert engine.n_workers == 1
    assert len(provider.rentals) == 2
