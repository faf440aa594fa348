"""A trial that was just trained here is not built again, and ends as one that is: bit for bit."""

import copy
import gc
import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.workloads import TorchWorkload, Visit
from dagsel.workloads.torch import live

N_UNITS = 6
ARRAYS = {
    "x": np.random.default_rng(0).normal(size=(27, 4)).astype("float32"),
    "y": np.random.default_rng(1).integers(0, 3, 27),
}
OUTSIDE: dict[str, Any] = {}  # what a factory has given away


class Net(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.activation, self.options = F.relu, {"rate": 0.3, "sizes": [8, 3]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.activation(self.norm(self.first(x))), 0.3, self.training)
        return self.last(x * (1 + 0.01 * random.random() + 0.01 * np.random.random()))


class Recurrent(nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.body, self.last = nn.LSTM(1, 5, 2, dropout=0.2, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(x[..., None])[0][:, -1])


class Norms(Net):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.first)


class Tied(Net):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight
        self.norm = nn.Sequential(self.norm, self.a, self.b)  # type: ignore[assignment]


class Scales(Net):
    """The output depends on `scale`, which each forward pass changes by `change`.

    Of a name that begins with an underscore it is not tried whether results depend on it.
    """

    def change(self) -> None:
        raise NotImplementedError

    def scale(self) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change()
        return super().forward(x) * self.scale()


class Counts(Scales):
    _n = 1

    def change(self) -> None:
        self._n += 1

    def scale(self) -> Any:
        return 1 / self._n


class CountsInList(Scales):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self._ns = [{"n": 1}]

    def change(self) -> None:
        self._ns[0]["n"] += 1

    def scale(self) -> Any:
        return 1 / self._ns[0]["n"]


class Draws(Scales):
    """Draws while it is scored; training may not."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.rng, self.drawn = np.random.default_rng(0), 1.0

    def change(self) -> None:
        if not self.training:
            self.drawn = self.rng.random()

    def scale(self) -> Any:
        return self.drawn


class DrawsInSilence(Draws):
    """As `Draws`, but no attribute is set."""

    def change(self) -> None:
        pass

    def scale(self) -> Any:
        return 1.0 if self.training else self.rng.random()


class Buffer(Scales):
    persistent = True

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self._seen: Any
        self.register_buffer("_seen", torch.ones(()), persistent=self.persistent)

    def change(self) -> None:
        self._seen.add_(1)

    def scale(self) -> Any:
        return 1 / self._seen


class Scratch(Buffer):
    persistent = False


class Replaced(Buffer):
    """A new tensor that may lie where the one of the beginning lay, so its copy may be used."""

    def change(self) -> None:
        self._seen = self._seen + 1


class ByData(Buffer):
    def change(self) -> None:
        self._seen.data += 1


class OnlyScored(Buffer):
    """A buffer that evaluation changes."""

    def change(self) -> None:
        if not self.training:
            self._seen.add_(1)


class Late(Buffer):
    """The first of its parameters is the last one that the optimizer gets to know."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.early = nn.Linear(4, 8)
        self._modules = {"early": self._modules.pop("early"), **self._modules}

    def scale(self) -> Any:
        return self.early.weight.sum() if self._seen > 16 else 1


class Clips(Scales):
    """Weights that evaluation clips, behind the back of PyTorch's versions."""

    def change(self) -> None:
        if not self.training:
            self.first.weight.data.clamp_(-0.1, 0.1)

    def scale(self) -> Any:
        return 1


class Plain(Scales):
    """A tensor that is neither a parameter nor a buffer."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self._seen = torch.ones(())

    def change(self) -> None:
        self._seen.add_(1)

    def scale(self) -> Any:
        return 1 / self._seen


class Loads(Net):
    """Loading changes what was saved."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.last.bias.data.mul_(0.5)


class Extra(Net):
    def get_extra_state(self) -> Any:
        return torch.ones(1)

    def set_extra_state(self, state: Any) -> None:
        self.last.bias.data.mul_(0.5)


class LoadsByHook(Net):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.register_load_state_dict_post_hook(halved)


def halved(module: Any, keys: Any) -> None:
    module.last.bias.data.mul_(0.5)


class Freezes(Scales):
    def change(self) -> None:
        self.first.weight.requires_grad_(False)

    def scale(self) -> Any:
        return 1 if self.first.weight.grad is None else 2


class Hooked(Net):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        calls: list[int] = []
        self.last.register_forward_hook(lambda module, args, output: self.halve(output, calls))

    def halve(self, output: torch.Tensor, calls: list[int]) -> torch.Tensor:
        calls.append(1)
        return output / len(calls)


def shown(config: Any) -> nn.Module:
    OUTSIDE["module"] = Net()
    return OUTSIDE["module"]


def local(config: Any) -> nn.Module:
    class Local(Net):
        n = 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).n += 1
            return super().forward(x) / self.n

    return Local()


def sgd(parameters: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=config.get("lr", 0.1), momentum=0.9, nesterov=True)


def adam(parameters: Any, config: Any) -> torch.optim.Optimizer:
    OUTSIDE["optimizer"] = torch.optim.Adam(parameters, lr=config.get("lr", 0.01))
    return OUTSIDE["optimizer"]


class MyAdam(torch.optim.Adam):
    n = 0

    def step(self, closure: Any = None) -> Any:
        self.n += 1
        self.param_groups[0]["lr"] = 0.01 / self.n
        return super().step(closure)


def clamped(parameters: Any, config: Any) -> torch.optim.Optimizer:
    optimizer, steps = torch.optim.SGD(parameters, lr=0.1), [0]

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps[0] += 1
        optimizer.param_groups[0]["lr"] = 0.1 / steps[0]

    optimizer.register_step_pre_hook(hook)
    return optimizer


def rates(p: Any, config: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(p, lr=torch.tensor(0.01))


def bounds(optimizer: Any, config: Any) -> Any:
    seen: list[int] = []  # what a rebuild does not have

    def rate(epoch: int) -> float:
        seen.append(epoch)
        return 1 / len(seen)

    return schedules.LambdaLR(optimizer, rate)


def make(model: Any = Net, optimizer: Any = adam, **options: Any) -> TorchWorkload:
    return TorchWorkload(model, F.cross_entropy, optimizer, batch_size=5, **options)


def chain(
    workload: TorchWorkload,
    between: Callable[[int], object] = lambda epoch: None,
    scored: int = 2,
    fresh: bool = False,
    config: Any = None,
) -> Any:
    """Train units one after the other and score some of them; always by a fresh copy if asked."""
    packed = cloudpickle.dumps(workload)
    here = lambda: pickle.loads(packed) if fresh else workload  # noqa: E731
    state, found = workload.init(config or {}, 3), list[Any]()
    shard = workload.prepare(ARRAYS)
    for epoch in range(1, N_UNITS + 1):
        visit = Visit(5, 2, epoch, 0, ends_epoch=True)
        trained = here().train(state, shard, config or {}, visit=visit)
        state = trained.state
        found.append((bytes(state.buffer), trained.loss))
        between(epoch)
        if epoch % 3 < scored:
            found.append(here().evaluate(state, shard, config or {}).metrics)
            found.append(here().evaluate(state, shard, config or {}).metrics)
    return found


SCHEDULES: dict[str, Any] = {
    "step": lambda o, c: schedules.StepLR(o, 2, 0.5),
    "one-cycle": lambda o, c: schedules.OneCycleLR(o, 0.1, total_steps=100),
    "multi-step": lambda o, c: schedules.MultiStepLR(o, [1, 2]),
    "cosine": lambda o, c: schedules.CosineAnnealingLR(o, 5),
    "plateau": lambda o, c: schedules.ReduceLROnPlateau(o),
    "none": None,
}


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", [adam, sgd])
@pytest.mark.parametrize("model", [Net, Recurrent, Tied, Buffer])
def test_a_live_trial_trains_and_scores_as_one_that_is_built(
    model: Any, optimizer: Any, schedule: str, interval: Any
) -> None:
    if (schedule, interval) == ("plateau", "step"):
        interval = "epoch"
    options = {"lr_scheduler": SCHEDULES[schedule], "lr_scheduler_interval": interval}
    workload = make(model, optimizer, **options)
    assert chain(workload) == chain(workload, fresh=True)
    assert workload._live.n_used >= N_UNITS - 2


@pytest.mark.parametrize("plain", [torch.zeros(4), np.zeros(4), np.zeros(0)], ids=str)
def test_a_module_may_hold_tensors_and_arrays_that_are_no_buffers(plain: Any) -> None:
    def model(config: Any) -> nn.Module:
        module = Net(config)
        module.mean = plain
        return module

    workload = make(model, adam)
    assert chain(workload) == chain(workload, fresh=True)


@pytest.mark.parametrize("options", [{"channels_last": True}, {"precision": "bf16"}], ids=str)
def test_with_options_that_change_the_module(options: dict[str, Any]) -> None:
    def model(config: Any) -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(),
            nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 3),
        )  # fmt: skip

    workload = make(model, **options)
    assert chain(workload) == chain(workload, fresh=True)
    assert workload._live.n_used >= N_UNITS - 2


NEVER = [Counts, CountsInList, Draws, DrawsInSilence, Scratch, Plain, Extra, Loads, LoadsByHook,
         Hooked, local]  # fmt: skip


@pytest.mark.parametrize("scored", [0, 2, 3])
@pytest.mark.parametrize(
    "model", [*NEVER, Replaced, ByData, Freezes, OnlyScored, Clips, Norms, Late]
)
def test_what_a_state_does_not_hold_is_as_after_a_build(model: Any, scored: int) -> None:
    workload = make(model)
    assert chain(workload, scored=scored) == chain(workload, scored=scored, fresh=True)
    if model in NEVER:
        assert workload._live.n_used == 0


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": MyAdam},
        {"optimizer": clamped},
        {"optimizer": rates},
        {"lr_scheduler": bounds},
        {"train_fn": lambda model, optimizer, batches, config: [batches.log(0.0) for _ in batches]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_may_hold_more_than_its_state_is_built_anew(options: dict[str, Any]) -> None:
    workload = make(**options)
    assert chain(workload) == chain(workload, fresh=True)
    assert workload._live.n_used == 0


@pytest.mark.parametrize(
    "touch",
    [
        lambda: OUTSIDE["module"].last.weight.data.zero_(),
        lambda: OUTSIDE["module"].options.update(rate=0.5),
        lambda: OUTSIDE["module"].norm.running_mean.add_(1),
        lambda: setattr(OUTSIDE["module"].first, "weight", nn.Parameter(torch.zeros(8, 4))),
        lambda: OUTSIDE["optimizer"].param_groups[0].update(lr=1.0),
        lambda: next(iter(OUTSIDE["optimizer"].state.values())).update(step=torch.tensor(1.0)),
        lambda: next(iter(OUTSIDE["optimizer"].state.values()))["exp_avg"].add_(1),
    ],
)
def test_what_somebody_else_has_touched_is_built_anew(touch: Any) -> None:
    workload = make(shown)
    between = lambda epoch: touch() if epoch > 2 else None  # noqa: E731
    found, expected = chain(workload, between, scored=0), chain(workload, fresh=True, scored=0)
    assert found == expected
    assert 0 < workload._live.n_used <= 2
    other = make(shown)
    assert chain(other, scored=0) == expected
    assert other._live.n_used > 2


def test_another_configuration_and_other_functions_build_anew() -> None:
    workload, shard = make(), make().prepare(ARRAYS)
    chain(workload, config={"lr": 0.01, "width": 8})
    state = workload.init({"lr": 0.01}, 3)
    for epoch in (1, 2, 3):
        visit = Visit(5, 2, epoch, 0)
        state = workload.train(state, shard, {"lr": 0.01}, visit=visit).state
    n_used, visit = workload._live.n_used, Visit(5, 2, 4, 0)
    clone = workload.reconfigure(state, {"lr": 0.01}, {"lr": 0.02})
    fresh: TorchWorkload = pickle.loads(cloudpickle.dumps(workload))
    for begin, config in ((clone, {"lr": 0.02}), (state, {"lr": 0.01, "more": 1})):
        trained = workload.train(begin, shard, config, visit=visit).state
        assert trained == fresh.train(begin, shard, config, visit=visit).state
    assert workload._live.n_used == n_used


def test_a_state_from_another_worker_goes_on_with_the_live_trial() -> None:
    workload, shard = make(), make().prepare(ARRAYS)
    state = workload.init({}, 3)
    for epoch in range(1, N_UNITS + 1):
        came = State(bytes(bytearray(3) + state.buffer)[3:])
        state = workload.train(came, shard, {}, visit=Visit(5, 2, epoch, 0)).state
    assert workload._live.n_used >= N_UNITS - 2
    flipped = bytearray(state.buffer)
    flipped[-1] ^= 1
    other = State(bytes(flipped))
    n_used, visit = workload._live.n_used, Visit(5, 2, 9, 0)
    fresh: TorchWorkload = pickle.loads(cloudpickle.dumps(workload))
    assert workload.evaluate(other, shard, {}) == fresh.evaluate(other, shard, {})
    trained = workload.train(other, shard, {}, visit=visit).state
    assert trained == fresh.train(other, shard, {}, visit=visit).state
    assert workload._live.n_used <= n_used + 1


def test_a_unit_that_raised_or_was_stopped_leaves_nothing() -> None:
    workload, shard = make(), make().prepare(ARRAYS)
    state = workload.init({}, 3)
    for epoch in (1, 2, 3):
        state = workload.train(state, shard, {}, visit=Visit(5, 2, epoch, 0)).state
    n_used, visit, polls = workload._live.n_used, Visit(5, 2, 4, 0), [0]

    def fails() -> bool:
        polls[0] += 1
        if polls[0] == 2:
            raise OSError("lost")
        return False

    with pytest.raises(OSError, match="lost"):
        workload.train(state, shard, {}, visit=visit, should_stop=fails)
    assert workload._live.n_used == n_used + 1
    stopped = workload.train(state, shard, {}, visit=visit, should_stop=lambda: True)
    done = workload.train(stopped.state, shard, {}, visit=visit)
    assert workload._live.n_used == n_used + 1
    fresh: TorchWorkload = pickle.loads(cloudpickle.dumps(workload))
    assert done.state == fresh.train(state, shard, {}, visit=visit).state


def test_few_are_kept_and_none_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, shard = make(), make().prepare(ARRAYS)

    def train(n: int) -> int:
        for seed in range(n):
            state = workload.init({}, seed)
            for epoch in (1, 2):
                state = workload.train(state, shard, {}, visit=Visit(5, seed, epoch, 0)).state
        return len(workload._live._kept)

    assert train(live.MOST + 3) == live.MOST
    assert not pickle.loads(cloudpickle.dumps(workload))._live._kept
    n_bytes = workload._live._kept[0].n_bytes
    monkeypatch.setattr(live, "MOST_BYTES", 2 * n_bytes + 1)
    assert train(3) == 2
    monkeypatch.setattr(live, "MOST_BYTES", n_bytes - 1)
    workload._live._kept.clear()
    assert train(2) == 0
    gc.collect()


BODY = nn.Linear(4, 3)
FROZEN = nn.Linear(4, 4).requires_grad_(False)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda config: BODY, id="all of it"),
        pytest.param(lambda config: nn.Sequential(nn.Linear(4, 4), BODY), id="a part"),
        pytest.param(lambda config: of_the_same_numbers(), id="its numbers"),
    ],
)
def test_what_was_made_outside_the_function_is_not_trained_by_all_trials(model: Any) -> None:
    workload = make(model=model)
    with pytest.raises(WorkloadError, match="weight' each time, so trials would train each"):
        workload.validate({})
    workload = make(model=model)
    workload.init({}, 0)
    with pytest.raises(WorkloadError, match="weight' each time, so trials would train each"):
        workload.init({}, 1)


def of_the_same_numbers() -> nn.Module:
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(BODY.weight.data)
    return layer


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda config: copy.deepcopy(BODY), id="copied"),
        pytest.param(lambda config: nn.Sequential(FROZEN, nn.Linear(4, 3)), id="frozen"),
    ],
)
def test_a_copy_or_what_is_frozen_may_be_made_outside(model: Any) -> None:
    workload = make(model=model)
    for seed in range(2):
        workload.validate({})
        workload.init({}, seed)


def test_a_workload_that_is_there_when_python_ends_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    workload = make()
    workload.init({}, 7)
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    (first, *_) = workload._live._made.values()
    first._free_weak_ref = None.__getattribute__  # PyTorch's modules are empty then
    del first
    workload._live._made.clear()
    assert said == []
