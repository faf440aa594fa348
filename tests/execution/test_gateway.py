"""A real dask-gateway server: its workers come and the named ones go, and nothing is left of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import psutil
import pytest
from gateway import gateway_server

import dagsel
from dagsel.execution.elastic import elastic_for
from dagsel.flows import SEER
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

from .helpers import processes, there

WHY = "needs the extra dev: a dask-gateway server"
dask_gateway = pytest.importorskip("dask_gateway", reason=WHY)
pytest.importorskip("dask_gateway_server", reason=WHY)
pytestmark = pytest.mark.slow

TIMEOUT_S = 60


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Any]:
    """A cluster without workers, and its client; all that it started has ended afterwards."""
    before = processes()
    with gateway_server(tmp_path) as address:
        with dask_gateway.GatewayCluster(address=address, auth="basic") as cluster:
            with cluster.get_client(set_as_default=False) as client:
                yield cluster, client
            ours = [psutil.Process(pid) for pid in processes() - before]
        # Its __del__ asks for a loop that has ended.
        del cluster.gateway._loop_runner
    # Workers outlive the server as children of init.
    assert not psutil.wait_procs(ours, timeout=TIMEOUT_S)[1]
    assert processes() <= before


def n_created(folder: Path) -> int:
    """Workers that the server has started."""
    return len(re.findall("Created worker", (folder / "gateway.log").read_text()))


def test_the_named_workers_go_and_are_not_replaced(gateway: Any, tmp_path: Path) -> None:
    _, client = gateway
    driver = elastic_for(client)
    assert driver.can_scale
    driver.grow(1)
    client.wait_for_workers(1, timeout=TIMEOUT_S)
    driver.grow(5)  # the administrator allows 4
    client.wait_for_workers(4, timeout=TIMEOUT_S)
    old = there(client)
    data = client.scatter({"held": 17}, workers=old[1:2])
    driver.grow(1)  # closes none that is there
    driver.retire(old[1:2])
    driver.close()
    assert there(client) == [old[0], *old[2:]]
    assert client.gather(data) == {"held": 17}
    assert driver.wanted == 3
    # One is lost as another one is retired: there are as many as there should be, of others.
    client.retire_workers(old[:1], close_workers=True)
    driver.retire(old[3:])
    driver.close()
    assert driver.wanted == 2
    client.wait_for_workers(2, timeout=TIMEOUT_S)
    assert set(there(client)) & set(old) == {old[2]}
    assert client.gather(data) == {"held": 17}
    (trouble,) = driver.troubles()
    assert "5 workers" in trouble
    assert n_created(tmp_path) == 5


def test_adapt_stays_in_charge(gateway: Any) -> None:
    cluster, client = gateway
    driver = elastic_for(client)
    cluster.adapt(minimum=0, maximum=2)
    assert "adapt" in driver.why_not
    cluster.adapt(active=False)
    assert driver.can_scale


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {"quality": trial.suggest_float("quality", 0.0, 1.0)}


def test_a_search_scales_the_cluster(gateway: Any, tmp_path: Path) -> None:
    cluster, client = gateway
    cluster.scale(1)
    client.wait_for_workers(1, timeout=TIMEOUT_S)
    data = ShardedDataset.write(str(tmp_path / "data.zarr"), {"x": np.arange(64)}, n_shards=4)
    workload = SyntheticWorkload(
        seconds=0.1, n_batches=4, value=lambda config, epoch: config["quality"] - 1 / (1 + epoch)
    )
    flow = SEER("16 s", 48, reduction_factor=2, max_workers_per_trial=1, min_stage=4, mode="paper")
    assert [stage.n_workers for stage in flow.plan.stages] == [4, 2]
    run = dagsel.optimize(
        optuna.create_study(direction="maximize"),
        workload,
        data,
        space=space,
        metric="value",
        flow=flow,
        cluster=cluster,
        run_dir=str(tmp_path / "run"),
    )
    sizes = [n for n, _ in itertools.groupby(wanted(tmp_path))]
    assert sizes == sorted(sizes[: sizes.index(4)]) + sorted(sizes[sizes.index(4) :], reverse=True)
    assert {1, 4, 2} <= set(sizes)
    assert sizes[-1] == len(there(client)) == 1  # as it was
    assert n_created(tmp_path) == 4
    assert run.record.notes == []
    assert run.failures == []
    assert run.timeline().worker.nunique() == 4
    assert sorted(trial.state for trial in run.record.trials.values()) == ["complete"] + 3 * [
        "pruned"
    ]


def wanted(folder: Path) -> list[int]:
    """How many workers the server was told to have, time after time."""
    log = (folder / "gateway.log").read_text()
    return [int(n) for n in re.findall(r"heartbeat \[count: (\d+)", log)]
