"""Another configuration for a state: new hyperparameters, and all else as it was, bit for bit."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules

from dagsel.errors import WorkloadError
from dagsel.state import State
from dagsel.workloads import Reconfigurable, SklearnWorkload, TorchWorkload, Visit
from tests.fused import fused

OLD, NEW = {"lr": 0.05, "wd": 0.01, "momentum": 0.9}, {"lr": 0.2, "wd": 0.1, "momentum": 0.5}
N_BEFORE, N_AFTER, SEED = 3, 2, 7

OPTIMIZERS = {
    "sgd": lambda p, c: torch.optim.SGD(
        p, lr=c["lr"], momentum=c["momentum"], weight_decay=c["wd"], nesterov=True
    ),
    "adam": lambda p, c: torch.optim.Adam(
        p, lr=c["lr"] / 10, betas=(c["momentum"], 0.99), weight_decay=c["wd"]
    ),
    "adam-tensor-lr": lambda p, c: torch.optim.Adam(p, lr=torch.tensor(c["lr"] / 10)),
    "adagrad": lambda p, c: torch.optim.Adagrad(p, lr=c["lr"], initial_accumulator_value=c["wd"]),
    "groups": lambda p, c: torch.optim.SGD(
        [{"params": [q], "lr": c["lr"] / (i + 1)} for i, q in enumerate(p)],
        lr=1.0,
        momentum=c["momentum"],
    ),
}
SCHEDULES = {
    "none": None,
    "step": lambda o, c: schedules.StepLR(o, 2, 0.5),
    "lambda": lambda o, c: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "exponential": lambda o, c: schedules.ExponentialLR(o, c["momentum"]),
    "cosine": lambda o, c: schedules.CosineAnnealingLR(o, 9),
    "warm-restarts": lambda o, c: schedules.CosineAnnealingWarmRestarts(o, 2),
    "cyclic": lambda o, c: schedules.CyclicLR(
        o, c["lr"] / 10, c["lr"], 3, cycle_momentum="momentum" in o.defaults
    ),
    "one-cycle": lambda o, c: schedules.OneCycleLR(o, c["lr"], total_steps=50),
    "chained": lambda o, c: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, 0.5, 2), schedules.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o, c: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=2), schedules.CosineAnnealingLR(o, 4)], [2]
    ),
}


class Net(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.get("width", 8)
        self.first, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = 1 + 0.01 * random.random() + 0.01 * np.random.random()
        hidden = F.relu(self.norm(self.first(x))) * scale
        output: torch.Tensor = self.second(F.dropout(hidden, 0.3, self.training))
        return output


def arrays(seed: int, n: int = 22) -> dict[str, NDArray[Any]]:
    x = np.random.default_rng(seed).normal(size=(n, 6)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


def torch_workload(optimizer: str = "sgd", schedule: str = "none", **more: Any) -> TorchWorkload:
    more = {"batch_size": 5, "lr_scheduler": SCHEDULES[schedule], **more}
    return TorchWorkload(Net, F.cross_entropy, OPTIMIZERS[optimizer], **more)


def train(workload: Any, state: State, config: Any, epochs: range) -> State:
    shard = workload.prepare(arrays(0))
    for epoch in epochs:
        visit = Visit(SEED, 2, epoch, 0, ends_epoch=True)
        state = workload.train(state, shard, config, visit=visit).state
    return state


def by_hand(optimizer_name: str, schedule_name: str, interval: str) -> dict[str, Any]:
    """Train as a script does that, under way, swaps its optimizer's settings for new ones."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)
    net = Net(OLD)
    make, make_schedule = OPTIMIZERS[optimizer_name], SCHEDULES[schedule_name]
    optimizer = fused(make(net.parameters(), OLD))
    schedule = make_schedule and make_schedule(optimizer, OLD)
    data, n_steps = arrays(0), 0
    for epoch in range(1, N_BEFORE + N_AFTER + 1):
        if epoch == N_BEFORE + 1:
            moments = optimizer.state
            optimizer = fused(make(net.parameters(), NEW))
            schedule = make_schedule and make_schedule(optimizer, NEW)
            if schedule:
                optimizer._opt_called = True  # type: ignore[attr-defined]
                for _ in range(n_steps):
                    schedule.step()
            optimizer.state = moments
        order = np.random.default_rng([SEED, 2, epoch, 0]).permutation(22)
        for start in range(0, 22, 5):
            index = order[start : start + 5]
            loss = F.cross_entropy(
                net(torch.from_numpy(data["x"][index])), torch.from_numpy(data["y"][index])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if schedule and interval == "step":
                schedule.step()
                n_steps += 1
        if schedule and interval == "epoch":
            schedule.step()
            n_steps += 1
    return dict(net.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "schedule", "interval"),
    [(optimizer, "none", "epoch") for optimizer in OPTIMIZERS]
    + [("sgd", schedule, "epoch") for schedule in SCHEDULES if schedule != "none"]
    + [("adam", schedule, "step") for schedule in SCHEDULES if schedule != "none"],
)
def test_training_goes_on_as_a_script_s_does(optimizer: str, schedule: str, interval: Any) -> None:
    workload = torch_workload(optimizer, schedule, lr_scheduler_interval=interval)
    state = train(workload, workload.init(OLD, SEED), OLD, range(1, N_BEFORE + 1))
    state = workload.reconfigure(state, OLD, NEW)
    state = train(workload, state, NEW, range(N_BEFORE + 1, N_BEFORE + N_AFTER + 1))
    module = workload.restore(state, NEW).state_dict()
    for name, expected in by_hand(optimizer, schedule, interval).items():
        assert torch.equal(module[name], expected), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_equal_configuration_changes_no_byte(schedule: str) -> None:
    workload = torch_workload("sgd", schedule)
    state = train(workload, workload.init(OLD, SEED), OLD, range(1, 4))
    before = bytes(state.buffer)
    assert workload.reconfigure(state, OLD, dict(OLD)) == state
    other = workload.reconfigure(state, OLD, NEW)
    assert other != state
    assert bytes(state.buffer) == before
    back = workload.reconfigure(other, NEW, OLD)
    assert back.meta == state.meta


def test_only_the_settings_change() -> None:
    workload = torch_workload("sgd", "step")
    state = train(workload, workload.init(OLD, SEED), OLD, range(1, 4))
    other = workload.reconfigure(state, OLD, NEW)
    assert other.tensors.keys() == state.tensors.keys()
    for name, tensor in state.tensors.items():
        assert other.tensors[name].data.tobytes() == tensor.data.tobytes()
    group = other.meta["tree"]["optimizer"]["param_groups"][0]
    assert group["lr"] == 0.2 * 0.5  # lowered once, after two epochs
    assert (group["weight_decay"], group["momentum"], group["initial_lr"]) == (0.1, 0.5, 0.2)
    schedule = other.meta["tree"]["schedule"]
    assert schedule["base_lrs"] == [0.2]
    assert schedule["last_epoch"] == state.meta["tree"]["schedule"]["last_epoch"] == 3


def test_what_a_loop_has_changed_by_hand_is_kept() -> None:
    def loop(model: Any, optimizer: Any, batches: Any, config: Any) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.param_groups[0]["note"] = "by hand"

    workload = torch_workload(train_fn=loop)
    state = train(workload, workload.init(OLD, SEED), OLD, range(1, 3))
    other = workload.reconfigure(state, OLD, {**OLD, "wd": 0.5})
    group = other.meta["tree"]["optimizer"]["param_groups"][0]
    assert (group["lr"], group["weight_decay"], group["note"]) == (0.0125, 0.5, "by hand")


def test_the_process_keeps_its_random_streams() -> None:
    workload = torch_workload("adam", "cosine")
    state = train(workload, workload.init(OLD, SEED), OLD, range(1, 2))
    before = torch.get_rng_state(), random.getstate()
    workload.reconfigure(state, OLD, NEW)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_another_model_or_optimizer_is_refused_by_name() -> None:
    def optimizer(parameters: Any, config: Any) -> torch.optim.Optimizer:
        kind = torch.optim.Adam if config.get("adaptive") else torch.optim.SGD
        if config.get("split"):
            parameters = [{"params": [parameter]} for parameter in parameters]
        return kind(parameters, lr=config["lr"])

    workload = TorchWorkload(Net, F.cross_entropy, optimizer, batch_size=5)
    state = train(workload, workload.init(OLD, SEED), OLD, range(1, 2))
    with pytest.raises(WorkloadError, match="another 'width': model first.weight is .8, 6. and"):
        workload.reconfigure(state, OLD, {**NEW, "width": 9})
    with pytest.raises(WorkloadError, match="another 'adaptive': optimizer is SGD and would"):
        workload.reconfigure(state, OLD, {**NEW, "adaptive": True})
    with pytest.raises(WorkloadError, match="another 'split': parameters in the optimizer's group"):
        workload.reconfigure(state, OLD, {**NEW, "split": True})


SGD_OLD, SGD_NEW = {"alpha": 1e-3, "eta0": 0.1}, {"alpha": 1e-1, "eta0": 0.02}
MLP_OLD = {"learning_rate_init": 0.01, "momentum": 0.9, "alpha": 1e-4, "beta_1": 0.9}
MLP_NEW = {"learning_rate_init": 0.1, "momentum": 0.3, "alpha": 1e-1, "beta_1": 0.5}
ESTIMATORS = {
    "sgd": (SGDClassifier(random_state=0, learning_rate="invscaling"), SGD_OLD, SGD_NEW),
    "random-state": (SGDClassifier(random_state=np.random.RandomState(5)), SGD_OLD, SGD_NEW),
    "mlp-sgd": (
        MLPClassifier((5,), solver="sgd", random_state=1),
        MLP_OLD,
        {**MLP_NEW, "nesterovs_momentum": False},
    ),
    "mlp-adam": (MLPClassifier((5,), random_state=1), MLP_OLD, MLP_NEW),
    "mlp-invscaling": (
        MLPClassifier((5,), solver="sgd", random_state=1, learning_rate="invscaling"),
        MLP_OLD,
        {**MLP_NEW, "power_t": 0.3},
    ),
}


def partial_fits(estimator: Any, epochs: range) -> None:
    data = arrays(0)
    for epoch in epochs:
        order = np.random.default_rng([SEED, 2, epoch, 0]).permutation(22)
        estimator.partial_fit(data["x"][order], data["y"][order], classes=[0, 1, 2])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_goes_on_with_new_parameters(name: str) -> None:
    from sklearn.base import clone

    estimator, old, new = ESTIMATORS[name]
    workload = SklearnWorkload(estimator, classes=[0, 1, 2])
    assert isinstance(workload, Reconfigurable)
    state = train(workload, workload.init(old, SEED), old, range(1, 4))
    before = bytes(state.buffer)
    other = workload.reconfigure(state, old, new)
    assert bytes(state.buffer) == before
    assert workload.reconfigure(state, old, dict(old)) == state

    expected = clone(estimator).set_params(**old)
    partial_fits(expected, range(1, 4))
    expected.set_params(**new)
    if hasattr(expected, "_optimizer"):
        adam = hasattr(expected._optimizer, "beta_1")
        lowered = expected._optimizer.learning_rate / old["learning_rate_init"]
        settings = ["beta_1"] if adam else ["momentum", "power_t"]
        for setting in ["learning_rate_init", *settings]:
            setattr(expected._optimizer, setting, getattr(expected, setting))
        if not adam:
            expected._optimizer.nesterov = expected.nesterovs_momentum
        expected._optimizer.learning_rate = new["learning_rate_init"] * lowered
    partial_fits(expected, range(4, 6))
    restored = workload.restore(train(workload, other, new, range(4, 6)), new)
    x = arrays(1)["x"]
    scores = "predict_proba" if name.startswith("mlp") else "decision_function"
    assert np.array_equal(getattr(restored, scores)(x), getattr(expected, scores)(x))


@pytest.mark.parametrize(
    ("estimator", "old", "new", "key"),
    [
        (MLPClassifier(), {"hidden_layer_sizes": 5}, {"hidden_layer_sizes": 6}, "hidden_layer_si"),
        (GaussianNB(), {"priors": np.ones(3) / 3}, {"priors": np.array([0.5, 0.3, 0.2])}, "priors"),
        (SGDRegressor(), {"average": 0}, {"average": 2}, "average"),
        (
            OneVsRestClassifier(SGDClassifier()),
            {"estimator__alpha": 0.1},
            {"estimator__alpha": 0.2},
            "estimator__alpha",
        ),
    ],
)
def test_what_has_shaped_an_estimator_is_refused(
    estimator: Any, old: dict[str, Any], new: dict[str, Any], key: str
) -> None:
    workload = SklearnWorkload(estimator, classes=[0, 1, 2])
    state = workload.init(old, SEED)
    with pytest.raises(WorkloadError, match=f"another '{key}"):
        workload.reconfigure(state, old, new)


def test_a_factory_s_estimator_is_asked_for_its_parameters() -> None:
    def make(config: Any) -> SGDRegressor:
        return SGDRegressor(alpha=10 ** config["log_alpha"], random_state=0)

    workload = SklearnWorkload(make)
    state = train(workload, workload.init({"log_alpha": -3}, SEED), {"log_alpha": -3}, range(1, 3))
    other = workload.reconfigure(state, {"log_alpha": -3}, {"log_alpha": -1})
    assert workload.restore(other, {"log_alpha": -1}).alpha == 0.1

    class Bare:
        def __init__(self) -> None:
            self.n = 0

        def partial_fit(self, x: Any, y: Any) -> None:
            pass

    bare = SklearnWorkload(lambda config: Bare())
    with pytest.raises(WorkloadError, match="Bare has no get_params"):
        bare.reconfigure(bare.init({}, 0), {}, {"lr": 1})
