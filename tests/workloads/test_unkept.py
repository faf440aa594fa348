"""What training changes beside the state fails the trial: it would begin anew in each unit."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.workloads import TorchWorkload, Visit

Step = Callable[[Any], object]
ARRAYS = {"x": np.ones((6, 4), "float32"), "y": np.array([0, 1, 2, 0, 1, 2])}


class Net(nn.Module):
    """Does something in each forward pass."""

    def __init__(self, in_forward: Step | None = None, **held: Any) -> None:
        super().__init__()
        self.layer, self.dropout, self.in_forward = nn.Linear(4, 3), nn.Dropout(0.1), in_forward
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_forward is not None:
            self.in_forward(self)
        return self.layer(self.dropout(x))


class OfTheHub(Net):
    """As of a file that came with a model."""

    __module__ = "transformers_modules.net"


class Own(torch.optim.Optimizer):
    """Does something in each step."""

    def __init__(self, parameters: Any, in_step: Step, **held: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.in_step = in_step
        for name, value in held.items():
            setattr(self, name, value(self) if callable(value) else value)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.in_step(self)


class Both(Own):
    """Has the moments of the optimizer that it holds in its state dict."""

    inner: torch.optim.Optimizer

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "inner": self.inner.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.inner.load_state_dict(saved.pop("inner"))
        super().load_state_dict(saved)


class Loss(nn.Module):
    """Does something with what it holds."""

    def __init__(self, in_loss: Step, **held: Any) -> None:
        super().__init__()
        self.in_loss, self.n = in_loss, 0
        self.register_buffer("center", torch.zeros(()))
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.in_loss(self)
        return F.cross_entropy(output, target)


def count(name: str) -> Step:
    return lambda it: setattr(it, name, getattr(it, name) + 1)


def draw(name: str) -> Step:
    def drawn(it: Any) -> None:
        generator = getattr(it, name)
        if isinstance(generator, torch.Generator):
            torch.rand(1, generator=generator)
        else:
            generator.random()

    return drawn


def inner(it: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(it.param_groups, lr=0.1, momentum=0.9)


def begin(it: Any) -> None:
    """Make the first weights as of the data."""
    if not it.is_ready:
        it.layer.weight.data.fill_(0.5)
    it.is_ready = True


def failing(it: Any) -> None:
    """Fail if training goes on where it was."""
    if it.is_over and torch.is_grad_enabled() and it.n_left == 0:
        raise ValueError("it is over")
    it.is_over, it.n_left = True, getattr(it, "n_left", 3) - 1


def cache(it: Any) -> None:
    """Keep a mask as long as the longest input so far."""
    if it.n_cached < 4:
        it.n_cached, it.mask = 4, torch.ones(4)


def follow(it: Any) -> None:
    """Set a rate by what a buffer has counted."""
    it.layer.count += 1
    it.rate = it.dropout.p = 0.1 / float(it.layer.count)


def counting(in_forward: Step = follow, **held: Any) -> nn.Module:
    net = Net(in_forward, **held)
    net.layer.register_buffer("count", torch.zeros(()))
    return net


def go_on(it: Any) -> None:
    """Follow the weights in what is no number, or no longer."""
    weight = it.layer.weight.detach().mean()
    it.mean = weight if it.mean is None else 0.5 * it.mean + weight
    it.layer.bias.data.fill_(it.mean)


def time_and_go_on(it: Any) -> None:
    it.last = next(NOISE)
    go_on(it)


def go_on_in_place(it: Any) -> None:
    it.mean.add_(1)
    it.layer.bias.data.fill_(it.mean.view(-1)[0])


def go_on_in_a_tuple(it: Any) -> None:
    it.teacher[0].weight.data.add_(1)
    it.layer.bias.data.fill_(it.teacher[0].weight[0, 0])


def count_in_a_dict(it: Any) -> None:
    it.counts["n"] += 1
    it.layer.bias.data.fill_(it.counts["n"])


def count_in_a_dict_alone(it: Any) -> None:
    it.counts["n"] += 1


def warm_up(it: Any) -> None:
    """Set a number by what a buffer has counted, and let it be in the end."""
    it.layer.count += 1
    if it.layer.count <= 7:
        it.rate = float(it.layer.count)
    it.layer.bias.data.fill_(it.rate)


def follow_a_table(it: Any) -> None:
    """Set a number by a table that is as long as training."""
    it.rate = [0.1, 0.2, 0.3, 0.3, 0.2, 0.1][int(it.layer.count)]
    it.layer.count += 1
    it.layer.bias.data.fill_(it.rate)


def set_later(it: Any) -> None:
    it.layer.count += 1
    if it.layer.count > 6:
        it.rate = float(it.layer.count)
    it.layer.bias.data.fill_(it.rate)


def calibrate(it: Any) -> None:
    """Set a number by what a buffer has counted, and go on from it in the end."""
    it.layer.count += 1
    it.rate = float(it.layer.count) if it.layer.count <= 4 else it.rate + 0.5
    it.layer.bias.data.fill_(it.rate)


def cache_the_longest(it: Any) -> None:
    it.layer.count += 1
    it.n_cached = max(it.n_cached, 9 - int(it.layer.count))


def unpersistent() -> nn.Module:
    net = Net(go_on_in_place)
    net.register_buffer("mean", torch.zeros(()), persistent=False)
    return net


def double(it: Any) -> None:
    it.seen = 2 * it.layer.weight.detach(), torch.fft.fft(it.layer.bias.detach()).conj()


def run_out(it: Any) -> None:
    """Run out of memory while it is tried what is needed."""
    it.n = 1
    it.calls.append(1)
    if len(it.calls) == 4:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


def draw_alike(it: Any) -> None:
    it.layer.bias.data.add_(torch.rand(3, generator=it.g.manual_seed(3)))


def two_that_draw() -> nn.Module:
    first, last = (Net(g=np.random.default_rng(0)) for _ in range(2))
    first.layer, first.in_forward = nn.Linear(4, 4), draw("g")
    return nn.Sequential(first, last)


def drawn_by(own: random.Random) -> Any:
    return lambda sample: {**sample, "x": sample["x"] * own.random()}


def named_by(own: random.Random) -> Any:
    return lambda sample: {**sample, "x": sample["x"] * (own is not None)}


def both(first: Any, last: Any) -> Any:
    return lambda sample, config: last(first(sample))


class Counting:
    """A loss that depends on how often it was called."""

    def __init__(self, step: Any = 1) -> None:
        self.n, self.step = 0, step

    def of(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.n = self.n + self.step
        return F.cross_entropy(output, target) / self.n

    __call__ = of


def training(step: Callable[[], float]) -> Any:
    def own_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets) * step()
            loss.backward()
            optimizer.step()
            batches.log(loss)

    return own_loop


class Anneals:
    """Counts; what it returns depends on that, or not."""

    def __init__(self, *, matters: bool) -> None:
        self.n_steps, self.losses, self.matters = 0, list[int](), matters

    def step(self) -> float:
        self.n_steps += 1
        self.losses.append(self.n_steps)
        return min(1.0, self.n_steps / 100) if self.matters else 1.0

    __call__ = step


def annealing(counted: Any) -> Any:
    def step() -> float:
        counted["n"] += 1
        return min(1.0, float(counted["n"]) / 100)

    return step


N_DONE = 0


def globally() -> float:
    global N_DONE
    N_DONE += 1
    return min(1.0, N_DONE / 100)


def now_and_then() -> float:
    return float(next(NOISE) % 5)


def called(loss: Any) -> Any:
    return lambda output, target: loss(output, target)


NOISE = itertools.count()
TREE: dict[str, Any] = {"children": []}
TREE["children"].append({"parent": TREE})
BOTH = torch.zeros(2, 3)
CHANCE = np.random.default_rng(0)


def chance() -> float:
    return float(CHANCE.random())


def augment(sample: Any, config: Any) -> Any:
    return {**sample, "x": sample["x"] * chance()}


def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        batches.log(loss)


def loop_with(make: Any) -> Any:
    def own_loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        loop(model, make(model.parameters()), batches, config)

    return own_loop


def loop_of_another(model: Any, *args: Any) -> None:
    weight = nn.Parameter(torch.ones(1))
    weight.sum().backward()
    torch.optim.Adam([weight]).step()
    loop(model, *args)


def adding(model: Any, optimizer: Any, *args: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    loop(model, optimizer, *args)


def setting(model: Any, *args: Any) -> None:
    model.rate = 0.5
    loop(model, *args)


def drawing(closed: random.Random) -> Any:
    def drawing_loop(*args: Any) -> None:
        closed.random()
        loop(*args)

    return drawing_loop


def workload(**options: Any) -> TorchWorkload:
    good: dict[str, Any] = {
        "model": lambda config: Net(),
        "loss": F.cross_entropy,
        "optimizer": lambda parameters, config: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "batch_size": 2,
    }
    return TorchWorkload(**good | options)


def model(*args: Any, **held: Any) -> dict[str, Any]:
    return {"model": lambda config: Net(*args, **held)}


def optimizer(kind: Any, *args: Any, **held: Any) -> dict[str, Any]:
    return {"optimizer": lambda parameters, config: kind(parameters, *args, **held)}


def moved(it: Any) -> None:
    it.moments[0].add_(1)


GENERATORS: list[Any] = [
    lambda: np.random.default_rng(0), lambda: np.random.RandomState(0), lambda: random.Random(0),
    lambda: torch.Generator().manual_seed(0),
]  # fmt: skip


def cache_and_count(it: Any) -> None:
    cache(it)
    it.n += 1


LOST: dict[str, tuple[dict[str, Any], str]] = {
    "a model's number": (model(count("n"), n=0), r"changed Net\.n, .*register_buffer"),
    "a model's switch": (model(begin, is_ready=False), r"changed Net\.is_ready, .*register_buffer"),
    "a number of PyTorch's layers": (
        model(lambda it: setattr(it.dropout, "p", it.dropout.p / 2)), r"changed Dropout\.p, which"
    ),
    "one beside a time that is measured": (
        model(time_and_go_on, last=0, mean=None),
        r"changed Net\.last or Net\.mean, which",
    ),
    "the one of two": (model(cache_and_count, n_cached=0, n=0), r"changed Net\.n, which no state"),
    "a model's error": (model(failing, is_over=False), r"Net\.is_over or Net\.n_left, which no"),
    "an optimizer's number": (optimizer(Own, count("n"), n=0), r"changed 'n' of the Own, .*group"),
    "an optimizer's tensors": (
        optimizer(Own, moved, moments=[torch.zeros(2)]), "changed 'moments' of the Own, which"
    ),
    "an optimizer's views": (
        optimizer(Own, lambda it: it.state.update(both=BOTH, one=BOTH[0])),
        r"state of the Own, of shapes \(3,\) and \(2, 3\), share memory",
    ),
    "an optimizer within": (
        optimizer(Own, lambda it: it.inner.step(), inner=inner),
        "the Own holds another optimizer, SGD, whose moments its state_dict",
    ),
    "a group that is added": (
        {"train_fn": adding}, "added a parameter group to the SGD, and that of the next unit lacks"
    ),
    "a train_fn's own": (
        {"train_fn": loop_with(torch.optim.Adam)},
        "train_fn steps an optimizer of its own, Adam, .*LightningWorkload",
    ),
    "a loss's buffer": ({"loss": Loss(lambda it: it.center.add_(1))}, "'center' of the loss"),
    "a loss's number": ({"loss": partial(Loss(count("n")))}, "'n' of the loss, which all trials"),
    "a model's number of NumPy": (
        model(lambda it: setattr(it, "n", np.float64(it.n + 0.5)), n=0.0), r"changed Net\.n, which"
    ),
    "a model's number that becomes a tensor": (model(go_on, mean=0.5), r"changed Net\.mean, which"),
    "a model's tensor": (model(go_on, mean=torch.ones(())), r"changed Net\.mean, which"),
    "a model's hidden state": (model(go_on, mean=None), r"changed Net\.mean, .*persistent buffer"),
    "a model's large tensor": (
        {"model": lambda config: Net(go_on_in_place, mean=torch.zeros(1_100_000))},
        r"changed Net\.mean, which",
    ),
    "a buffer that no state holds": ({"model": lambda config: unpersistent()}, r"Net\.mean, which"),
    "numbers in a dict": (
        {"model": lambda config: Net(count_in_a_dict, counts={"n": 0})}, r"Net\.counts, which"
    ),
    "numbers in a dict of all": (model(count_in_a_dict, counts={"n": 0}), r"Net\.counts, which"),
    "a teacher in a tuple": (
        {"model": lambda config: Net(go_on_in_a_tuple, teacher=(nn.Linear(4, 3),))},
        r"changed Net\.teacher, which",
    ),
    "what is let be in the end": (
        {"model": lambda config: counting(warm_up, rate=0.0)}, r"changed Net\.rate, which"
    ),
    "what goes on in the end": (
        {"model": lambda config: counting(calibrate, rate=0.0)}, r"changed Net\.rate, which"
    ),
    "the first of two that draw": (
        {"model": lambda config: two_that_draw()}, r"draws from 'Net\.g', a generator"
    ),
    "one of two of a name": (
        {"augment": both(named_by(random.Random(0)), drawn_by(random.Random(0)))}, "from 'own', a"
    ),
    "a global number": ({"train_fn": training(globally)}, "changed 'N_DONE', which a function of"),
    "a dict of a closure": ({"train_fn": training(annealing({"n": 0}))}, "changed 'counted', wh"),
    "a number of a function's object": (
        {"train_fn": training(Anneals(matters=True).step)}, "changed 'n_steps', which a function"
    ),
    "a number of an object that is called": (
        {"train_fn": training(Anneals(matters=True))}, "changed 'step', which a function of the"
    ),
    "a method's number": ({"loss": Counting().of}, "'n' of the loss, which all trials"),
    "a number of what a loss calls": ({"loss": called(Counting())}, "'n' of the loss, which all"),
    "a number of a loss that is cast": (
        {"loss": Loss(count("n"), weights=nn.Buffer(torch.ones(3, dtype=torch.float64)))},
        "'n' of the loss, which all trials",
    ),
    "a loss's tensor": (
        {"loss": called(Counting(torch.ones(())))}, "'n' of the loss, which all trials"
    ),
    "a loss's generator": (
        {"loss": Loss(draw("own"), own=random.Random(0))}, "draws from 'own', a"
    ),
    "a function's generator": ({"augment": augment}, "draws from 'CHANCE', a generator of"),
    "a closure's generator": ({"train_fn": drawing(random.Random(0))}, "draws from 'closed'"),
} | {
    f"a model's generator {at}": (model(draw("g"), g=make()), r"draws from 'Net\.g'.*travel")
    for at, make in enumerate(GENERATORS)
}  # fmt: skip
KEPT: dict[str, dict[str, Any]] = {
    "an underscore": model(count("_n"), _n=0),
    "code of the Hub": {"model": lambda config: OfTheHub(count("n"), n=0)},
    "a switch": model(lambda it: setattr(it, "is_ready", True), is_ready=False),
    "a cache": model(cache, n_cached=0),
    "a cache of the longest": {"model": lambda config: counting(cache_the_longest, n_cached=0)},
    "tensors of the last forward": model(double, seen=None),
    "a schedule that ends": {
        **model(double, seen=None),
        "lr_scheduler": lambda optimizer, config: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=2 * 3
        ),
        "lr_scheduler_interval": "step",
    },
    "a time that is measured": model(lambda it: setattr(it, "last", next(NOISE)), last=0),
    "what is never alike": {**model(double, seen=None), "train_fn": training(now_and_then)},
    "a model that ends": {"model": lambda config: counting(follow_a_table, rate=0.0)},
    "what a function only counts": {"train_fn": training(Anneals(matters=False).step)},
    "a tree whose leaves know it": {"model": lambda config: Net(tree=copy.deepcopy(TREE))},
    "a dict that only counts": model(count_in_a_dict_alone, counts={"n": 0}),
    "a number that a buffer sets": {"model": lambda config: counting()},
    "a number that train_fn sets": {"train_fn": setting} | model(rate=1.0),
    "a loss's last value": {"loss": Loss(lambda it: setattr(it, "n", 5))},
    "a generator that is seeded": model(draw_alike, g=torch.Generator()),
    "what is no number": model(lambda it: setattr(it, "n", torch.ones(1)), n=0),
    "the same number": model(lambda it: setattr(it, "n", float("nan")), n=float("nan")),
    "a step of one's own": optimizer(Own, lambda it: it.state.update(n=1), n=0),
    "one tensor twice": optimizer(Own, lambda it: it.state.update(one=BOTH, other=BOTH)),
    "views of one tensor": optimizer(Own, lambda it: it.state.update(one=BOTH[0], other=BOTH[1])),
    "weights": optimizer(Own, lambda it: it.weights[0].data.add_(1),
                         weights=lambda it: it.param_groups[0]["params"]),
    "an optimizer within": optimizer(Both, lambda it: it.inner.step(), inner=inner),
    "one without moments": {"train_fn": loop_with(partial(torch.optim.SGD, lr=0.1))},
    "another's parameters": {"train_fn": loop_of_another},
    "the streams that travel": model(draw("g"), g=np.random.mtrand._rand),
    "a generator that does not draw": model(g=np.random.default_rng(0)),
}  # fmt: skip


def trained(it: TorchWorkload, n_epochs: int = 2) -> State:
    state, shard = it.init({}, 0), it.prepare(ARRAYS)
    for epoch in range(1, n_epochs + 1):
        visit = Visit(seed=0, trial=0, epoch=epoch, shard=0, ends_epoch=True)
        state = it.train(state, shard, {}, visit=visit).state
    return state


@pytest.mark.parametrize("name", LOST)
def test_what_would_begin_anew_in_each_unit_fails_the_trial(name: str) -> None:
    options, told = LOST[name]
    with pytest.raises(WorkloadError, match=told):
        trained(workload(**options), n_epochs=4)


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_or_changes_nothing_is_trained(name: str) -> None:
    it = workload(**KEPT[name])
    it.validate({})
    trained(it)


def test_what_is_let_be_is_tried_now_and_then_and_changes_no_state() -> None:
    passes = itertools.count()

    def counted(rate: str) -> Any:
        def passing(model: Any, *args: Any) -> None:
            next(passes)
            setattr(model, rate, 0.5)
            loop(model, *args)

        return passing

    seen = trained(workload(**model(rate=1.0), train_fn=counted("rate")), n_epochs=7)
    # In epochs 1, 2 and 4: a batch with what was left, and one without.
    assert next(passes) == 7 + 3 * 2
    hidden = trained(workload(**model(_rate=1.0), train_fn=counted("_rate")), n_epochs=7)
    assert next(passes) == 2 * 7 + 3 * 2 + 1
    assert seen == hidden


def test_a_trial_that_begins_again_has_not_yet_set_what_it_sets_later() -> None:
    passes = itertools.count()

    def passing(*args: Any) -> None:
        next(passes)
        loop(*args)

    it = workload(model=lambda config: counting(set_later, rate=0.0), train_fn=passing)
    assert trained(it, n_epochs=4) == trained(it, n_epochs=4)
    assert next(passes) == 2 * (4 + 2)  # tried in epoch 3


def test_what_is_tried_may_run_out_of_memory() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(workload(**model(run_out, n=0, calls=[])))


def test_of_several_things_the_error_names_each_that_it_may_be() -> None:
    def both_change(it: Any) -> None:
        double(it)
        go_on(it)

    with pytest.raises(WorkloadError, match=r"changed Net\.mean or Net\.seen, which no state"):
        trained(workload(**model(both_change, mean=None, seen=None)))


def test_on_a_gpu_two_batches_come_to_the_same_if_they_come_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "dagsel.workloads.torch.needless.device_of", lambda shard: torch.device("cuda", 0)
    )
    for name in ("a cache", "a number that a buffer sets", "a generator that is seeded"):
        trained(workload(**KEPT[name]))
    trained(workload(**model(lambda it: setattr(it, "last", 1 + 1e-9 * next(NOISE)), last=0.0)))
    slowly = optimizer(torch.optim.SGD, lr=1e-4)  # so that all weights come near
    with pytest.raises(WorkloadError, match="changed 'counted', which a function"):
        trained(workload(train_fn=training(annealing({"n": 0})), **slowly))
    for name in ("a model's number", "a model's switch", "a loss's buffer"):
        with pytest.raises(WorkloadError, match=LOST[name][1]):
            trained(workload(**LOST[name][0]))
