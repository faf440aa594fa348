"""A learning rate that follows the metric of the search, against plain PyTorch, bit for bit.

Training by units equals ``train; validate; schedule.step(metric)``, wherever units are stopped,
alone and in a gang. What cannot work is said before anything trains.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR

import dagsel
from dagsel.errors import WorkloadError
from dagsel.flow import Goal
from dagsel.state import State
from dagsel.testing import WorkloadSuite
from dagsel.testing.workloads import in_gang
from dagsel.workloads import TorchWorkload, Visit
from tests.fused import fused

SEED, TRIAL, SIZES = 3, 2, (11, 9)
#: The third and the fourth epoch are no better than those before.
VALUES = (0.5, 0.6, 0.6, 0.1, 0.7, 0.2)
UP = Goal("accuracy", "maximize")


class ByBest:
    """A schedule of the user's own: it halves the rate whenever its metric is not the best."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.best = optimizer, float("-inf")

    def step(self, value: float) -> None:
        if value <= self.best:
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.5
        self.best = max(self.best, value)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best = state["best"]


def plateau(optimizer: Any, config: Any, **options: Any) -> ReduceLROnPlateau:
    options = {"mode": "max", "patience": 0, "factor": 0.5} | options
    return ReduceLROnPlateau(optimizer, **{**options, **config.get("plateau", {})})


SCHEDULES = {"plateau": plateau, "own": lambda optimizer, config: ByBest(optimizer)}


def sgd(parameters: Any, config: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p], "lr": config.get("lr", 0.1) / (i + 1)} for i, p in enumerate(parameters)
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def workload(schedule: Any = plateau, **options: Any) -> TorchWorkload:
    model = lambda config: torch.nn.Linear(4, 3)  # noqa: E731
    return TorchWorkload(
        model, F.cross_entropy, sgd, batch_size=4, lr_scheduler=schedule, **options
    )


def arrays(seed: int, n: int = 11) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(size=(n, 4)).astype("float32")
    return {"x": x, "y": (x[:, 0] > 0).astype("int64") + (x[:, 1] > 0)}


def plain_pytorch(schedule: Any, values: Any) -> tuple[Any, Any, Any]:
    """Train as a script does; epochs are worth the given values, each known at its end."""
    torch.manual_seed(7)
    net = torch.nn.Linear(4, 3)
    optimizer = fused(sgd(net.parameters(), {}))
    schedule = schedule(optimizer, {})
    for epoch in range(1, len(values) + 1):
        if epoch > 1:
            schedule.step(values[epoch - 2])
        for shard, size in enumerate(SIZES):
            data = arrays(shard, size)
            order = np.random.default_rng([SEED, TRIAL, epoch, shard]).permutation(size)
            for batch in torch.from_numpy(order).split(4):
                optimizer.zero_grad()
                x, y = (torch.from_numpy(data[name])[batch] for name in ("x", "y"))
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
    return net, optimizer, schedule


def by_units(work: Any, values: Any, stop_every: int = 0, gang: int = 1) -> State:
    """Train by units that are told the value of the epoch before, each stopped now and then."""
    state = work.init({}, 7)
    shards = [work.prepare(arrays(shard, size)) for shard, size in enumerate(SIZES)]
    for epoch in range(1, len(values) + 1):
        for shard, data in enumerate(shards):
            told = values[epoch - 2] if epoch > 1 and shard == 0 else None
            visit = Visit(SEED, TRIAL, epoch, shard, shard == len(SIZES) - 1, told)
            finished = False
            while not finished:
                polls = itertools.count(1)
                stop = (lambda p=polls: next(p) == stop_every) if stop_every else (lambda: False)
                trained = unit(work, State(bytes(state.buffer)), data, visit, stop, gang)
                state, finished = trained.state, trained.finished
    return state


def unit(work: Any, state: State, data: Any, visit: Visit, stop: Any, size: int) -> Any:
    if size == 1:
        return work.train(state, data, {}, visit=visit, should_stop=stop)

    def rank(gang: Any) -> Any:
        mine, asked = (state, stop) if gang.rank == 0 else (None, lambda: False)
        return work.train_gang(mine, data, {}, visit=visit, should_stop=asked, gang=gang)

    return in_gang(size, rank)[0]


def settings_of(state: State) -> tuple[list[Any], dict[str, Any]]:
    tree = state.meta["tree"]
    return [group["lr"] for group in tree["optimizer"]["param_groups"]], tree["schedule"]


@pytest.mark.parametrize("stop_every", [0, 1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_units_equal_a_plain_loop_that_steps_by_a_metric(name: str, stop_every: int) -> None:
    work = workload(SCHEDULES[name])
    state = by_units(work, VALUES, stop_every)
    net, optimizer, schedule = plain_pytorch(SCHEDULES[name], VALUES)
    for key, tensor in work.restore(state, {}).state_dict().items():
        assert torch.equal(tensor, net.state_dict()[key])
    rates, saved = settings_of(state)
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert rates[0] < 0.1 / 2  # it was lowered more than once
    assert saved == schedule.state_dict()


def test_ranks_of_a_gang_step_alike() -> None:
    work = workload()
    alone, together = (by_units(work, VALUES, gang=size) for size in (1, 2))
    assert settings_of(alone) == settings_of(together)
    ends = [work.restore(state, {}).state_dict() for state in (alone, together)]
    for key, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][key], rtol=1e-4, atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, float("inf")]), min_size=2, max_size=6),
    st.fixed_dictionaries(
        {
            "mode": st.sampled_from(["min", "max"]),
            "patience": st.integers(0, 2),
            "cooldown": st.integers(0, 1),
        }
    ),
)
def test_rates_are_those_of_the_schedule_alone(values: list[float], options: Any) -> None:
    def schedule(optimizer: Any, config: Any) -> Any:
        return plateau(optimizer, config, **options)

    rates, saved = settings_of(by_units(workload(schedule), values))
    optimizer = sgd(torch.nn.Linear(4, 3).parameters(), {})
    alone = schedule(optimizer, {})
    for value in values[:-1]:
        alone.step(value)
    assert rates == [group["lr"] for group in optimizer.param_groups]
    assert saved == alone.state_dict()


def test_a_metric_that_is_not_known_changes_nothing() -> None:
    rates, saved = settings_of(by_units(workload(), [None] * 4))
    assert (rates[0], saved["last_epoch"]) == (0.1, 0)


@pytest.mark.parametrize(
    ("schedule", "follows"),
    [
        (None, False),
        (lambda optimizer, config: StepLR(optimizer, 1), False),
        (plateau, True),
        (SCHEDULES["own"], True),
        (lambda o, config: plateau(o, config) if config["lr"] > 1 else StepLR(o, 1), False),
    ],
)
def test_a_workload_says_whether_it_follows(schedule: Any, follows: bool) -> None:
    before = torch.get_rng_state()
    assert workload(schedule).follows_metric({"lr": 0.1}, UP) is follows
    assert torch.equal(torch.get_rng_state(), before)


def test_a_metric_of_the_wrong_direction_is_refused() -> None:
    work = workload(lambda optimizer, config: ReduceLROnPlateau(optimizer))
    assert work.follows_metric({}, Goal("loss", "minimize"))
    wanted = (
        r"ReduceLROnPlateau has mode='min', and the search is to maximize 'accuracy', which it "
        r"follows; write ReduceLROnPlateau\(optimizer, mode='max'\)"
    )
    with pytest.raises(WorkloadError, match=wanted):
        work.follows_metric({}, UP)


def test_a_step_after_each_batch_has_no_metric() -> None:
    work = workload(lr_scheduler_interval="step")
    with pytest.raises(WorkloadError, match="write lr_scheduler_interval='epoch'"):
        work.validate({})


def test_another_configuration_keeps_what_was_lowered() -> None:
    work, old = workload(), {"lr": 0.1, "plateau": {"patience": 0}}
    state = by_units(work, VALUES)
    n_lowered = settings_of(state)[0][0] / 0.1
    assert work.reconfigure(state, old, dict(old)) == state
    rates, saved = settings_of(
        work.reconfigure(state, old, {"lr": 0.4, "plateau": {"patience": 5}})
    )
    assert rates == pytest.approx([0.4 * n_lowered, 0.2 * n_lowered])
    before = settings_of(state)[1]
    assert saved == {**before, "patience": 5, "_last_lr": rates}


class TestPlateau(WorkloadSuite):
    config: Mapping[str, Any] = {"lr": 0.1}

    def make_workload(self) -> TorchWorkload:
        return workload()

    def make_arrays(self, seed: int) -> dict[str, Any]:
        return arrays(seed)


@given(
    before=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    now=st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_a_refit_steps_as_often_an_epoch_as_the_search(before: list[int], now: list[int]) -> None:
    it = dagsel.TorchWorkload(
        lambda config: torch.nn.Linear(1, 1), torch.nn.functional.mse_loss, torch.optim.SGD,
        batch_size=4, lr_scheduler=lambda optimizer, config: ExponentialLR(optimizer, 0.9),
        lr_scheduler_interval="step",
    ).refitting(before, now)  # fmt: skip
    steps = 0
    for shard in range(len(now)):
        batches: Any = SimpleNamespace(cursor=SimpleNamespace(shard=shard))
        it._step_by_batch(SimpleNamespace(step=None), batches, {})
        steps += batches.n_after
    assert steps == sum(-(-n // 4) for n in before)
