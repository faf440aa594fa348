"""The end of an epoch is damaged while it is scored, and both workers are lost then.

Training could go on from the state after it. The scores that are missing could not: they would be
those of another epoch.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest

import dagsel
from dagsel.flows import RandomSearch
from dagsel.storage import RunDir
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize
from tests.waiting import wait_until

from .helpers import client_of


def space(trial: optuna.Trial) -> dict[str, float]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


@dataclass(frozen=True)
class Held(SyntheticWorkload):
    """The first to score the end of epoch 1 waits until it is lost."""

    folder: str = ""

    def evaluate(self, state: Any, *args: Any) -> Any:
        if state.meta["epoch"] == 1:
            try:
                Path(self.folder, "scoring").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                threading.Event().wait()
        return super().evaluate(state, *args)


def test_an_end_that_is_lost_before_it_is_scored_is_trained_anew(
    optimize: Optimize, tmp_path: Path, run_dir: str, caplog: Any
) -> None:
    store, workload = RunDir(run_dir).states, Held(folder=str(tmp_path))
    with client_of(2) as client:
        pids = client.run(os.getpid).values()

        def lose() -> None:
            wait_until((tmp_path / "scoring").exists, "epoch 1 is scored")
            wait_until(lambda: store.list(0)[-1:] > ((1, 3),), "epoch 2 is trained")
            (blob,) = Path(run_dir, "states/trial-000000").glob("epoch-000001-position-000003.*.s*")
            blob.write_bytes(bytes(blob.stat().st_size))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

        losing = threading.Thread(target=lose)
        losing.start()
        flow = RandomSearch(max_epochs=2, n_trials=1)
        with caplog.at_level(logging.WARNING, "dagsel"):
            run = optimize(flow, client=client, workload=workload, space=space)
        losing.join()
        into = f"{run_dir}-again"
        again = dagsel.replay(run_dir, client, workload=workload, space=space, into=into)
    assert [epoch.value for epoch in run.record.trials[0].epochs] == pytest.approx([1 / 2, 2 / 3])
    assert again.record.notes == []
    assert again.best == run.best
    assert any("epoch-000001-position-000003" in r.getMessage() for r in caplog.records)
