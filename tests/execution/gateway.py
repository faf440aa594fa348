"""A real dask-gateway server on this machine, as an administrator would set it up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from tests.waiting import wait_until

CONFIG = """
c.DaskGateway.backend_class = "dask_gateway_server.backends.local.UnsafeLocalBackend"
c.DaskGateway.authenticator_class = "dask_gateway_server.auth.SimpleAuthenticator"
c.DaskGateway.address = "127.0.0.1:{private}"
c.Proxy.address = "127.0.0.1:{public}"
c.UnsafeLocalBackend.clusters_directory = "{folder}"
c.LocalClusterConfig.scheduler_cmd = ["{dask}", "scheduler"]
c.LocalClusterConfig.worker_cmd = ["{dask}", "worker", "--no-dashboard", "--resources", "TRAIN=1"]
c.LocalClusterConfig.cluster_max_workers = 4
c.LocalClusterConfig.worker_threads = 2
c.LocalClusterConfig.worker_memory = "1 G"
"""


@contextmanager
def gateway_server(folder: Path, *, timeout_s: float = 30.0) -> Iterator[str]:
    """Give the address of a server on loopback; it and all that it started end with the block."""
    program = Path(sys.executable).parent / "dask-gateway-server"
    dask = Path(sys.executable).parent / "dask"
    public, private = free_ports(2)
    config, log = folder / "dask_gateway_config.py", folder / "gateway.log"
    config.write_text(CONFIG.format(public=public, private=private, folder=folder, dask=dask))
    # Its workers inherit the path, and so find the workloads of these tests.
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    with log.open("wb") as out:
        server = subprocess.Popen(
            [program, "--config", config],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        try:
            address = f"http://127.0.0.1:{public}"
            wait_until(
                lambda: server.poll() is not None or is_healthy(address),
                log.read_text,
                timeout_s=timeout_s,
            )
            assert server.poll() is None, log.read_text()
            yield address
        finally:
            server.terminate()
            try:
                server.wait(timeout_s)
            except subprocess.TimeoutExpired:
                server.kill()
                raise


def is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/health", timeout=1):
            return True
    except OSError:  # nobody listens yet, or the proxy has no route yet
        return False


def free_ports(n: int) -> list[int]:
    """Find ports that nobody listens at, below the kernel's own; other processes look elsewhere."""
    with ExitStack() as stack:
        ports: list[int] = []
        for port in range(20_000 + 10 * (os.getpid() % 1_000), 32_000):
            one = stack.enter_context(closing(socket.socket()))
            with suppress(OSError):
                one.bind(("127.0.0.1", port))
                ports.append(port)
            if len(ports) == n:
                return ports
    raise OSError("no port is free")
