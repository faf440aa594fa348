"""Shards keep to their budget, batches arrive as if resident, and no option leaks into a state.

A device of host memory takes the GPU's place: all that decides and counts runs, nothing of CUDA.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import dagsel.metrics
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.describe import describe, differences
from dagsel.workloads.torch import device as torch_device
from dagsel.workloads.torch import passes as torch_passes
from dagsel.workloads.torch import workload as torch_workload
from dagsel.workloads.torch.device import MemoryUse, Tensors, place, place_shard, send_ahead


class HostDevice:
    """A device whose memory is the host's. It keeps what happened, in order."""

    device = torch.device("cpu")

    def __init__(self, total: int = 1 << 30) -> None:
        self.memory_use = MemoryUse()
        self.total = total
        self.log: list[str] = []
        self.n_sent = self.n_received = self.most_ahead = 0
        self.n_marks = self.n_waits = 0
        self._pinned: dict[int, torch.Tensor] = {}  # kept, so that no address is used again

    def memory(self) -> tuple[int, int]:
        return self.total - self.memory_use.taken, self.total

    def pinned(self, like: torch.Tensor, n: int | None = None) -> torch.Tensor:
        tensor = torch.empty(like.shape if n is None else (n, *like.shape[1:]), dtype=like.dtype)
        self._pinned[tensor.data_ptr()] = tensor
        return tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() in self._pinned

    def send(self, batch: Tensors) -> Callable[[], Tensors]:
        assert all(map(self.is_pinned, pytree.tree_leaves(batch)))
        there = pytree.tree_map(torch.clone, batch)
        self.n_sent += 1
        self.most_ahead = max(self.most_ahead, self.n_sent - self.n_received)

        def receive() -> Tensors:
            self.n_received += 1
            return there

        return receive

    def mark(self) -> Callable[[], object]:
        self.n_marks += 1

        def wait() -> None:
            self.n_waits += 1

        return wait

    def graph_stream(self) -> contextlib.AbstractContextManager[object]:
        self.log.append("warm-up")
        return contextlib.nullcontext()

    def record(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.log.append("record")
        kept = torch.empty(())

        def replay() -> torch.Tensor:
            self.log.append("replay")
            for group in optimizer_of[0].param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # a recorded backward pass writes, it does not add
            return kept.copy_(step())  # always the same memory, as a graph's is

        return replay


#: The optimizer that the workload under test made last.
optimizer_of: list[Any] = [None]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    device = HostDevice()
    for module in (torch_device, torch_passes, torch_workload):
        monkeypatch.setattr(module, "accelerator", lambda: device)
    return device


def arrays(seed: int = 0, n: int = 45) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2, 6, 6)).astype("float32")
    return {"x": x, "weight": np.ones(n, "float32"), "y": (x.mean((1, 2, 3)) > 0).astype("int64")}


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, bias=False)  # a bias before a norm has only noise
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.norm(self.first(x))).flatten(1)  # dropout draws by memory format
        return self.second(F.dropout(hidden, 0.2, self.training))


def adam(parameters: Any, config: Any) -> torch.optim.Optimizer:
    optimizer_of[0] = torch.optim.Adam(parameters, lr=0.01)
    return optimizer_of[0]


def sgd(parameters: Any, config: Any) -> torch.optim.Optimizer:
    optimizer_of[0] = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return optimizer_of[0]


def make(optimizer: Any = adam, **options: Any) -> TorchWorkload:
    metrics = {"accuracy": dagsel.metrics.accuracy}
    options = {"batch_size": 8, "eval_batch_size": 16, "metrics": metrics, **options}
    return TorchWorkload(Net, F.cross_entropy, optimizer, **options)


def run(workload: TorchWorkload, n_units: int = 3, stop_after: int | None = None) -> Any:
    """Train and score, each unit in pieces of so many batches; give the states and the scores."""
    shard = workload.prepare(arrays())
    state, states, losses = workload.init({}, 3), [], []
    for epoch in range(1, n_units + 1):
        visit = Visit(3, 2, epoch, 0, ends_epoch=True)
        finished = False
        while not finished:
            asked = iter(range(1, 1000))
            stop = (lambda: next(asked) == stop_after) if stop_after else (lambda: False)  # noqa: B023
            trained = workload.train(state, shard, {}, visit=visit, should_stop=stop)
            state, finished = trained.state, trained.finished
        states.append(state)
        losses.append(trained.loss)
    return states, losses, workload.evaluate(state, workload.prepare(arrays(1)), {})


# Where shards lie.


@given(st.lists(st.integers(0, 60), max_size=12), st.integers(0, 100), st.integers(0, 100))
def test_shards_take_no_more_than_their_budget_and_give_it_back(
    sizes: list[int], budget: int, free: int
) -> None:
    memory_use, held = MemoryUse(), []
    for size in sizes:
        before = memory_use.taken
        fits = memory_use.claim(size, free=free - before, total=100, budget=budget)
        assert fits == (before + size <= min(budget, free))
        if fits:
            held.append(torch.empty(size, dtype=torch.uint8))
            memory_use.release_with(held[-1])
        assert memory_use.taken == sum(map(len, held)) <= budget
    held.clear()
    assert memory_use.taken == 0


def test_garbage_that_is_collected_within_a_claim_gives_its_bytes_back() -> None:
    """Python may collect a shard of a reference cycle at any call of any thread."""
    memory_use = MemoryUse()

    class Collecting(int):
        def __ge__(self, other: int) -> bool:
            memory_use.release(4)
            return int(self) >= other

    assert memory_use.claim(4, free=9, total=9, budget=9)
    claimed: list[bool] = []

    def claim() -> None:
        claimed.append(memory_use.claim(4, free=9, total=9, budget=Collecting(9)))

    thread = threading.Thread(target=claim, daemon=True)
    thread.start()
    thread.join(5.0)
    assert claimed == [True], "it waits for itself"
    assert memory_use.taken == 4


@pytest.mark.parametrize("stop_after", [None, 2])
def test_batches_of_a_shard_on_the_hosts_disk_are_sent_and_the_shard_is_not_copied(
    device: HostDevice, monkeypatch: pytest.MonkeyPatch, stop_after: int | None
) -> None:
    made = arrays()
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "arrays", lambda seed=0, of=arrays: read_only(of(seed)))
        patched = run(make(device_memory=0), stop_after=stop_after)
        shard = make(device_memory=0).prepare(read_only(made))
        resident = make(device_memory=1 << 20).prepare(read_only(made))
    assert device.n_sent >= device.n_received > 0
    for name, array in made.items():
        assert shard[name].data_ptr() == array.__array_interface__["data"][0]
        assert resident[name].data_ptr() != shard[name].data_ptr(), "there is room on the device"
    assert patched == run(make(device_memory=0), stop_after=stop_after)


def read_only(arrays: dict[str, Any]) -> dict[str, Any]:
    """Give arrays as they come from a disk."""
    views = {name: array.view() for name, array in arrays.items()}
    for view in views.values():
        view.flags.writeable = False
    return views


def test_a_share_is_a_float_and_bytes_are_an_int() -> None:
    assert place(1, 0, free=9, total=9, budget=1) == "device"
    assert place(2, 0, free=9, total=9, budget=1) == "pinned"
    assert place(9, 0, free=9, total=9, budget=1.0) == "device"


def test_a_shard_that_does_not_fit_waits_in_pinned_memory() -> None:
    device = HostDevice()
    shard = {"x": torch.arange(6.0), "y": torch.arange(6)}
    first, second = place_shard(shard, device, 100), place_shard(shard, device, 100)
    for placed in (first, second):
        assert all(torch.equal(placed[name], shard[name]) for name in shard)
        assert all(placed[name].data_ptr() != shard[name].data_ptr() for name in shard)
    assert (device.is_pinned(first["x"]), device.is_pinned(second["x"])) == (False, True)
    assert device.memory_use.taken == 72
    del first
    assert device.memory_use.taken == 0
    assert place_shard(shard, None, 0) is shard


def test_a_device_that_is_full_after_all_gives_the_bytes_back() -> None:
    class Full(HostDevice):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            raise torch.OutOfMemoryError("full")

    full = Full()
    placed = place_shard({"x": torch.ones(4)}, full, 0.5)
    assert full.is_pinned(placed["x"])
    assert full.memory_use.taken == 0


# How batches travel.


@given(st.integers(0, 9), st.integers(1, 4))
def test_batches_come_once_in_order_and_few_ahead(n_parts: int, n: int) -> None:
    device, seen = HostDevice(), []

    def gather(part: int) -> Tensors:
        return {"x": device.pinned(torch.zeros(1)).fill_(part)}

    for received, batch in enumerate(send_ahead(gather, range(n_parts), device, n)):
        seen.append(int(batch["x"]))
        assert device.n_sent == min(n_parts, received + 1 + n)
        assert device.n_marks - device.n_waits <= n
    assert seen == list(range(n_parts))
    assert device.n_sent == device.n_received == n_parts


@pytest.mark.parametrize("stop_after", [None, 2])
@pytest.mark.parametrize("input_fn", [None, lambda b, c: (b["x"] * (1 + torch.rand(())), b["y"])])
def test_what_is_sent_trains_as_what_is_resident(
    device: HostDevice, stop_after: int | None, input_fn: Any
) -> None:
    resident = run(make(input_fn=input_fn), stop_after=stop_after)
    assert device.n_sent == 0
    sent = run(make(input_fn=input_fn, device_memory=0), stop_after=stop_after)
    assert sent == resident
    assert device.n_received >= 3 * 6 + 3
    if stop_after is None:
        assert device.most_ahead == 3
        assert device.n_sent == device.n_received == 3 * 6 + 3


def test_an_autoencoder_has_a_target_of_its_own(device: HostDevice) -> None:
    def spoil(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for inputs, targets in batches:
            inputs.zero_()
            batches.log(targets.abs().sum())

    workload = TorchWorkload(Net, F.mse_loss, sgd, batch_size=8, train_fn=spoil, device_memory=0)
    shard = workload.prepare({"x": arrays()["x"]})
    trained = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0))
    assert trained.loss is not None
    assert trained.loss > 0


def test_a_buffer_that_alone_is_elsewhere_is_moved_too() -> None:
    """As one that a model function adds to a base, whose weights are on the GPU already."""

    class Scaled(nn.Linear):
        def __init__(self, config: Any) -> None:
            super().__init__(72, 2)
            self.register_buffer("scale", torch.ones(2, device="meta"), persistent=False)

        def to(self, device: torch.device) -> Scaled:  # type: ignore[override]
            self.scale = torch.ones(2, device=device)
            return self

    workload = TorchWorkload(Scaled, F.cross_entropy, adam, batch_size=8)
    module: Any = workload.restore(workload.init({}, 0), {})
    assert module.scale.device.type == "cpu"


# Options.


def tensors(state: State) -> dict[str, Any]:
    return {name: (tensor.dtype, tensor.numpy()) for name, tensor in state.tensors.items()}


def assert_close(ours: Any, plain: Any, tolerance: float) -> None:
    for state, other in zip(ours[0], plain[0], strict=True):
        found, expected = tensors(state), tensors(other)
        assert list(found) == list(expected)
        for name, (dtype, value) in found.items():
            assert dtype == expected[name][0]
            if name.startswith(("model.", "optimizer.")):
                np.testing.assert_allclose(value, expected[name][1], atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(ours[1], plain[1], rtol=max(tolerance, 1e-6))
    assert ours[2].metrics["loss"] == pytest.approx(plain[2].metrics["loss"], rel=tolerance + 1e-6)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"precision": "tf32"}, 0),  # only a GPU has it
        ({"cuda_graphs": True}, 0),
        ({"device_memory": 0}, 0),
        ({"compile": "eager"}, 0),
        ({"channels_last": True}, 1e-4),
        ({"fused": True}, 1e-4),
        ({"precision": "bf16"}, 0.2),
        (
            {
                "precision": "bf16",
                "compile": "eager",
                "channels_last": True,
                "fused": True,
                "cuda_graphs": True,
            },
            0.2,
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_an_option_changes_no_more_than_rounding(
    optimizer: Any, options: dict[str, Any], tolerance: float
) -> None:
    torch._dynamo.reset()
    plain = run(make(optimizer, fused=False))
    ours = run(make(optimizer, **{"fused": False, **options}))
    assert_close(ours, plain, tolerance)
    if tolerance:
        assert ours[0][-1] != plain[0][-1], "the option did nothing"
    else:
        assert ours == plain


@pytest.mark.parametrize("own_loop", [False, True])
def test_bf16_is_seen_by_the_model_and_by_nobody_else(own_loop: bool) -> None:
    seen: set[Any] = set()

    class Spy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = super().forward(x)
            seen.add(("inside", output.dtype))
            return output

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen.add(("loss", output.dtype, torch.is_autocast_enabled("cpu")))
        return F.cross_entropy(output, targets)

    def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        assert isinstance(model, Spy)
        for inputs, targets in batches:
            optimizer.zero_grad()
            value = loss(model(inputs), targets)
            value.backward()
            optimizer.step()
            batches.log(value)

    train_fn = loop if own_loop else None
    workload = TorchWorkload(Spy, loss, adam, batch_size=8, precision="bf16", train_fn=train_fn)
    states, losses, _ = run(workload, n_units=8)
    assert seen == {("inside", torch.bfloat16), ("loss", torch.float32, False)}
    assert losses[-1] < 0.7 * losses[0]
    assert {dtype for dtype, _ in tensors(states[-1]).values()} <= {"F32", "I64", "U8", "U32"}
    module = workload.restore(states[-1], {})
    assert type(module) is Spy


def test_a_model_is_compiled_once_for_all_units(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(torch.is_grad_enabled())
        return graph.forward

    torch._dynamo.reset()
    compile_ = nn.Module.compile
    count = lambda module, **_: compile_(module, backend=backend)  # noqa: E731
    monkeypatch.setattr(nn.Module, "compile", count)
    workload = make(compile="eager", precision="bf16", drop_last=True)
    states, _, _ = run(workload, n_units=1)
    assert compiled
    n_compiled = len(compiled)
    more, _, _ = run(workload, n_units=3)
    assert len(compiled) == n_compiled
    assert more[0] == states[0]
    assert not any("_orig_mod" in name for name in states[0].tensors)


def test_channels_last_leaves_a_states_bits_alone() -> None:
    workload = make(channels_last=True)
    state = run(workload, n_units=1)[0][0]
    empty = {name: array[:0] for name, array in arrays().items()}
    again = workload.train(state, workload.prepare(empty), {}, visit=Visit(3, 2, 2, 0)).state
    assert again == state
    shapes = {n: t.shape for n, t in state.tensors.items()}
    assert shapes["model.first.weight"] == (4, 2, 3, 3)


def test_flags_of_an_optimizer_do_not_travel() -> None:
    plain, ours = run(make(fused=False), n_units=1), run(make(), n_units=1)
    assert ours[0][0].meta["tree"] == plain[0][0].meta["tree"]
    odd = make(lambda p, c: torch.optim.Rprop(p), fused=True)
    assert run(odd) == run(make(lambda p, c: torch.optim.Rprop(p)))


@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_a_recorded_step_trains_as_an_ordinary_one(device: HostDevice, optimizer: Any) -> None:
    plain = run(make(optimizer))
    device.log.clear()
    with allowed_capturable():
        recorded = run(make(optimizer, cuda_graphs=True))
    assert_close(recorded, plain, 1e-4)
    batches = ["warm-up"] * 3 + ["record", "replay", "replay", "warm-up"]  # the last is smaller
    assert device.log == batches * 3


@contextlib.contextmanager
def allowed_capturable() -> Iterator[None]:
    # PyTorch wants capturable parameters on an accelerator; the CPU computes the same.
    from torch.optim import adam as module

    devices = module._get_capturable_supported_devices
    module._get_capturable_supported_devices = lambda *_, **__: ["cpu", "cuda"]
    try:
        yield
    finally:
        module._get_capturable_supported_devices = devices


@pytest.mark.parametrize(
    "options",
    [
        {"train_fn": lambda m, o, b, c: [b.log(0.0) for _ in b]},
        {
            "lr_scheduler": lambda o, c: torch.optim.lr_scheduler.StepLR(o, 2),
            "lr_scheduler_interval": "step",
        },
        {"optimizer": lambda p, c: torch.optim.LBFGS(p)},
        {"optimizer": lambda p, c: torch.optim.SGD(p, lr=torch.tensor(0.1))},
        {"optimizer": lambda p, c: torch.optim.Adagrad(p)},
    ],
)
def test_what_cannot_be_recorded_is_not(device: HostDevice, options: dict[str, Any]) -> None:
    assert run(make(cuda_graphs=True, **options), 1) == run(make(**options), 1)
    assert not device.log


@pytest.mark.parametrize(
    "options",
    [{}, {"cuda_graphs": True}, {"max_batch": 3}, {"optimizer": lambda p, c: torch.optim.LBFGS(p)}],
    ids=["plain", "graphs", "pieces", "closure"],
)
def test_outputs_that_would_be_compared_with_each_target_are_refused(
    device: HostDevice, options: dict[str, Any]
) -> None:
    """Whatever makes the step: such a model learns the mean of the targets, and nobody is told."""
    given: Any = {"optimizer": sgd, "batch_size": 8, "input_fn": lambda b, c: (b["x"], b["weight"])}
    model = lambda c: nn.Sequential(nn.Flatten(), nn.Linear(72, 1))  # noqa: E731
    workload = TorchWorkload(model, F.mse_loss, **{**given, **options})
    shard = workload.prepare(arrays())
    with pytest.raises(WorkloadError, match=r"outputs \(\d, 1\) and targets \(\d,\) would compare"):
        workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0))


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("precision", "fp16", "precision must be 'fp32', 'tf32' or 'bf16', got 'fp16'"),
        ("compile", "inducter", "compile is 'inducter'; take one that this PyTorch has: "),
        ("compile", 3, "compile is 3"),
        ("fused", "yes", "fused is 'yes', not 'auto', True or False"),
        ("channels_last", "yes", "channels_last is 'yes', not 'auto', True or False"),
        ("device_memory", 1.5, "device_memory is 1.5, not a share"),
        ("device_memory", -1, "device_memory is -1"),
        ("device_memory", True, "device_memory is True"),
        ("device_memory", "1GB", "device_memory is '1GB', not a share"),
        ("device_memory", None, "device_memory is None"),
        ("max_batch", 2.5, "max_batch must be a whole number of 1 or more, got 2.5"),
        ("max_batch", True, "max_batch must be a whole number of 1 or more, got True"),
        ("max_batch", "4", "max_batch must be a whole number of 1 or more, got '4'"),
        ("eval_batch_size", "4", "eval_batch_size must be a whole number of 1 or more, got '4'"),
    ],
)
def test_an_option_that_is_none_is_refused(option: str, value: Any, text: str) -> None:
    with pytest.raises(WorkloadError, match=text):
        make(**{option: value})


def test_a_run_goes_on_with_the_options_it_began_with() -> None:
    then, now = describe(make()), describe(make(precision="bf16", fused=True))
    assert differences(then, now) == [
        "'fused' was 'auto' and is True",
        "'precision' was 'fp32' and is 'bf16'",
    ]
