"""A whole run on S3: data, journal and states lie there, and nothing but URLs says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import optuna
import pytest
from distributed import Client
from moto.server import ThreadedMotoServer

import dagsel
from dagsel.execution.cluster import local_cluster
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

FLOW = RandomSearch(max_epochs=2, n_trials=6, n_concurrent=3)


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"x": trial.suggest_float("x", 0.0, 1.0)}


def value(config: Any, epoch: int) -> float:
    return float(config["x"]) * epoch


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def move(url: str, to: str) -> None:
    store = fsspec.filesystem("s3")
    for path in store.find(url):
        store.copy(path, path.replace(url.removeprefix("s3://"), to.removeprefix("s3://")))
    store.rm(url, recursive=True)


@pytest.fixture
def bucket(s3_options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket that processes find by their environment, as on a cloud's machines."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["client_kwargs"]["endpoint_url"])
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield "s3://bucket/run-on-s3"
    fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_it_is_interrupted_resumed_moved_and_replayed(
    bucket: str, optimize: Optimize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = ShardedDataset.write(f"{bucket}/data.zarr", {"x": np.arange(80)}, n_shards=4)
    study = optuna.create_study(storage=f"sqlite:///{tmp_path}/study.db", direction="maximize")
    workload, ended = SyntheticWorkload(seconds=0.1, value=value), list[int]()
    with local_cluster(2) as cluster, Client(cluster, set_as_default=False) as client:
        options: dict[str, Any] = {"workload": workload, "space": space}
        there: dict[str, Any] = {"data": data, "run_dir": f"{bucket}/run", "client": client}
        with pytest.raises(KeyboardInterrupt):
            optimize(FLOW, study=study, callbacks=[interrupt], **there, **options)
        move(data.url, f"{bucket}/moved.zarr")
        run = dagsel.resume(
            f"{bucket}/run",
            client,
            data=f"{bucket}/moved.zarr",
            callbacks=[lambda _, trial: ended.append(trial.number)],
            **options,
        )
        again = dagsel.replay(
            f"{bucket}/run",
            client,
            data=f"{bucket}/moved.zarr",
            into=f"{bucket}/again",
            **options,
        )
    assert run.record.finished
    assert len(run.record.sessions) == 2
    assert 0 < len(ended) < FLOW.n_trials  # those that ended before the interruption are not told
    best = value(run.record.trials[run.best.trial].config, FLOW.max_epochs)
    assert run.best_value == again.best_value == best
    assert run.best_model() == again.best_model()
    rounds = run.makespans()
    assert len(rounds) >= 2  # one in each session
    assert (rounds.makespan >= rounds.bound).all()
    assert [path.name for path in tmp_path.iterdir()] == ["study.db"]


class StartsAgain(logging.Handler):
    """Starts a server as soon as somebody says that it is waited for."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__()
        self.server = ThreadedMotoServer(ip_address=host, port=port, verbose=False)
        self.n_said = 0

    def emit(self, record: logging.LogRecord) -> None:
        if "cannot be reached" in record.getMessage() and "; waiting" in record.getMessage():
            self.n_said += 1
            if self.n_said == 1:
                self.server.start()


def test_an_outage_of_the_store_costs_no_trial(
    optimize: Optimize, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    first.start()
    host, port = first.get_host_and_port()
    for name, text in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }.items():
        monkeypatch.setenv(name, text)
    store = fsspec.get_filesystem_class("s3")
    store.clear_instance_cache()
    store().mkdir("outage")
    data = ShardedDataset.write("s3://outage/data.zarr", {"x": np.arange(80)}, n_shards=4)
    still_there, starts = [first], StartsAgain(host, port)

    def end_it(*_: Any) -> None:
        if still_there:
            still_there.pop().stop()

    logging.getLogger("dagsel").addHandler(starts)
    try:
        run = optimize(
            FLOW,
            workload=SyntheticWorkload(seconds=0.05, value=value),
            space=space,
            data=data,
            run_dir="s3://outage/run",
            callbacks=[end_it],  # after the first trial
        )
        found = run.best_model()
    finally:
        logging.getLogger("dagsel").removeHandler(starts)
        store.clear_instance_cache()
        starts.server.stop()
    assert starts.n_said >= 1
    assert run.failures == []
    assert len(run.record.trials) == FLOW.n_trials
    assert all(len(trial.epochs) == FLOW.max_epochs for trial in run.record.trials.values())
    assert found is not None
