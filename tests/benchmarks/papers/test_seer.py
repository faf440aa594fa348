"""SEER's page holds what was assumed and what was found; its curves are the recorded ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagsel.errors import SearchError
from dagsel.flows import SEER
from dagsel.simulation import Curves
from dagsel.simulation.curves import Scales
from tests.benchmarks import grids
from tests.benchmarks.papers import seer
from tests.benchmarks.seer_traces import load

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/measured/papers/seer.md"
TRACES = load.curves("table 1", 60.0, seer.SCALING)
SETTINGS = (seer.VGG, *seer.FIGURE_4, seer.SEGMENTATION, seer.TEXT)


def test_table_1_is_recorded() -> None:
    assert isinstance(TRACES, Curves)
    assert isinstance(TRACES, Scales)
    assert [dict(config) for config in TRACES.configs] == grids.points(grids.SEER)
    assert TRACES.values.shape == (144, 210)
    assert TRACES.values.max() > 0.95
    slow = {"lr": 1e-4, "weight_decay": 0.0001, "momentum": 0.9}
    lost = {"lr": 1.0, "weight_decay": 0.0001, "momentum": 0.997}
    assert 0.5 < TRACES.value(slow, 210, trial=0) < 0.9
    assert TRACES.value(lost, 210, trial=0) < 0.5
    assert (load.HERE / "mlp.npz").stat().st_size < 1_000_000


@pytest.mark.parametrize("name", ["cnn", "mlp"])
def test_curves_of_hermes_are_cut_into_as_many_epochs(name: str) -> None:
    traces = load.curves(name, 60.0, seer.SCALING)
    assert traces.values.shape == (192, 210)
    with np.load(load.HERE.parent / f"hermes_traces/{name}.npz") as kept:
        recorded = kept["test_accuracy"]
    assert traces.values[:, 20::21] == pytest.approx(recorded[:, 2::2])  # 21 epochs are 100 steps
    assert traces.initial == pytest.approx(recorded[:, 0])


@pytest.mark.parametrize("name", ["table 1", "cnn", "mlp"])
def test_an_epoch_that_was_not_recorded_is_refused_with_the_range(name: str) -> None:
    traces = load.curves(name, 60.0, seer.SCALING)
    for epoch in (210.5, 211, 1000):
        with pytest.raises(SearchError, match=f"epoch {epoch}, and epochs 0 to 210 were recorded"):
            traces.value(traces.configs[0], epoch, trial=0)
    with pytest.raises(SearchError, match="epochs 0 to 210 were recorded"):
        traces.value(traces.configs[0], -1, trial=0)


@given(config=st.sampled_from(TRACES.configs), epoch=st.floats(0, 210))
def test_between_two_epochs_a_curve_lies_between_their_values(config: Any, epoch: float) -> None:
    ends = [TRACES.value(config, at, trial=0) for at in (np.floor(epoch), np.ceil(epoch))]
    assert min(ends) - 1e-9 <= TRACES.value(config, epoch, trial=0) <= max(ends) + 1e-9


def test_a_file_that_is_damaged_or_of_another_experiment_is_named(tmp_path: Path) -> None:
    path = tmp_path / "seer.npz"

    def refused(match: str) -> None:
        with pytest.raises(SearchError, match=match) as caught:
            load.curves("table 1", 60.0, seer.SCALING, path)
        assert str(path) in str(caught.value)

    whole = (load.HERE / "mlp.npz").read_bytes()
    for cut in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        refused("is damaged")
    turned = bytearray(whole)
    turned[len(whole) // 3] ^= 0xFF
    path.write_bytes(turned)
    refused("is damaged")
    path.write_bytes((load.HERE.parent / "hermes_traces/cnn.npz").read_bytes())
    refused("another experiment: it has no momentum, n_held_out, n_right")
    with np.load(load.HERE / "mlp.npz") as kept:
        arrays = {key: kept[key] for key in kept.files}
    np.savez_compressed(path, **(arrays | {"lr": arrays["lr"][::-1]}))
    refused("another experiment: its lr is not that of the 144 points of lr × weight_decay × mom")
    np.savez_compressed(path, **(arrays | {"n_right": arrays["n_right"][:, :100]}))
    refused(r"its n_right has the shape \(144, 100\), not \(144, 211\)")
    np.savez_compressed(path, **(arrays | {"n_right": -arrays["n_right"]}))
    refused("is damaged: an accuracy is not between 0 and 1")
    with pytest.raises(FileNotFoundError, match="nothing.npz"):
        load.curves("table 1", 60.0, seer.SCALING, tmp_path / "nothing.npz")


@pytest.mark.parametrize("at", SETTINGS, ids=lambda at: f"{at.n_workers}x{at.minutes}")
def test_hypersched_uses_what_is_billed_in_every_setting(at: seer.Setting) -> None:
    traces = load.curves("table 1", 60.0 * at.t_min, seer.SCALING)
    run = seer.search("HyperSched", at, traces, 0)
    assert 0.95 <= seer.used_of(run) <= 1 + 1e-9
    assert run.cost <= 60.0 * at.minutes * at.n_workers + 1e-6


def test_the_smallest_budget_has_thirteen_trials_with_a_first_stage_of_two_epochs() -> None:
    at = seer.Setting(8, 30)
    n_trials = {}
    for method in ("SEER", "SEER, 2 t_min"):
        flow = seer.flow_of(method, at)
        assert isinstance(flow, SEER)
        n_trials[method] = sum(flow.plan.stages[0].n_trials)
    assert n_trials == {"SEER": 36, "SEER, 2 t_min": 13}


def test_a_stage_ends_within_a_batch_of_its_time() -> None:
    """An epoch has 31 batches. E-Grid's best has half of the time on one worker, half on 4."""
    at = seer.Setting(16, 30)
    run = seer.search("E-Grid", at, TRACES, 0)
    assert len(run.record.trials) == 28
    trained = max(len(trial.epochs) for trial in run.record.trials.values())
    assert trained in (64, 65)  # 15 + 15 · 3.43 = 66.45, but for a batch and the last epoch


def test_runs_of_one_seed_begin_with_the_same_trials() -> None:
    at, first = seer.Setting(4, 15), list[list[Any]]()
    for method in ("ASHA", "HyperSched", "E-Grid", "SEER"):
        trials = seer.search(method, at, TRACES, 3).record.trials
        first.append([trials[number].config for number in range(4)])
    assert first[1:] == first[:-1]


def test_the_page_says_what_was_assumed_before_what_was_run_and_found() -> None:
    text = PAGE.read_text()
    parts = (
        "## What is assumed here", "<!-- begin: figures -->", "<!-- begin: comparison -->",
        "## What was found",
    )  # fmt: skip
    assert sorted(parts, key=text.index) == list(parts)
    assert seer.worked_example().strip() in text
    for number in (1, 3, 4):
        assert f"(seer-figure-{number}.svg)" in text
        assert "<svg" in (PAGE.parent / f"seer-figure-{number}.svg").read_text()


def test_a_picture_has_the_same_bytes_when_it_is_drawn_again(tmp_path: Path) -> None:
    pictures = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        seer.figure_3(tmp_path / name, TRACES)
        pictures.append((tmp_path / name / "seer-figure-3.svg").read_text())
    assert pictures[0] == pictures[1]
    assert "<dc:date>" not in pictures[0]
