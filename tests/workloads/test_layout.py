"""Channels last by default, where the CPU is faster so: as if it were named, bit for bit."""

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dagsel.state import State
from dagsel.testing.workloads import in_gang
from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.describe import describe, differences
from dagsel.workloads.torch import trials
from dagsel.workloads.torch.layout import bears, gains, lay_out
from dagsel.workloads.torch.loop import standard_loop

N, PIXELS = 22, 8
N_UNITS = 5


def arrays(n_colours: int = 1) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, n_colours, PIXELS, PIXELS)).astype("float32")
    return {"x": x, "y": rng.integers(0, 3, N)}


class Net(nn.Module):
    """What networks for images have: a norm, dropout, a place by place convolution, a shortcut."""

    def __init__(self, width: int = 8, n_colours: int = 1, **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(n_colours, width, 3, padding=1, **options)
        self.norm, self.drop = nn.BatchNorm2d(width), nn.Dropout2d(0.2)
        self.second = nn.Conv2d(width, width, 1, **options)
        self.last = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.drop(x[..., ::2, ::2] if self.second.stride == (2, 2) else x) + self.second(x)
        return self.last(x.mean((2, 3)))


class Viewed(Net):
    """Its images become rows by a view, which is for channels that come first."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8 * PIXELS * PIXELS, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        return self.last(x.view(len(x), -1))


class ViewedInTraining(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.first(x).view(-1)
        return super().forward(x)


class ViewedInScoring(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            self.first(x).view(-1)
        return super().forward(x)


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.view(-1).neg().view(gradient.shape)


class ViewedBackwards(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = self.second(Turned.apply(x) if self.training else x)
        return self.last(x.mean((2, 3)))


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(8)  # type: ignore[assignment]


class InOnePlace(Net):
    """Two of its weights lie in one place: a step of one is a step of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Conv2d(8, 8, 1)
        self.third.weight.data = self.second.weight.data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(F.relu(self.norm(self.first(x))))
        return self.last(self.third(F.relu(x)).mean((2, 3)))


def make(model: Any = Net, **options: Any) -> TorchWorkload:
    given = {"optimizer": torch.optim.Adam, "batch_size": 5, **options}
    return TorchWorkload(lambda *_: model(), F.cross_entropy, **given)


def run(
    workload: TorchWorkload, stop_every: int = 0, *, fresh: bool = False, n_colours: int = 1
) -> tuple[State, list[float]]:
    """Train some epochs and score each; `fresh` builds each unit from its state."""
    state, scores = workload.init({"lr": 0.01}, 7), []
    shard = workload.prepare(arrays(n_colours))
    for epoch in range(1, N_UNITS + 1):
        visit, finished = Visit(3, 2, epoch, 1), False
        while not finished:
            polls = itertools.count(1)
            stops = lambda polls=polls: next(polls) == stop_every  # noqa: E731
            if fresh:
                workload._live.clear()
            trained = workload.train(state, shard, {"lr": 0.01}, visit=visit, should_stop=stops)
            state, finished = trained.state, trained.finished
        if fresh:
            workload._live.clear()
        scores.append(workload.evaluate(state, shard, {"lr": 0.01}).metrics["loss"])
    return state, scores


@pytest.mark.parametrize("stop_every", [0, 1, 3])
@pytest.mark.parametrize("n_colours", [1, 3])
def test_the_default_is_what_channels_last_gives(n_colours: int, stop_every: int) -> None:
    model = lambda: Net(n_colours=n_colours)  # noqa: E731
    found = run(make(model), stop_every, n_colours=n_colours)
    assert found == run(make(model, channels_last=True), n_colours=n_colours)
    assert found == run(make(model), n_colours=n_colours, fresh=True)
    other, scores = run(make(model, channels_last=False), n_colours=n_colours)
    assert found[0] != other
    assert found[1] == pytest.approx(scores, rel=1e-2)


def test_a_trial_stays_alive() -> None:
    workload = make()
    run(workload)
    assert workload._live.n_used >= 2 * N_UNITS - 3  # what it is made of is not known at first


def test_in_bfloat16() -> None:
    ours = make(precision="bf16")
    assert run(ours) == run(make(precision="bf16", channels_last=True))
    assert run(ours) == run(ours, fresh=True)


FEW = [lambda: Net(4), lambda: Net(stride=2), Normed]
OTHERS = [InOnePlace]
VIEWED = [Viewed, ViewedInTraining, ViewedInScoring, ViewedBackwards]


@pytest.mark.parametrize("model", [*FEW, *VIEWED, *OTHERS])
def test_a_network_that_would_not_gain_or_cannot_is_left_as_it_is(model: Any) -> None:
    found = run(make(model))
    assert found == run(make(model, channels_last=False))
    assert found == run(make(model), stop_every=2, fresh=True)


@pytest.mark.parametrize("model", VIEWED)
def test_what_cannot_is_said_by_pytorch_if_channels_last_is_named(model: Any) -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        run(make(model, channels_last=True))


def no_two_alike(batch: Any, config: Any) -> Any:
    if len(batch["x"].flatten(1).unique(dim=0)) < len(batch["x"]):
        raise ValueError("two samples are equal")
    return batch["x"], batch["y"]


def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    standard_loop(model, optimizer, batches, F.cross_entropy)


@pytest.mark.parametrize(
    "options",
    [
        {"train_fn": loop},
        {"input_fn": no_two_alike},
        {"collate": lambda batch: {name: torch.stack(list(rows)) for name, rows in batch.items()}},
        {"compile": "eager"},
        {"state": "trainable"},
        {"base": Net},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_model_that_others_call_or_share_is_left_as_it_is(options: Any) -> None:
    assert run(make(**options)) == run(make(**options, channels_last=False))


def test_a_gang_has_what_its_scores_have() -> None:
    workload = make(lambda: Net(n_colours=3), batch_size=8)
    state, shard = workload.init({"lr": 0.01}, 7), workload.prepare(arrays(3))
    visit = Visit(3, 2, 1, 1)

    def rank(gang: Any) -> Any:
        mine = state if gang.rank == 0 else None
        return workload.train_gang(mine, shard, {"lr": 0.01}, visit=visit, gang=gang)

    with warnings.catch_warnings(action="error"):
        alone = in_gang(1, rank)[0]
        together = in_gang(2, rank)[0]
    assert alone.state == workload.train(state, shard, {"lr": 0.01}, visit=visit).state
    assert together.loss == pytest.approx(alone.loss, rel=0.2)  # each rank has norms of its own


def test_a_run_of_before_goes_on_with_the_layout_that_it_had() -> None:
    ours, then = make(), make(channels_last=False)
    assert describe(ours.as_of(describe(then))) == describe(then)
    assert run(ours.as_of(describe(then))) == run(then)
    assert ours.channels_last == "auto"
    assert ours.as_of(describe(ours)) is ours
    both = ours.as_of({})  # of a version that had neither
    assert (both.fused, both.channels_last) == (False, False)


def test_trying_it_leaves_the_model_and_the_streams_alone() -> None:
    module = Net()
    lay_out(module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert bears(module, lambda: torch.ones(2, 1, PIXELS, PIXELS))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("n_colours", [1, 3])
def test_all_between_the_convolutions_has_channels_last(n_colours: int) -> None:
    module = Net(n_colours=n_colours).eval()
    lay_out(module)
    seen = []
    for part in (module.first, module.norm, module.second):
        part.register_forward_hook(lambda part, given, output: seen.append(output))
    module(torch.randn(2, n_colours, PIXELS, PIXELS)).sum().backward()
    assert len(seen) == 3
    assert all(it.is_contiguous(memory_format=torch.channels_last) for it in seen)
    assert all(
        p.grad is not None and p.grad.stride() == p.stride() for p in module.parameters()
    )  # one kernel steps all


def test_a_network_gains_by_what_is_between_its_convolutions() -> None:
    conv = nn.Conv2d
    assert gains(nn.Sequential(conv(3, 8, 3), conv(8, 1, 1)))
    assert gains(nn.Sequential(conv(3, 16, 3, stride=2), conv(16, 16, 3, groups=16)))
    assert not gains(nn.Sequential(conv(3, 16, 3), conv(16, 4, 3), conv(4, 16, 3)))
    assert not gains(nn.Sequential(conv(3, 16, 3, stride=2), conv(16, 32, 3, stride=2)))
    assert not gains(nn.Sequential(nn.Conv1d(8, 8, 3), nn.Linear(8, 8)))


def test_a_configuration_is_tried_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def counted(*about: Any) -> bool:
        tried.append(about)
        return bears(*about)

    monkeypatch.setattr(trials, "bears", counted)
    workload = make()
    before = describe(workload)
    run(workload, stop_every=2, fresh=True)
    assert len(tried) == 1
    assert differences(before, describe(workload)) == []  # so that a resume knows it
    state, shard = workload.init({}, 7), workload.prepare(arrays())
    for config in (
        {"lr": 0.02},
        {"lr": 0.02},
        {"lr": 1},
        {"lr": 1.0},
        {"lr": 0.02, "of": object()},
    ):
        workload.evaluate(state, shard, config)
    assert len(tried) == 1 + 3 + 1
    workload.evaluate(state, shard, {"of": object()})  # which may be another one
    assert len(tried) == 6
