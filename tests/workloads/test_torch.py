"""TorchWorkload against plain PyTorch, bit for bit."""

import copy
import functools
import itertools
import math
import random
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

import dagsel.metrics
from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.testing import WorkloadSuite
from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.abilities import DataOutline
from dagsel.workloads.batches import Cursor, ShardPass
from dagsel.workloads.torch.loop import following
from tests.fused import fused

SEED, TRIAL, N_EPOCHS, N_SHARDS = 3, 2, 3, 4
SIZES = (22, 18, 20, 17)


def arrays(seed, n=22):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        # Python's and NumPy's streams are used too: a random scale, as augmentations have.
        scale = 1 + 0.01 * random.random() + 0.01 * np.random.random()
        return self.second(F.dropout(F.relu(self.norm(self.first(x))), 0.3, self.training) * scale)


def sgd(parameters, config):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)


def adam(parameters, config):
    return torch.optim.Adam(parameters, lr=0.01)


class Lion(torch.optim.Optimizer):
    """An optimizer of the user's own: wide moments, odd things in its state."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p, dtype=torch.float64)
                    state["history"] = [torch.zeros(()), (torch.ones(2), "tag")]
                    state["count"] = 0
                    state["self"] = p.detach()
                state["count"] += 1
                state["history"][0].add_(p.grad.float().norm())
                gradient = p.grad.double()
                update = state["moment"].mul(first).add(gradient, alpha=1 - first).sign()
                state["moment"].lerp_(gradient, 1 - second)
                state["self"].sub_((group["lr"] * update).to(p.dtype))


def lion(parameters, config):
    return Lion(parameters, 0.01)


OPTIMIZERS = {
    "sgd": sgd,
    "adam": adam,
    "adamw-amsgrad": lambda p, c: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam-tensor-lr": lambda p, c: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "rmsprop": lambda p, c: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p, c: torch.optim.Adagrad(p, lr=0.05),
    "nadam": lambda p, c: torch.optim.NAdam(p),
    "asgd": lambda p, c: torch.optim.ASGD(p),
    "rprop": lambda p, c: torch.optim.Rprop(p),
    "groups": lambda p, c: torch.optim.SGD(
        [{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)], lr=0.1, momentum=0.5
    ),
    "own": lion,
}
SCHEDULES = {
    "step": lambda o, c: schedules.StepLR(o, 2, 0.5),
    "multi-step": lambda o, c: schedules.MultiStepLR(o, [1, 2]),
    "lambda": lambda o, c: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "multiplicative": lambda o, c: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "constant": lambda o, c: schedules.ConstantLR(o, 0.5, 2),
    "linear": lambda o, c: schedules.LinearLR(o, total_iters=5),
    "exponential": lambda o, c: schedules.ExponentialLR(o, 0.9),
    "cosine": lambda o, c: schedules.CosineAnnealingLR(o, 5),
    "warm-restarts": lambda o, c: schedules.CosineAnnealingWarmRestarts(o, 2),
    "polynomial": lambda o, c: schedules.PolynomialLR(o, 7, 0.5),
    "cyclic": lambda o, c: schedules.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.99),
    "one-cycle": lambda o, c: schedules.OneCycleLR(o, 0.1, total_steps=100),
    "chained": lambda o, c: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o, c: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, 4)], [2]
    ),
    "swa": lambda o, c: torch.optim.swa_utils.SWALR(o, 0.01, 3),
}


def visit_orders():
    rng = np.random.default_rng(11)
    return [rng.permutation(N_SHARDS).tolist() for _ in range(N_EPOCHS)]


def plain_pytorch(model, optimizer, schedule=None, interval="epoch", batch_size=5, loss=None):
    """Train as a script does: no dagsel in here, but for the documented order of the samples."""
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    net = model({})
    opt = fused(optimizer(net.parameters(), {}))
    sched = schedule and schedule(opt, {})
    losses = []
    for epoch, shards in enumerate(visit_orders(), 1):
        for shard in shards:
            data = arrays(shard, SIZES[shard])
            order = np.random.default_rng([SEED, TRIAL, epoch, shard]).permutation(SIZES[shard])
            for start in range(0, SIZES[shard], batch_size):
                index = order[start : start + batch_size]
                value = (loss or F.cross_entropy)(
                    net(torch.from_numpy(data["x"][index])), torch.from_numpy(data["y"][index])
                )
                opt.zero_grad()
                value.backward()
                opt.step()
                losses.append((value.item(), len(index)))
                if sched and interval == "step":
                    sched.step()
        if sched and interval == "epoch":
            sched.step()
    return net, opt, sched, losses


def units(workload, stop_every=None):
    """The same by units, each with a state that came over the wire."""
    state = workload.init({}, 7)
    losses = []
    for epoch, shards in enumerate(visit_orders(), 1):
        for position, shard in enumerate(shards):
            data = workload.prepare(arrays(shard, SIZES[shard]))
            visit = Visit(SEED, TRIAL, epoch, shard, ends_epoch=position == N_SHARDS - 1)
            finished = False
            while not finished:
                count = itertools.count(1)
                stop = (lambda c=count: next(c) == stop_every) if stop_every else (lambda: False)
                state = State(bytes(state.buffer))
                trained = workload.train(state, data, {}, visit=visit, should_stop=stop)
                state, finished = trained.state, trained.finished
            losses.append((trained.loss, trained.n_samples))
    return state, losses


def bits(value):
    return value.detach().contiguous().view(-1).view(torch.uint8).tolist()


def leaves(tree):
    if isinstance(tree, dict):
        return {key: leaves(value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [leaves(value) for value in tree]
    return (tree.dtype, bits(tree)) if isinstance(tree, torch.Tensor) else tree


def assert_equal(workload, state, net, opt, sched):
    module = workload.restore(state, {})
    assert leaves(dict(module.state_dict())) == leaves(dict(net.state_dict()))
    assert not module.training
    module, opt2, sched2 = live(workload, state)
    assert leaves(opt2.state_dict()) == leaves(opt.state_dict())
    if sched:
        own, expected = sched2.state_dict(), sched.state_dict()
        assert leaves(own) == leaves(expected)
    assert state.tensors["random.torch"].data.tobytes() == torch.get_rng_state().numpy().tobytes()
    of_numpy: Any = np.random.get_state()
    assert state.tensors["random.numpy.state.key"].numpy().tolist() == of_numpy[1].tolist()
    words = state.tensors["random.python.words"].numpy().tolist()
    assert tuple(words) == random.getstate()[1]


def live(workload, state):
    """The optimizer as the next unit will see it."""
    seen = {}

    def spy(model, optimizer, batches, config):
        seen["it"] = model, copy.deepcopy(optimizer.state_dict())

    class Frozen:
        def __init__(self, state):
            self.state_dict = lambda: state

    peek = copy.copy(workload)
    peek.train_fn = spy
    if workload.lr_scheduler:
        built = []

        def build(optimizer, config):
            built.append(workload.lr_scheduler(optimizer, config))
            return built[0]

        peek.lr_scheduler = build
    peek.train(state, peek.prepare(arrays(0)), {}, visit=Visit(0, TRIAL, 9, 0))
    model, opt = seen["it"]
    return model, Frozen(opt), built[0] if workload.lr_scheduler else None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_units_equal_a_plain_loop(name):
    optimizer = OPTIMIZERS[name]
    workload = TorchWorkload(Net, F.cross_entropy, optimizer, batch_size=5)
    state, losses = units(workload)
    net, opt, _, plain = plain_pytorch(Net, optimizer)
    assert_equal(workload, state, net, opt, None)
    total = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
    assert total == pytest.approx(sum(v * n for v, n in plain) / sum(n for _, n in plain))


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_travel(name, interval):
    workload = TorchWorkload(
        Net, F.cross_entropy, sgd, batch_size=5,
        lr_scheduler=SCHEDULES[name], lr_scheduler_interval=interval,
    )  # fmt: skip
    state, _ = units(workload)
    assert_equal(workload, state, *plain_pytorch(Net, sgd, SCHEDULES[name], interval)[:3])


@pytest.mark.parametrize("stop_every", [1, 2, 3, 4])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_cut_at_batch_boundaries_equals_a_plain_loop(optimizer, stop_every):
    schedule = SCHEDULES["one-cycle"]
    workload = TorchWorkload(
        Net, F.cross_entropy, optimizer, batch_size=5,
        lr_scheduler=schedule, lr_scheduler_interval="step",
    )  # fmt: skip
    state, losses = units(workload, stop_every)
    assert losses == units(workload)[1]
    net, opt, sched, _ = plain_pytorch(Net, optimizer, schedule, "step")
    assert_equal(workload, state, net, opt, sched)


class Tied(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.c(self.b(self.a(x)))


def test_tied_weights_are_stored_once_and_stay_tied():
    workload = TorchWorkload(Tied, F.cross_entropy, adam, batch_size=5)
    state, _ = units(workload)
    assert "model.a.weight" in state.tensors
    assert "model.b.weight" not in state.tensors
    module: Any = workload.restore(state, {})
    assert module.a.weight is module.b.weight
    assert_equal(workload, state, *plain_pytorch(Tied, adam)[:3])


class Unfreezes(nn.Module):
    """Trains its first layer from the tenth batch on, and then no more its last one's bias."""

    n: Any

    def __init__(self, config):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 3)
        self.register_buffer("n", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.n += self.training
        if self.n == 10:
            self.first.requires_grad_(True)
            self.last.bias.requires_grad_(False)
        return self.last(F.relu(self.first(x)))


@pytest.mark.parametrize("stop_every", [None, 1])
def test_which_weights_are_frozen_travels(stop_every):
    workload = TorchWorkload(Unfreezes, F.cross_entropy, adam, batch_size=5)
    state, _ = units(workload, stop_every)
    assert_equal(workload, state, *plain_pytorch(Unfreezes, adam)[:3])


class Bag(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(12, 3, sparse=True)

    def forward(self, x):
        return self.table((x * 2).long().clamp(-5, 5) + 6).mean(1)


def test_sparse_gradients():
    def optimizer(parameters, config):
        return torch.optim.SparseAdam(list(parameters), lr=0.01)

    workload = TorchWorkload(Bag, F.cross_entropy, optimizer, batch_size=5)
    assert_equal(workload, units(workload)[0], *plain_pytorch(Bag, optimizer)[:3])


class Half(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(6, 3).bfloat16()

    def forward(self, x):
        return self.layer(x.bfloat16()).float()


@pytest.mark.parametrize("optimizer", [sgd, adam, lion])
def test_bfloat16_with_wider_moments(optimizer):
    workload = TorchWorkload(Half, F.cross_entropy, optimizer, batch_size=5)
    state, _ = units(workload, 2)
    assert state.tensors["model.layer.weight"].dtype == "BF16"
    if optimizer is lion:
        assert state.tensors["optimizer.state.0.moment"].dtype == "F64"
        assert "optimizer.state.0.self" not in state.tensors
    assert_equal(workload, state, *plain_pytorch(Half, optimizer)[:3])


def test_lbfgs():
    workload = TorchWorkload(
        lambda config: nn.Linear(6, 3), F.cross_entropy,
        lambda p, c: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4), batch_size=11,
    )  # fmt: skip
    assert leaves_of(units(workload)[0]) == leaves_of(units(workload, 1)[0])
    assert units(workload)[1][-1][0] < units(workload)[1][0][0]


def leaves_of(state):
    return {name: tensor.data.tobytes() for name, tensor in state.tensors.items()}


class Odd(nn.Module):
    """Draws more than its weights, and keeps some of it outside the state dict."""

    def __init__(self, config):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("fixed", torch.randn(6), persistent=False)
        self.scale = random.random()
        self.extra: dict[str, Any] = {"n": 0, "t": torch.zeros(2, dtype=torch.bfloat16)}

    def forward(self, x):
        if self.training:
            self.extra["n"] += 1
            self.extra["t"] += 1
        return self.layer(x * self.fixed) * self.scale

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Scaled(torch.optim.Optimizer):
    """Draws a number as it is made, after the model's."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.scale = 1 + torch.rand(())

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.scale, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("large", [False, True])
def test_what_an_optimizer_draws_as_it_is_made_is_the_same_in_every_unit(large, monkeypatch):
    if large:
        monkeypatch.setattr("dagsel.workloads.torch.trials.LARGE", 0)
    workload = TorchWorkload(Net, F.cross_entropy, lambda p, c: Scaled(p, 0.1), batch_size=5)
    state, _ = units(workload, 3)
    assert_equal(workload, state, *plain_pytorch(Net, lambda p, c: Scaled(p, 0.1))[:3])


@pytest.mark.parametrize("large", [False, True])
def test_what_a_factory_draws_beside_its_weights_is_the_same_in_every_unit(large, monkeypatch):
    if large:
        monkeypatch.setattr("dagsel.workloads.torch.trials.LARGE", 0)
    workload = TorchWorkload(Odd, F.cross_entropy, adam, batch_size=5)
    state, _ = units(workload, 3)
    net, opt, sched, _ = plain_pytorch(Odd, adam)
    assert_equal(workload, state, net, opt, sched)
    module: Any = workload.restore(state, {})
    assert torch.equal(module.fixed, net.fixed)
    assert module.scale == net.scale
    assert module.extra["n"] == net.extra["n"]


@pytest.mark.parametrize("net", [Net, Tied, Bag, Half])
def test_large_models_are_built_without_random_numbers_to_the_same_effect(net, monkeypatch):
    workload = TorchWorkload(
        net, F.cross_entropy, lambda p, c: torch.optim.SGD(p, 0.1), batch_size=5
    )
    expected = units(workload)[0]
    monkeypatch.setattr("dagsel.workloads.torch.trials.LARGE", 0)
    assert units(workload)[0] == expected
    assert workload._unfilled


def reads(module):
    module.norm = module[0].weight.norm().item()


def lists(module):
    module.first = module[0].weight.detach().numpy().copy()


def draws(module):
    module.register_buffer("more", torch.randn(2), persistent=False)


def derives(module):
    module.register_buffer("twice", module[0].weight.detach() * 2, persistent=False)


def replaces(module):
    module.register_buffer("old", module[0].weight.detach(), persistent=False)
    module[0].weight = nn.Parameter(torch.zeros(3, 3))


def orthogonal(module):
    nn.init.orthogonal_(module[0].weight)


def generator(module):
    module[0].weight.data.normal_(generator=torch.Generator())


def asserts(module):
    spread = float(module[0].weight.std())
    assert 0 < spread < 1, f"the weights spread by {spread}"


@pytest.mark.parametrize(
    "twist", [reads, lists, draws, derives, replaces, orthogonal, generator, asserts]
)
def test_a_build_without_random_numbers_is_refused_where_it_is_not_proved(twist):
    from dagsel.workloads.torch.build import build_unfilled

    def factory():
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        twist(module)
        return module

    assert build_unfilled(lambda: nn.Sequential(nn.Linear(3, 3), nn.Embedding(4, 2, 0)))
    assert build_unfilled(factory) is None


def own_loop(model, optimizer, batches, config):
    for inputs, targets in batches:
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batches.log(loss)


@pytest.mark.parametrize("stop_every", [None, 1, 3])
def test_a_loop_of_the_users_own_is_preemptible_without_knowing_it(stop_every):
    standard = TorchWorkload(Net, F.cross_entropy, adam, batch_size=5)
    own = TorchWorkload(Net, F.cross_entropy, adam, batch_size=5, train_fn=own_loop)
    expected, losses = units(standard)
    state, own_losses = units(own, stop_every)
    assert state == expected
    assert own_losses == losses


def test_an_optimizer_whose_class_came_by_its_code_is_seen_to_step():
    """As one of a script or a notebook: its `step` holds a copy of PyTorch's table of hooks."""

    class Plain(torch.optim.Optimizer):
        def __init__(self, parameters, lr):
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])

    workload = TorchWorkload(
        Net, F.cross_entropy, lambda p, c: Plain(p, 0.1), batch_size=5, train_fn=own_loop
    )
    workload.init({}, 0)
    there = cloudpickle.loads(cloudpickle.dumps(workload))
    assert units(there, stop_every=1)[0] == units(workload)[0]


def test_an_optimizer_that_does_not_load_its_own_state_is_named():
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner, self.param_groups = inner, inner.param_groups

        def state_dict(self):
            return self.inner.state_dict()

        def load_state_dict(self, saved):
            self.inner.load_state_dict(saved["inner"])

    workload = TorchWorkload(Net, F.cross_entropy, lambda p, c: Wrapped(sgd(p, c)), batch_size=5)
    told = r"the Wrapped does not load what its own state_dict\(\) returns.*KeyError\('inner'\)"
    with pytest.raises(WorkloadError, match=told):
        workload.validate({})


def test_sparse_gradients_that_no_step_follows_fail_the_trial():
    def loop(model, optimizer, batches, config):
        for inputs, targets in batches:
            F.cross_entropy(model(inputs), targets).backward()

    workload = TorchWorkload(Bag, F.cross_entropy, sgd, batch_size=5, train_fn=loop)
    with pytest.raises(WorkloadError, match=r"gradients that wait for an optimizer\.step"):
        units(workload)


@pytest.mark.parametrize("stop_every", [None, 1])
def test_a_loop_over_batches_that_are_used_up_is_refused(stop_every):
    def loop(*args):
        own_loop(*args)
        own_loop(*args)

    with pytest.raises(WorkloadError, match="a second time, and each is handed out once"):
        units(TorchWorkload(Net, F.cross_entropy, adam, batch_size=5, train_fn=loop), stop_every)


@pytest.mark.parametrize("is_last", [
    lambda index, inputs, batches: len(inputs) < 5,
    lambda index, inputs, batches: index + 1 == len(batches),  # of a stopped unit's rest, too
])  # fmt: skip
def test_a_loop_that_accumulates_gradients_stops_only_after_its_steps(is_last):
    places = []

    def loop(model, optimizer, batches, config):
        for index, (inputs, targets) in enumerate(batches):
            (F.cross_entropy(model(inputs), targets) / 2).backward()
            if index % 2 == 1 or is_last(index, inputs, batches):
                optimizer.step()
                optimizer.zero_grad()
        places.append(index)

    workload = TorchWorkload(Net, F.cross_entropy, sgd, batch_size=5, train_fn=loop)
    whole, losses = units(workload)
    places.clear()
    assert units(workload, 1)[0] == whole
    assert math.isnan(losses[0][0])  # it reports none
    assert set(places[:2]) == {1}


def test_input_fn_metrics_and_drop_last():
    def input_fn(batch, config):
        assert set(batch) == {"x", "noise", "y"}
        return batch["x"].mul_(2) + batch["noise"], batch["y"]

    workload = TorchWorkload(
        lambda config: nn.Linear(6, 3), F.cross_entropy, sgd, batch_size=lambda config: config["b"],
        input_fn=input_fn, drop_last=True, eval_batch_size=4,
        metrics={"accuracy": dagsel.metrics.accuracy, "top": lambda o, t: 0.5},
    )  # fmt: skip
    assert workload.metrics == {"loss": "minimize", "accuracy": "maximize", "top": None}
    data = arrays(0, 21)
    data = {"x": data["x"], "noise": data["x"] * 0, "y": data["y"]}
    for array in data.values():
        array.flags.writeable = False
    shard = workload.prepare(data)
    config = {"b": np.int64(5)}
    trained = workload.train(workload.init(config, 0), shard, config, visit=Visit(0, 0, 1, 0))
    assert trained.n_samples == 20
    result = workload.evaluate(trained.state, shard, config)
    module = workload.restore(trained.state, config)
    with torch.no_grad():
        output = module(torch.tensor(data["x"]) * 2)
        targets = torch.tensor(data["y"])
    assert torch.equal(shard["x"], torch.tensor(data["x"]))
    assert result.n_samples == 21
    assert result.metrics["accuracy"] == pytest.approx(
        (output.argmax(1) == targets).double().mean().item(), abs=1e-12
    )
    assert result.metrics["loss"] == pytest.approx(F.cross_entropy(output, targets).item())
    assert result.metrics["top"] == 0.5


@pytest.mark.parametrize("mode", [True, False])
def test_evaluation_is_in_evaluation_mode_and_training_in_training_mode(mode):
    def model(config):
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        return nn.Sequential(*layers).train(mode)

    workload = TorchWorkload(model, F.cross_entropy, sgd, batch_size=5)
    data = arrays(0)
    shard = workload.prepare(data)
    state = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0)).state
    module: Any = workload.restore(state, {})
    assert not module.training
    assert module[1].num_batches_tracked == 5
    with torch.no_grad():
        loss = F.cross_entropy(module(torch.tensor(data["x"])), torch.tensor(data["y"]))
    assert workload.evaluate(state, shard, {}).metrics["loss"] == pytest.approx(loss.item())


def test_a_nan_loss_is_reported_as_such():
    workload = TorchWorkload(Net, lambda o, t: F.cross_entropy(o, t) * math.nan, sgd, batch_size=5)
    shard = workload.prepare(arrays(0))
    trained = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0))
    assert trained.loss is not None
    assert math.isnan(trained.loss)
    assert trained.diverged
    assert math.isnan(workload.evaluate(trained.state, shard, {}).metrics["loss"])


def test_a_shard_smaller_than_a_batch_with_drop_last():
    workload = TorchWorkload(
        Net, F.cross_entropy, sgd, batch_size=50, drop_last=True, lr_scheduler=SCHEDULES["step"]
    )
    shard = workload.prepare(arrays(0))
    visit = Visit(0, 0, 1, 0, ends_epoch=True)
    trained = workload.train(workload.init({}, 0), shard, {}, visit=visit)
    assert trained.finished
    assert (trained.n_samples, trained.loss, trained.diverged) == (0, 0.0, False)
    nothing = workload.prepare({name: array[:0] for name, array in arrays(0).items()})
    assert workload.evaluate(trained.state, nothing, {}).metrics == {"loss": 0.0}


def test_a_stopped_state_goes_on_with_its_own_shard_only():
    workload = TorchWorkload(Net, F.cross_entropy, sgd, batch_size=5)
    shard = workload.prepare(arrays(0))
    state = workload.init({}, 0)
    stopped = workload.train(state, shard, {}, visit=Visit(0, 1, 1, 2), should_stop=lambda: True)
    assert (stopped.n_samples, stopped.finished) == (5, False)
    with pytest.raises(WorkloadError, match="stopped inside shard 2 of epoch 1 of trial 1"):
        workload.train(stopped.state, shard, {}, visit=Visit(0, 1, 1, 3))


class Wide(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, dtype=torch.complex128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size must be .*, got 0"),
        ({"batch_size": True}, "batch_size must be .*, got True"),
        ({"batch_size": lambda config: 2.5}, "batch_size must be .*, got 2.5"),
        ({"model": lambda config: "net"}, "model gave a str"),
        ({"model": lambda config: nn.ReLU()}, "without parameters"),
        ({"model": lambda config: nn.LazyLinear(3)}, "lazy"),
        ({"model": lambda config: Wide(config)}, "complex128"),
        ({"optimizer": lambda parameters, config: None}, "optimizer gave a NoneType"),
        ({"lr_scheduler": lambda o, c: 3}, "lr_scheduler gave a int"),
    ],
)
def test_validate_names_the_culprit(change, message):
    arguments = {"model": Net, "loss": F.cross_entropy, "optimizer": sgd, "batch_size": 5}
    with pytest.raises(WorkloadError, match=message):
        TorchWorkload(**(arguments | change)).validate({})


def test_pytorchs_random_stream_is_left_alone():
    workload = TorchWorkload(Net, F.cross_entropy, adam, batch_size=5)
    shard = workload.prepare(arrays(0))
    before = torch.get_rng_state()
    workload.validate({})
    state = workload.init({}, 0)
    state = workload.train(state, shard, {}, visit=Visit(0, 0, 1, 0)).state
    workload.evaluate(state, shard, {})
    workload.restore(state, {})
    assert torch.equal(torch.get_rng_state(), before)


class TestTorchWorkload(WorkloadSuite):
    config: Mapping[str, Any] = {"lr": 0.01}
    gang_tolerance = None  # `Net` has dropout

    def make_workload(self):
        return TorchWorkload(
            Net, F.cross_entropy, adam, batch_size=5,
            metrics={"accuracy": dagsel.metrics.accuracy}, lr_scheduler=SCHEDULES["sequential"],
        )  # fmt: skip

    def make_arrays(self, seed):
        return arrays(seed)


class TestOwnLoop(TestTorchWorkload):
    def make_workload(self):
        return TorchWorkload(
            Net, F.cross_entropy, lion, batch_size=5, train_fn=own_loop,
            lr_scheduler=SCHEDULES["one-cycle"], lr_scheduler_interval="step",
        )  # fmt: skip


@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, functools.partial(F.huber_loss, delta=2.0), nn.L1Loss()],
    ids=["function", "partial", "module"],
)
def test_a_loss_that_would_compare_each_with_each_is_refused(loss: Any) -> None:
    arrays = {"x": np.ones((6, 3), "float32"), "y": np.arange(6, dtype="float32")}
    layer = nn.Linear(3, 1)
    models: dict[str, Any] = {
        "(n, 1)": lambda config: copy.deepcopy(layer),
        "(n,)": lambda config: nn.Sequential(copy.deepcopy(layer), nn.Flatten(0)),
    }
    found = {}
    for shape, model in models.items():
        workload = TorchWorkload(model, loss, torch.optim.SGD, batch_size=3)
        shard, state = workload.prepare(arrays), workload.init({"lr": 0.1}, 0)
        train = functools.partial(workload.train, state, shard, {"lr": 0.1})
        found[shape] = functools.partial(train, visit=Visit(0, 0, 1, 0))
    with pytest.raises(WorkloadError, match=r"outputs \(3, 1\) and targets \(3,\) .*squeeze"):
        found["(n, 1)"]()
    assert found["(n,)"]().n_samples == 6


def test_weights_of_classes_follow_the_model_as_wide_and_to_its_device() -> None:
    rng = np.random.default_rng(0)
    arrays = {"x": rng.normal(size=(12, 3)).astype("float32"), "y": np.arange(12) % 2}
    layer, weights = nn.Linear(3, 2), np.array([0.25, 2.0])  # float64, as scikit-learn gives them
    found = []
    for dtype in (torch.float64, torch.float32):
        loss = nn.CrossEntropyLoss(weight=torch.tensor(weights, dtype=dtype))
        workload = TorchWorkload(
            lambda config: copy.deepcopy(layer), loss, torch.optim.SGD, batch_size=4
        )
        shard, state = workload.prepare(arrays), workload.init({"lr": 0.1}, 0)
        trained = workload.train(state, shard, {"lr": 0.1}, visit=Visit(0, 0, 1, 0))
        scored = workload.evaluate(trained.state, shard, {"lr": 0.1})
        found.append((trained.loss, trained.state, scored.metrics))
        assert loss.get_buffer("weight").dtype == dtype, "the user's own stays as it is"
    assert found[0] == found[1]
    away = following(loss, nn.Linear(3, 2, device="meta").parameters())
    assert (away.weight.device.type, away.weight.dtype) == ("meta", torch.float32)
    double = nn.Linear(3, 2, dtype=torch.float64).parameters()
    for fits in (loss, F.cross_entropy, nn.CrossEntropyLoss()):
        assert following(fits, layer.parameters()) is fits
        assert following(fits, double) is fits


def test_arrays_that_nothing_uses_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    of_x: Any = (np.dtype("float32"), (6,))
    arrays: dict[str, Any] = {
        "x": of_x, "more": of_x, "rest": of_x, "y": (np.dtype("int64"), ()),
    }  # fmt: skip
    for data, given in [
        (DataOutline((20,), arrays), {"input_fn": lambda batch, config: (batch["x"], batch["y"])}),
        (DataOutline((20,), {"x": of_x, "y": arrays["y"]}), {}),
    ]:
        make_workload(**given).validate_data({}, data)
    assert caplog.messages == []
    workload = make_workload()
    for _ in range(2):
        workload.validate_data({}, DataOutline((20,), arrays))
    (told,) = caplog.messages
    assert "'x', the target is 'y', and nothing uses 'more' and 'rest'" in told


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_unsigned_numbers_are_trained_on(dtype: str) -> None:
    def input_fn(batch: Any, config: Any) -> Any:
        return batch["x"].float() / 9, batch["y"].long()

    rows = np.random.default_rng(0).integers(0, 9, (20, 6))
    last: dict[str, Any] = {"x": rows.astype(dtype), "y": (rows[:, 0] % 3).astype(dtype)}
    first = {name: array.astype("int64") for name, array in last.items()}
    states = []
    for arrays_ in (first, last):
        workload = make_workload(input_fn=input_fn)
        outline = {name: (array.dtype, array.shape[1:]) for name, array in arrays_.items()}
        workload.validate_data({}, DataOutline((20,), outline))
        shard = workload.prepare(arrays_)
        trained = workload.train(workload.init({}, 0), shard, {}, visit=Visit(0, 0, 1, 0))
        workload.evaluate(trained.state, shard, {})
        states.append(workload.restore(trained.state, {}).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def make_workload(**given: Any) -> TorchWorkload:
    return TorchWorkload(Net, F.cross_entropy, torch.optim.SGD, batch_size=5, **given)


class Forces(torch.nn.Module):
    """Returns the gradient of an energy."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().clone().requires_grad_()
            energy = self.net(x).sum()
            return torch.autograd.grad(energy, x, create_graph=self.training)[0]


def test_a_model_that_differentiates_in_its_forward_is_scored() -> None:
    workload = TorchWorkload(lambda config: Forces(), F.mse_loss, torch.optim.SGD, batch_size=8)
    x = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    shard, state = workload.prepare({"x": x, "y": 2 * x}), workload.init({}, seed=0)
    state = workload.train(state, shard, {}, visit=Visit(seed=0, trial=0, epoch=1, shard=0)).state
    module = workload.restore(state, {})
    wanted = F.mse_loss(module(torch.tensor(x)), torch.tensor(2 * x)).item()
    assert workload.evaluate(state, shard, {}).metrics["loss"] == pytest.approx(wanted)


def test_of_two_losses_of_one_batch_the_last_counts(monkeypatch):
    monkeypatch.setattr("dagsel.workloads.batches.FOLD", 2)
    begin = Cursor.begin(None, Visit(seed=0, trial=0, epoch=1, shard=0))
    taken = ShardPass([*"abcde"], [1] * 5, make=str, cursor=begin, should_stop=lambda: False)
    for _ in taken:
        taken.log(100.0)
        taken.log(1.0)
    assert (taken.loss, taken.cursor.n_logged) == (1.0, 5)
