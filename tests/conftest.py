"""A real cluster of two worker processes, real data, and a real S3 server."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import dask
import fsspec
import numpy as np
import optuna
import pytest
import torch
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, settings
from sklearn.datasets import load_digits
from xdist.scheduler import LoadFileScheduling

import dagsel
from dagsel.execution import fork_server
from dagsel.execution.cluster import local_cluster
from dagsel.execution.quiet_servers import SELDOM
from dagsel.flow import Flow
from dagsel.flows import RandomSearch
from dagsel.storage import ShardedDataset
from dagsel.testing.synthetic import SyntheticWorkload

optuna.logging.set_verbosity(optuna.logging.WARNING)

# How long an example takes, or is drawn, says how busy the machine is, no more.
for profile, n_examples in (("dagsel", 30), ("quick", 20), ("long", 500)):
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=n_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
if settings().deadline is not None:  # else a profile without one is chosen already
    settings.load_profile("dagsel")

HERE = Path(__file__).parent
#: Takes a flow, and by name any other argument of `dagsel.optimize`.
Optimize: TypeAlias = Callable[..., dagsel.Run]
SHORT = RandomSearch(max_epochs=1, n_trials=2)
#: Tests here start clusters or gangs.
ALONE = (
    "attack/test_innocent.py",
    "attack/test_told_once.py",
    "attack/test_clients.py",
    "attack/test_planted_gang.py",
    "attack/test_fuzz_files.py",
    "attack/test_run_dirs.py",
    "chaos",
    "examples",
    "execution",
    "gpu",
    "laws",
    "notebook",
    "test_docs.py",
    "workloads/test_gang.py",
    "workloads/test_traps.py",
)


#: Files whose tests wait most of their time: for machines that come and go, for deadlines.
WAITING = {
    f"tests/execution/test_{name}.py"
    for name in ("slurm", "machines", "seer_cluster", "spot", "first_hour")
}
#: What a test costs, about, beside one that has no cluster: one with a cluster, one that is slow.
CLUSTER_COSTS, SLOW_COSTS = 5, 30


def pytest_configure(config: pytest.Config) -> None:
    """Compute on the CPU also where there is a GPU, unless its tests are asked for by ``-m gpu``.

    What is compared to the bit is what a CPU computes.
    """
    if config.option.markexpr != "gpu" and torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what has a cluster, and spread it over the whole run, the longest files first.

    A cluster waits for a part of its time, where laws compute: files of both kinds at a time leave
    no core without work. Files that wait most of it are the very first: one process has them all.
    """
    cost, place = Counter[Path](), dict[Path, float]()
    has_cluster = set[Path]()
    for item in items:
        is_alone = starts_clusters(item.path) or "cluster" in getattr(item, "fixturenames", ())
        if is_alone:
            item.add_marker(pytest.mark.alone)
            has_cluster.add(item.path)
        is_slow = item.get_closest_marker("slow") is not None
        cost[item.path] += SLOW_COSTS if is_slow else CLUSTER_COSTS if is_alone else 1
        if is_waiting(item.nodeid):
            place[item.path] = -1.0
    total, before = Counter[bool](), Counter[bool]()
    rest = [(path, costs) for path, costs in cost.most_common() if path not in place]
    for path, costs in rest:
        total[path in has_cluster] += costs
    for path, costs in rest:
        place[path] = before[path in has_cluster] / total[path in has_cluster]
        before[path in has_cluster] += costs
    items.sort(key=lambda item: (place[item.path], -cost[item.path]))


@cache
def starts_clusters(path: Path) -> bool:
    return any(path.is_relative_to(HERE / place) for place in ALONE)


def is_waiting(nodeid: str) -> bool:
    return nodeid.partition("::")[0] in WAITING


class Lanes(LoadFileScheduling):
    """A file is run by one process, and so are all files that wait, one after the other.

    They leave the processor to what others run meanwhile.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "waiting" if is_waiting(nodeid) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling:
    return Lanes(config, log)


@pytest.fixture(scope="session", autouse=True)
def workers_cost_little() -> Iterator[None]:
    """Let all workers of this process be copies of one, and do nothing for a dashboard.

    Most of their time they would import.
    """
    with dask.config.set({fork_server.METHOD: "forkserver", **SELDOM}):
        fork_server.prepare()
        yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster, set_as_default=False) as client:
        yield client


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> ShardedDataset:
    """Scikit-learn's digits: 1,437 training and 360 validation samples in 4 shards."""
    bunch = load_digits()
    arrays = {"x": (bunch.data / 16).astype(np.float32), "y": bunch.target.astype(np.int64)}
    url = str(tmp_path_factory.mktemp("data") / "digits.zarr")
    return ShardedDataset.write(url, arrays, n_shards=4)


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def study() -> optuna.Study:
    return optuna.create_study(study_name="test", direction="maximize")


@pytest.fixture
def optimize(tmp_path: Path, run_dir: str) -> Optimize:
    """Call `dagsel.optimize` with what will do, but for what is given."""

    @cache
    def data() -> ShardedDataset:
        return ShardedDataset.write(tmp_path / "data.zarr", {"x": np.arange(80)}, n_shards=4)

    def call(flow: Flow = SHORT, **given: Any) -> dagsel.Run:
        default: dict[str, Any] = {
            "study": optuna.create_study(direction="maximize"),
            "workload": SyntheticWorkload(),
            "space": lambda trial: {"x": trial.suggest_float("x", 0.0, 1.0)},
            "metric": "value",
            "run_dir": run_dir,
        }
        if "data" not in given:
            default["data"] = data()
        return dagsel.optimize(flow=flow, **(default | given))

    return call


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """Storage options of a running S3 server with a bucket ``bucket``."""
    from moto.server import ThreadedMotoServer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "from-the-environment")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "from-the-environment")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        options = {
            "key": "the-key",
            "secret": "the-secret",
            "client_kwargs": {"endpoint_url": f"http://{host}:{port}"},
        }
        fsspec.filesystem("s3", **options).mkdir("bucket")
        yield options
        server.stop()
