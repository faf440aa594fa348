"""A cluster from dask-gateway, which the search makes larger and smaller.

    python examples/gateway.py --address https://gateway.example.com --data s3://bucket/example
    python examples/gateway.py --local

``--local`` starts a gateway server on this machine first, as an administrator would; it takes
about a minute on two cores and needs ``pip install "dask-gateway-server[local]"``. Needs the extra
``gateway``.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import optuna
import torch
from dask_gateway import Gateway
from optuna.samplers import TPESampler
from sklearn.datasets import load_digits

import dagsel
from dagsel.flows import SEER
from dagsel.storage import ShardedDataset

SERVER = """
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.DaskGateway.address = "127.0.0.1:{private}"
c.Proxy.address = "127.0.0.1:{public}"
c.UnsafeLocalBackend.clusters_directory = "{folder}"
c.LocalClusterConfig.scheduler_cmd = ["{bin}/dask", "scheduler"]
c.LocalClusterConfig.worker_cmd = ["{bin}/dask", "worker", "--resources", "TRAIN=1"]
c.LocalClusterConfig.cluster_max_workers = 2
c.LocalClusterConfig.worker_threads = 2
c.LocalClusterConfig.worker_memory = "1 G"
"""


@contextmanager
def local_server(folder: Path) -> Iterator[str]:
    """Start a gateway server for nobody but you, and end it afterwards."""
    with socket() as one, socket() as other:
        for free in (one, other):
            free.bind(("127.0.0.1", 0))
        public, private = one.getsockname()[1], other.getsockname()[1]
    programs = Path(sys.executable).parent
    config = folder / "dask_gateway_config.py"
    config.write_text(SERVER.format(public=public, private=private, folder=folder, bin=programs))
    address = f"http://127.0.0.1:{public}"
    with (folder / "gateway.log").open("w") as log:
        command = [str(programs / "dask-gateway-server"), "--config", str(config)]
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
        try:
            while not answers(f"{address}/api/health"):
                if server.poll() is not None:
                    raise SystemExit((folder / "gateway.log").read_text())
                time.sleep(0.1)
            yield address
        finally:
            server.terminate()
            server.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


def model(config: dict[str, Any]) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, config["width"]),
        torch.nn.ReLU(),
        torch.nn.Linear(config["width"], 10),
    )


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "width": trial.suggest_int("width", 16, 128, log=True),
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
    }


def search(gateway: Gateway, folder: str, args: argparse.Namespace) -> dagsel.Run:
    digits = load_digits()
    arrays = {"x": (digits.data / 16).astype("float32"), "y": digits.target}
    data = ShardedDataset.write(f"{folder}/digits.zarr", arrays, n_shards=2)
    workload = dagsel.TorchWorkload(
        model=model,
        loss=torch.nn.functional.cross_entropy,
        optimizer=torch.optim.Adam,
        batch_size=32,
        metrics=["accuracy"],
    )
    with gateway.new_cluster() as cluster:
        print(f"the gateway has opened {cluster.name}")
        return dagsel.optimize(
            optuna.create_study(
                study_name="gateway", direction="maximize", sampler=TPESampler(seed=0)
            ),
            workload,
            data,
            space=space,
            metric="accuracy",
            flow=SEER(deadline=args.deadline, budget=args.budget, max_epochs=args.epochs),
            cluster=cluster,
            max_cluster_workers=args.workers,
            run_dir=f"{folder}/run",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="a search on a cluster of dask-gateway")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--address", help="of your gateway")
    where.add_argument("--local", action="store_true", help="start one on this machine")
    parser.add_argument("--auth", help="how you sign in; by default as dask-gateway is configured")
    parser.add_argument("--data", help="a folder or URL that the cluster's workers reach")
    parser.add_argument("--deadline", default="60 s")
    parser.add_argument("--budget", default="100 worker-s")
    parser.add_argument("--epochs", type=int, default=20, help="of a trial, at most")
    parser.add_argument("--workers", type=int, default=2, help="at most")
    args = parser.parse_args()

    folder = Path(tempfile.mkdtemp(prefix="dagsel-gateway-"))
    if args.local:
        with local_server(folder) as address:
            run = search(Gateway(address, auth="basic"), str(folder), args)
    elif args.data is None:
        parser.error("give --data, a URL that the cluster's workers reach, such as s3://bucket/me")
    else:
        place = f"{args.data}/{uuid.uuid4().hex[:8]}"
        run = search(Gateway(args.address, auth=args.auth), place, args)
    print(run.plan)
    print(run.leaderboard(5).to_string(index=False, float_format="{:.4g}".format))
    most = max(moment.n_workers for moment in run.record.course)
    print(f"{most} workers at most, {run.worker_seconds:.1f} worker-seconds in all")
    torch.save(run.best_model().state_dict(), folder / "best.pt")
    print(f"best accuracy {run.best_value:.4f}; model saved in {folder / 'best.pt'}")


if __name__ == "__main__":
    main()
