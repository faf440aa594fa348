"""What the papers' pages tell of real workers is what they did: bytes, visits, weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dagsel
from dagsel.planning.capacity import Limits
from dagsel.planning.scaling import Scaling
from dagsel.workloads.base import Visit
from tests.benchmarks.page import MARKER
from tests.benchmarks.papers import (
    cerebro_cluster,
    cerebro_faults,
    cerebro_training,
    hermes,
    hermes_cluster,
    mnist,
    pages,
    seer,
    seer_training,
)
from tests.benchmarks.papers.cerebro_cluster import QUICK, Size

#: Two configurations, two epochs, three workers.
TINY = Size(2, (1, 3), 0.02, 0.15, 1, 300, {**QUICK.grid, "weight_decay": (1e-4,)})


@pytest.fixture(scope="module")
def images() -> mnist.Images:
    return mnist.images(Path("/there is no MNIST here"))


def test_what_hops_is_what_dask_has_sent_and_no_more_than_the_formula(
    images: mnist.Images,
) -> None:
    p, k, n = 3, TINY.n_epochs, TINY.n_configs
    found, data = cerebro_cluster.sent(p, images, TINY)
    assert found.agrees
    assert found.n_units == k * p * n
    assert 0 < found.n_to_train <= (k * p - 1) * n  # a trial's first unit makes its state
    assert found.n_to_score <= k * (p - 1) * n
    assert found.n_bytes_read == data.nbytes


def test_workers_hold_as_many_copies_as_were_asked_for(
    images: mnist.Images, tmp_path: Path
) -> None:
    rows = cerebro_cluster.figure_7(tmp_path, images, TINY).splitlines()
    in_all = [row.split(" | ")[-1] for row in rows if row.startswith(("| dagsel", "| task"))]
    assert in_all == ["1.00 D |", "3.00 D |", "3.00 D |", "3 D |"]


def test_all_is_done_once_though_two_of_three_workers_are_killed() -> None:
    size = replace(TINY, n_epochs=3, failing_unit_s=0.4)  # it is not over before the second kill
    run, done = cerebro_faults.rough(size, fails=True)
    assert [told.rpartition(" ")[0] for _, told in sorted(done)][:2] == ["killed-0", "killed-1"]
    assert cerebro_faults.done_once(run, 3, size)
    assert not cerebro_faults.done_once(run, 4, size)
    took = cerebro_faults.epochs_of(run)
    assert len(took) == size.n_epochs
    assert sum(took) == pytest.approx(
        cerebro_cluster.trained_by(run).stop.max() - cerebro_cluster.trained_by(run).start.min()
    )


def test_hopping_trains_the_bits_of_plain_pytorch_and_another_order_does_not(
    images: mnist.Images,
) -> None:
    found, configs = cerebro_training.compare(images, TINY, 1, n_processes=1)
    assert [config["lr"] for config in configs] == [0.01, 0.1]
    assert cerebro_training.n_equal(found) == (2, 2)
    for way in ("shuffled", "averaged"):
        assert cerebro_training.n_equal({**found, "same order": found[way]}) == (0, 2)


@given(n=st.integers(1, 300), batch=st.sampled_from([16, 50]), trial=st.integers(0, 3))
def test_epochs_of_50_batches_go_through_all_samples_again_and_again(
    n: int, batch: int, trial: int
) -> None:
    epochs = range(1, 1 + max(1, -(-2 * n // (50 * batch))))
    visits = [Visit(seed=0, trial=trial, epoch=epoch, shard=0) for epoch in epochs]
    parts = [hermes_cluster.samples_of(visit, n, batch) for visit in visits]
    assert {len(part) for part in parts} == {50 * batch}
    order = np.concatenate(parts)
    assert (np.sort(order[:n]) == np.arange(n)).all()
    assert (np.sort(order[n : 2 * n]) == np.arange(n)).all()


def test_quanta_of_jobs_that_really_train_are_in_the_papers_proportion() -> None:
    scale = hermes_cluster.recorded_scale()
    for ours, theirs in ((hermes_cluster.QUANTUM_S, 10.0), (hermes_cluster.OTHERS_S, 30.0)):
        share = ours / scale.factor / scale.seconds
        assert share == pytest.approx(theirs / hermes.NETWORKS["GoogleNet"].seconds)
    losses = hermes.recorded("cnn")["test_loss"]
    assert losses[:, -1].min() < hermes_cluster.goal_of() < losses[:, 0].mean() / 2


def test_seers_deadline_in_real_time_has_60_least_stages_as_in_table_2() -> None:
    at, resnet = seer_training.AT, seer.RESNET
    assert at.minutes / at.t_min == pytest.approx(resnet.minutes / resnet.t_min)
    flow = seer.flow_of("SEER", at, max_epochs=None)
    assert isinstance(flow, dagsel.flows.SEER)
    assert (flow.deadline_s, flow.cost.worker_seconds) == (45.0, 90.0)
    stages = flow.make_plan(Limits(45.0, 90.0, most_workers=2)).stages
    assert [sum(stage.n_trials) for stage in stages] == [24, 6, 1]
    assert {seer_training.METHODS[place] for place in range(7)} == set(seer.METHODS[:7])


def test_a_table_of_searches_ranks_them_and_says_who_is_first() -> None:
    def runs(mean: float) -> list[seer_training.Search]:
        return [
            seer_training.Search(mean + more, 46.0, 45.0, 90.0, 60.0, 3, 9, 30.0)
            for more in (-1.0, 0.0, 1.0)
        ]

    found = {method: runs(90.0 - place) for place, method in enumerate(seer_training.METHODS)}
    text = seer_training.table_2_text(found, Scaling({2: 1.5}), seer_training.AT, 3)
    assert "λ(2) = 1.50" in text
    assert "First is **Random**" in text
    assert "of Random -6.00 ± 0.00" in text
    assert "| SEER | 95.6 (1) | 93.5 (1) | 67.5 (1) | 84.00 ± 0.58 | 7 | 83.0, 84.0, 85.0 |" in text
    assert "| SEER | 3.0 | 9 | 45.0 | 46.0 | 100% | 67% | 33% |" in text
    assert seer_training.ranks([3.0, 5.0, 5.0]) == [3, 1, 1]


@pytest.mark.parametrize("page", pages.SCRIPTS)
def test_each_part_of_a_page_is_made_by_a_script_that_is_there(page: str) -> None:
    text = (pages.PAGES / f"{page}.md").read_text()
    parts = [name for names in pages.SCRIPTS[page].values() for name in names]
    assert sorted(MARKER.split(text)[2::3]) == sorted([*parts, *parts])
    for script in pages.SCRIPTS[page]:
        path = f"tests/benchmarks/papers/{script}.py"
        assert (mnist.ROOT / path).exists()
        assert path in text
        assert path in (mnist.ROOT / "Makefile").read_text().replace("$(BENCH)", "tests/benchmarks")
