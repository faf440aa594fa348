"""Clients and clusters that a search cannot use are refused before it begins, with the cure."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import dagsel
from dagsel.errors import ClusterError
from dagsel.testing.synthetic import SyntheticWorkload
from tests.conftest import Optimize

HERE: dict[str, Any] = {"processes": False, "dashboard_address": "127.0.0.1:0"}
CURE = "make a new one before the search, and close it after the search"


@pytest.fixture
def made() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=1, **HERE) as cluster:
        yield cluster


@pytest.fixture
def search(optimize: Optimize, tmp_path: Path) -> Optimize:
    arrays = (np.zeros((60, 2)), np.arange(60))
    return partial(optimize, data=arrays, run_dir=tmp_path / "run")


def test_a_closed_client(search: Optimize, made: LocalCluster, tmp_path: Path) -> None:
    client = Client(made, set_as_default=False)
    client.close()
    with pytest.raises(ClusterError, match=f"^the client is closed; {CURE}$"):
        search(client=client)
    assert list(tmp_path.iterdir()) == []


def test_a_closed_cluster_and_the_client_of_one(search: Optimize, tmp_path: Path) -> None:
    cluster = LocalCluster(n_workers=1, **HERE)
    client = Client(cluster, set_as_default=False)
    cluster.close()
    with pytest.raises(ClusterError, match=f"^the cluster is closed; {CURE}$"):
        search(cluster=cluster)
    with pytest.raises(ClusterError, match=f"^the (cluster of the )?client is closed; {CURE}$"):
        search(client=client)
    client.close()
    assert list(tmp_path.iterdir()) == []


def test_an_asynchronous_client_and_what_the_error_says_to_write(search: Optimize) -> None:
    async def main() -> dagsel.Run:
        async with (
            LocalCluster(n_workers=1, asynchronous=True, **HERE) as cluster,
            Client(cluster, asynchronous=True, set_as_default=False) as client,
        ):
            with pytest.raises(ClusterError, match="the cluster is asynchronous") as of_cluster:
                search(cluster=cluster)
            with pytest.raises(ClusterError, match="the client is asynchronous") as of_client:
                search(client=client)
            assert "client=cluster.scheduler_address)" in str(of_cluster.value)
            assert "client=client.scheduler.address)" in str(of_client.value)
            assert cluster.scheduler_address == client.scheduler.address
            return await asyncio.to_thread(search, client=client.scheduler.address)

    assert len(asyncio.run(main()).record.trials) == 2


def test_a_search_may_be_called_where_an_event_loop_runs(
    search: Optimize, made: LocalCluster
) -> None:
    """As in a notebook."""

    async def cell() -> dagsel.Run:
        with Client(made, set_as_default=False) as client:
            return search(client=client)

    assert len(asyncio.run(cell()).record.trials) == 2


def test_two_arrays_are_searched_and_resumed(
    search: Optimize, made: LocalCluster, tmp_path: Path
) -> None:
    run = search(client=made.scheduler_address)
    again = dagsel.resume(
        tmp_path / "run",
        made.scheduler_address,
        workload=SyntheticWorkload(),
        space=lambda trial: {"x": trial.suggest_float("x", 0, 1)},
    )
    assert again.best_params == run.best_params
    assert again.record.trials.keys() == run.record.trials.keys()
