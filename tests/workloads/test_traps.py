"""The traps of torch.distributed: whatever becomes of a gang, all leave it and the next one works.

Each rank is a thread here, or a process where it is to be killed.
"""

from __future__ import annotations

import gc
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from dagsel.errors import GangBrokenError, WorkloadError
from dagsel.testing.workloads import in_gang
from dagsel.workloads import TorchWorkload, Trained, Visit
from dagsel.workloads.gang.gang import Gang, join_gang, lead_gang
from dagsel.workloads.gang.rendezvous import RendezvousClient, RendezvousServer

HERE = "127.0.0.1"


def add_ranks(gang: Gang) -> float:
    return float(gang.total(np.array([gang.rank + 1.0]))[0])


def distributed(gang: Gang) -> DistributedDataParallel:
    model = DistributedDataParallel(nn.Linear(3, 1), process_group=gang.group.process_group)
    model(torch.ones(2, 3)).sum().backward()
    return model


def test_a_model_that_somebody_holds_does_not_keep_the_others_waiting() -> None:
    held: list[Any] = []

    def body(gang: Gang) -> None:
        held.append(distributed(gang))
        if gang.rank == 1:
            raise ValueError("mine")
        gang.agree(False)

    began = time.monotonic()
    with pytest.raises(ValueError, match="mine"):
        in_gang(2, body, timeout_s=60)
    in_gang(2, lambda gang: held.append(distributed(gang)), timeout_s=60)
    assert len(held) == 4
    assert in_gang(2, add_ranks) == [3.0, 3.0]
    assert time.monotonic() - began < 20


def call_nobody(rank: int, port: int) -> None:
    """Call no rank."""


def test_a_rank_that_does_not_come_is_named_and_the_next_gang_works() -> None:
    about: dict[str, Any] = {"size": 2, "name": "a", "timeout_s": 60, "come_within_s": 0.2}
    with pytest.raises(GangBrokenError, match=r"rank 1 did not come within 0\.2 s"):
        with lead_gang(HERE, call=call_nobody, **about):
            raise AssertionError("a gang without its rank 1")
    assert in_gang(2, add_ranks, name="a") == [3.0, 3.0]


def test_a_wait_that_is_ended_says_why() -> None:
    waits: list[Callable[[str], None]] = []
    about: dict[str, Any] = {"size": 2, "name": "a", "timeout_s": 60, "waits": waits.append}
    with pytest.raises(GangBrokenError, match="rank 1 did not come: its worker was lost"):
        with lead_gang(HERE, call=lambda *_: waits[0]("its worker was lost"), **about):
            raise AssertionError("a gang without its rank 1")


def test_a_gang_that_has_come_is_not_broken_by_the_end_of_a_wait() -> None:
    waits: list[Callable[[str], None]] = []
    about: dict[str, Any] = {"size": 1, "name": "a", "timeout_s": 60, "waits": waits.append}
    with lead_gang(HERE, call=call_nobody, **about) as gang:
        waits[0]("its worker was lost")
        assert isinstance(gang._rendezvous, RendezvousServer)
        with closing(RendezvousClient(HERE, gang._rendezvous.port, "a", 60)) as client:
            assert client.get("all", 60) == b""


def test_a_rank_is_called_when_those_before_it_have_come() -> None:
    """So gangs that take their workers in one order never wait for each other."""
    ports: queue.Queue[int] = queue.Queue()
    called: list[int] = []

    def call(rank: int, port: int) -> None:
        called.append(rank)
        ports.put(port)

    def lead() -> None:
        with lead_gang(HERE, size=3, name="b", timeout_s=60, call=call, come_within_s=0.5):
            raise AssertionError("a gang without its rank 2")

    def join() -> None:
        with join_gang(HERE, ports.get(), rank=1, size=3, name="b", timeout_s=60):
            raise AssertionError("a gang without its rank 2")

    with ThreadPoolExecutor(2) as pool:
        leader = pool.submit(lead)
        with pytest.raises(GangBrokenError, match="rank 1 did not come"):
            leader.result()
        assert called == [1]
        ports.get()
        ranks = [pool.submit(lead), pool.submit(join)]
    for rank, says in zip(ranks, ("rank 2 did not come", "its leader has left"), strict=True):
        with pytest.raises(GangBrokenError, match=says):
            rank.result()
    assert called == [1, 1, 2]
    assert in_gang(3, add_ranks, name="b") == [6.0] * 3


def test_who_waits_when_the_meeting_ends_hears_that_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket.socket, "shutdown", lambda guest, how: None)  # comes too late
    asked = threading.Event()

    class Watched(RendezvousServer):
        def get(self, key: str, seconds: float) -> bytes | None:
            asked.set()
            return super().get(key, seconds)

    host = Watched(HERE, "b")
    with (
        closing(RendezvousClient(HERE, host.port, "b", 60)) as guest,
        ThreadPoolExecutor(1) as pool,
    ):
        heard = pool.submit(guest.get, "all", 60.0)
        assert asked.wait(60)
        host.close()
        with pytest.raises(OSError, match="has left"):
            heard.result()


def test_a_leader_that_is_not_there_or_another_gang_is_no_gang() -> None:
    ports: list[int] = []

    def call(rank: int, port: int) -> None:
        ports.append(port)
        with pytest.raises(GangBrokenError, match="has left"):
            with join_gang(HERE, port, rank=1, size=2, name="other", timeout_s=60):
                raise AssertionError("one that does not know the name")

    with pytest.raises(GangBrokenError, match="did not come"):
        with lead_gang(HERE, size=2, name="own", timeout_s=60, call=call, come_within_s=0.2):
            raise AssertionError("a gang without its rank 1")
    with pytest.raises(GangBrokenError, match="is not there"):
        with join_gang(HERE, ports[0], rank=1, size=2, name="own", timeout_s=60):
            raise AssertionError("a gang without its leader")


def test_no_environment_variable_counts_and_none_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "no-such-thing")
    before = dict(os.environ)
    assert in_gang(2, add_ranks) == [3.0, 3.0]
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()


def test_gangs_at_the_same_time_do_not_meet() -> None:
    both = threading.Barrier(4)

    def body(gang: Gang) -> float:
        both.wait(30)
        return sum(add_ranks(gang) for _ in range(20))

    with ThreadPoolExecutor(2) as pool:
        gangs = [pool.submit(in_gang, 2, body, name="same") for _ in range(2)]
        assert [gang.result() for gang in gangs] == [[60.0, 60.0]] * 2


def test_a_rank_that_does_not_answer_breaks_the_gang_in_time() -> None:
    gone = threading.Event()

    def body(gang: Gang) -> None:
        if gang.rank == 1:
            assert gone.wait(60)
        try:
            gang.agree(False)
        finally:
            gone.set()

    began = time.monotonic()
    with pytest.raises(GangBrokenError, match="as rank 0 of 2 saw"):
        in_gang(2, body, timeout_s=1.0)
    assert time.monotonic() - began < 10
    assert in_gang(2, add_ranks) == [3.0, 3.0]


def test_many_gangs_of_which_some_break_leave_nothing_behind() -> None:
    def body(gang: Gang) -> float:
        if gang.rank == 1 and number % 10 == 9:
            raise ValueError("mine")
        return add_ranks(gang)

    process = psutil.Process()
    for number in range(60):
        if number == 20:
            gc.collect()
            before = process.num_fds(), process.num_threads()
        if number % 10 == 9:
            with pytest.raises(ValueError, match="mine"):
                in_gang(2, body)
        else:
            assert in_gang(2, body) == [3.0, 3.0]
    gc.collect()
    after = process.num_fds(), process.num_threads()
    assert after[0] <= before[0] + 4
    assert after[1] <= before[1] + 4


def test_a_gang_for_gpus_needs_gpus() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")

    def body(gang: Gang) -> None:
        gang.group.reach(torch.device("cuda"))

    with pytest.raises(WorkloadError, match="this process has no such device"):
        in_gang(2, body)


@pytest.mark.parametrize("with_gpu", [0, 1])
def test_ranks_with_a_gpu_and_without_are_no_gang(
    monkeypatch: pytest.MonkeyPatch, with_gpu: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = SimpleNamespace(uuid="u")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)

    def body(gang: Gang) -> None:
        gang.group.reach(torch.device("cuda" if gang.rank == with_gpu else "cpu"))
        gang.agree(False)

    with pytest.raises(WorkloadError, match=f"worker {1 - with_gpu} of 2 has no GPU"):
        in_gang(2, body, timeout_s=9.0)


def test_a_rank_that_dies_before_it_tells_its_gpu_breaks_the_gang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="u")
    )
    monkeypatch.setattr(
        "dagsel.workloads.torch.workload.device_of", lambda shard: torch.device("cuda", 0)
    )
    monkeypatch.setattr("dagsel.workloads.gang.gang.seconds_left", lambda deadline: 9.0)
    work = workload()

    def body(gang: Gang) -> None:
        if gang.rank == 1:
            raise SystemExit
        visit = Visit(1, 2, 1, 0, ends_epoch=True)
        work.train_gang(work.init({}, seed=0), shard(), {}, visit=visit, gang=gang)

    with pytest.raises(GangBrokenError, match=r"nothing of gpu 1 in 1\.0 s"):
        in_gang(2, body, timeout_s=1.0)


def test_only_a_gang_that_is_whole_is_shut_down() -> None:
    told: list[str] = []

    def body(gang: Gang) -> None:
        gang.group.process_group = SimpleNamespace(
            shutdown=lambda: told.append("shutdown"), abort=lambda: told.append("abort")
        )
        if gang.name == "broken":
            raise ValueError("mine")

    in_gang(2, body)
    with pytest.raises(ValueError, match="mine"):
        in_gang(2, body, name="broken")
    assert told == ["shutdown"] * 2 + ["abort"] * 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.relu(self.first(x)))


def workload(**options: Any) -> TorchWorkload:
    return TorchWorkload(
        model=lambda config: Net(),
        loss=F.cross_entropy,
        optimizer=lambda parameters, config: torch.optim.Adam(parameters, lr=0.01),
        batch_size=8,
        **options,
    )


def shard() -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(41, 4)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64")}


def dying_loop(model: Any, optimizer: Any, batches: Any, config: Any, at: int) -> None:
    for number, (inputs, targets) in enumerate(batches):
        if number == at and os.environ.get("RANK_OF_TEST") == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def failing_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for number, (inputs, targets) in enumerate(batches):
        if number == 2 and os.environ.get("RANK_OF_TEST") == "1":
            raise ZeroDivisionError("the second rank's own")
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()


def train_with_a_process(work: TorchWorkload, n_epochs: int, timeout_s: float) -> list[Trained]:
    """Train epochs of one shard as rank 0; rank 1 is a process of its own."""

    def visit(epoch: int) -> Visit:
        return Visit(1, 2, epoch, 0, ends_epoch=True)

    def as_rank_1(port: int) -> None:
        torch.set_num_threads(1)
        options: dict[str, Any] = {"rank": 1, "size": 2, "name": "two", "timeout_s": timeout_s}
        with join_gang(HERE, port, **options) as gang:
            for epoch in range(1, n_epochs + 1):
                work.train_gang(None, work.prepare(shard()), {}, visit=visit(epoch), gang=gang)

    with rank_1(as_rank_1) as start:
        options: dict[str, Any] = {"size": 2, "name": "two", "timeout_s": timeout_s}
        with lead_gang(HERE, call=start, **options) as gang:
            state, units = work.init({}, seed=0), []
            for epoch in range(1, n_epochs + 1):
                units.append(
                    work.train_gang(state, work.prepare(shard()), {}, visit=visit(epoch), gang=gang)
                )
                state = units[-1].state
            return units


class rank_1:
    """A process that calls a function once it is told a port."""

    def __init__(self, body: Callable[[int], None]) -> None:
        cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self._body = cloudpickle.dumps(body)

    def __enter__(self) -> Callable[[int, int], None]:
        program = (
            "import sys, cloudpickle; read = sys.stdin.buffer; body = cloudpickle.load(read);"
            "print('ready', flush=True); body(int(read.readline()))"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "RANK_OF_TEST": "1"},
        )
        self._pipe(self._body)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return lambda rank, port: self._pipe(b"%d\n" % port)

    def __exit__(self, *_: Any) -> None:
        self._process.communicate(timeout=60)

    def _pipe(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()


def test_two_processes_give_what_one_gives() -> None:
    work = workload()
    state, shard_ = work.init({}, seed=0), work.prepare(shard())
    for epoch, gang in enumerate(train_with_a_process(work, 3, timeout_s=60.0), 1):
        alone = work.train(state, shard_, {}, visit=Visit(1, 2, epoch, 0, ends_epoch=True))
        state = alone.state
        assert gang.loss == pytest.approx(alone.loss, rel=1e-5)
        assert gang.state.meta == state.meta
        for name, tensor in state.tensors.items():
            value = gang.state.tensors[name].numpy()
            np.testing.assert_allclose(value, tensor.numpy(), rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("at", [0, 1, 2])  # the ranks agree on their buckets after the first one
def test_a_killed_rank_breaks_the_gang_in_time(at: int) -> None:
    began = time.monotonic()
    with pytest.raises(GangBrokenError, match="gang two broke") as caught:
        train_with_a_process(workload(train_fn=partial(dying_loop, at=at)), 1, timeout_s=60.0)
    assert time.monotonic() - began < 45
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    assert in_gang(2, add_ranks) == [3.0, 3.0]


def test_what_a_user_wrote_fails_as_it_would_alone() -> None:
    with pytest.raises(ZeroDivisionError, match="the second rank's own") as caught:
        train_with_a_process(workload(train_fn=failing_loop), 1, timeout_s=60.0)
    assert "in failing_loop" in caught.value.__notes__[0]
