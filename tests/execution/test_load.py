"""A run is opened to look at it, whatever has become of it, and nothing in it changes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import optuna
import pytest
from distributed import Client

import dagsel
from dagsel.errors import RunDirError, SearchError, WorkloadError
from dagsel.flows import PBT, RandomSearch, Range
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

from .interrupted import interrupt, space, stopping_after, value, workload


def files(folder: str) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def search(optimize: Optimize, client: Client, run_dir: str) -> Optimize:
    def call(**given: Any) -> dagsel.Run:
        default = {"flow": RandomSearch(max_epochs=2, n_trials=3), "space": space}
        return optimize(**{**default, "workload": workload(), "client": client, **given})

    return call


def test_a_run_that_has_ended_is_opened_as_it_was(
    search: Optimize, run_dir: str, tmp_path: Path
) -> None:
    home = f"sqlite:///{tmp_path}/study.db"
    study = optuna.create_study(study_name="s", direction="maximize", storage=home)
    run = search(study=study, top_k=2)
    before = files(run_dir)
    seen = dagsel.load(run_dir)
    assert (seen.best, seen.best_params) == (run.best, run.best_params)
    assert seen.leaderboard().equals(run.leaderboard())
    assert seen.metrics.equals(run.metrics)
    assert seen.timeline().equals(run.timeline())
    assert dagsel.load(run.run_dir).best == dagsel.load(Path(run.run_dir.url)).best == run.best
    assert repr(seen) == repr(run)
    assert len(seen.study.trials) == 3
    with pytest.raises(WorkloadError, match=r"models need the workload: write dagsel.load\(.*run"):
        seen.best_model()
    assert dagsel.load(run_dir, workload=workload()).models() == run.models()
    assert dagsel.load(run_dir, workload=workload(), space=space).models() == run.models()
    assert files(run_dir) == before
    Path(tmp_path, "study.db").unlink()
    assert len(dagsel.load(run_dir).study.trials) == 0
    with pytest.raises(RunDirError, match="the workload is not the one"):
        dagsel.load(run_dir, workload=SyntheticWorkload(value=value, n_batches=7))
    with pytest.raises(SearchError, match="the space is not the one"):
        dagsel.load(run_dir, space=lambda trial: {"y": trial.suggest_int("y", 1, 2)})
    with pytest.raises(RunDirError, match="nowhere"):
        dagsel.load(tmp_path / "nowhere")


def test_a_study_that_was_in_memory_is_filled_by_the_space(search: Optimize, run_dir: str) -> None:
    run = search()
    before = files(run_dir)
    seen = dagsel.load(run_dir, space=space)
    told = [(t.number, t.state, t.value, t.params) for t in run.study.trials]
    assert [(t.number, t.state, t.value, t.params) for t in seen.study.trials] == told
    assert seen.plot.parallel().data
    assert files(run_dir) == before
    for figure in ("parallel", "importance"):
        with pytest.raises(SearchError, match=r"the study, which is empty.*load\(run_dir, space="):
            getattr(dagsel.load(run_dir).plot, figure)()


@pytest.mark.parametrize("n_steps", [6, 14, 22])
def test_a_run_that_was_interrupted_is_opened_as_far_as_it_came(
    n_steps: int, search: Optimize, client: Client, run_dir: str
) -> None:
    with pytest.raises(KeyboardInterrupt), stopping_after(n_steps, interrupt):
        search()
    # A unit that was running may still store its state.
    before = {name: told for name, told in files(run_dir).items() if "states" not in name}
    seen = dagsel.load(run_dir, workload=workload())
    assert before.items() == {k: v for k, v in files(run_dir).items() if "states" not in k}.items()
    assert not seen.record.finished
    n_epochs = seen.record.n_epochs
    run = dagsel.resume(run_dir, client, workload=workload(), space=space)
    assert run.record.n_epochs >= n_epochs
    assert dagsel.load(run_dir).best == run.best


def test_a_run_that_goes_on_is_opened_beside_its_driver(search: Optimize, run_dir: str) -> None:
    seen = []

    def look(study: optuna.Study, trial: Any) -> None:
        seen.append(dagsel.load(run_dir, workload=workload()))

    # One after the other: all could end in one turn of the driver, and the search with them.
    run = search(callbacks=[look], flow=RandomSearch(max_epochs=2, n_trials=3, n_concurrent=1))
    assert [s.record.n_live for s in seen] == sorted((s.record.n_live for s in seen), reverse=True)
    assert not seen[0].record.finished
    assert set(seen[0].leaderboard()["trial"]) <= set(run.leaderboard()["trial"])


def test_a_clones_configuration_is_that_of_its_model(search: Optimize, run_dir: str) -> None:
    flow = PBT(max_epochs=4, n_trials=4, mutations={"x": Range(0.0, 1.0)})
    run = search(flow=flow)
    seen = dagsel.load(run_dir)
    for number, trial in run.record.trials.items():
        config = seen.record.trials[number].config
        assert config == {k: v for k, v in trial.config.items() if k != "fixed"}
