"""A process group of PyTorch for one gang, not registered in the process."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dagsel.errors import WorkloadError
from dagsel.workloads.gang.rendezvous import Rendezvous

# PyTorch's names for these are its own, without types, and some are only there on a GPU.
_dist: Any = dist
_Base: Any = _dist.Store
_GIVEN_UP = 7  # tag of a message that no rank ever sends
_Kind: Any = _dist.ProcessGroup.BackendType


class _Store(_Base):  # type: ignore[misc]
    # What gloo asks of a store while it connects.
    def __init__(self, rendezvous: Rendezvous, seconds: float) -> None:
        super().__init__()
        self._rendezvous, self.seconds = rendezvous, seconds

    def set(self, key: str, value: Any) -> None:
        self._rendezvous.put(key, bytes(value))

    def get(self, key: str) -> bytes:
        return self._wait(key, self.seconds)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        for key in keys:
            self._wait(key, seconds)

    def check(self, keys: list[str]) -> bool:
        return all(self._rendezvous.get(key, 0.0) is not None for key in keys)

    def _wait(self, key: str, seconds: float) -> bytes:
        value = self._rendezvous.get(key, seconds)
        if value is None:
            raise TimeoutError(f"nothing of {key} in {seconds:.1f} s")
        return value


class Group:
    """The connections between the ranks of a gang: gloo for the CPU, NCCL for GPUs.

    The ranks have `connect_s` to connect, and wait `timeout_s` for the others in each exchange.
    """

    def __init__(
        self, rendezvous: Rendezvous, *, rank: int, size: int, connect_s: float, timeout_s: float
    ) -> None:
        self._rendezvous = rendezvous
        self._rank, self._size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._store = _Store(rendezvous, connect_s)
        options = _dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=connect_s)
        options._threads = 1
        # Without a device gloo asks an environment variable, or for this machine's own name.
        options._devices = [_dist.ProcessGroupGloo.create_device(hostname=rendezvous.address)]
        self._gloo = _dist.ProcessGroupGloo(self._store, rank, size, options)
        # A rank that has nothing to do would be gone before another one is connected.
        self._gloo.barrier().wait()
        self._gloo.set_timeout(self._timeout)
        self.process_group = _dist.ProcessGroup(self._store, rank, size)
        self.process_group._set_default_backend(_Kind.GLOO)
        self._register("cpu", _Kind.GLOO, self._gloo)
        self._kinds = {"cpu"}
        self._store.seconds = timeout_s  # from here on it is asked in exchanges

    def reach(self, device: torch.device) -> None:
        """Prepare the group for tensors on a device; all ranks call it, and need the same kind."""
        if device.type == "cpu":
            self._rendezvous.put(f"gpu {self._rank}", b"")  # a rank with a GPU asks for it
        if device.type in self._kinds:
            return
        if device.type != "cuda" or not torch.cuda.is_available():
            raise WorkloadError(f"a gang cannot train on {device}: this process has no such device")
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        self._rendezvous.put(f"gpu {self._rank}", gpu.encode())
        gpus = [self._store.get(f"gpu {rank}") for rank in range(self._size)]
        if not all(gpus):
            without = gpus.index(b"")
            raise WorkloadError(
                f"a gang cannot train on GPUs and on CPUs together, and worker {without} of "
                f"{self._size} has no GPU: take gangs of 1, or workers that all have a GPU, or none"
            )
        if len(set(gpus)) < self._size or not _dist.is_nccl_available():
            # Ranks that share a GPU: NCCL refuses that, gloo goes by way of the host.
            self._register("cuda", _Kind.GLOO, self._gloo)
        else:
            self._register("cuda", _Kind.NCCL, self._nccl())
        self._kinds.add("cuda")

    def close(self, *, broken: bool) -> None:
        """Leave; `broken` says whether others may still wait for this rank.

        Connections end when nobody holds the group any more. In a broken gang they must end at
        once, or the others would wait: the traceback of an error may hold the model, and so the
        group.
        """
        if not broken:
            self.process_group.shutdown()  # NCCL's part; gloo has no such thing
        elif self._size > 1:
            self.process_group.abort()
            # A receive that is given up ends all connections of its rank.
            with suppress(RuntimeError):
                never_sent = torch.empty(1)
                work = self._gloo.recv([never_sent], (self._rank + 1) % self._size, _GIVEN_UP)
                work.wait(timedelta(milliseconds=1))
        del self._gloo, self.process_group, self._store

    def _nccl(self) -> Any:
        # NCCL's own threads use the store as well: it gets one that needs no Python.
        if self._rank == 0:
            address = self._rendezvous.address
            store = _dist.TCPStore(
                address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
            self._rendezvous.put("nccl", f"{store.port} {address}".encode())
        else:
            told = self._store.get("nccl").decode()
            port, host = told.split(" ", 1)
            store = _dist.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=self._timeout
            )
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return _dist.ProcessGroupNCCL(store, self._rank, self._size, options)

    def _register(self, device: str, kind: Any, backend: Any) -> None:
        self.process_group._register_backend(torch.device(device), kind, backend)
