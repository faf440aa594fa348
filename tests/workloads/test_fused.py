"""Fused kernels by default, where they are right: bit for bit as a script that names them."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dagsel.state import State
from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.describe import describe

N, SHARD = 22, 1
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "tensor-lr": (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
ARRAYS = {
    "x": np.random.default_rng(0).normal(size=(N, 6)).astype("float32"),
    "y": np.random.default_rng(1).integers(0, 3, N),
}


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 40).to(dtype), nn.Linear(40, 3).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.to(self.first.weight.dtype))))


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(12, 8, sparse=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.table((x * 2).long().clamp(-5, 5) + 6).mean(1))


class Strided(nn.Module):
    """Weights that do not lie in memory one after the other, or not in the order of the rows."""

    def __init__(self, step: int) -> None:
        super().__init__()
        wide = torch.randn(6, 3 * step)
        self.weight = nn.Parameter(wide[:, ::step] if step > 1 else torch.randn(3, 6).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def make(optimizer: Any, model: Any = Net, **options: Any) -> TorchWorkload:
    return TorchWorkload(
        lambda config: model(), F.cross_entropy, optimizer, batch_size=5, **options
    )


def train(workload: TorchWorkload, state: State, epoch: int, stop_every: int = 0) -> State:
    shard, visit, finished = workload.prepare(ARRAYS), Visit(3, 2, epoch, SHARD), False
    while not finished:
        polls = itertools.count(1)
        stops = lambda polls=polls: next(polls) == stop_every  # noqa: E731
        trained = workload.train(state, shard, {}, visit=visit, should_stop=stops)
        state, finished = trained.state, trained.finished
    return state


def run(workload: TorchWorkload, stop_every: int = 0, n_epochs: int = 3) -> State:
    state = workload.init({}, 7)
    for epoch in range(1, n_epochs + 1):
        state = train(workload, state, epoch, stop_every)
    return state


def plain_pytorch(kernels: list[bool], kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Train as a script does; for each epoch, whether by fused kernels."""
    torch.manual_seed(7)
    net, (make_optimizer, options) = Net(dtype), KINDS[kind]
    optimizer = make_optimizer(net.parameters(), **options)
    x, y = (torch.from_numpy(ARRAYS[name]) for name in "xy")
    for epoch, fused in enumerate(kernels, 1):
        for group in optimizer.param_groups:
            group["fused"] = fused
        order = np.random.default_rng([3, 2, epoch, SHARD]).permutation(N)
        for index in torch.from_numpy(order).split(5):
            optimizer.zero_grad()
            F.cross_entropy(net(x[index]), y[index]).backward()
            optimizer.step()
    return net


def same(workload: TorchWorkload, state: State, net: nn.Module) -> bool:
    ours, theirs = workload.restore(state, {}).state_dict(), net.state_dict()
    return all(torch.equal(ours[name], value) for name, value in theirs.items())


def optimizer_of(kind: str) -> Any:
    return lambda parameters, config: KINDS[kind][0](parameters, **KINDS[kind][1])


@pytest.mark.parametrize("stop_every", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_is_what_a_script_with_fused_gets(
    kind: str, dtype: torch.dtype, stop_every: int
) -> None:
    workload = make(optimizer_of(kind), lambda: Net(dtype))
    state = run(workload, stop_every)
    assert same(workload, state, plain_pytorch([True] * 3, kind, dtype))
    if kind != "sgd" or dtype is torch.float32:  # or the two give the same numbers
        assert not same(workload, state, plain_pytorch([False] * 3, kind, dtype))
    without = make(optimizer_of(kind), lambda: Net(dtype), fused=False)
    assert same(without, run(without, stop_every), plain_pytorch([False] * 3, kind, dtype))


@pytest.mark.parametrize("kernels", [[True, False, True], [False, True, False]], ids=str)
@pytest.mark.parametrize("default", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_on_under_other_kernels(
    kind: str, default: torch.dtype, kernels: list[bool]
) -> None:
    by = {fused: make(optimizer_of(kind), fused=fused or "auto") for fused in (True, False)}
    by[False] = make(optimizer_of(kind), fused=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)  # decides what counts the steps of an ordinary Adam
    try:
        state = by[True].init({}, 7)
        for epoch, fused in enumerate(kernels, 1):
            state = train(by[fused], state, epoch, stop_every=2)
        assert same(by[True], state, plain_pytorch(kernels, kind))
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("says", [{"fused": False}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_optimizer_that_says_how_it_steps_is_left_alone(kind: str, says: Any) -> None:
    made, options = KINDS[kind]
    optimizer = lambda parameters, config: made(parameters, **options, **says)  # noqa: E731
    assert run(make(optimizer)) == run(make(optimizer, fused=False))
    assert run(make(optimizer)) != run(make(optimizer, fused=True))


@pytest.mark.parametrize("kind", ["adam", "sgd"])
@pytest.mark.parametrize("model", [Table, lambda: Strided(2), lambda: Strided(1)])
def test_what_the_kernels_cannot_step_is_stepped_as_without_them(kind: str, model: Any) -> None:
    optimizer = torch.optim.SGD if model is Table else optimizer_of(kind)
    assert run(make(optimizer, model), 2) == run(make(optimizer, model, fused=False))


def test_gradients_that_a_loop_lays_out_otherwise_are_stepped_as_without_the_kernels() -> None:
    def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            if targets.sum() % 2:
                weight = model.first.weight
                weight.grad = weight.grad.t().contiguous().t()
            optimizer.step()

    adam = optimizer_of("adam")
    state = run(make(adam, train_fn=loop))
    for name, tensor in run(make(adam, fused=False)).tensors.items():
        if name.startswith("model."):
            np.testing.assert_allclose(state.tensors[name].numpy(), tensor.numpy(), 1e-4, 1e-5)
    assert run(make(adam, train_fn=loop), stop_every=1) == state


@pytest.mark.parametrize("fused", ["auto", True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_half_precision_is_not_fused_on_the_cpu(kind: str, dtype: torch.dtype, fused: Any) -> None:
    model = lambda: Net(dtype)  # noqa: E731
    made, options = KINDS[kind]
    more = {"eps": 1e-3} if kind == "adam" else {}
    optimizer = lambda parameters, config: made(parameters, **options, **more)  # noqa: E731
    assert run(make(optimizer, model, fused=fused)) == run(make(optimizer, model, fused=False))


def test_a_run_of_before_goes_on_with_the_kernels_that_it_had() -> None:
    adam = optimizer_of("adam")
    ours, then = make(adam), make(adam, fused=False)
    assert describe(ours.as_of(describe(then))) == describe(then)
    assert run(ours.as_of(describe(then))) == run(then)
    assert ours.fused == "auto"
    assert ours.as_of(describe(ours)) is ours
    by_name = make(adam, fused=True)
    assert by_name.as_of(describe(then)) is by_name  # and is refused


def test_sgd_with_momentum_steps_what_gets_its_first_gradient_later_than_others() -> None:
    class Drops(torch.nn.Module):
        n_steps: Any

        def __init__(self) -> None:
            super().__init__()
            self.always, self.later = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
            self.register_buffer("n_steps", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n_steps += 1
            return self.always(x) + (self.later(x) if self.n_steps > 2 else 0.0)

    def optimizer(parameters: Any, config: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    rng = np.random.default_rng(0)
    arrays = {"x": rng.standard_normal((32, 4)).astype("f4"), "y": rng.integers(0, 2, 32)}
    losses = []
    for fused in ("auto", False):
        it = TorchWorkload(
            lambda config: Drops(), torch.nn.functional.cross_entropy, optimizer,
            batch_size=4, fused=fused,
        )  # fmt: skip
        shard = it.prepare(arrays)
        losses.append(it.train(it.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0)).loss)
    assert losses[0] == pytest.approx(losses[1])
